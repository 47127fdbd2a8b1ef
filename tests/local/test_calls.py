"""Calls that run on workers are work: adapt, idle_timeout, scaling by hand and walltime wait for them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Event, get_worker, secede, worker_client

from hpcgpu import LocalGPUCluster
from hpcgpu import connect as connect_to
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, told
from tests.helpers import ADAPT, CPU, GPU, decisions, hpcgpu, let_go, travels, waits_for

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]


@travels
def in_background(name: str) -> str:
    """A task that has left its thread."""
    secede()
    Event(name).wait()
    return str(get_worker().name)


def waits_for_file(place: str) -> None:
    """Work that goes on until there is a file."""
    Path(place, "begun").touch()
    while not Path(place, "go").exists():
        time.sleep(0.1)
    Path(place, "done").touch()


async def asynchronously_waits_for_file(place: str) -> None:
    """The same, and meanwhile its worker does other things."""
    Path(place, "begun").touch()
    while not Path(place, "go").exists():
        await asyncio.sleep(0.1)
    Path(place, "done").touch()


def waiter() -> type:
    """An actor whose class travels by value."""

    class Waiter:
        def __init__(self) -> None:
            self.waits = waits_by_value

        def wait(self, place: str) -> str:
            self.waits(place)
            return "waited"

    waits_by_value = travels(waits_for_file)
    return Waiter


def kinds() -> dict[str, Callable[[Client, str], object]]:
    """Work of each kind, by what begins it. Functions of a function are pickled by value."""
    waits = travels(waits_for_file)

    def in_worker_client(place: str) -> None:
        with worker_client():
            waits(place)

    asynchronous = travels(asynchronously_waits_for_file)
    return {
        "worker_client": lambda client, place: client.submit(in_worker_client, place),
        "async": lambda client, place: client.submit(asynchronous, place),
    }


@travels
def ends_when_idle(dask_scheduler: Any) -> None:
    """End the scheduler after 3 s without work. It has no `idle_timeout` while its worker starts."""
    dask_scheduler.plugins["hpcgpu"].idle_time.limit = 3.0


@travels
def idle_since(dask_scheduler: Any) -> float | None:
    """Since when the scheduler has no work, as it finds now."""
    found: float | None = None if dask_scheduler.plugins["hpcgpu"].works() else dask_scheduler.check_idle()
    return found


@travels
def never_ends_when_idle(dask_scheduler: Any) -> None:
    """Let the scheduler live without work again."""
    dask_scheduler.plugins["hpcgpu"].idle_time.limit = 0.0


@travels
def running(dask_scheduler: Any) -> int:
    """Return how many workers take tasks."""
    return len(dask_scheduler.running)


@travels
def expects_heartbeats(dask_scheduler: Any) -> None:
    """Let the scheduler restart each worker that was silent for 5 s, instead of 5 min."""
    dask_scheduler.plugins["hpcgpu"].silence.limit = 1.0


def test_adapt_ends_no_job_on_which_a_call_runs(queue: LocalQueue, home: Path, until: Until) -> None:
    with ThreadPoolExecutor(4) as threads, LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        cluster.adapt(minimum_jobs=2, maximum_jobs=2, **ADAPT)
        cluster.wait_for_workers(2)
        first, second = client.scheduler_info()["workers"]
        client.run(waits_for, "test_go", workers=[first], wait=False)  # its answer comes before its end
        # this one holds the event loop of its worker, which sends no heartbeats
        call = threads.submit(client.run, travels(waits_for_file), str(home), workers=[second])
        [called] = [job.name for job in cluster.workers.values() if first in job.workers]
        until(lambda: cluster.workers[called].work.load.calls, "its worker has reported the first call")
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
        until(lambda: "2 calls run on the workers of 2 jobs" in adaptive.state.reason, "the reason says it")
        (home / "go").touch()
        assert call.result() == {second: None}
        until(lambda: list(cluster.workers) == [called], "the job without a call ends")
        until(lambda: "1 call runs on the workers of 1 job" in adaptive.state.reason, "the other stays")
        client.run(let_go, "test_go", workers=[first])
        until(lambda: not cluster.workers and len(live(queue)) == 1, "the other ends when its call has")


def test_a_job_that_is_released_by_hand_waits_for_its_calls(queue: LocalQueue, until: Until) -> None:
    with ThreadPoolExecutor(4) as threads, LocalGPUCluster(**CPU, jobs=2) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        called, _ = sorted(cluster.workers)
        [address] = cluster.workers[called].workers
        call = threads.submit(client.run, waits_for, "test_go", workers=[address])
        cluster.adapt(minimum_jobs=2, maximum_jobs=2)  # reads the load
        until(lambda: cluster.workers[called].work.load.calls, "it is known")
        cluster.scale(jobs=1)
        until(lambda: list(cluster.workers) == [called] and len(live(queue)) == 2, "the other job is chosen")
        cluster.scale(jobs=0)
        until(lambda: not cluster.workers, "the job drains")
        ended = threading.Event()
        call.add_done_callback(lambda _: ended.set())
        assert not ended.wait(3) and len(live(queue)) == 2
        client.run(let_go, "test_go", workers=[address])
        assert call.result() == {address: called}
        until(lambda: len(live(queue)) == 1, "it ends after its call")


def test_idle_timeout_counts_calls_and_tasks_that_have_left_their_thread(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with (
        ThreadPoolExecutor() as threads,  # a call of a failed test ends with the cluster
        LocalGPUCluster(**CPU, jobs=1) as cluster,
        Client(cluster) as client,
        told("it ended by itself"),
    ):
        cluster.wait_for_workers(1)

        def works() -> bool:  # after a task has moved on, one check proves nothing
            return all(client.run_on_scheduler(idle_since) is None for _ in range(3))

        for work in (waits_for_file, asynchronously_waits_for_file):
            place = home / work.__name__
            place.mkdir()
            call = threads.submit(client.run, travels(work), str(place))
            until((place / "begun").exists, "it runs")
            assert works(), "a call is work"
            (place / "go").touch()
            call.result()
            until(lambda: not works(), "the call has ended")
        (home / "alone").mkdir()
        client.run(travels(asynchronously_waits_for_file), str(home / "alone"), wait=False)
        until((home / "alone" / "begun").exists, "it runs")
        until(works, "a call for which no program waits is work, as soon as its worker has reported it")
        (home / "alone" / "go").touch()
        until(lambda: not works(), "this call has ended too")
        left = client.submit(in_background, "go")
        until(works, "a task that has left its thread is work")
        Event("go", client=client).set()
        assert left.result() in cluster.workers
        del left
        client.run_on_scheduler(ends_when_idle)
        until(lambda: not live(queue), "without work it ends")


def test_a_call_is_waited_for_as_long_as_the_walltime_allows(queue: LocalQueue, until: Until) -> None:
    """Also without a manager. Both clusters run at the same time, because the walltime takes long."""
    options = CPU | {"walltime": "2m", "walltime_margin": "1m", "scheduler": {"walltime": "20m"}}
    with ThreadPoolExecutor(4) as threads, ExitStack() as stack:
        calls = []
        for name in ("managed", "left"):
            cluster = stack.enter_context(LocalGPUCluster(**options, name=name, jobs=1))
            cluster.wait_for_workers(1)
            [log] = cluster.directory.logs.glob(f"{name}-0*")
            if name == "left":
                cluster.detach()
            client = stack.enter_context(connect_to(name, quiet=True))
            [address] = client.scheduler_info()["workers"]
            call = threads.submit(client.run, waits_for, "test_go", workers=[address])
            calls.append((f"{name}-0", log, client, address, call))
        for worker, log, client, address, call in calls:
            until(
                lambda log=log: "its workers retire once what runs on them has ended" in log.read_text(), log.read_text
            )
            ended = threading.Event()
            call.add_done_callback(lambda _, ended=ended: ended.set())
            assert not ended.wait(3)
            client.run(let_go, "test_go", workers=[address])
            assert call.result() == {address: worker}
            until(lambda client=client, address=address: address not in client.scheduler_info()["workers"], "it leaves")
    assert hpcgpu("stop", "left").returncode == 0


def test_a_call_that_sends_no_heartbeats_for_long_keeps_its_worker(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        [address] = client.scheduler_info()["workers"]
        client.run_on_scheduler(expects_heartbeats)
        assert client.run(time.sleep, 15) == {address: None}
        assert list(client.run(os.getpid)) == [address]


@pytest.mark.parametrize("kind", kinds())
def test_work_of_each_kind_keeps_its_job_and_is_waited_for(
    kind: str, queue: LocalQueue, home: Path, until: Until
) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        job = list(cluster.workers)
        work = kinds()[kind](client, str(home))
        until((home / "begun").exists, "it runs")
        client.run_on_scheduler(ends_when_idle)
        cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        decisions(cluster, until)
        assert list(cluster.workers) == job and len(live(queue)) == 2, "neither adapt nor idle_timeout ends it"
        cluster.scale(jobs=0)
        until(lambda: not cluster.workers, "the job drains")
        assert not threading.Event().wait(3)
        assert len(live(queue)) == 2 and not (home / "done").exists()
        (home / "go").touch()
        until(lambda: len(live(queue)) <= 1, "its job ends")
        assert (home / "done").exists()
        del work


def test_zero_jobs_wait_for_a_call_also_where_an_actor_and_results_are_lost_then(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        [job] = list(cluster.workers)
        held = client.submit(str, "held")
        assert held.result() == "held"
        actor = client.submit(waiter(), actor=True).result()
        call = actor.wait(str(home))
        until((home / "begun").exists, "it runs")
        cluster.adapt(minimum_jobs=1, maximum_jobs=1)  # reads the load
        until(lambda: cluster.workers[job].work.load.calls, "its worker has reported it")
        client.run_on_scheduler(ends_when_idle)
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        until(lambda: "1 call runs on the workers of 1 job" in adaptive.state.reason, "an actor's call is work")
        decisions(cluster, until)
        assert list(cluster.workers) == [job] and len(live(queue)) == 2, "neither adapt nor idle_timeout ends it"
        client.run_on_scheduler(never_ends_when_idle)
        cluster.scale(jobs=0)
        until(lambda: client.run_on_scheduler(running) == 0, "the job drains")
        new = client.submit(str, "new")
        assert not threading.Event().wait(3)
        assert len(live(queue)) == 2 and held.result() == "held" and not call.done()
        assert new.status == "pending", "it takes no new tasks"
        (home / "go").touch()
        assert call.result() == "waited"
        until(lambda: len(live(queue)) == 1, "its job ends, and the actor and the result with it")
        cluster.scale(jobs=1)
        assert client.gather([held, new]) == ["held", "new"], "another job computes them"


def test_a_worker_whose_gpu_works_is_not_idle(
    queue: LocalQueue, fake_gpus: None, home: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    says = home / "says"
    says.mkdir()
    monkeypatch.setenv("STUBNVML_READINGS", str(says))
    (says / "1").write_text("80 9000 250500")  # something that Dask has no record of computes on it
    with LocalGPUCluster(**GPU, jobs=1) as cluster, Client(cluster) as client, told("it ended by itself"):
        cluster.wait_for_workers(2)
        [job] = cluster.workers
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        until(lambda: f"job {job} is kept, as its GPU works" in adaptive.state.reason, "the reason says it")
        client.run_on_scheduler(ends_when_idle)
        decisions(cluster, until)
        assert list(cluster.workers) == [job] and len(live(queue)) == 2
        (says / "1").write_text("0 9000 70000")
        until(lambda: not live(queue), "its job ends, and then the cluster")
