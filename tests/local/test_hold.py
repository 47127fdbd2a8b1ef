"""Workers that a program holds: nobody ends or replaces them, each has its rank, and the loss of one is an error."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, get_worker

import hpcgpu
import hpcgpu.client.held_set
from hpcgpu import ClusterError, ClusterWarning, LocalGPUCluster, OptionError
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
def blocks_its_worker(place: str) -> None:
    """A plain function that `Client.run` runs: the worker answers nobody meanwhile."""
    Path(place, "begun").touch()
    while not Path(place, "go").exists():
        time.sleep(0.1)


@travels
def second_fails_and_the_first_waits(place: str) -> None:
    """As a training in which one rank has no memory left, and the others wait for it in all_reduce."""
    rank = os.environ["RANK"]
    Path(place, f"begun-{rank}").touch()
    while len(list(Path(place).glob("begun-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    if rank == "1":
        raise MemoryError("CUDA out of memory")
    while not Path(place, "go").exists():
        time.sleep(0.1)


@travels
async def this_fails_and_others_wait(address: str, place: str, dask_worker: Any) -> None:
    """The same, as libraries call functions by `Client.run`."""
    if dask_worker.address == address:
        raise MemoryError("CUDA out of memory")
    while not Path(place, "go").exists():
        await asyncio.sleep(0.1)


@travels
def breaks_with_its_peer(place: str) -> None:
    """What a library of collectives does: if the process of a rank ends, the other ranks raise an error at once."""
    rank, own = os.environ["RANK"], os.environ["MASTER_ADDR"]
    if rank == "0":
        with socket.create_server((own, int(os.environ["MASTER_PORT"]))) as server:
            connection, _ = server.accept()
            Path(place, "pid").write_text(connection.recv(100).decode())
            Path(place, "connected").touch()
            if not connection.recv(1):
                raise RuntimeError("Connection closed by peer")
    while True:
        try:
            connection = socket.create_connection((own, int(os.environ["MASTER_PORT"])))
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(str(os.getpid()).encode())
    time.sleep(600)


@travels
def requests_that_wait(dask_scheduler: Any) -> int:
    return sum(not hold.members for hold in dask_scheduler.plugins["hpcgpu"].holds._holds)


@travels
def workers_that_will_leave(dask_scheduler: Any) -> set[str]:
    return set(dask_scheduler.plugins["hpcgpu"].holds.must_leave_until)


@travels
def status(address: str, dask_scheduler: Any) -> str:
    return str(dask_scheduler.workers[address].status.name)


@travels
def set_status(address: str, status: str, dask_scheduler: Any) -> None:
    dask_scheduler.handle_worker_status_change(status, dask_scheduler.workers[address], "test")


def reports_while_it_waits(
    cluster: LocalGPUCluster, n_workers: int, until: Until, capfd: pytest.CaptureFixture[str], *words: str
) -> None:
    """Hold workers of a cluster in a program that has only connected to it, until it reports these words."""
    said: list[str] = []

    def waits() -> bool:
        said.append(capfd.readouterr().err)
        return all(one in "".join(said) for one in words)

    def block() -> None:
        with hpcgpu.hold(client, n_workers):
            pass

    with ThreadPoolExecutor(1) as threads, hpcgpu.connect(cluster.name, quiet=True) as client:
        waiting = threads.submit(block)
        until(waits, "it reports them")
        client.close()
        assert waiting.exception(timeout=150) is not None, "its client is closed"


def hold_one(cluster: LocalGPUCluster, timeout: str | float = "150s") -> None:
    with cluster.hold(1, timeout=timeout) as workers:
        assert len(workers) == 1


def test_each_held_worker_has_its_rank_and_a_place_to_meet(
    queue: LocalQueue, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalGPUCluster(**{**GPU, "quiet": False}, jobs=2, walltime="1h") as cluster, cluster.hold(4) as workers:
        assert [(w.rank, w.local_rank, w.world_size) for w in workers] == [(0, 0, 4), (1, 1, 4), (2, 2, 4), (3, 3, 4)]
        assert [w.job for w in workers] == sorted(2 * [*cluster.workers])
        assert {w.job_id for w in workers} == {job.job_id for job in cluster.workers.values()}
        answers = workers.run(all_reduce, 5)
        assert [total for _, total, _ in answers] == 4 * [20]
        assert [name for *_, name in answers] == [w.name for w in workers]
        assert [environment["RANK"] for environment, *_ in answers] == ["0", "1", "2", "3"]
        assert [environment["LOCAL_RANK"] for environment, *_ in answers] == ["0", "1", "2", "3"]
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


def test_a_hold_gets_its_workers_from_two_groups_that_adapt_and_a_fixed_one(queue: LocalQueue) -> None:
    with LocalGPUCluster(**GPU | {"gpus_per_node": 1}) as cluster:
        cluster.add_worker_group("fixed", jobs=1)
        cluster.add_worker_group("more", jobs=0)
        cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        cluster.adapt(minimum_jobs=0, maximum_jobs=2, worker_group="more", **ADAPT)
        with cluster.hold(4, timeout="150s") as workers:
            groups = {job.name: job.group for job in cluster.jobs}
            assert sorted(groups[w.job] for w in workers) == ["default", "fixed", "more", "more"]


def test_a_job_with_held_workers_drains_only_after_the_block(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**GPU) as cluster, Client(cluster) as client:
        for begin, end in (
            (lambda: cluster.add_worker_group("more", jobs=1), lambda: cluster.delete_worker_group("more")),
            (lambda: cluster.scale(jobs=1), lambda: cluster.scale(jobs=0)),
        ):
            begin()
            with cluster.hold(1) as workers:
                [job] = [job for job in cluster.jobs if job.name == workers[0].job]
                end()
                until(lambda: workers[0].name in client.run_on_scheduler(workers_that_will_leave), "the drain waits")
                assert workers.client.submit(travels(lambda: 1)).result(timeout=150) == 1
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
            pinned.result(timeout=150)
        with pytest.raises(ClusterError, match="this task may run there only"):
            pair.result(timeout=150)
        with hpcgpu.hold(client, 4) as others:  # a new job replaces the lost one
            assert set(workers.addresses[:2]) < set(others.addresses) and lost.job != workers[0].job
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
        assert f"2 workers held; job {workers[0].job} drains first, in " in capfd.readouterr().err
        queue.cancel([workers[0].job_id])
        with pytest.raises(ClusterError, match=words):
            workers.run(time.sleep, 600)
        raise RuntimeError("NCCL error: unhandled system error")  # as a library reports the loss


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_fresh_cluster_reports_which_job_ends_first_before_the_queue_does(
    queue: LocalQueue, capfd: pytest.CaptureFixture[str], scheduler_first: bool
) -> None:
    options = {**GPU, "quiet": False, "poll_interval": 600, "walltime": "2h"}
    options["scheduler"] = {**GPU["scheduler"], "walltime": "1h" if scheduler_first else "2h"}
    with LocalGPUCluster(**options, jobs=1) as cluster, cluster.hold(2) as workers:
        said = capfd.readouterr().err
        words = rf"job {workers[0].job} drains first, in 1 h 5\d min, as its walltime ends in"
        if scheduler_first:
            words = rf"scheduler job {cluster.name}-scheduler ends first, in [56]\d min, and the "
        assert re.search(f"2 workers held; {words}", said), said


def test_a_call_on_held_workers_goes_on_while_their_job_drains_and_another_one_can_begin(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        LocalGPUCluster(**GPU, jobs=1, walltime="2h") as cluster,
        Client(cluster) as client,
        cluster.hold(2) as workers,
    ):
        call = threads.submit(workers.run, rank_or_wait, str(home))
        until(lambda: len(list(home.glob("begun-*"))) == 2, "it runs")
        (own,) = cluster._state.registry.groups["default"].jobs
        until(lambda: own.work.walltime > 7000, "the cluster has planned with its walltime")
        with queue._locked():  # its walltime ends soon, as if it had run for long
            job = queue._read(workers[0].job_id)
            assert job is not None
            queue._write(replace(job, end=time.time() + 240))
        until(lambda: client.run_on_scheduler(status, workers[0].address) == "closing_gracefully", "the job drains")
        assert workers.run(travels(lambda: os.environ["RANK"])) == ["0", "1"]
        (home / "go").touch()
        assert call.result(timeout=150) == ["0", "1"]


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

    monkeypatch.setattr(hpcgpu.client.held_set, "_ANSWERED", 1e6)
    monkeypatch.setattr(hpcgpu.client.held_set.HeldWorkers, "_jobs_now", jobs)
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
    late = pytest.raises(TimeoutError, match=r"hold: 1 worker requested; after 10 s 0 free$")

    with ThreadPoolExecutor(1) as threads, cluster_of_two.hold(2), late:
        threads.submit(hold_one, cluster_of_two, timeout=10).result()
    with ThreadPoolExecutor(1) as threads, cluster_of_two.hold(2):
        at_once = threads.submit(hold_one, cluster_of_two, timeout=0)
        assert isinstance(at_once.exception(timeout=100), TimeoutError), "0 is no wait"


def test_a_program_that_has_only_connected_is_shown_why_there_are_not_more_workers(
    cluster_of_two: LocalGPUCluster, until: Until, capfd: pytest.CaptureFixture[str]
) -> None:
    reports_while_it_waits(cluster_of_two, 3, until, capfd, "3 workers to hold: 2 free, ", "the size is set to 1 job")


def test_workers_without_a_gpu_are_held_by_their_resources_and_that_is_reported(
    queue: LocalQueue, until: Until, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "no worker group has workers with a GPU; to hold others, give `resources`"
    with LocalGPUCluster(gpus_per_node=0, cores=1, jobs=1, resources={"CPU": 1}, quiet=True) as cluster:
        reports_while_it_waits(cluster, 1, until, capfd, "1 worker to hold: 0 free, ", words)
        with pytest.raises(ClusterError, match=words), cluster.hold(1, timeout="150s"):
            pass
        with cluster.hold(1, resources={"CPU": 1}, timeout="150s") as workers:
            assert len(workers) == 1


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
            with pytest.raises(ClusterError, match=words), cluster.hold(**request, timeout="150s"):
                pass
        with cluster.hold(1, resources={"CPU": 1}), cluster.hold(2, timeout="150s") as workers:
            assert len(workers) == 2, "the block around it holds a worker of another kind"


def test_a_block_inside_a_block_does_not_wait_for_a_worker_of_the_outer_one_that_takes_no_tasks(
    cluster_of_two: LocalGPUCluster,
) -> None:
    with Client(cluster_of_two) as client, cluster_of_two.hold(1) as outer:
        client.run_on_scheduler(set_status, outer[0].address, "paused")
        with cluster_of_two.hold(1, timeout="150s") as inner:
            assert len(inner) == 1
        client.run_on_scheduler(set_status, outer[0].address, "running")


def test_a_block_that_waits_for_workers_of_a_block_around_it_is_an_error(cluster_of_two: LocalGPUCluster) -> None:
    words = r"hold: 1 worker requested, beside 2 that this program holds already: .* will have only 2 workers in 1 job"
    own = pytest.raises(ClusterError, match=words)
    with cluster_of_two.hold(2), own, cluster_of_two.hold(1, timeout="150s"):
        pass
    with cluster_of_two.hold(1), cluster_of_two.hold(1, timeout="150s") as workers:
        assert len(workers) == 1, "there are enough"
    with cluster_of_two.hold(1), cluster_of_two.hold(1, timeout="150s"), own, cluster_of_two.hold(1, timeout="150s"):
        pass
    with cluster_of_two.hold(2, timeout="150s"):
        pass

    late = pytest.raises(
        TimeoutError, match=r"2 workers requested, beside 1 that this program holds already; after 10 s 1 free"
    )

    async def program() -> None:  # it has no record whether the cluster will grow
        async with (
            await hpcgpu.connect(cluster_of_two.name, asynchronous=True, quiet=True) as client,
            hpcgpu.hold(client, 1, quiet=True),
        ):
            with late:
                async with hpcgpu.hold(client, 2, quiet=True, timeout=10):
                    pass

    asyncio.run(program())


def test_what_the_block_raises_comes_through_and_the_workers_are_free_again(cluster_of_two: LocalGPUCluster) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cluster_of_two.hold(2, timeout="150s") as workers:
            workers.run(travels(lambda: 1 / 0))


def test_what_one_rank_raises_is_raised_while_the_others_still_wait_and_reports_which_rank_it_was(
    cluster_of_two: LocalGPUCluster, home: Path
) -> None:
    with cluster_of_two.hold(2) as workers:
        failed = workers[1]
        where = f"rank 1: worker {failed.name} of job {failed.job_id} ({failed.job}), node {failed.node}"
        for run, arguments in (
            (workers.run, (second_fails_and_the_first_waits, str(home))),
            (workers.client.run, (this_fails_and_others_wait, failed.address, str(home))),
        ):
            with pytest.raises(MemoryError, match="CUDA out of memory") as error:
                run(*arguments)
            said = "".join(traceback.format_exception(error.value))
            assert where in said and "still runs on rank 0" in said and "restart_workers(" in said
        (home / "go").touch()


def test_an_exception_whose_class_is_not_here_is_raised_with_its_words(cluster_of_two: LocalGPUCluster) -> None:
    def raises() -> None:
        import sys
        import types

        module = types.ModuleType("only_on_workers")
        exec("class OutOfMemoryError(RuntimeError): __module__ = 'only_on_workers'", vars(module))
        sys.modules["only_on_workers"] = module
        raise module.OutOfMemoryError("CUDA out of memory")

    with cluster_of_two.hold(2) as workers, pytest.raises(RuntimeError, match="CUDA out of memory") as error:
        workers.run(raises)
    said = "".join(traceback.format_exception(error.value))
    assert "OutOfMemoryError" in said and "No module named 'only_on_workers'" in said and "rank " in said
    assert "in raises" in said, "the traceback of the worker"


def test_the_loss_of_a_job_is_raised_also_if_a_library_notices_it_first(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        LocalGPUCluster(**{**GPU, "gpus_per_node": 1}, jobs=2) as cluster,
        cluster.hold(2) as workers,
    ):
        call = threads.submit(workers.run, breaks_with_its_peer, str(home))
        until((home / "connected").exists, "the ranks are connected")
        queue.cancel([workers[1].job_id])
        with pytest.raises(ClusterError, match=rf"of job {workers[1].job_id} .* was lost .*: .*cancelled") as error:
            call.result(timeout=150)
        assert isinstance(error.value.__cause__, RuntimeError), "what the library has raised"
        assert "Connection closed by peer" in str(error.value.__cause__)


def test_a_crash_of_a_worker_is_raised_before_the_queue_could_report_the_end_of_its_job(
    cluster_of_two: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hpcgpu.client.held_set, "_ENDED", 1e6)
    crash = travels(lambda: os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL))
    words = r"was lost .*: .*its job still runs.*\. Log: .*\.log"
    with pytest.raises(ClusterError, match=words), cluster_of_two.hold(2, timeout=150) as workers:
        workers.run(crash)
    with Client(cluster_of_two) as client:
        client.wait_for_workers(2)


def test_an_error_of_the_block_that_is_no_loss_is_raised_without_a_wait(
    cluster_of_two: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hpcgpu.client.held_set, "_REPORTED", 1e6)
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
    with hpcgpu.hold(client, 1) as workers:
        client.close()
        with pytest.raises(ClusterError, match="the client of this block is closed"):
            workers.run(len, "")
    with cluster_of_two.hold(1, timeout=150) as workers:
        with pytest.raises(ZeroDivisionError):
            workers.run(travels(lambda: 1 / 0))
        workers.client.close()
    with cluster_of_two.hold(2, timeout=150) as workers:
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
            words = "hold: 1 worker requested; after 10 s 1 free, 1 of them for earlier requests"
            with ThreadPoolExecutor(1) as third, pytest.raises(TimeoutError, match=words):
                third.submit(hold_one, cluster_of_two, timeout=10).result()
            second = threads.submit(hold, 1, served)
            wait_for(2)
            with cluster_of_two.hold(1, timeout="150s") as workers:
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


def test_an_interrupt_that_comes_when_the_workers_are_there_lets_them_go(
    cluster_of_two: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(cluster_of_two) as client:
        sync = client.sync

        def interrupted(*arguments: Any, **options: Any) -> Any:
            answer = sync(*arguments, **options)
            if client.asynchronous:  # a call of the block itself, in the event loop
                return answer
            raise KeyboardInterrupt

        block = hpcgpu.hold(client, 2, quiet=True)
        with monkeypatch.context() as patch:
            patch.setattr(client, "sync", interrupted)
            with pytest.raises(KeyboardInterrupt), block:
                pytest.fail("the block does not begin")
        hold_one(cluster_of_two)


def test_workers_on_which_an_interrupted_call_still_runs_are_given_last_and_that_is_reported(
    cluster_of_two: LocalGPUCluster, tmp_path: Path, until: Until
) -> None:
    then = f"""
