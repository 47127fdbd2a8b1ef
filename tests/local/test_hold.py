"""Workers that a program holds: nobody ends or replaces them, each has its rank, and the loss of one is an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import hpcgpu
import hpcgpu.client.hold
from hpcgpu import ClusterError, LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.fabric import interface_addresses
from tests.helpers import ADAPT, GPU, sum_over_ranks, travels, waits_for_file

pytestmark = [pytest.mark.shows("Workers that a program holds"), pytest.mark.usefixtures("fake_gpus")]

Until = Callable[..., None]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster_of_two(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster of one job with two GPUs, which tests leave as it was."""
    with LocalGPUCluster(**GPU, jobs=1) as cluster:
        yield cluster


@travels
def all_reduce(own: int, dask_worker: Any) -> tuple[dict[str, str], int, str]:
    """Add a number of each rank, over sockets and with the variables of torchrun, as a library of collectives does."""
    environment = {
        name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    where = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    total = sum_over_ranks(own, int(environment["RANK"]), int(environment["WORLD_SIZE"]), where)
    return environment, total, str(dask_worker.name)


@travels
def rank_or_wait(place: str) -> str:
    """End at once on the first rank; wait for a file on the others."""
    Path(place, f"begun-{os.environ['RANK']}").touch()
    while os.environ["RANK"] != "0" and not Path(place, "go").exists():
        time.sleep(0.1)
    return os.environ["RANK"]


@travels
def requests_that_wait(dask_scheduler: Any) -> int:
    return sum(not hold.members for hold in dask_scheduler.plugins["hpcgpu"].holds._holds)


@travels
def workers_that_will_leave(dask_scheduler: Any) -> set[str]:
    return set(dask_scheduler.plugins["hpcgpu"].holds.leaving)


@travels
def set_status(address: str, status: str, dask_scheduler: Any) -> None:
    dask_scheduler.handle_worker_status_change(status, dask_scheduler.workers[address], "test")


def hold_one(cluster: LocalGPUCluster, timeout: str | float = "60s") -> None:
    with cluster.hold(1, timeout=timeout) as workers:
        assert len(workers) == 1


def test_each_held_worker_has_its_rank_and_a_place_to_meet(
    queue: LocalQueue, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalGPUCluster(**{**GPU, "quiet": False}, jobs=2, walltime="1h") as cluster, cluster.hold(4) as workers:
        assert [(w.rank, w.local_rank, w.world_size) for w in workers] == [(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)]
        assert [w.job for w in workers] == sorted(2 * [*cluster.workers])
        assert {w.job_id for w in workers} == {job.job_id for job in cluster.workers.values()}
        answers = workers.run(all_reduce, 5)
        assert [total for _, total, _ in answers] == 4 * [20]
        assert [name for *_, name in answers] == [w.name for w in workers]
        assert [environment["RANK"] for environment, *_ in answers] == ["0", "1", "2", "3"]
        assert [environment["LOCAL_RANK"] for environment, *_ in answers] == ["0", "1", "0", "1"]
        with Client(cluster) as client:  # the variables are those of the call
            assert client.run(lambda: os.environ.get("RANK")) == dict.fromkeys(workers.addresses)
            assert client.submit(lambda: 1).result() == 1, "held workers take tasks"
            [own] = [name for name, address in interface_addresses.addresses().items() if address == workers[0].host]
            assert set(client.run(lambda: os.environ.get("GLOO_SOCKET_IFNAME")).values()) == {own}
    assert "4 workers held; job" in capfd.readouterr().err


def test_an_adaptive_cluster_starts_jobs_for_a_hold_and_keeps_them_until_it_ends(
    queue: LocalQueue, until: Until
) -> None:
    with ThreadPoolExecutor(2) as threads, LocalGPUCluster(**GPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
        with hpcgpu.hold(client, 4) as workers:
            assert len(workers) == 4
            until(
                lambda: "2 jobs needed for workers that a program holds" in adaptive.state.reason, "the reason says it"
            )
            second, begun, go = threading.Event(), threading.Event(), threading.Event()

            def hold_another() -> list[str]:
                with Client(cluster, set_as_default=False) as other, hpcgpu.hold(other, 2) as held:
                    begun.set()
                    go.wait()
                    return held.addresses

            another = threads.submit(hold_another)
            another.add_done_callback(lambda _: second.set())
            until(
                lambda: "4 jobs needed" in adaptive.state.reason or "3 jobs needed" in adaptive.state.reason, "it waits"
            )
            assert not begun.is_set(), "nobody else can hold them"
            cluster.scale(jobs=0)
            until(lambda: not cluster.workers, "the jobs drain")
            assert client.run(lambda: 1, workers=workers.addresses) == dict.fromkeys(workers.addresses, 1)
            cluster.adapt(minimum_jobs=1, maximum_jobs=1, **ADAPT)
        until(begun.is_set, "the other program has its workers")
        go.set()
        assert len(another.result()) == 2


@pytest.mark.parametrize("deleted", [True, False])
def test_a_job_with_held_workers_drains_only_after_the_block(queue: LocalQueue, until: Until, deleted: bool) -> None:
    with LocalGPUCluster(**GPU, jobs=0 if deleted else 1) as cluster, Client(cluster) as client:
        if deleted:
            cluster.add_worker_group("more", jobs=1)
        with cluster.hold(1) as workers:
            [job] = [job for job in cluster.jobs if job.name == workers[0].job]
            if deleted:
                cluster.delete_worker_group("more")
            else:
                cluster.scale(jobs=0)
            until(lambda: workers[0].name in client.run_on_scheduler(workers_that_will_leave), "the drain waits")
            assert workers.client.submit(travels(lambda: 1)).result(timeout=60) == 1
            assert job.name not in cluster.workers, "the job must end"
        until(lambda: not client.scheduler_info()["workers"], "the job ends after the block")


def test_the_loss_of_a_held_worker_is_raised_at_once_with_job_and_reason_and_the_others_are_free(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        LocalGPUCluster(**GPU, jobs=2) as cluster,
        Client(cluster) as client,
        cluster.hold(jobs=2) as workers,
    ):
        lost = workers[-1]
        pinned = client.submit(waits_for_file, str(home), workers=[lost.address])
        pair = client.submit(waits_for_file, str(home), workers=workers.addresses[2:], pure=False)
        call = threads.submit(workers.run, rank_or_wait, str(home))
        until(lambda: len(list(home.glob("begun-*"))) == 4 and client.processing()[lost.address], "all run")
        queue.cancel([lost.job_id])
        with pytest.raises(ClusterError) as error:
            call.result(timeout=150)
        words = str(error.value)
        assert f"of job {lost.job_id} ({lost.job}) was lost while a program held it: " in words
        assert "cancelled" in words and ".log" in words and words.endswith("The other workers are free again")
        with pytest.raises(ClusterError, match="this task may run there only"):
            pinned.result(timeout=60)
        with pytest.raises(ClusterError, match="this task may run there only"):
            pair.result(timeout=60)
        with hpcgpu.hold(client, 2) as others:
            assert [w.job for w in others] == 2 * [workers[0].job] and lost.job != workers[0].job
        (home / "go").touch()


def test_a_program_that_has_only_connected_learns_the_end_of_the_walltime_and_why_a_worker_was_lost(
    queue: LocalQueue, capfd: pytest.CaptureFixture[str]
) -> None:
    words = r"was lost while a program held it: .*cancelled.*\. Log: .*\.log\. The"
    with (
        LocalGPUCluster(**GPU, jobs=1, walltime="1h") as cluster,
        hpcgpu.connect(cluster.name, quiet=True) as client,
        pytest.raises(ClusterError, match=words),
        hpcgpu.hold(client, 2) as workers,
    ):
        assert f"2 workers held; job {workers[0].job} ends first, in " in capfd.readouterr().err
        queue.cancel([workers[0].job_id])
        with pytest.raises(ClusterError, match=words):
            workers.run(time.sleep, 600)
        raise RuntimeError("NCCL error: unhandled system error")  # as a library reports the loss


def test_a_queue_that_does_not_answer_delays_no_block_beyond_its_timeout(
    cluster_of_two: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def jobs(held: Any) -> list[Any]:
        asked.set()
        answers.wait()
        return []

    def program() -> int:
        with hpcgpu.connect(cluster_of_two.name, quiet=True) as client, hpcgpu.hold(client, 1, timeout=10) as workers:
            return len(workers)

    monkeypatch.setattr(hpcgpu.client.hold, "_ANSWERED", 1e6)
    monkeypatch.setattr(hpcgpu.client.hold.HeldWorkers, "_jobs_now", jobs)
    with ThreadPoolExecutor(1) as threads:
        try:
            assert threads.submit(program).result(timeout=100) == 1 and asked.is_set()
        finally:
            answers.set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "write either n_workers or jobs"),
        ({"n_workers": 1, "jobs": 1}, "write either n_workers or jobs"),
        ({"n_workers": 0}, "n_workers must be a whole number from 1 on, not 0"),
        ({"jobs": 1.5}, "jobs must be a whole number from 1 on, not 1.5"),
        ({"n_workers": 2, "timeout": "soon"}, "timeout"),
        ({"n_workers": 2, "resources": {"GPU": "1"}}, "resources"),
    ],
)
def test_what_cannot_be_held_is_refused(cluster_of_two: LocalGPUCluster, arguments: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        cluster_of_two.hold(**arguments)


def test_more_workers_than_there_will_be_are_an_error_and_a_wait_ends_by_its_timeout(
    cluster_of_two: LocalGPUCluster,
) -> None:
    few = pytest.raises(ClusterError, match=r"will have only 2 workers in 1 job, but the program waits for 3")
    with few, cluster_of_two.hold(3):
        pass
    late = pytest.raises(TimeoutError, match=r"hold: 1 worker requested; after 0.5 s 0 free$")

    with ThreadPoolExecutor(1) as threads, cluster_of_two.hold(2), late:
        threads.submit(hold_one, cluster_of_two, timeout=0.5).result()


def test_only_workers_that_can_serve_a_request_count_as_its_workers(queue: LocalQueue) -> None:
    with LocalGPUCluster(**GPU, jobs=1) as cluster:
        cluster.add_worker_group("cpu", jobs=1, gpus_per_node=0, cores=1, resources={"CPU": 1})
        cluster.wait_for_workers(3)
        for words, request in (
            (r"will have only 2 workers in 1 job, .* waits for 3: call scale\(3\)", {"n_workers": 3}),
            (
                r"will have only 1 worker in 1 job, .* waits for 2: call scale\(2, worker_group='cpu'\)",
                {"n_workers": 2, "resources": {"CPU": 1}},
            ),
            (r"no worker group has workers of this kind", {"n_workers": 1, "resources": {"FPGA": 1}}),
        ):
            with pytest.raises(ClusterError, match=words), cluster.hold(**request, timeout="60s"):
                pass
        with cluster.hold(1, resources={"CPU": 1}), cluster.hold(2, timeout="60s") as workers:
            assert len(workers) == 2, "the block around it holds a worker of another kind"


def test_a_block_inside_a_block_does_not_wait_for_a_worker_of_the_outer_one_that_takes_no_tasks(
    cluster_of_two: LocalGPUCluster,
) -> None:
    with Client(cluster_of_two) as client, cluster_of_two.hold(1) as outer:
        client.run_on_scheduler(set_status, outer[0].address, "paused")
        with cluster_of_two.hold(1, timeout="60s") as inner:
            assert len(inner) == 1
        client.run_on_scheduler(set_status, outer[0].address, "running")


def test_a_block_that_waits_for_workers_of_a_block_around_it_is_an_error(cluster_of_two: LocalGPUCluster) -> None:
    words = r"hold: 1 worker requested, beside 2 that this program holds already: .* will have only 2 workers in 1 job"
    own = pytest.raises(ClusterError, match=words)
    with cluster_of_two.hold(2), own, cluster_of_two.hold(1, timeout="60s"):
        pass
    with cluster_of_two.hold(1), cluster_of_two.hold(1, timeout="60s") as workers:
        assert len(workers) == 1, "there are enough"
    with cluster_of_two.hold(1), cluster_of_two.hold(1, timeout="60s"), own, cluster_of_two.hold(1, timeout="60s"):
        pass
    with cluster_of_two.hold(2, timeout="60s"):
        pass

    late = pytest.raises(
        TimeoutError, match=r"2 workers requested, beside 1 that this program holds already; after 0.5 s 1 free"
    )

    async def program() -> None:  # it cannot know whether the cluster will grow
        async with (
            await hpcgpu.connect(cluster_of_two.name, asynchronous=True, quiet=True) as client,
            hpcgpu.hold(client, 1, quiet=True),
        ):
            with late:
                async with hpcgpu.hold(client, 2, quiet=True, timeout=0.5):
                    pass

    asyncio.run(program())


def test_what_the_block_raises_comes_through_and_the_workers_are_free_again(cluster_of_two: LocalGPUCluster) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cluster_of_two.hold(2, timeout="60s") as workers:
            workers.run(travels(lambda: 1 / 0))


def test_an_error_of_the_block_that_is_no_loss_is_raised_without_a_wait(
    cluster_of_two: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hpcgpu.client.hold, "_REPORTED", 1e6)
    with pytest.raises(FileNotFoundError), cluster_of_two.hold(2) as workers:
        workers.run(travels(lambda: Path("/not/there").read_text()))
    with pytest.raises(FileNotFoundError), cluster_of_two.hold(2):
        Path("/not/there").read_text()


def test_calls_that_overlap_have_their_own_ranks_when_they_begin_and_leave_nothing(
    cluster_of_two: LocalGPUCluster, home: Path, until: Until
) -> None:
    with Client(cluster_of_two) as client, ThreadPoolExecutor(1) as threads:
        with cluster_of_two.hold(2) as workers:
            early = threads.submit(workers.run, rank_or_wait, str(home))
            until(lambda: len(list(home.glob("begun-*"))) == 2, "the first call runs on both")
            assert workers.run(travels(lambda: os.environ["RANK"])) == ["0", "1"]
            (home / "go").touch()
            assert early.result() == ["0", "1"]
        assert set(client.run(lambda: os.environ.get("RANK")).values()) == {None}


def test_a_rank_may_not_start_a_process_unless_dask_is_configured_so(cluster_of_two: LocalGPUCluster) -> None:
    """`test_libraries` shows the other case."""

    def start_process() -> None:
        import multiprocessing

        multiprocessing.Process(target=print).start()

    words = "daemonic processes are not allowed to have children"
    assert words in " ".join((ROOT / "docs" / "libraries.rst").read_text().split())
    with pytest.raises(AssertionError, match=words), cluster_of_two.hold(2) as workers:
        workers.run(start_process)


def test_a_client_that_is_closed_in_its_block_stops_no_later_block(cluster_of_two: LocalGPUCluster) -> None:
    client = hpcgpu.connect(cluster_of_two.name, quiet=True)
    with suppress(Exception), hpcgpu.hold(client, 1):
        client.close()
    with cluster_of_two.hold(2, timeout=60) as workers:
        assert len(workers) == 2


def test_a_scheduler_that_is_not_of_hpcgpu_is_named(home: Path) -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address=None, processes=False) as other,
        Client(other) as client,
        pytest.raises(ClusterError, match=r"is no scheduler of a cluster of hpcgpu"),
        hpcgpu.hold(client, 1),
    ):
        pass


