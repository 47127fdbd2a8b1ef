"""Nobody else gets in through the filesystem: not by a directory that others may change, nor by one that others have
made.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import BatchError, NotTrusted
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact
from tests.helpers import CPU

pytestmark = pytest.mark.shows("Attacks of other users through files and directories")

STRANGER = 64321  # a user id that nobody has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def test_what_a_cluster_makes_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    code = f"""
import contextlib, os
os.umask(0)
from hpcgpu import LocalGPUCluster
with LocalGPUCluster(**{CPU!r}, jobs=1) as cluster:
    cluster.wait_for_workers()
    for path in [cluster.directory.path, *cluster.directory.path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # a draft has just got its name
            assert path.stat().st_mode & 0o077 == 0, path
"""
    environ = {
        k: v for k, v in os.environ.items() if k not in ("HPCGPU_QUEUE_DIRECTORY", "DASK_HPCGPU__CLUSTER_DIRECTORY")
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environ | {"HOME": str(tmp_path)}, cwd=tmp_path)
    made = [tmp_path / ".hpcgpu", *(tmp_path / ".hpcgpu").rglob("*")]
    assert len(made) > 10
    assert not [path for path in made if path.stat().st_mode & 0o022], "others can write to these"
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}


def test_a_queue_in_a_directory_that_everybody_can_write_to_is_refused(home: Path) -> None:
    (home / "open").mkdir(mode=0o700)
    LocalQueue(home / "open" / "queue").check()
    (home / "open").chmod(0o777)
    with pytest.raises(BatchError, match=f"{home}/open .*everybody can write there. chmod o-w {home}/open"):
        LocalQueue(home / "open" / "queue").check()


def test_a_cluster_in_a_directory_that_everybody_can_write_to_is_refused(queue: LocalQueue, home: Path) -> None:
    (home / "open").mkdir(mode=0o700)
    (home / "open").chmod(0o777)
    with pytest.raises(hpcgpu.OptionError, match=f"cluster_directory='{home}/open': .*chmod o-w {home}/open"):
        LocalGPUCluster(**CPU, cluster_directory=str(home / "open"))
    assert list((home / "open").iterdir()) == []


class Trap:
    """A listener where a stranger's scheduler would be; who connects to a scheduler unpickles what it sends."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    trap = Trap()
    yield trap
    trap.listener.shutdown(socket.SHUT_RDWR)  # else its thread waits on for ever
    trap.listener.close()


@pytest.fixture
def foreign(home: Path, trap: Trap) -> Path:
    """The directory of a cluster that somebody else has made, with a scheduler of theirs."""
    directory = create_directory.claim(home / "clusters" / "gift", lambda submits: [], system="local", security=False)
    address = f"tcp://127.0.0.1:{trap.listener.getsockname()[1]}"
    directory.publish(Contact(token=directory.token(), job_id="1", workers=address, client=address))
    directory.intend("gift-scheduler", "scheduler")
    directory.submitted("gift-scheduler", "1")
    for path in (directory.path, *directory.path.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory.path


@needs_root
@pytest.mark.parametrize("where", ["path", "name"])
def test_a_cluster_directory_of_somebody_else_is_refused(
    queue: LocalQueue, foreign: Path, trap: Trap, where: str
) -> None:
    name: Any = foreign if where == "path" else foreign.name
    for use in (
        lambda: hpcgpu.connect(name, timeout=1),
        lambda: LocalGPUCluster.from_name(name),
        lambda: LocalGPUCluster(**CPU, name=foreign.name, if_exists="connect"),
        lambda: LocalGPUCluster(**CPU, name=foreign.name),
    ):
        with pytest.raises((NotTrusted, hpcgpu.OptionError), match=f"{foreign} belongs to uid {STRANGER}"):
            use()
    assert trap.connections == 0
    assert foreign.stat().st_mode & 0o777 == 0o755 and (foreign / "contact.json").exists(), "it is left as it is"


@needs_root
@pytest.mark.parametrize(
    "command",
    [["status"], ["stop"], ["logs"], ["scale", "--jobs", "1"], ["adapt", "--maximum-jobs", "1"]],
    ids=lambda words: words[0],
)
def test_the_commands_refuse_it_too(queue: LocalQueue, foreign: Path, trap: Trap, command: list[str]) -> None:
    words = [sys.executable, "-m", "hpcgpu", command[0], str(foreign), *command[1:]]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and f"{foreign} belongs to uid {STRANGER}" in done.stderr, done.stderr
    assert trap.connections == 0


@needs_root
def test_the_list_shows_own_clusters_and_reports_why_it_leaves_one_out(queue: LocalQueue, foreign: Path) -> None:
    create_directory.claim(foreign.parent / "own", lambda submits: [], system="local")
    done = subprocess.run(
        [sys.executable, "-m", "hpcgpu", "list", "--json"], check=True, capture_output=True, text=True
    )
    assert [cluster["name"] for cluster in json.loads(done.stdout)] == ["own"]
    assert done.stderr.startswith(f"{foreign.name}: not shown: ")
    assert f"{foreign} belongs to uid {STRANGER}" in done.stderr


@needs_root
def test_stop_all_reports_which_cluster_it_has_not_stopped_and_fails(queue: LocalQueue, foreign: Path) -> None:
    create_directory.claim(foreign.parent / "own", lambda submits: [], system="local")
    done = subprocess.run(
        [sys.executable, "-m", "hpcgpu", "stop", "--all"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1 and "own: 0 jobs cancelled, no job is left" in done.stdout, (
        "the others are stopped all the same"
    )
    assert (
        f"gift: not stopped: {foreign} is not used" in done.stderr
        and "Correct this, then run: hpcgpu stop gift" in done.stderr
    )
    assert f"{foreign} belongs to uid {STRANGER}" in done.stderr and (foreign / "contact.json").exists()


@needs_root
def test_a_job_refuses_a_cluster_directory_that_became_somebody_elses(
    queue: LocalQueue, home: Path, until: Any
) -> None:
    with LocalGPUCluster(**CPU, name="taken", jobs=1) as cluster:
        cluster.wait_for_workers(1)
        os.chown(cluster.directory.path / "tls" / "key.pem", STRANGER, STRANGER)
        job = queue.submit(cluster.directory.path / "worker.sh", job_name="late")
        until(lambda: queue.poll([job])[job].state.ended, "it ends")
        os.chown(cluster.directory.path / "tls" / "key.pem", 0, 0)
        assert queue.poll([job])[job].exit_code == 1
        assert f"key.pem belongs to uid {STRANGER}" in (cluster.directory.logs / f"late-{job}.log").read_text()


@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_no_module_is_imported_from_where_others_can_put_one(
    queue: LocalQueue, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    here, ran = tmp_path / "submitted-from", tmp_path / "ran"
    here.mkdir()
    here.chmod(mode)
    for name in ("argparse", "multiprocessing", "hpcgpu", "dask"):  # what the first lines of a job import
        (here / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()")
    (here / "my_analysis.py").write_text("ANSWER = 42")
    monkeypatch.chdir(here)

    def answer() -> int | None:
        try:
            import my_analysis  # type: ignore[import-not-found]
        except ImportError:
            return None
        return int(my_analysis.ANSWER)

    with LocalGPUCluster(name="here", gpus_per_node=0, cores=1, jobs=1, scheduler={"gpus_per_node": 0}) as cluster:
        cluster.wait_for_workers()
        with cluster.get_client() as client:
            expected = None if mode & 0o002 else 42  # the user's own modules are imported, behind all others
            assert client.submit(answer).result() == expected
    assert not ran.exists()


@needs_root
@pytest.mark.parametrize("plant", ["link", "fifo"])
def test_what_a_stranger_put_where_a_log_goes_costs_that_job_alone(
    queue: LocalQueue, tmp_path: Path, until: Any, plant: str
) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.write_text("precious")
    log = shared / "planted.log"
    log.symlink_to(mine) if plant == "link" else os.mkfifo(log)
    os.chown(log, STRANGER, STRANGER, follow_symlinks=False)
    for name, output in (("planted", log), ("other", shared / "other.log")):
        (tmp_path / f"{name}.sh").write_text(f"#!/bin/bash\n#HPCGPU --output={output}\necho done\n")
    jobs = [queue.submit(tmp_path / f"{name}.sh", job_name=name) for name in ("planted", "other")]
    until(lambda: all(status.state.ended for status in queue.poll(jobs).values()), "both end")
    planted, other = (queue.poll(jobs)[job] for job in jobs)
    assert planted.state.value == "failed" and f"its log {log} cannot be written" in planted.reason
    assert other.state.value == "completed" and (shared / "other.log").read_text() == "done\n"
    assert mine.read_text() == "precious"