import hpcgpu, time
from pathlib import Path
def train():
    Path({str(tmp_path)!r}, "begun").touch()
    time.sleep(600)
client = hpcgpu.connect({cluster_of_two.name!r}, quiet=True)
with hpcgpu.hold(client, 1, quiet=True) as workers:
    print(workers[0].name, flush=True)
    workers.run(train)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen([sys.executable, "-P", "-c", then], text=True, **pipes)
    assert program.stdout is not None
    name = program.stdout.readline().strip()
    until((tmp_path / "begun").exists, "it trains")
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate()
    words = f"calls (train) still run on {name}: `client.restart_workers(['{name}'])`"
    assert "KeyboardInterrupt" in errors and f"the block has ended, but {words}" in errors
    with Client(cluster_of_two) as client:
        with cluster_of_two.hold(1, timeout=150) as workers:
            assert workers[0].name != name, "there is a worker without a call"
        said = pytest.warns(ClusterWarning, match=re.escape(f"the block begins, but earlier {words}"))
        with said, cluster_of_two.hold(2, timeout=150) as workers:
            assert name in [worker.name for worker in workers]
        client.restart_workers([name], timeout=150)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "hold: the block begins, but", ClusterWarning)
            with cluster_of_two.hold(2, timeout=150) as workers:
                assert workers.run(len, "abc") == [3, 3]