def test_a_program_that_is_killed_holds_nothing_any_more(cluster_of_two: LocalGPUCluster) -> None:
    then = f"""
import hpcgpu
with hpcgpu.hold(hpcgpu.connect({cluster_of_two.name!r}, quiet=True), 2, quiet=True):
    print("held", flush=True)
    time.sleep(600)
"""
    program = subprocess.Popen([sys.executable, "-c", f"import time\n{then}"], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError), cluster_of_two.hold(1, timeout=1):
        pass
    program.kill()
    with cluster_of_two.hold(2) as workers:
        assert len(workers) == 2
    program.communicate()


def test_requests_are_served_in_their_order_and_a_program_that_dies_leaves_the_queue(
    cluster_of_two: LocalGPUCluster, until: Until
) -> None:
    then = f"""
import hpcgpu
with hpcgpu.hold(hpcgpu.connect({cluster_of_two.name!r}, quiet=True), 2, quiet=True):
    pass
"""
    with Client(cluster_of_two) as client, ThreadPoolExecutor(2) as threads:

        def wait_for(waiting: int) -> None:
            until(lambda: client.run_on_scheduler(requests_that_wait) == waiting, f"{waiting} requests wait")

        def hold(number: int, served: list[int]) -> None:
            with Client(cluster_of_two, set_as_default=False) as other, hpcgpu.hold(other, number, quiet=True):
                served.append(number)

        served: list[int] = []
        with cluster_of_two.hold(1):
            first = threads.submit(hold, 2, served)
            wait_for(1)
            words = "hold: 1 worker requested; after 0.5 s 1 free, 1 of them for earlier requests"
            with ThreadPoolExecutor(1) as third, pytest.raises(TimeoutError, match=words):
                third.submit(hold_one, cluster_of_two, timeout=0.5).result()
            second = threads.submit(hold, 1, served)
            wait_for(2)
            with cluster_of_two.hold(1, timeout="60s") as workers:
                assert len(workers) == 1, "the others wait for this program in any case"
            wait_for(2)
        first.result(), second.result()
        assert served == [2, 1], "the smaller request came later"

        with cluster_of_two.hold(1):
            program = subprocess.Popen([sys.executable, "-c", then])
            wait_for(1)
            second = threads.submit(hold, 1, served)
            wait_for(2)
            program.kill()
            second.result()
        program.wait()


