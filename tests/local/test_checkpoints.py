"""Results that are saved on the shared disk: later clusters restore them, and no fault in the middle harms them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from dask import bag, delayed
from distributed import Client
from distributed import wait as wait_for

import hpcgpu
from hpcgpu import CheckpointError, LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU, travels

pytestmark = pytest.mark.shows("Results saved on the shared disk, and restored on later clusters")

Until = Callable[..., None]
BIG = 1_000_000


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster of two workers, which tests leave as it was."""
    with LocalGPUCluster(**CPU, jobs=2) as cluster:
        cluster.wait_for_workers()
        yield cluster


@pytest.fixture
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    cluster.wait_for_workers()
    with Client(cluster) as client:
        yield client


@travels
def waits_to_be_saved(place: str) -> Any:
    """A result that is 7. Its write makes a file `begun-PID` and waits for a file `go`."""

    class Waits:
        def __reduce__(self) -> Any:
            Path(place, f"begun-{os.getpid()}").touch()
            while not Path(place, "go").exists():
                time.sleep(0.05)
            return int, (7,)

    return Waits()


def begun(place: Path) -> list[int]:
    """The processes that write such a result."""
    return [int(file.name.partition("-")[2]) for file in place.glob("begun-*")]


def has_big_piece(place: Path) -> bool:
    """Whether a big piece is there of a version that is not complete. While it is written, it has another name."""
    return any(file.stat().st_size > BIG for file in place.glob(".*/[0-9a-f]*"))