def test_a_block_that_waits_for_a_worker_that_a_call_blocks_names_the_worker(
    cluster_of_two: LocalGPUCluster, tmp_path: Path, until: Until
) -> None:
    def hold_both() -> None:
        with cluster_of_two.hold(2) as workers:
            assert len(workers) == 2

    with Client(cluster_of_two) as client, ThreadPoolExecutor(2) as threads:
        client.wait_for_workers(2)
        address, worker = next(iter(client.scheduler_info()["workers"].items()))
        blocking = threads.submit(client.run, blocks_its_worker, str(tmp_path), workers=[address])
        try:
            until((tmp_path / "begun").exists, "the call blocks the worker")
            with pytest.warns(ClusterWarning) as said:
                holding = threads.submit(hold_both)
                until(lambda: len(said) or holding.done(), "the block says what it waits for")
                (tmp_path / "go").touch()
                holding.result(), blocking.result()
        finally:
            (tmp_path / "go").touch()
    words = f"workers that do not answer: perhaps calls (blocks_its_worker) still run on {worker['name']}: `client."
    assert [one for one in said if words in str(one.message)]
    assert not [one for one in said if "the block begins, but" in str(one.message)], "the call has ended"


def test_a_broken_connection_to_a_scheduler_that_lives_is_not_called_the_end_of_the_scheduler(
    cluster_of_two: LocalGPUCluster, home: Path, until: Until
) -> None:
    with ThreadPoolExecutor(1) as threads, cluster_of_two.hold(2) as workers:
        call = threads.submit(workers.run, rank_or_wait, str(home))
        until(lambda: len(list(home.glob("begun-*"))) == 2, "the call runs on both")
        workers.client.loop.add_callback(workers._comm.abort)
        with pytest.raises(ClusterError, match=r"is broken: .* or the network was interrupted, .*: hold workers again"):
            call.result()
        (home / "go").touch()


