"""An archive is unpacked whole or not at all, where nobody else can change it, and goes with the last process that uses
it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.runtime import stage
from tests.packed import Environment, content, refusal

Until = Callable[..., None]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user, or mount a small disk")

#: What a job does: it uses the environment until it must end.
PROGRAM = "from hpcgpu.runtime import stage; stage.release_at_exit(); print(*sys.orig_argv[:1], flush=True); input()"


class Job:
    """A process that uses an archive as a job does."""

    def __init__(self, archive: Path, base: Path, sha256: str = "", program: str = PROGRAM) -> None:
        found = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
        helper = [sys.executable, "-P", "-m", "hpcgpu.runtime.stage", str(archive), "--sha256", found]
        self.process = subprocess.Popen(
            [*helper, "--local-directory", str(base), "--", "-P", "-c", f"import sys; {program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def python(self) -> Path:
        """Wait for it to run, and return its interpreter."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.process.communicate()[1]
        return Path(line)

    def end(self) -> str:
        """Let it end; return what it printed."""
        return self.process.communicate("\n")[1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


#: What a job does that has a child, which outlives its last line.
WITH_A_CHILD = """
import atexit, multiprocessing.util, pathlib, time
place = pathlib.Path({place!r})
atexit.register((place / "exits").touch)
from hpcgpu.runtime import stage
stage.release_at_exit()
def wait():
    while not (place / "go").exists():
        time.sleep(0.01)
    (place / "seen").write_text(str(pathlib.Path(sys.orig_argv[0]).exists()))
multiprocessing.get_context("fork").Process(target=wait).start()
print(*sys.orig_argv[:1], flush=True)
input()
"""

#: What a worker job does whose scheduler has ended: its first step begins anew, in the same process.
BEGINS_ANEW = """
import argparse, os
from hpcgpu.runtime import next_scheduler, stage
stage.release_at_exit()
if not next_scheduler.begins_anew():
    next_scheduler._follows = lambda *known: True
    next_scheduler.begin_anew(argparse.Namespace(restart_wait=1.0, directory=None), dict(os.environ), "")
print(*sys.orig_argv[:1], flush=True)
input()
"""

Start = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[Start]:
    jobs: list[Job] = []

    def one(*arguments: Any, **named: Any) -> Job:
        jobs.append(Job(*arguments, **named))
        return jobs[-1]

    yield one
    for job in jobs:
        if job.process.returncode is None:
            job.kill()


@pytest.mark.parametrize("name", ["env.tar.zst", "env.tar.gz", "env.tar"])
def test_two_jobs_share_one_environment_and_the_last_one_removes_it(
    environment: Environment, base: Path, start: Start, name: str
) -> None:
    if name.endswith(".zst") and shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    archive = environment.archive(name)
    first, second = start(archive, base), start(archive, base)
    python = first.python()
    assert second.python() == python and base in python.parents
    said = [first.end()]
    assert python.exists()
    said += [second.end()]
    assert content(base) == []
    assert [text.count("hpcgpu: unpacked") for text in sorted(said, key=len)] in ([0, 1], [1, 0])


def test_a_job_that_is_killed_counts_as_one_that_has_ended(archive: Path, base: Path, start: Start) -> None:
    killed, other = start(archive, base), start(archive, base)
    killed.python()
    python = other.python()
    killed.kill()
    assert python.exists()
    other.end()
    assert content(base) == []


def test_a_worker_job_that_begins_anew_keeps_its_environment(archive: Path, base: Path, start: Start) -> None:
    job, other = start(archive, base, program=BEGINS_ANEW), start(archive, base)
    python = job.python()
    assert other.python() == python
    other.end()
    assert python.exists()
    assert "begins anew" in job.end() and content(base) == []


def test_an_environment_stays_until_the_children_of_its_last_user_have_ended(
    archive: Path, base: Path, tmp_path: Path, start: Start, until: Until
) -> None:
    job = start(archive, base, program=WITH_A_CHILD.format(place=str(tmp_path)))
    python = job.python()
    assert job.process.stdin is not None
    print(file=job.process.stdin, flush=True)
    try:
        until((tmp_path / "exits").exists, "the program exits")
        assert python.exists()
    finally:
        (tmp_path / "go").touch()
    job.process.communicate(timeout=60)
    assert job.process.returncode == 0
    assert (tmp_path / "seen").read_text() == "True" and content(base) == []


def test_a_directory_that_its_last_user_removes_just_now_is_made_again(
    archive: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open, removed = os.open, list[Path]()

    def open_late(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith(f"{base}/hpcgpu-environment") and not removed:
            removed.append(Path(path))
            os.rmdir(path)
        return really_open(path, *arguments, **named)

    monkeypatch.setattr(os, "open", open_late)
    used, environment = stage.use(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), [base])
    assert removed and (environment / "bin" / "python").exists()
    os.close(used)


def test_what_the_last_one_left_because_it_was_killed_is_used_by_the_next(
    archive: Path, base: Path, start: Start
) -> None:
    killed = start(archive, base)
    python = killed.python()
    killed.kill()
    after = start(archive, base)
    assert after.python() == python
    assert "unpacked" not in after.end() and content(base) == []


def test_what_nobody_uses_for_a_day_goes_when_another_environment_is_unpacked(
    environment: Environment, archive: Path, base: Path, start: Start
) -> None:
    used, left = environment.archive("used.tar"), environment.archive("left.tar.gz")
    (environment.path / "more").write_text("")
    left.write_bytes(environment.archive("other.tar").read_bytes())
    left = left.rename(left.with_name("left.tar"))
    jobs = [start(used, base), start(left, base)]
    pythons = [job.python() for job in jobs]
    jobs[1].kill()
    (base / f"hpcgpu-environment-{os.geteuid()}-{socket.gethostname()}-other-0123456789abcdef").mkdir(mode=0o700)
    start(archive, base).python()
    assert all(python.exists() for python in pythons)
    for place in base.iterdir():
        os.utime(place / "whole" if (place / "whole").exists() else place, (0, time.time() - 2 * 86400))
    (environment.path / "last").write_text("")
    start(environment.archive("last.tar"), base).python()
    assert pythons[0].exists() and not pythons[1].exists()
    assert len(content(base)) == 4  # used, archive, last, and that of a host whose name begins alike


def test_a_job_that_is_killed_while_it_unpacks_leaves_nothing_that_another_takes_for_whole(
    environment: Environment, base: Path, start: Start, until: Until, tmp_path: Path
) -> None:
    (environment.path / "large").write_bytes(bytes(8 << 20))
    plain = environment.archive("env.tar").read_bytes()
    slow = tmp_path / "slow.tar"
    os.mkfifo(slow)
    sha256 = hashlib.sha256(plain).hexdigest()
    half = start(slow, base, sha256)
    with slow.open("wb", buffering=0) as pipe:
        pipe.write(plain[: len(plain) // 2])
        until(lambda: list(base.glob("*/environment/*")), "it unpacks")
        half.kill()
    slow.unlink()
    slow.write_bytes(plain)
    after = start(slow, base, sha256)
    after.python()
    assert "hpcgpu: unpacked" in after.end()


def test_an_environment_from_before_a_crash_of_the_node_is_unpacked_again(
    archive: Path, base: Path, start: Start
) -> None:
    killed = start(archive, base)
    killed.python()
    killed.kill()
    (mark,) = base.glob("*/whole")
    mark.write_text(mark.read_text().split()[0] + " 00000000-0000-0000-0000-000000000000\n")
    after = start(archive, base)
    after.python()
    assert "hpcgpu: unpacked" in after.end()


def test_one_that_is_not_whole_but_in_use_is_not_touched(archive: Path, base: Path, start: Start) -> None:
    job = start(archive, base)
    python = job.python()
    (mark,) = base.glob("*/whole")
    mark.unlink()  # as a site's cleaning of /tmp may do
    assert "can hold the environment" in refusal(archive, base)
    assert python.exists()
    job.end()
    assert content(base) == []


def test_the_end_of_a_job_removes_nothing_that_another_one_unpacked_later(
    archive: Path, base: Path, start: Start
) -> None:
    first = start(archive, base)
    first.python()
    shutil.rmtree(next(base.iterdir()))  # the site has cleaned /tmp
    second = start(archive, base)
    python = second.python()
    first.end()
    assert python.exists()
    second.end()
    assert content(base) == []


def test_another_archive_than_the_scripts_is_refused(archive: Path, base: Path) -> None:
    said = refusal(archive, base, sha256="0" * 64)
    assert (
        f"stage: {archive} has changed since the job script was written" in said and "render the scripts again" in said
    )
    assert content(base) == []


def test_what_cannot_be_unpacked_is_refused_with_why(archive: Path, base: Path, tmp_path: Path) -> None:
    with archive.open("r+b") as file:
        file.truncate(archive.stat().st_size // 2)
    said = refusal(archive, base)
    assert f"{archive} cannot be unpacked on {socket.gethostname()}: gzip: stdin: unexpected end" in said
    assert "The archive may be damaged: pack the environment again" in said
    missing = tmp_path / "missing.tar"
    assert f"{missing} cannot be read on {socket.gethostname()}: No such file" in refusal(missing, base, "0" * 64)
    assert content(base) == []


def test_an_environment_that_cannot_run_is_refused_with_why(environment: Environment, base: Path) -> None:
    python = environment.path / "bin" / "python"
    target = python.readlink()
    python.unlink()
    assert "has no bin/python at its top" in refusal(environment.archive("none.tar"), base)
    python.symlink_to("/opt/base/bin/python3")
    assert "is a link to /opt/base/bin/python3, which" in refusal(environment.archive("dangling.tar"), base)
    python.unlink()
    python.symlink_to(target)
    shutil.rmtree(environment.path / "lib")
    said = refusal(environment.archive("empty.tar"), base)
    assert "No module named 'hpcgpu'. Install hpcgpu into the environment, and pack it again" in said
    (environment.path / "bin" / "conda-unpack").write_text("raise SystemExit('no prefix was found')")
    said = refusal(environment.archive("prefix.tar"), base)
    assert f"conda-unpack fails on {socket.gethostname()}: no prefix was found. Pack the environment again" in said
    assert "Install hpcgpu" not in said
    assert content(base) == []


def test_a_node_without_zstd_is_shown_what_to_do(
    environment: Environment, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = environment.archive("env.tar").rename(tmp_path / "env.tar.zst")
    tar = shutil.which("tar")
    assert tar is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tar").symlink_to(tar)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    said = refusal(archive, base)
    assert f"{socket.gethostname()} has no program zstd, which unpacks env.tar.zst. Load it in" in said
    assert "or pack a .tar.gz or .tar" in said


def test_what_is_unpacked_is_the_users_alone_whatever_the_umask(archive: Path, base: Path) -> None:
    before = os.umask(0)
    try:
        job = Job(archive, base)
    finally:
        os.umask(before)
    job.python()
    modes = {stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in base.rglob("*") if not path.is_symlink()}
    assert modes == {0}
    job.end()


def test_read_only_directories_in_an_archive_can_be_removed(environment: Environment, base: Path, start: Start) -> None:
    (environment.path / "fixed").mkdir()
    (environment.path / "fixed" / "file").write_text("")
    (environment.path / "fixed").chmod(0o500)
    job = start(environment.archive("env.tar"), base)
    job.python()
    job.end()
    (environment.path / "fixed").chmod(0o700)
    assert content(base) == []


def test_an_environment_that_was_packed_read_only_can_be_removed(base: Path) -> None:
    place = base / "place"
    (place / "environment" / "lib").mkdir(parents=True)
    for directory in (place / "environment" / "lib", place / "environment"):
        (directory / "file").write_text("")
        directory.chmod(0o500)
    # root without the right to write everywhere, as any user
    like_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    remove = f"from hpcgpu.runtime import stage; from pathlib import Path; stage._remove(Path({str(place)!r}))"
    subprocess.run([*like_others, sys.executable, "-P", "-c", remove], check=True)
    assert content(base) == []


def test_a_job_reports_whom_it_waits_for_and_takes_another_directory_if_that_hangs(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, start: Start, until: Until
) -> None:
    plain = environment.archive("env.tar").read_bytes()
    hanging, sha256 = tmp_path / "hanging.tar", hashlib.sha256(plain).hexdigest()
    os.mkfifo(hanging)
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir(mode=0o700)
    holder = start(hanging, places[0], sha256)
    monkeypatch.setattr(stage, "_SILENCE", 0.1)
    monkeypatch.setattr(stage, "_TIMEOUT", 0.5)
    with hanging.open("wb", buffering=0) as pipe:
        pipe.write(plain[: len(plain) // 2])
        until(lambda: list(places[0].glob("*/environment")), "it unpacks")
        archive = environment.path.parent / "env.tar"
        used, found = stage.use(archive, sha256, places)
        assert places[1] in found.parents
        os.close(used)
        shutil.rmtree(found.parent)
        said = refusal(archive, places[0])
        holder.kill()
    told = f"process {holder.process.pid} of another job of yours"
    assert f"waiting for {told}, which works in {places[0]}" in capfd.readouterr().err
    assert f"{told} has worked there for more than 0.5 s. If it hangs, cancel its job" in said


def test_an_archive_that_changes_while_it_is_unpacked_is_refused(
    environment: Environment, base: Path, tmp_path: Path, start: Start, until: Until
) -> None:
    plain, changing = environment.archive("env.tar").read_bytes(), tmp_path / "changing.tar"
    os.mkfifo(changing)
    job = start(changing, base, hashlib.sha256(plain).hexdigest())
    with changing.open("wb", buffering=0) as pipe:
        pipe.write(plain[: len(plain) // 2])
        until(lambda: list(base.glob("*/environment")), "it unpacks")
        pipe.write(plain[len(plain) // 2 : -1] + b"x")
    assert "has changed since the job script was written" in job.end()
    assert job.process.returncode == 1 and content(base) == []


@needs_root
def test_a_disk_without_room_is_reported_with_what_is_needed_and_free(environment: Environment, base: Path) -> None:
    (environment.path / "large").write_bytes(os.urandom(6 << 20))
    archive = environment.archive("env.tar.gz")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "hpcgpu", base]).returncode:
        pytest.skip("this root cannot mount")
    try:
        said = refusal(archive, base)
        assert content(base) == []
    finally:
        subprocess.run(["umount", "-l", base], check=True)
    assert f"does not fit into {base} on {socket.gethostname()}: it needs 6 MiB, and 4 MiB are free" in said
    assert "Set local_directory to a larger disk of the node" in said


@needs_root
def test_what_is_killed_while_it_unpacks_into_memory_reports_it(
    environment: Environment, base: Path, tmp_path: Path, start: Start, until: Until
) -> None:
    plain, slow = environment.archive("env.tar.gz").read_bytes(), tmp_path / "slow.tar.gz"
    os.mkfifo(slow)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "hpcgpu", base]).returncode:
        pytest.skip("this root cannot mount")
    try:
        job = start(slow, base, hashlib.sha256(plain).hexdigest())
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        with slow.open("wb", buffering=0) as pipe:
            pipe.write(plain[: len(plain) // 2])
            until(lambda: len(children.read_text().split()) == 2, "it unpacks")
            os.kill(int(children.read_text().split()[1]), signal.SIGKILL)  # gzip's reader
            pipe.write(plain[len(plain) // 2 :])
        said = job.end()
        assert content(base) == []
    finally:
        subprocess.run(["umount", "-l", base], check=True)
    assert re.search(rf"hpcgpu: unpacking {slow} into {base}/\S+, which is memory\n", said), said
    assert f"stage: what unpacked {slow} on {socket.gethostname()} was killed" in said, said


def test_a_filesystem_that_other_machines_see_is_not_used(
    archive: Path, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/home {base} nfs4 rw 0 0\n")
    monkeypatch.setattr("hpcgpu.posix.filesystems._MOUNTS", mounts)
    assert f"{base} is on nfs4, not on the node's own disk" in refusal(archive, base)


@needs_root
def test_a_disk_from_which_no_program_runs_is_not_used(archive: Path, base: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,mode=700", "hpcgpu", base]).returncode:
        pytest.skip("this root cannot mount")
    try:
        assert f"{base} is mounted with noexec" in refusal(archive, base)
    finally:
        subprocess.run(["umount", "-l", base], check=True)