def entries(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


#: Another program: it connects to a cluster and saves a big result and one that waits.
PROGRAM = """
import sys, hpcgpu
name, place = sys.argv[1:]
def waits_to_be_saved(place):
    import os, time
    from pathlib import Path
    class Waits:
        def __reduce__(self):
            Path(place, f"begun-{os.getpid()}").touch()
            while not Path(place, "go").exists():
                time.sleep(0.05)
            return int, (7,)
    return Waits()
with hpcgpu.connect(name, quiet=True) as client:
    big = client.submit(bytes, BIG)
    big.result()
    hpcgpu.checkpoint(client, [big, client.submit(waits_to_be_saved, place)], place, name="demo", quiet=True)
""".replace("BIG", str(BIG))


@contextmanager
def program(*arguments: str, code: str = PROGRAM) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def test_all_kinds_of_data_are_restored_bit_by_bit_on_a_later_cluster_of_another_size(
    queue: LocalQueue, home: Path
) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    pandas = pd.DataFrame({"x": np.arange(20) / 7, "text": [*"abcde"] * 4, "n": range(20)})
    with LocalGPUCluster(**CPU, jobs=2, checkpoint_directory=home / "saved") as cluster, Client(cluster) as client:
        frame = dd.from_pandas(pandas, npartitions=3)
        cube = da.random.default_rng(1).random((5, 6, 7), chunks=(2, 3, 7))
        data = {
            "array": client.persist(cube),
            "lazy array": da.ones((4, 4), chunks=3, dtype="f4") * np.float32(1.5),
            "F": client.persist(da.arange(12.0, chunks=-1).reshape(3, 4).map_blocks(np.asfortranarray)),
            "unknown sizes": client.persist(cube[cube > 0.5]),
            "frame": client.persist(frame),
            "lazy frame": frame[frame.n > 3].assign(y=frame.x * 2),
            "unknown divisions": client.persist(frame.groupby("text").x.mean(split_out=2)),
            "series": frame.x,
            "index": frame.index,
            "scalar": frame.x.sum(),
            "bag": bag.from_sequence(range(10), npartitions=3).map(str),
            "item": bag.from_sequence(range(10), npartitions=3).sum(),
            "delayed": delayed(pow)(2, 5),
            "futures": [client.submit(pow, 3, n) for n in range(3)],
            "named": client.submit(np.arange, 5, key="a plain key"),
            "scattered": client.scatter(np.eye(3)),
            "nested": ({"deep": [client.submit(dict, a=1)]}, "text", None, np.arange(3)),
        }
        wanted = {name: compute(value) for name, value in data.items()}
        saved = cluster.checkpoint(data, name="all")
    assert saved.path == home / "saved" / "all" / "000001" and saved.size == saved.written
    with LocalGPUCluster(**CPU, jobs=1, checkpoint_directory=home / "saved") as cluster:
        again = cluster.restore("all")
        assert list(again) == list(data)
        for name, value in wanted.items():
            assert same(compute(again[name]), value), name
        layout = again["F"].map_blocks(lambda block: np.array([[block.flags.f_contiguous]]), dtype=bool)
        assert layout.compute().all(), "as the workers have it"
        assert again["array"].chunks == data["array"].chunks
        assert again["frame"].divisions == data["frame"].divisions and again["frame"].npartitions == 3
        assert not again["unknown divisions"].known_divisions
        assert compute(again["array"].sum(axis=0) + 1).shape == (6, 7), "work goes on with it"
        assert compute(again["frame"].groupby("text").n.sum()).to_dict() == pandas.groupby("text").n.sum().to_dict()


def compute(data: Any) -> Any:
    """The data, without Dask."""
    if isinstance(data, (list, tuple)):
        return [compute(value) for value in data]
    if isinstance(data, dict):
        return {name: compute(value) for name, value in data.items()}
    if hasattr(data, "compute"):
        return data.compute()
    return data.result() if hasattr(data, "result") else data


def same(one: Any, other: Any) -> bool:
    """Whether these are the same, bit by bit."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(same, one.values(), other.values()))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one.equals(other) if hasattr(one, "equals") else one == other)


def test_a_worker_that_is_killed_while_it_writes_costs_nothing(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path, until: Until
) -> None:
    with ThreadPoolExecutor(1) as threads:
        data = [client.submit(waits_to_be_saved, str(tmp_path)), client.submit(pow, 2, 3)]
        saving = threads.submit(cluster.checkpoint, data, tmp_path, name="demo")
        until(lambda: begun(tmp_path), "the write begins")
        [killed] = begun(tmp_path)
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "go").touch()
        saved = saving.result(timeout=150)
    assert client.gather(cluster.restore("demo", tmp_path)) == [7, 8]
    assert entries(tmp_path / "demo") == ["000001"]
    assert len(entries(saved.path)) == 4, "two pieces, the structure, and checkpoint.json; nothing half"


@travels
def stays_on_its_worker(number: int) -> Any:
    """A result that no other worker can have, as one in GPU memory. To write it takes longer than to send it."""

    def arrives(pid: int) -> int:
        if os.getpid() != pid:
            raise TypeError("this worker has no GPU")
        return 7

    class Stays:
        def __reduce__(self) -> Any:
            time.sleep(0.3)
            return arrives, (os.getpid(),)

    return Stays()


def test_a_worker_without_work_does_not_take_over_the_results_that_another_one_saves(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path
) -> None:
    """It would ask for each of them again and again, and the save would not end."""
    one, _ = client.scheduler_info()["workers"]
    saved = cluster.checkpoint(client.map(stays_on_its_worker, range(10), workers=[one]), tmp_path, name="demo")
    assert saved.size


@pytest.mark.parametrize("act", ["checkpoint", "restore"])
def test_neither_waits_until_all_other_tasks_are_done(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path, act: str
) -> None:
    done = tmp_path / "done"

    def wait(number: int) -> bool:
        """Return whether the save or the restore was complete when this task ended."""
        end = time.monotonic() + (0.1 if number < 100 else 30)
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return done.exists()

    data = client.map(pow, [2] * 4, range(4))
    client.gather(data)
    if act == "restore":
        cluster.checkpoint(data, tmp_path, name="demo")
    inputs = client.map(int, range(104))  # tasks without inputs would wait at the scheduler, and not at the workers
    client.gather(inputs)
    others = client.map(wait, inputs)
    wait_for(others[:6])  # what is submitted later has to overtake: Dask runs first what was submitted first
    if act == "restore":
        cluster.restore("demo", tmp_path)
    else:
        cluster.checkpoint(data, tmp_path, name="demo")
    done.touch()
    assert client.gather(others)[-1]


def test_a_restored_result_that_is_lost_with_its_worker_is_read_again(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path, until: Until
) -> None:
    cluster.checkpoint(client.map(pow, [2] * 10, range(10)), tmp_path, name="demo")
    client.restart()
    again = hpcgpu.restore(client, tmp_path, name="demo", quiet=True)
    lost = set(client.run(os.getpid).values())
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    assert client.gather(again) == [2**n for n in range(10)]
    until(lambda: len(set(client.run(os.getpid, on_error="ignore").values()) - lost) == 2, "the workers are back")


@travels
def takes_long(place: str, number: int) -> Any:
    """A result that is a number. Both its write and its read make a file in a directory, and take 0.3 s."""

    def again(number: int) -> int:
        Path(place, f"read-{number}").touch()
        time.sleep(0.3)
        return number

    class Long:
        def __reduce__(self) -> Any:
            Path(place, f"written-{number}").touch()
            time.sleep(0.3)
            return again, (number,)

    return Long()


def test_a_drain_in_the_middle_of_a_save_and_of_a_restore_costs_nothing(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path, until: Until
) -> None:
    place = str(tmp_path)
    try:
        with ThreadPoolExecutor(1) as threads:
            data = [client.submit(takes_long, place, number) for number in range(12)]
            wait_for(data)
            saving = threads.submit(cluster.checkpoint, data, tmp_path, name="demo")
            until(lambda: [*tmp_path.glob("written-*")], "the save begins")
            cluster.scale(jobs=1)
            saving.result(timeout=150)
            del data
            cluster.scale(jobs=2)
            cluster.wait_for_workers()
            restoring = threads.submit(cluster.restore, "demo", tmp_path)
            until(lambda: [*tmp_path.glob("read-*")], "the restore begins")
            cluster.scale(jobs=1)
            assert client.gather(restoring.result(timeout=150)) == [*range(12)]
            until(lambda: len(client.nthreads()) == 1, "the other worker has left")
    finally:
        cluster.scale(jobs=2)


def test_a_program_that_is_killed_in_the_middle_leaves_no_version_and_the_next_save_uses_what_it_wrote(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path, until: Until
) -> None:
    place = tmp_path / "demo"
    with program(cluster.name, str(tmp_path)) as killed:
        until(lambda: begun(tmp_path) and has_big_piece(place), "it writes")
        killed.kill()
        killed.wait()
    assert not [name for name in entries(place) if name.isdecimal()]
    with pytest.raises(CheckpointError, match=f"there is no checkpoint {place}"):
        cluster.restore("demo", tmp_path)
    (tmp_path / "go").touch()
    saved = cluster.checkpoint([client.submit(bytes, BIG), client.submit(int, 7)], tmp_path, name="demo")
    assert saved.size > BIG > saved.written
    assert client.gather(cluster.restore("demo", tmp_path)) == [bytes(BIG), 7]


def test_ctrl_c_leaves_neither_files_nor_writes(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path, until: Until
) -> None:
    with program(cluster.name, str(tmp_path)) as interrupted:
        until(lambda: begun(tmp_path), "it writes")
        interrupted.send_signal(signal.SIGINT)
        _, said = interrupted.communicate(timeout=150)
        assert interrupted.returncode == -signal.SIGINT and said.rstrip().endswith("KeyboardInterrupt"), said
    assert entries(tmp_path / "demo") == []
    (tmp_path / "go").touch()
    until(lambda: not any(client.processing().values()), "no write is left")
    assert entries(tmp_path / "demo") == []


def test_programs_that_save_the_same_name_again_and_again_do_not_harm_each_other(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path
) -> None:
    code = """
import sys, hpcgpu
with hpcgpu.connect(sys.argv[1], quiet=True) as client:
    for number in range(8):
        hpcgpu.checkpoint(client, client.map(pow, [int(sys.argv[3])] * 5, range(5)), sys.argv[2], name="x", quiet=True)
"""
    with (
        program(cluster.name, str(tmp_path), "2", code=code) as one,
        program(cluster.name, str(tmp_path), "3", code=code) as other,
    ):
        for running in (one, other):
            _, said = running.communicate(timeout=200)
            assert (running.returncode, said) == (0, "")
    assert entries(tmp_path / "x") == ["000015", "000016"]
    assert client.gather(cluster.restore("x", tmp_path)) in ([2**n for n in range(5)], [3**n for n in range(5)])


def test_an_asynchronous_program_awaits_both(queue: LocalQueue, home: Path) -> None:
    async def program() -> None:
        async with (
            LocalGPUCluster(**CPU, jobs=1, checkpoint_directory=home / "saved", asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            futures = client.map(pow, [2] * 5, range(5))
            saved = await cluster.checkpoint([futures, da.ones(4, chunks=2)], name="demo")
            assert saved.path.name == "000001"
            again, ones = await cluster.restore("demo")
            assert await client.gather(again) == [1, 2, 4, 8, 16]
            assert await client.compute(ones.sum()) == 4
            saved = await hpcgpu.checkpoint(client, again, home / "saved", name="demo", quiet=True)
            assert saved.path.name == "000002"

    asyncio.run(program())


def test_a_cluster_without_a_directory_for_checkpoints_names_what_to_write(cluster: LocalGPUCluster) -> None:
    for act in (lambda: cluster.checkpoint(1, name="demo"), lambda: cluster.restore("demo")):
        with pytest.raises(OptionError, match=r"write where it is, as path=... or .* checkpoint_directory=\.\.\."):
            act()