def test_the_form_of_with_that_does_not_fit_is_refused(cluster_of_two: LocalGPUCluster) -> None:
    async def program() -> None:
        async with (
            await hpcgpu.connect(cluster_of_two.name, asynchronous=True, quiet=True) as client,
            LocalGPUCluster(**GPU, asynchronous=True) as cluster,
        ):
            for asynchronous, kind in ((hpcgpu.hold(client, 1), "client"), (cluster.hold(1), "cluster")):
                words = f"hold: this {kind} is asynchronous: write `async with`"
                with pytest.raises(OptionError, match=words), asynchronous:
                    pass
        with Client(cluster_of_two, set_as_default=False) as synchronous:
            for held, kind in ((hpcgpu.hold(synchronous, 1), "client"), (cluster_of_two.hold(1), "cluster")):
                with pytest.raises(OptionError, match=f"hold: this {kind} is not asynchronous: write `with`"):
                    async with held:
                        pass

    asyncio.run(program())


def test_an_asynchronous_program_holds_workers_too(cluster_of_two: LocalGPUCluster) -> None:
    async def program() -> list[str]:
        async with (
            await hpcgpu.connect(cluster_of_two.name, asynchronous=True, quiet=True) as client,
            hpcgpu.hold(client, 2, quiet=True) as workers,
        ):
            answers: list[str] = await workers.run(travels(lambda: os.environ["RANK"]))
            return answers

    assert asyncio.run(program()) == ["0", "1"]


