"""The end of a budget of GPU hours is reported in advance and when it comes, and no result is waited for in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client, Event
from distributed.client import FutureCancelledError

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.notify import Notice
from tests.conftest import live, told
from tests.helpers import ADAPT, GPU, let_the_budget_end_soon, messages
from tests.helpers import hpcgpu as command

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]

ONE: dict[str, Any] = {**GPU, "gpus_per_node": 1, "jobs": 1}
ENDED = (["cancelled"], ["completed"])
NEAR = r"cluster spent has used \d+ % of its budget of 1 GPU hour\. When it is used up"
SPENT = r"cluster spent has used up its budget of \S+ GPU hours .*: its worker jobs end"


@pytest.fixture(autouse=True)
def short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a budget of some GPU seconds be worth a job, and running tasks get a second at its end."""
    let_the_budget_end_soon(monkeypatch)


def tasks() -> tuple[Callable[..., str], Callable[[Any], Any]]:
    """Functions of a function, which travel by value."""

    def wait_for(name: str, *needs: Any) -> str:
        Event(name).wait()
        return name

    def same(value: Any) -> Any:
        return value

    return wait_for, same


wait_for, same = tasks()


def used_up(cluster: LocalGPUCluster) -> None:
    """Set a budget that the jobs have used already."""
    hours = sum(group["gpu_hours"] for group in cluster.snapshot().groups)
    cluster.adapt(maximum_jobs=1, maximum_gpu_hours=hours, **ADAPT)


class Gathering:
    """Gathers in a thread, as a program that has called it before the budget ended."""

    def __init__(self, client: Client, futures: list[Any]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._gather, args=(client, futures), daemon=True)
        self._thread.start()

    def _gather(self, client: Client, futures: list[Any]) -> None:
        try:
            client.gather(futures)
        except BaseException as error:
            self.error = error

    def raised(self) -> str:
        """Wait until it has raised, and return what."""
        self._thread.join(150)
        assert self.error is not None, "gather still waits"
        return f"{type(self.error).__name__}: {self.error}"


def test_the_end_of_the_budget_is_reported_before_and_then_and_lost_results_are_errors_at_once(
    queue: LocalQueue, until: Until, fake_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.budget._NEAR", 1e-6)
    notices: list[Notice] = []
    with LocalGPUCluster(**ONE, name="spent", notify=notices.append) as cluster, Client(cluster) as client:
        result = client.submit(same, 1, key="result")
        assert result.result() == 1
        with told(NEAR):
            cluster.adapt(maximum_jobs=1, maximum_gpu_hours=1, **ADAPT)
        assert "% of its budget" in repr(cluster) and "% of its budget" in cluster._repr_html_()
        assert any("% of its budget" in text for text in cluster.snapshot().warnings)
        [sent] = client.scatter([[1, 2, 3]])
        waits = client.submit(wait_for, "go", key="waits")
        needs_sent = client.submit(wait_for, "go", sent, key="needs-sent")
        until(lambda: any(client.processing().values()), "a task runs")
        gathering = Gathering(client, [waits, result])
        with told(SPENT):
            used_up(cluster)
        assert "ClusterError: the budget of" in gathering.raised() and "maximum_gpu_hours above" in gathering.raised()
        assert "cluster spent is used up, and its worker jobs have ended: this result is lost" in gathering.raised()
        for future in (sent, needs_sent):
            with pytest.raises(FutureCancelledError, match=r"(?s)the budget of .* is used up.* send it again"):
                future.result(timeout=150)
        until(lambda: len(live(queue)) == 1, "the job has ended")
        until(lambda: [notice.event for notice in notices].count("budget") == 2, "both were told")
        assert "maximum_gpu_hours" in notices[-1].message
        assert "has used up its budget" in messages(cluster) and "% of its budget" in messages(cluster)
        assert "has used up its budget" in repr(cluster)
        assert any("has used up its budget" in text for text in cluster.snapshot().warnings)
        until(lambda: any("used up" in text for text in hpcgpu.snapshot("spent").warnings), "other programs see it")
        assert "warning    cluster spent has used up its budget" in command("status", "spent").stdout
        for _ in range(2):
            with pytest.raises(ClusterError, match="used up its budget"):
                cluster.wait_for_workers(1, timeout=150)
        monkeypatch.setattr("hpcgpu.scaling.budget._NEAR", 0.8)
        cluster.adapt(maximum_jobs=1, maximum_gpu_hours=10, **ADAPT)
        assert "its budget" not in repr(cluster) and not cluster.snapshot().warnings
        client.retry([result, waits])
        Event("go", client=client).set()
        assert client.gather([result, waits]) == [1, "go"], "with a larger budget the program goes on"


def test_a_program_that_loses_nothing_waits_and_goes_on_with_a_larger_budget(
    queue: LocalQueue, until: Until, fake_gpus: None
) -> None:
    with LocalGPUCluster(**ONE) as cluster, Client(cluster) as client:
        future = client.submit(wait_for, "go")
        until(lambda: any(client.processing().values()), "the task runs")
        with told("has used up its budget"):
            used_up(cluster)
        until(lambda: [job.state for job in cluster.jobs if job.kind == "worker"] in ENDED, "no other was asked for")
        assert not future.done() and cluster.adaptive is not None
        used = cluster.adaptive.state.gpu_hours
        cluster.settle()
        assert cluster.adaptive.state.gpu_hours == used > 0
        cluster.adapt(maximum_jobs=1, maximum_gpu_hours=10, **ADAPT)
        Event("go", client=client).set()
        assert future.result() == "go"


def test_results_move_to_another_group_before_the_jobs_end(queue: LocalQueue, until: Until, fake_gpus: None) -> None:
    with LocalGPUCluster(**ONE) as cluster, Client(cluster) as client:
        cluster.add_worker_group("cpus", gpus_per_node=0, cores=1, jobs=1)
        cluster.wait_for_workers(2)
        result = client.submit(same, [1, 2, 3], resources={"GPU": 1})
        assert result.result() == [1, 2, 3]
        with told("has used up its budget"):
            used_up(cluster)
        until(lambda: len(live(queue)) == 2, "the job with the GPU has ended")
        assert client.gather(result) == [1, 2, 3]


def test_work_that_the_rest_of_the_budget_cannot_pay_is_reported(
    queue: LocalQueue, until: Until, fake_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.adaptive_policy._USEFUL", 300.0)
    notices: list[Notice] = []
    with (
        LocalGPUCluster(**ONE | {"jobs": 0}, name="poor", notify=notices.append) as cluster,
        Client(cluster) as client,
    ):
        with told(r"rest of the budget of cluster poor is too small for a job: 0\.01 of 0\.01 GPU hours are left"):
            cluster.adapt(maximum_jobs=1, maximum_gpu_hours=0.01, **ADAPT)
            waits = client.submit(same, 1)
        until(lambda: [notice.event for notice in notices][-1:] == ["budget"], "it was told")
        with pytest.raises(ClusterError, match="too small for a job"):
            cluster.wait_for_workers(1)
        cluster.adapt(maximum_jobs=1, maximum_gpu_hours=1, **ADAPT)
        assert waits.result() == 1
