"""One name, one cluster: whoever starts it at the same moment, and wherever a start is killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.errors import ClusterExists, NotTrusted
from hpcgpu.store import create_directory, managers
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

ROUNDS = int(os.environ.get("HPCGPU_CLAIM_ROUNDS", "20"))
PROCESSES = 4
_fork = multiprocessing.get_context("fork")


def files(directory: ClusterDirectory) -> None:
    """What a start writes into its directory."""
    directory.tls.mkdir(mode=0o700)
    directory.write("tls/key.pem", "a secret")
    directory.take_over(f"process {os.getpid()}")


def ended(directory: ClusterDirectory) -> list[str]:
    return []


def contend(root: Path, rounds: int, barrier: Barrier, tell: Any) -> None:
    for number in range(rounds):
        barrier.wait(60)
        try:
            claimed = create_directory.claim(root / "demo", ended, complete=files)
        except ClusterExists as error:
            tell.send((number, "lost", str(error)))
        except BaseException as error:
            tell.send((number, "crashed", repr(error)))
        else:
            tell.send((number, "won", claimed.token()))
        barrier.wait(60)
        barrier.wait(60)  # the test has checked, and ended the cluster


@pytest.mark.parametrize("ends", ["closed", "jobs ended"])
def test_of_four_starts_of_one_name_exactly_one_wins(tmp_path: Path, ends: str) -> None:
    barrier, (told, tell) = _fork.Barrier(PROCESSES + 1), _fork.Pipe(duplex=False)
    processes = [_fork.Process(target=contend, args=(tmp_path, ROUNDS, barrier, tell)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    tokens = []
    try:
        for _ in range(ROUNDS):
            barrier.wait(60)
            barrier.wait(60)
            outcomes = [told.recv() for _ in processes]
            winners = [said for _, what, said in outcomes if what == "won"]
            assert len(winners) == 1 and sum(what == "lost" for _, what, _ in outcomes) == PROCESSES - 1, outcomes
            assert all("a cluster named 'demo' " in said for _, what, said in outcomes if what == "lost"), outcomes
            there = ClusterDirectory(tmp_path / "demo")
            assert there.token() == winners[0] and (there.tls / "key.pem").read_text() == "a secret"
            tokens += winners
            if ends == "closed":
                there.close()
            else:
                there.intend("demo-scheduler", "scheduler")
                there.submitted("demo-scheduler", "7")
            barrier.wait(60)
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    directories = {path.name: ClusterDirectory(path) for path in tmp_path.iterdir()}
    assert sorted(directory.token() for directory in directories.values()) == sorted(tokens), (
        "each is kept, and nothing else is there"
    )
    assert [name for name, directory in directories.items() if directory.tls.exists()] == ["demo"], (
        "the credentials of the others are gone"
    )


def claim_and_die(path: Path, step: int) -> None:
    """Claim a name, and be killed just before that step of it."""
    left = step
    for name in ("mkdir", "open", "rename", "write", "fsync", "unlink", "rmdir", "chmod", "close"):

        def step_on(real: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        setattr(os, name, partial(step_on, getattr(os, name)))
    create_directory.claim(path, ended, complete=files)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_start_that_is_killed_at_any_step_leaves_a_name_that_can_be_used(tmp_path: Path, earlier: bool) -> None:
    for step in range(1, 200):
        path = tmp_path / str(step) / "demo"
        if earlier:
            create_directory.claim(path, ended, complete=files).close()
        program = _fork.Process(target=claim_and_die, args=(path, step))
        program.start()
        program.join()
        again = create_directory.claim(path, ended, complete=files)
        assert (again.tls / "key.pem").read_text() == "a secret"
        if program.exitcode == 0:
            assert step > 10
            return
        assert program.exitcode == -signal.SIGKILL
    pytest.fail("it never succeeded")


def test_what_was_never_completed_is_removed_later(tmp_path: Path) -> None:
    def killed(directory: ClusterDirectory) -> None:
        files(directory)
        shutil.copytree(directory.path, tmp_path / "copy")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_directory.claim(tmp_path / "clusters" / "demo", ended, complete=killed)
    left = tmp_path / "clusters" / ".demo~0123abcd"
    assert list(left.parent.iterdir()) == []
    (tmp_path / "copy").rename(left)
    create_directory.claim(left.with_name("other"), ended)
    assert left.exists(), "somebody may still write it"
    os.utime(left, (time.time() - 3600,) * 2)
    create_directory.claim(left.with_name("third"), ended)
    assert not left.exists()


@pytest.mark.parametrize("name", ["write", "mkdir", "fsync", "rename"])
def test_a_full_disk_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real: Callable[..., Any] = getattr(os, name)
    for step in range(1, 50):
        left = step

        def full(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            try:
                claimed = create_directory.claim(tmp_path / "clusters" / "demo", ended, complete=files)
                create_directory.abandon(claimed, claimed.token())
            except OSError as error:
                assert error.errno == errno.ENOSPC
        assert not (tmp_path / "clusters").exists() or list((tmp_path / "clusters").iterdir()) == []
        if left > 0:
            return
    pytest.fail("it never succeeded")


def test_a_start_of_another_program_is_waited_for_and_a_dead_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    process = _fork.Process(target=lambda: create_directory.claim(path, ended, complete=files))
    process.start()
    process.join()
    create_directory.claim(path, ended, complete=files)  # that program has ended, and submitted nothing
    with pytest.raises(ClusterExists, match=rf"'demo' is being started by process {os.getpid()}, in "):
        create_directory.claim(path, ended)


def test_a_start_on_another_machine_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(managers.socket, "gethostname", lambda: "login2")
        first = create_directory.claim(tmp_path / "demo", ended, complete=files)
    with pytest.raises(ClusterExists, match="is being started by"):
        create_directory.claim(tmp_path / "demo", ended)
    os.utime(first.path, (time.time() - 3600,) * 2)
    create_directory.claim(tmp_path / "demo", ended)


@pytest.mark.parametrize(("alive", "closed"), [(ended, True), (None, False)])
def test_an_ended_cluster_that_is_replaced_counts_as_closed_if_somebody_asked_for_its_jobs(
    alive: Callable[[ClusterDirectory], list[str]] | None, closed: bool, tmp_path: Path
) -> None:
    first = create_directory.claim(tmp_path / "demo", ended, complete=files)
    first.intend("demo-scheduler", "scheduler")
    first.submitted("demo-scheduler", "7")
    second = create_directory.claim(tmp_path / "demo", alive, complete=files)
    (aside,) = tmp_path.glob("demo~*")
    assert (ClusterDirectory(aside).closed, second.closed) == (closed, False)


def test_a_submit_that_is_under_way_keeps_the_name(tmp_path: Path) -> None:
    first = create_directory.claim(tmp_path / "demo", ended, complete=files)
    first.intend("demo-scheduler", "scheduler")
    with pytest.raises(ClusterExists, match="is being started by"):
        create_directory.claim(tmp_path / "demo", ended)


@pytest.mark.parametrize("refused", [False, True])
def test_a_submit_of_another_machine_keeps_the_name_until_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(managers.socket, "gethostname", lambda: "login2")
        first = create_directory.claim(tmp_path / "demo", ended, complete=files)
    first.intend("demo-scheduler", "scheduler")
    if refused:
        first.refused("demo-scheduler", "Invalid account")
    os.utime(first.path, (time.time() - 3600,) * 2)  # NFS may report the time of an earlier change
    if refused:
        create_directory.claim(tmp_path / "demo", ended)
        return
    with pytest.raises(ClusterExists, match="is being started by"):
        create_directory.claim(tmp_path / "demo", ended)


@pytest.mark.parametrize("host", [socket.gethostname(), "login2"])
def test_a_cluster_whose_scheduler_lives_in_a_program_keeps_its_name_when_its_worker_jobs_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(managers.socket, "gethostname", lambda: host)
        first = create_directory.claim(tmp_path / "demo", ended, complete=files)
    first.intend("demo-0", "worker")
    first.submitted("demo-0", "7")
    first.publish(Contact(token=first.token(), job_id="", workers="tls://a:1", client="tls://a:1"))
    os.utime(first.path, (time.time() - 3600,) * 2)
    with pytest.raises(ClusterExists, match=f"a cluster named 'demo' runs in process {os.getpid()}, in "):
        create_directory.claim(tmp_path / "demo", ended)
    assert first.token() == ClusterDirectory(tmp_path / "demo").token()


def test_what_is_no_cluster_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").touch()
    with pytest.raises(ClusterExists, match="is not the directory of a cluster: choose another name, or remove it"):
        create_directory.claim(tmp_path / "demo", ended)
    (tmp_path / "file").touch()
    with pytest.raises(ClusterExists, match="is not the directory of a cluster"):
        create_directory.claim(tmp_path / "file", ended)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
@pytest.mark.parametrize("planted", ["an empty directory", "a cluster", "a link", "a link to nothing", "a file"])
def test_what_another_user_put_there_first_is_refused_with_the_name_of_that_user(planted: str) -> None:
    with tempfile.TemporaryDirectory(prefix="claims-", dir="/tmp") as name:
        root = Path(name)
        root.chmod(0o1777)
        path = root / "demo"
        if "link" in planted:
            path.symlink_to("/tmp" if planted == "a link" else "/nothing")
        elif planted == "a file":
            path.touch()
        else:
            path.mkdir()
            if planted == "a cluster":
                path.joinpath("cluster.json").write_text("{}")
        os.chown(path, 64321, 64321, follow_symlinks=False)
        os.seteuid(64322)
        try:
            with pytest.raises(NotTrusted, match=f"{path} is not used, because .*: {path} belongs to uid 64321"):
                create_directory.claim(path, ended)
            assert create_directory.claim(root / "other", ended).path.exists()
        finally:
            os.seteuid(0)
        assert sorted(one.name for one in root.iterdir()) == ["demo", "other"], "no draft stays"