def test_an_asynchronous_program_sees_the_first_failure_too(cluster_of_two: LocalGPUCluster, tmp_path: Path) -> None:
    async def program() -> str:
        async with (
            await hpcgpu.connect(cluster_of_two.name, asynchronous=True, quiet=True) as client,
            hpcgpu.hold(client, 2, quiet=True) as workers,
        ):
            failing = workers.client.run(this_fails_and_others_wait, workers[0].address, str(tmp_path))
            with pytest.raises(MemoryError) as error:
                await failing
            assert await workers.client.run(len, "four") == dict.fromkeys(workers.addresses, 4)
            (tmp_path / "go").touch()
            return "".join(traceback.format_exception(error.value))

    said = asyncio.run(program())
    assert "Raised on rank 0: worker" in said and "still runs on rank 1" in said


def test_a_block_that_does_not_begin_leaves_no_client(queue: LocalQueue) -> None:
    async def program() -> str:
        async with LocalGPUCluster(**GPU, jobs=0, asynchronous=True) as cluster:
            block = cluster.hold(1, timeout="150s")
            with pytest.raises(ClusterError, match="will have only 0 workers"):
                await block.__aenter__()
            assert block.client.status == "closed"
            cluster.scale(jobs=1)
            for _ in range(2):  # it can be used again
                async with block as workers:
                    assert len(workers) == 1
            return str(block.client.status)

    assert asyncio.run(program()) == "closed"


