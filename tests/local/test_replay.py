"""The scheduler ends too early, and what the program holds is submitted again: `with cluster.replay():`."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask import delayed
from distributed import Client, as_completed, wait
from distributed.client import FutureCancelledError

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, told
from tests.helpers import CPU, travels

pytestmark = pytest.mark.shows("A scheduler job that ends too early: the program's futures are submitted again")

Until = Callable[..., None]

RESTART = CPU | {"on_scheduler_end": "restart"}
GONE = "the scheduler of cluster demo is gone and another one is started"


@travels
def counted(place: str, name: str, *inputs: Any) -> int:
    """Make a file for each run; wait until there is a file `go`. The sum of the inputs plus 1."""
    import uuid

    Path(place, f"{name}.{uuid.uuid4().hex}").touch()
    while not Path(place, "go").exists():
        time.sleep(0.05)
    return sum(inputs) + 1


@travels
def fails(place: str) -> None:
    Path(place, f"fails.{os.getpid()}").touch()
    raise ValueError("as it should")


def runs(place: Path) -> Counter[str]:
    """How many times each task has begun."""
    return Counter(file.name.partition(".")[0] for file in place.iterdir() if file.name != "go")


@contextmanager
def scheduler_ends(client: Client, signum: int = signal.SIGKILL, queue: LocalQueue | None = None) -> Iterator[None]:
    """The scheduler ends at the beginning of the block, and another one is there at the end of it.

    With a queue the next one comes after the block, in which the client has no scheduler.
    """
    address, held = client.scheduler.address, queue._locked() if queue is not None else nullcontext()
    with told(
        f"{GONE}.* A block of `replay` submits its futures again; without it, run your work again: scheduler job"
    ):
        pid = client.run_on_scheduler(os.getpid)
        with held:
            os.kill(pid, signum)
            yield
    for _ in range(2400):
        if client.scheduler.address != address and client.status == "running":
            return
        time.sleep(0.05)
    raise AssertionError("the client has not followed")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_program_goes_on_as_if_nothing_had_happened(
    queue: LocalQueue, tmp_path: Path, until: Until, signum: int
) -> None:
    place = str(tmp_path)
    with LocalGPUCluster(name="demo", jobs=2, **RESTART) as cluster, cluster.get_client() as client, cluster.replay():
        cluster.wait_for_workers(2)
        (tmp_path / "go").touch()
        finished = client.submit(counted, place, "finished")
        released = client.submit(counted, place, "released")
        follows = client.submit(counted, place, "follows", released)
        failed = client.submit(fails, place)
        with pytest.raises(ValueError, match="as it should"):
            failed.result()
        assert [finished.result(), released.result(), follows.result()] == [1, 1, 2]
        array = client.persist(da.arange(1000, chunks=100) + 1)
        cancelled, useless = client.submit(counted, place, "cancelled"), client.submit(counted, place, "useless")
        wait([array, cancelled, useless])
        (tmp_path / "go").unlink()
        cancelled.cancel()
        useless.release()
        del released
        running = client.map(counted, [place] * 4, [f"running{n}" for n in range(4)], range(4))
        chained = client.submit(counted, place, "chained", follows, *running)
        until(lambda: sum(name.startswith("running") for name in runs(tmp_path)) == 2, "each worker runs one")
        with ThreadPoolExecutor(4) as threads:
            blocked = [
                threads.submit(chained.result),
                threads.submit(lambda: sum(future.result() for future in as_completed(running))),
                threads.submit(client.gather, {"one": running, "two": [finished, chained]}),
                threads.submit(dask.compute, array.sum(), delayed(chained)),
            ]
            before = runs(tmp_path)
            with scheduler_ends(client, signum, queue):
                until(lambda: client.status == "connecting", "it is noticed")
                assert {future.status for future in (finished, follows, chained, *running)} == {"pending"}
                later = client.submit(counted, place, "later", chained)
            client.wait_for_workers(2)  # no worker of the ended scheduler is left that could begin what it still has
            (tmp_path / "go").touch()
            together = [1, 2, 3, 4]
            assert [one.result(120) for one in blocked] == [13, 10, {"one": together, "two": [1, 13]}, (500500, 13)]
        assert [later.result(), chained.result(), finished.result(), follows.result()] == [14, 13, 1, 2]
        assert array.sum().compute() == 500500
        assert cancelled.status == "cancelled" and failed.status == "error"
        again = runs(tmp_path) - before
        assert set(again) == {"finished", "released", "follows", "chained", "later", *(f"running{n}" for n in range(4))}
        assert max(again.values()) == 1, again
        keys = {str(key) for key in client.futures} - {failed.key}
        until(lambda: set(client.run_on_scheduler(wanted)) == keys, "the scheduler keeps no more than the program")
    assert live(queue) == []


@travels
def wanted(dask_scheduler: Any) -> list[str]:
    return [str(key) for key, task in dask_scheduler.tasks.items() if task.who_wants]


def test_what_is_submitted_between_two_schedulers_runs_whatever_it_needs(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "go").touch()
    place, stop, many = str(tmp_path), threading.Event(), list[Any]()

    def submits(client: Client) -> None:
        for number in itertools.count():
            many.append(client.submit(abs, -number))
            if stop.wait(0.001):
                return

    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        with ThreadPoolExecutor(1) as threads, cluster.replay():
            before = client.submit(counted, place, "before")
            assert before.result() == 1
            with scheduler_ends(client, queue=queue):
                until(lambda: client.status == "connecting", "it is noticed")
                submitting = threads.submit(submits, client)
                impure = client.submit(counted, place, "impure", pure=False)
                after = client.submit(counted, place, "after", impure, before)
            assert after.result(timeout=120) == 3 and impure.result() == 1
            stop.set()
            submitting.result()
            assert client.gather(many) == list(range(len(many)))


def test_a_block_that_ends_between_two_schedulers(queue: LocalQueue, tmp_path: Path, until: Until) -> None:
    (tmp_path / "go").touch()
    place = str(tmp_path)
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        block = cluster.replay()
        block.__enter__()
        before = client.submit(counted, place, "before")
        assert before.result() == 1
        with scheduler_ends(client, queue=queue):
            until(lambda: client.status == "connecting", "it is noticed")
            block.__exit__(None, None, None)
            after = client.submit(counted, place, "after", before)
        assert [before.result(timeout=120), after.result(timeout=120)] == [1, 2]


def test_results_that_were_saved_are_not_computed_again(queue: LocalQueue, tmp_path: Path) -> None:
    place, saved = tmp_path / "runs", str(tmp_path / "saved")
    place.mkdir()
    (place / "go").touch()

    @travels
    def block(number: int, where: str = str(place)) -> Any:
        import uuid

        Path(where, f"block{number}.{uuid.uuid4().hex}").touch()
        return np.full(10, number)

    @travels
    def twice(block: Any, where: str = str(place)) -> Any:
        import uuid

        Path(where, f"twice.{uuid.uuid4().hex}").touch()
        return 2 * block

    options = RESTART | {"checkpoint_directory": saved}
    with LocalGPUCluster(name="demo", jobs=2, **options) as cluster, cluster.get_client() as client, cluster.replay():
        blocks = [da.from_delayed(delayed(block, pure=True)(n), (10,), dtype=int) for n in range(4)]
        array = client.persist(da.concatenate(blocks))
        total = client.submit(counted, str(place), "total")
        frame = client.persist(dd.from_pandas(pd.DataFrame({"x": range(10)}), npartitions=2).assign(y=1))
        for name, data in {"array": array, "total": total, "frame": frame}.items():
            client.publish_dataset(data, name=name)
            cluster.checkpoint(data, name=name)
        more = client.persist(array.map_blocks(twice, dtype=int))
        assert more.sum().compute() == 120
        before = runs(place)
        with scheduler_ends(client):
            pass
        assert array.sum().compute() == 60 and total.result() == 1 and more.sum().compute() == 120
        assert frame.x.sum().compute() == 45 and frame.y.sum().compute() == 10
        assert client.submit(counted, str(place), "next", total).result() == 2
        again = runs(place) - before
        assert again == {"next": 1, "twice": 4}, "only what was not saved runs again"
        del array, total, frame, more
        assert client.get_dataset("array").sum().compute() == 60
    assert live(queue) == []


@travels
def waits_to_be_saved(place: str, number: int) -> Any:
    """A result that is a number. Its write and its read wait for a file `go`, and make files."""

    def wait_for_go(what: str) -> None:
        Path(place, f"{what}{number}.{os.getpid()}").touch()
        while not Path(place, "go").exists():
            time.sleep(0.05)

    def again() -> int:
        wait_for_go("read")
        return number

    class Waits:
        def __reduce__(self) -> Any:
            wait_for_go("written")
            return again, ()

    return Waits()


def test_a_save_and_a_restore_go_on(queue: LocalQueue, tmp_path: Path, until: Until) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    with (
        LocalGPUCluster(name="demo", jobs=1, checkpoint_directory=tmp_path / "saved", **RESTART) as cluster,
        Client(cluster) as client,
        ThreadPoolExecutor(1) as threads,
        cluster.replay(),
    ):
        data = client.map(waits_to_be_saved, [str(place)] * 3, range(3))
        saving = threads.submit(cluster.checkpoint, data, name="demo")
        until(lambda: runs(place)["written0"], "it saves")
        with scheduler_ends(client):
            (place / "go").touch()
        assert saving.result(timeout=120).path.name == "000001"
        (place / "go").unlink()
        del data, saving
        restoring = threads.submit(cluster.restore, "demo")
        until(lambda: runs(place)["read0"], "it restores")
        with scheduler_ends(client):
            (place / "go").touch()
        assert client.gather(restoring.result(timeout=120)) == [0, 1, 2]
    assert live(queue) == []


def test_what_cannot_run_again_is_lost_and_reports_why(queue: LocalQueue, tmp_path: Path) -> None:
    place = str(tmp_path)
    (tmp_path / "go").touch()
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, cluster.get_client() as client:
        before = client.submit(counted, place, "before")
        [worker] = client.scheduler_info()["workers"] if not cluster.wait_for_workers(1) else []
        with cluster.replay():
            with pytest.warns(hpcgpu.ClusterWarning, match="with pure=False do not run again") as warned:
                impure = client.submit(counted, place, "impure", pure=False)
                others = client.map(counted, [place] * 2, ["a", "b"], pure=False)
            assert len(warned) == 1 and warned[0].filename == __file__
            with pytest.warns(hpcgpu.ClusterWarning, match="as actors do not run again"):
                actor = client.submit(Counter, actor=True)
            scattered = client.scatter(7)
            there = client.submit(counted, place, "there", workers=[worker])
            anywhere = client.submit(counted, place, "anywhere", workers=[worker], allow_other_workers=True)
            lost = {
                impure: "it was submitted with pure=False",
                others[1]: "it was submitted with pure=False",
                actor: "it was submitted as actors",
                scattered: "has data of `client.scatter`",
                before: "it was not submitted in this block",
                there: r"only on workers that have ended with their scheduler \(workers=",
                client.submit(counted, place, "on-impure", impure): "it needs 'counted-.*', .*: .* with pure=False",
                client.submit(counted, place, "on-scattered", scattered): "it needs 'int-.*client.scatter`",
            }
            mixed = client.map(counted, [place] * 2, ["good", "bad"], [1, impure])
            wait([*lost, anywhere, *mixed])
            with told("2 futures of this program submitted again, 10 futures lost: "), scheduler_ends(client):
                pass
            for future, why in lost.items():
                with pytest.raises(FutureCancelledError, match=why) as error:
                    future.result(timeout=150)
                assert GONE in str(error.value)
            assert anywhere.result() == 1 and mixed[0].result() == 2
            with pytest.raises(FutureCancelledError, match="it needs"):
                mixed[1].result()
            later = client.submit(counted, place, "later")
            assert later.result() == 1
        with scheduler_ends(client), pytest.raises(FutureCancelledError, match=GONE):  # the block has ended
            later.result(timeout=150)
    assert live(queue) == []


def test_several_clients_and_two_ends(queue: LocalQueue, tmp_path: Path, until: Until) -> None:
    place = str(tmp_path)
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        with (
            Client(cluster, set_as_default=False) as second,
            hpcgpu.connect("demo", quiet=True, set_as_default=False) as third,
            hpcgpu.connect("demo", quiet=True, set_as_default=False) as alone,
            hpcgpu.connect("demo", quiet=True, set_as_default=False) as outside,
            cluster.replay(),
            hpcgpu.replay(alone),
        ):
            futures = [
                one.submit(counted, place, name)
                for one, name in ((client, "1"), (second, "2"), (third, "3"), (alone, "4"), (client, "1"))
            ]
            shared = second.submit(counted, place, "shared", futures[0])
            del futures[0]
            for number in range(2):
                begun = runs(tmp_path).total()
                with scheduler_ends(client):
                    pass
                until(lambda begun=begun: runs(tmp_path).total() > begun, "it runs again")
                futures.append(third.submit(counted, place, f"later{number}", futures[1]))
            (tmp_path / "go").touch()
            assert [future.result(120) for future in futures] == [1, 1, 1, 1, 2, 2]
            assert shared.result(120) == 2
        assert outside.status == "closed"
    assert live(queue) == []


def test_tasks_are_submitted_again_with_their_resources_priorities_and_retries(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    place, options = str(tmp_path), {"priority": 7, "retries": 3, "resources": {"x": 1}}
    with (
        LocalGPUCluster(name="demo", jobs=1, resources={"x": 1}, **RESTART) as cluster,
        cluster.get_client() as client,
        hpcgpu.replay(client),
    ):
        cluster.wait_for_workers(1)
        held = [client.submit(counted, place, "submit", **options), *client.map(counted, [place], ["map"], **options)]
        with dask.annotate(**options):
            array = da.ones(10, chunks=5).map_blocks(lambda block: block + 1)
        array = client.persist(array, optimize_graph=False)
        keys = [*(future.key for future in held), *dask.core.flatten(array.__dask_keys__())]
        until(lambda: len(client.run_on_scheduler(annotated, keys=keys)) == len(keys), "they are there")
        before = client.run_on_scheduler(annotated, keys=keys)
        assert len(before) == 4 and all(options.items() <= one.items() for one in before.values()), before
        with scheduler_ends(client):
            (tmp_path / "go").touch()
        assert client.gather(held) == [1, 1] and array.sum().compute() == 20
        assert client.run_on_scheduler(annotated, keys=keys) == before
    assert live(queue) == []


@travels
def annotated(keys: list[Any], dask_scheduler: Any) -> dict[str, Any]:
    tasks = [dask_scheduler.tasks[key] for key in keys if key in dask_scheduler.tasks]
    return {str(task.key): {**task.annotations, "first": task.priority[0]} for task in tasks}


def test_a_block_on_a_cluster_that_ends_with_its_scheduler_is_refused(queue: LocalQueue) -> None:
    with LocalGPUCluster(name="demo", **CPU) as cluster, cluster.get_client() as client:
        for call in (cluster.replay, lambda: hpcgpu.replay(client)):
            with pytest.raises(OptionError, match=r"on_scheduler_end='end'.*with on_scheduler_end='restart'"):
                call()
    with pytest.raises(ClusterError):
        cluster.replay()
    assert live(queue) == []
