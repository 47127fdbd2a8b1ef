"""What is reported of a cluster whose scheduler has ended, and whose worker jobs wait for the next one."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import FORGOTTEN
from hpcgpu.client import lost_scheduler
from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler.rpc_types import ManagerState, SchedulerState
from hpcgpu.display.job_info import JobInfo
from hpcgpu.existing_clusters import snapshot
from hpcgpu.existing_clusters.between_schedulers import between_schedulers, next_scheduler_job
from hpcgpu.manager import answer_clients
from hpcgpu.runtime import next_scheduler
from hpcgpu.runtime.scheduler_connection import ConnectionResult, answer_of
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.store import certificates_and_keys, saved_options
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

NOW = 1e9


def cluster(path: Path, **options: Any) -> ClusterDirectory:
    """A cluster whose scheduler is in job 1, and whose manager is this process."""
    directory = ClusterDirectory(path)
    about = {"name": "demo", "token": "t", "created": 1, "format": FORMAT, "system": "slurm"}
    directory.write("cluster.json", json.dumps(about))
    directory.tls.mkdir()
    options = {"name": "demo", "gpus_per_node": 2, "on_scheduler_end": "restart", **options}
    saved_options.write(directory, resolve("slurm", options))
    for job_id, name in (("1", "demo-scheduler"), ("2", "demo-0"), ("3", "demo-scheduler2")):
        directory.intend(name, "scheduler" if "scheduler" in name else "worker")
        directory.submitted(name, job_id)
    directory.publish(Contact(token="t", job_id="1", workers="tls://127.0.0.1:1", client="tls://127.0.0.1:1"))
    directory.take_over("python (process 1 on login1)")
    return directory


def job(job_id: str, name: str, state: str, **more: Any) -> JobInfo:
    kind = "scheduler" if "scheduler" in name else "worker"
    about = {"kind": kind, "reason": "", "waited": 0.0, "node": "n1", "workers": 0, "log": Path("log")}
    more = {"group": "default" if kind == "worker" else "", "gpus": 2 if kind == "worker" else 1, **more}
    return JobInfo(id=job_id, name=name, state=state, **(about | more))


ENDED = job("1", "demo-scheduler", "timeout", reason="its walltime is over", started=NOW - 9000, ended=NOW - 1800)
WAITS = job("2", "demo-0", "running", started=NOW - 7200, waited=7000.0)
NEXT = job("3", "demo-scheduler2", "pending", reason="Priority", waited=1790.0, expected_start=NOW + 600)


def test_it_reports_what_has_ended_what_comes_and_what_the_wait_costs(tmp_path: Path) -> None:
    late = job("5", "demo-1", "running", started=NOW - 900, waited=100.0)
    gave_up = job("6", "demo-2", "failed", started=NOW - 7200, ended=NOW - 900)
    restart = between_schedulers(cluster(tmp_path), [ENDED, WAITS, NEXT, late, gave_up], now=NOW)
    assert restart is not None and restart.comes and restart.since == NOW - 1800
    assert restart.sentences == [
        "scheduler job 1 has ended 30 min ago (timeout: its walltime is over)",
        "the next scheduler job 3 is pending for 30 min: Priority; the queue expects to start it in 10 min",
        "2 worker jobs keep their 4 GPUs and wait for it, 7 min to 2 h 02 min at most (restart_wait): "
        "4 GPU hours in an hour, 2.00 so far",
    ]


def test_a_full_disk_on_which_the_next_scheduler_cannot_write_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.existing_clusters.between_schedulers.is_full", lambda path: path == tmp_path)
    restart = between_schedulers(cluster(tmp_path), [ENDED, WAITS, NEXT], now=NOW)
    assert restart is not None
    said = f"its address cannot be written: the disk of {tmp_path} is full. Make room there"
    assert restart.sentences[2] == said


def test_a_time_that_the_user_sets_holds_for_each_job(tmp_path: Path) -> None:
    restart = between_schedulers(cluster(tmp_path, restart_wait="20m"), [ENDED, WAITS, NEXT], now=NOW)
    assert restart is not None and "waits for it, 20 min at most" in restart.sentences[2]


def test_a_next_job_that_runs_starts_its_scheduler_when_it_has_noticed_the_end(tmp_path: Path) -> None:
    directory, runs = cluster(tmp_path), replace(NEXT, state="running", reason="")
    restart = between_schedulers(directory, [ENDED, WAITS, runs], now=NOW)
    assert restart is not None
    says = "the next scheduler job 3 runs on n1, and takes over within a minute or two, when it notices the end"
    assert restart.sentences[1] == says, "no program has told it"
    directory.ended({"demo-scheduler": "1"}, {})
    restart = between_schedulers(directory, [ENDED, WAITS, runs], now=NOW)
    assert restart is not None
    assert restart.sentences[1] == "the next scheduler job 3 runs on n1, and its scheduler starts"


def test_without_a_next_job_it_names_who_submits_it(tmp_path: Path) -> None:
    directory = cluster(tmp_path)
    forgotten = job("1", "demo-scheduler", "unknown", reason=FORGOTTEN)
    restart = between_schedulers(directory, [forgotten, WAITS], now=NOW)
    assert restart is not None and restart.comes
    assert restart.sentences[1] == "python (process 1 on login1) submits the next scheduler job"
    [record] = tmp_path.glob("manager-*.json")
    directory.write(record.name, json.dumps(json.loads(record.read_text()) | {"process": [2**22, 1]}))
    restart = between_schedulers(directory, [ENDED, WAITS], now=NOW)
    assert restart is not None and not restart.comes, "its manager was killed"
    assert "`from_name(" in restart.sentences[1] and "takes the cluster over" in restart.sentences[1]


def test_a_job_that_should_have_followed_and_ended_before_is_not_the_scheduler_that_has_ended(tmp_path: Path) -> None:
    directory = cluster(tmp_path)
    directory.withdraw()  # the scheduler has ended in order
    ended = replace(ENDED, submitted=1.0)
    dropped = job("3", "demo-scheduler2", "cancelled", submitted=2.0, started=NOW - 3000, ended=NOW - 2500)
    restart = between_schedulers(directory, [ended, WAITS, dropped], now=NOW)
    assert restart is not None and restart.since == NOW - 1800
    assert restart.sentences[0].startswith("scheduler job 1 has ended 30 min ago")
    lives = job("1", "demo-scheduler", "running", submitted=1.0)  # it removes its contact first
    assert between_schedulers(directory, [lives, WAITS, dropped], now=NOW) is None


def test_it_names_the_next_job_of_a_cluster_whose_manager_has_ended_with_its_scheduler(tmp_path: Path) -> None:
    directory = cluster(tmp_path)
    directory.leave(1)
    directory.withdraw()
    restart = between_schedulers(directory, [ENDED, WAITS, NEXT], now=NOW)
    assert restart is not None and restart.comes
    assert restart.sentences[1].startswith("the next scheduler job 3 is pending")


@pytest.mark.parametrize("case", ["end", "alive", "early", "left", "closing", "intended"])
def test_it_is_silent_where_no_worker_job_waits(tmp_path: Path, case: str) -> None:
    directory = cluster(tmp_path, **({"on_scheduler_end": "end"} if case == "end" else {}))
    jobs = [ENDED, WAITS, NEXT]
    if case == "alive":
        jobs = [job("1", "demo-scheduler", "running"), WAITS]
    elif case == "early":  # the next one waits while the present one works
        jobs[0] = job("1", "demo-scheduler", "running")
    elif case == "left":
        directory.leave(1)
        directory.cancel(["demo-scheduler2"])  # else it follows without a program
    elif case == "closing":
        directory.begin_close()
    elif case == "intended":  # the scheduler has removed the keys
        directory.tls.rmdir()
    assert between_schedulers(directory, jobs, now=NOW) is None


def test_a_manager_that_has_not_yet_connected_to_the_next_scheduler_is_not_called_missing(tmp_path: Path) -> None:
    directory = cluster(tmp_path)
    manager: ManagerState = {"number": 0, "present": False, "about": "", "problem": "", "groups": [], "warnings": []}
    answer = SchedulerState(workers=[], gpus=[], manager=manager)
    shown = snapshot._manager(directory, directory.contact(), answer)
    assert shown == "python (process 1 on login1): it is not connected to the scheduler"
    directory.leave(1)
    assert snapshot._manager(directory, directory.contact(), answer) == ""


def test_the_list_names_the_next_scheduler_job(tmp_path: Path) -> None:
    directory = cluster(tmp_path)
    live = [JobStatus(job_id=i, state=JobState.PENDING) for i in ("1", "2", "3")]
    assert next_scheduler_job(directory, live) == "", "the scheduler works, and its successor waits"
    assert next_scheduler_job(directory, live[1:]).endswith("job 3 is its next scheduler job")
    assert next_scheduler_job(directory, live[1:2]) == ""


async def test_an_address_at_which_nobody_listens_is_no_reason_to_wait(tmp_path: Path) -> None:
    directory = cluster(tmp_path)
    directory.tls.rmdir()
    certificates_and_keys.create(directory, 3600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tls://127.0.0.1:{taken.getsockname()[1]}"
        contact = Contact(token="t", job_id="1", workers=address, client=address)
        with pytest.raises(ConnectionRefusedError, match="nobody listens there any more"):
            async with asyncio.timeout(9):
                await answer_of(directory, contact, lambda one: one.identity(), 600)


@pytest.mark.parametrize(
    "state", [SimpleNamespace(phase=SimpleNamespace(managed=False, left=True)), None], ids=["left", "forgotten"]
)
async def test_a_client_of_the_program_that_has_left_the_cluster_waits_for_the_scheduler_job_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    """The manager in the scheduler job has left, too: SIGTERM ends all processes of a job at its walltime."""
    directory = cluster(tmp_path)
    directory.write("wanted.json", json.dumps({"detached": True, "manager_in_scheduler_job": True}))
    directory.leave(directory.take_over("hpcgpu in the scheduler job", in_scheduler_job=True).number)
    directory.withdraw()
    looks = iter(range(3))

    async def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            directory.publish(Contact(token="t", job_id="3", workers="tls://127.0.0.1:2", client="tls://127.0.0.1:2"))

    monkeypatch.setattr(lost_scheduler.asyncio, "sleep", sleep)
    found = await answer_clients._next_address(lambda: state, directory, "tls://127.0.0.1:1", "1")  # type: ignore[arg-type]
    assert found == "tls://127.0.0.1:2"


@pytest.mark.parametrize(
    ("case", "again"),
    [
        ("a program manages the cluster", True),
        ("its manager has detached it, and a job waits to follow", True),
        ("its manager has detached it, and no job waits to follow", False),
        ("the job that should follow was cancelled", False),
        ("the cluster is closed", False),
        ("its keys were removed", False),
        ("its scheduler lives", False),
        ("a person ends the job", False),
        ("a person ends the job, after it has ended its workers itself", False),
        ("the job has ended its workers itself", True),
    ],
)
def test_a_worker_job_begins_anew_only_if_another_scheduler_can_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, again: bool
) -> None:
    directory, begun = cluster(tmp_path), list[str]()
    directory.withdraw()  # by a scheduler that has ended
    manager = directory.manager()
    assert manager is not None
    own, sent = "has ended its workers itself" in case, ("a person" in case) + ("itself" in case)
    monkeypatch.setattr(next_scheduler, "_served", ["1"])
    monkeypatch.setattr(next_scheduler, "_own_signals", [signal.SIGTERM] * own)
    monkeypatch.setattr(next_scheduler, "_terminated", [signal.SIGTERM] * sent)
    monkeypatch.setattr(next_scheduler, "identify", lambda contact, directory: ConnectionResult.ACCEPTED)
    monkeypatch.setattr(next_scheduler.os, "execve", lambda program, *_: begun.append(program))
    if "detached" in case or "cancelled" in case:
        directory.want(Wanted(detached=True))
        directory.leave(manager.number)
    if "no job waits" in case:
        directory.ended({"demo-scheduler2": "3"})
    if "cancelled" in case:
        directory.cancel(["demo-scheduler2"])
    if "closed" in case:
        directory.begin_close()
    if "keys" in case:
        directory.remove_secrets()
    if "lives" in case:
        directory.publish(Contact(token="t", job_id="1", workers="tls://127.0.0.1:1", client="tls://127.0.0.1:1"))
    arguments = argparse.Namespace(directory=tmp_path, restart_wait=60.0)
    next_scheduler.begin_anew(arguments, {}, "tls://127.0.0.1:1")
    assert bool(begun) is again