def test_the_client_of_a_block_lists_and_uses_only_the_held_workers(cluster_of_two: LocalGPUCluster) -> None:
    """cuML takes its workers from `has_what`, and other libraries from `nthreads` or `ncores`."""
    name = travels(lambda dask_worker: dask_worker.name)
    with Client(cluster_of_two) as client, hpcgpu.hold(client, 1, quiet=True) as workers:
        theirs, own, other = workers.client, workers.addresses, {*client.nthreads()} - {*workers.addresses}
        assert len(other) == 1
        listing = [theirs.has_what, theirs.nthreads, theirs.ncores, theirs.processing, theirs.get_worker_logs]
        assert [list(method()) for method in listing] == [own] * 5
        assert {*theirs.nthreads([*other])} == other == {*theirs.has_what(workers=[*other])}
        data = client.scatter([7], workers=[*other])
        assert {*theirs.who_has(data)[data[0].key]} == other, "no held worker has it"
        theirs.replicate(data)
        assert theirs.who_has(data)[data[0].key] == tuple(own)
        with theirs.get_executor(pure=False) as executor:
            assert {executor.submit(travels(lambda: get_worker().address)).result(150) for _ in range(4)} == {*own}
        assert list(theirs.run(name)) == own


def test_an_annotation_chooses_among_the_held_workers(cluster_of_two: LocalGPUCluster) -> None:
    where = travels(lambda _: get_worker().address)
    with cluster_of_two.hold(2) as workers:
        for address in workers.addresses * 2:
            with dask.annotate(workers=[address]):
                futures = [workers.client.submit(where, uuid.uuid4())]
                futures += workers.client.map(where, [uuid.uuid4() for _ in range(3)])
                futures += [workers.client.compute(dask.delayed(where)(uuid.uuid4()))]
                kept = workers.client.persist(dask.delayed(where)(uuid.uuid4()))
            futures.append(workers.client.compute(kept))
            assert {*workers.client.gather(futures)} == {address}
        with dask.annotate(priority=1):
            assert workers.client.submit(where, uuid.uuid4()).result(150) in workers.addresses
