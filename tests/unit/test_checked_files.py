"""Files that others could have made: nobody waits for them, nothing of them is believed, and nothing is emptied."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest

from hpcgpu.errors import NotTrusted, OptionError
from hpcgpu.posix import checked_files, ownership
from hpcgpu.scaling.wanted_state import AddGroup, Wanted, apply
from hpcgpu.scripts import bundle
from hpcgpu.store import create_directory, usage_file
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.usage_file import JobUsage

STRANGER = 64321  # a user id that nobody has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
pytestmark = pytest.mark.shows("Attacks of other users through files and directories")


def as_stranger(*words: str | Path) -> None:
    """Run a command as another user of the node."""
    subprocess.run(
        ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "--", *map(str, words)], check=True
    )


@pytest.fixture
def shared() -> Any:
    """A directory in which everybody can make entries, as a project's without the sticky bit."""
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@needs_root
@pytest.mark.parametrize("made", ["fifo", "file", "link", "link to a FIFO"])
def test_what_a_stranger_made_is_neither_read_nor_waited_for_nor_emptied(
    shared: Path, tmp_path: Path, made: str
) -> None:
    mine, path = tmp_path / "mine", shared / "demo-0-7.log"
    mine.write_text("precious")
    if made == "fifo":
        as_stranger("mkfifo", "-m", "666", path)
    elif made == "file":
        as_stranger("sh", "-c", f"echo theirs > {path}; chmod 666 {path}")
    elif made == "link":
        as_stranger("ln", "-s", mine, path)
    else:
        as_stranger("sh", "-c", f"mkfifo -m 666 {shared}/fifo; ln -s {shared}/fifo {path}")
    with pytest.raises(OSError, match=f"belongs to uid {STRANGER}"):
        checked_files.read(path)
    with pytest.raises(OSError) as refused:
        checked_files.created(path)
    assert refused.value.errno in (errno.ELOOP, errno.EPERM, errno.ENXIO)
    assert mine.read_text() == "precious"
    if made == "file":
        assert path.read_text() == "theirs\n"


def test_a_link_a_fifo_and_a_second_name_of_ones_own_are_no_files(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "hard").hardlink_to(mine)
    for name, why in (("link", "it is a symbolic link"), ("fifo", "it is a FIFO"), ("", "Is a directory")):
        with pytest.raises(OSError, match=why):
            checked_files.read(tmp_path / name)
    for name in ("link", "fifo", "hard"):
        with pytest.raises(OSError):
            checked_files.created(tmp_path / name)
    assert mine.read_text() == "precious" and checked_files.end(mine, 4) == b"ious"
    device = checked_files.created(Path("/dev/null"))
    assert os.get_blocking(device), "a program with this output could not wait until it can write"
    os.close(device)


def test_a_terminal_is_no_log_file() -> None:
    ends = os.openpty()
    try:
        path = Path(os.ttyname(ends[1]))
        if os.geteuid() == 0:  # the devices of root are opened
            os.chown(path, STRANGER, -1)
        with pytest.raises(OSError, match=f"belongs to uid {STRANGER}|it is a device"):
            checked_files.created(path)
    finally:
        for end in ends:
            os.close(end)


def test_a_file_that_is_replaced_before_it_is_opened_is_refused_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "demo-0-7.log"
    path.touch()
    before = os.lstat(path)
    path.unlink()
    os.mkfifo(path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="it is a FIFO"):
        patch.setattr("os.lstat", lambda path: before)
        checked_files.opened(path)
    there = list[Path]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the list itself, and those of other threads
            there.append(link.readlink())
    assert path not in there


def test_a_file_has_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(checked_files.LIMIT + 1)
    with pytest.raises(OSError, match="it is larger than 64 MiB"):
        checked_files.read(tmp_path / "large")


def test_a_fresh_read_changes_no_mode_and_follows_no_link(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o755)
    (tmp_path / "link").symlink_to(public)
    for path in (public, tmp_path / "link"):
        ClusterDirectory(path).refresh()
    assert public.stat().st_mode & 0o777 == 0o755


