"""Jobs on a node with which the batch system has lost contact, and jobs that the queue does not list any more."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import Client, Scheduler
from distributed.client import FutureCancelledError

from hpcgpu.batch.base import JobState, JobStatus, Reasons
from hpcgpu.batch.reasons import explain, why_it_stays
from hpcgpu.cli import main
from hpcgpu.client import lost_scheduler
from hpcgpu.errors import ClusterError
from hpcgpu.existing_clusters import lookup, query_jobs, stop
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory
from tests.unit.simulated import Site, closed

LOST = {"out_of_reach": True, "reason": "no contact since 14:00; it waits until 14:40"}
WORDS = Reasons(out_of_reach="If its node is off, `remove --force {job}` removes it at once")
STAYS = (
    "job 7 (demo-0) is cancelled, but stays in the queue: the batch system has lost contact with its node [no contact "
    "since 14:00; it waits until 14:40]. If its node is off, `remove --force 7` removes it at once"
)


def job(state: JobState = JobState.COMPLETING, **more: Any) -> JobStatus:
    return JobStatus(job_id="7", name="demo-0", state=state, words=WORDS, **LOST | more)


def test_a_cancelled_job_whose_node_is_out_of_reach_reports_why_it_stays_and_until_when() -> None:
    assert why_it_stays(job()) == STAYS
    assert why_it_stays(job(JobState.RUNNING)) == "" == why_it_stays(job(out_of_reach=False)), (
        "it is not cancelled; it ends soon"
    )
    assert job(JobState.RUNNING).halted and not job().halted
    assert "stop the cluster" not in explain(job(), kind="scheduler"), "it is stopped"


class Queue:
    """Has one job, which stays when it is cancelled."""

    remembers = False

    def __init__(self, status: JobStatus | None) -> None:
        self.status, self.cancelled = status, list[str]()

    def poll(self, job_ids: Any) -> dict[str, JobStatus]:
        return {"7": self.status} if self.status is not None and "7" in job_ids else {}

    def ended(self, job_ids: Any) -> dict[str, JobStatus]:
        return {}

    def find(self, job_name: str) -> list[str]:
        return []

    def cancel(self, job_ids: Any) -> None:
        self.cancelled += job_ids
        self.status = job()


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    directory = create_directory.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "7")
    return directory


def stopped(directory: ClusterDirectory, queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lookup, "batch_system", lambda name: queue)
    return CliRunner().invoke(main, ["stop", str(directory.path)])


def test_a_stop_reports_at_once_which_job_stays_and_what_to_do(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(job(JobState.RUNNING))
    done = stopped(directory, queue, monkeypatch)
    assert (done.exit_code, done.output, queue.cancelled) == (1, f"demo: {STAYS}\n", ["7"])
    assert directory.closing and not directory.closed, "`hpcgpu list` shows it until the job has left the queue"
    with pytest.raises(ClusterError, match=re.escape(STAYS)):
        stop.stop_all(directory)


def test_a_stop_does_not_report_that_no_job_is_left_if_the_queue_has_lost_them(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_jobs, "_SUBMIT", 0.0)
    done = stopped(directory, Queue(None), monkeypatch)
    assert done.output == (
        "demo: 0 jobs cancelled. The queue of this machine does not know 7: hpcgpu counts it as ended. "
        "If it may be in the queue of another machine, cancel it there\n"
    )
    assert done.exit_code == 0 and directory.closed


async def test_a_close_reports_which_job_stays_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    await site.begin(1)
    [lost] = [one.job_id for one in site.registry.jobs.values() if one.name == "demo-0"]

    def cancel(job_ids: Any, *, only_pending: bool = False) -> None:
        site.says("demo-scheduler", JobState.CANCELLED)
        site.says("demo-0", JobState.COMPLETING, **LOST)

    monkeypatch.setattr(site.queue, "cancel", cancel)
    closing = await closed(site)
    [told] = [text for text in site.warned if "in the queue" in text]
    assert told.startswith(f"cluster demo: job {lost} (demo-0) is cancelled, but stays in the queue: the batch system")
    assert "[no contact since 14:00; it waits until 14:40]" in told and "may still be" not in told
    assert closing.left == [lost] and not site.directory.closed


async def test_a_future_does_not_report_that_a_scheduler_is_gone_which_only_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_reconnect", "_handle_report", "_gather_remote"):  # put back at the end
        monkeypatch.setattr(Client, name, getattr(Client, name))

    async def why() -> str:
        return lost_scheduler.no_answer("demo", job(JobState.RUNNING))

    async with Scheduler(port=0, host="127.0.0.1", dashboard=False) as scheduler:
        lost_scheduler.explain_loss(scheduler.address, why)
        async with Client(scheduler.address, asynchronous=True, set_as_default=False) as client:
            result = asyncio.ensure_future(client.gather([client.submit(abs, -1)]))  # there is no worker
            while not scheduler.tasks:
                await asyncio.sleep(0.01)
            client.scheduler_comm.comm.abort()
            with pytest.raises(FutureCancelledError, match=r"for reason: the scheduler does not answer\.\n") as caught:
                await asyncio.wait_for(result, 60)
    assert "is gone" not in str(caught.value) and "lost contact with its node" in str(caught.value)