def test_an_interrupted_program_leaves_the_queue(cluster_of_two: LocalGPUCluster, until: Until) -> None:
    then = f"""
import hpcgpu
client = hpcgpu.connect({cluster_of_two.name!r}, quiet=True)
try:
    with hpcgpu.hold(client, 2, quiet=True):
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
    input()
"""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Client(cluster_of_two) as client, cluster_of_two.hold(1):
        program = subprocess.Popen([sys.executable, "-c", then], text=True, **pipe)
        until(lambda: client.run_on_scheduler(requests_that_wait) == 1, "it waits")
        program.send_signal(signal.SIGINT)
        assert program.stdout is not None and program.stdout.readline() == "interrupted\n"
        with ThreadPoolExecutor(1) as threads:
            threads.submit(hold_one, cluster_of_two).result()
        program.communicate("\n")


def test_an_asynchronous_program_holds_workers_too(cluster_of_two: LocalGPUCluster) -> None:
    async def program() -> list[str]:
        async with (
            await hpcgpu.connect(cluster_of_two.name, asynchronous=True, quiet=True) as client,
            hpcgpu.hold(client, 2, quiet=True) as workers,
        ):
            answers: list[str] = await workers.run(travels(lambda: os.environ["RANK"]))
            return answers

    assert asyncio.run(program()) == ["0", "1"]