class Replaced:
    """A network filesystem whose client has a stale handle of a file, until somebody reads the directory."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        self.left, self.path, really = times, path, checked_files.opened
        self.tries = 0

        class Stale:
            def __init__(self, file: Any) -> None:
                self.file = file

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def read(self, size: int) -> bytes:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def opened(path: Path) -> Any:
            file = really(path)
            if path != self.path:
                return file
            self.tries += 1
            return Stale(file) if self.tries <= self.left else file

        monkeypatch.setattr(checked_files, "opened", opened)


READERS: dict[str, Callable[[ClusterDirectory], object]] = {
    "usage.jsonl": lambda directory: (
        usage_file.read(directory.path).problems == [] and usage_file.read(directory.path).jobs
    ),
    "contact.json": lambda directory: directory.contact(),
    "cluster.json": lambda directory: directory.token() and not directory.damage(),
    "journal.jsonl": lambda directory: directory.submits(),
    "wanted.json": lambda directory: directory.wanted().groups,
    "manager-000001.json": lambda directory: (found := directory.manager()) and found.program == "me",
    "dashboard.token": lambda directory: directory.dashboard_token(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_another_machine_replaces_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="local")
    directory.write(usage_file.FILE, usage_file.line(JobUsage(id="7", name="demo-0")))
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://a:1", client="tls://a:1"))
    directory.intend("demo-0", "worker")
    directory.want(apply(Wanted(), AddGroup("default", 1)))
    directory.take_over("me")
    stale = Replaced(directory.path / name, monkeypatch)
    assert READERS[name](directory)
    assert stale.tries > 1


def test_a_file_that_stays_stale_is_an_error_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="local")
    directory.write(usage_file.FILE, usage_file.line(JobUsage(id="7")))
    monkeypatch.setattr(checked_files, "_TIMEOUT", 0.1)
    stale = Replaced(directory.path / usage_file.FILE, monkeypatch, times=10**6)
    assert "cannot be read: Stale file handle" in usage_file.read(directory.path).problems[0]
    assert stale.tries > 1


def test_a_file_whose_directory_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="local")
    directory.write(usage_file.FILE, usage_file.line(JobUsage(id="7")))
    stale = Replaced(directory.path / usage_file.FILE, monkeypatch, times=10**6)
    monkeypatch.setattr("os.listdir", lambda path: os.scandir(path / "gone"))
    assert "cannot be read: Stale file handle" in usage_file.read(directory.path).problems[0]
    assert stale.tries == 1


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_log_directory_in_which_others_can_plant_links_is_refused_before_anything_is_written(
    tmp_path: Path, mode: int
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(mode)
    if mode == 0o770:
        if os.geteuid():
            pytest.skip("only root can give a directory to a group that is not its own")
        os.chown(logs, -1, STRANGER)
    with pytest.raises(OptionError, match=f"log_directory='{logs}': .* other users can change it.*can write there"):
        bundle.make("slurm", {"log_directory": logs, "gpus_per_node": 1}, tmp_path / "demo")
    assert not (tmp_path / "demo").exists() and list(logs.iterdir()) == []
    bundle.make(
        "slurm", {"log_directory": logs / "mine", "gpus_per_node": 1}, tmp_path / "demo"
    ) if mode != 0o777 else None


@needs_root
def test_a_way_that_a_stranger_can_lead_elsewhere_is_not_followed(shared: Path, tmp_path: Path) -> None:
    shared.chmod(0o1777)
    as_stranger("ln", "-s", tmp_path / "gone" / "further", shared / "link")
    with pytest.raises(NotTrusted, match=f"{shared}/link belongs to uid {STRANGER}"):
        ownership.check(shared / "link" / "below")


@needs_root
def test_fifos_and_links_of_others_in_a_shared_cluster_directory_hang_no_command(shared: Path, home: Path) -> None:
    shared.chmod(0o1777)
    for name in ("gift", ".removing~gift", ".gift~0123abcd"):
        as_stranger("mkdir", "-m", "755", shared / name)
        for file in ("cluster.json", "journal.jsonl", "contact.json"):
            as_stranger("mkfifo", "-m", "666", shared / name / file)
    as_stranger("ln", "-s", shared / "gift", shared / "link")
    environ = os.environ | {"DASK_HPCGPU__CLUSTER_DIRECTORY": str(shared)}
    environ["PYTHONWARNINGS"] = "ignore"
    on_cpus = ("--system", "local", "--gpus-per-node", "0", "--cores", "1")
    for words, code in [
        (["list"], 0),
        (["status", "gift"], 2),
        (["logs", "gift"], 2),
        (["report", "gift"], 2),
        (["top", "gift"], 2),
        (["stop", "gift"], 2),
        (["stop", "none"], None),
        (["status", "none"], None),
        (["clean", "--older-than", "1d", "--yes"], 0),
        (["start", "gift", *on_cpus], 2),
    ]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpcgpu", *words], env=environ, capture_output=True, text=True, timeout=60
        )
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        if code == 2:
            assert f"belongs to uid {STRANGER}" in done.stderr, (words, done.stderr)
    with dask.config.set({"hpcgpu.cluster-directory": str(shared)}), pytest.raises(NotTrusted):
        import hpcgpu

        hpcgpu.connect("gift", timeout=1)
    assert (shared / ".removing~gift").exists() and (shared / "gift").stat().st_mode & 0o777 == 0o755
