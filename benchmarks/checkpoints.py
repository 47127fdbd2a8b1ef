"""How fast results are saved, against `dd` on the same disk; and what a save costs a computation that runs meanwhile.

    python benchmarks/checkpoints.py --directory /scratch/me

First, in turn: `dd` (``conv=fsync``, as each file of a checkpoint is synchronized too) writes files of the size of the
pieces, in as many streams as there are workers; `checkpoint` saves an array for the first time; it saves an array that
has changed wholly under the same name; and one that has not changed. The speed is that of all data.

Then, in turn: all workers compute without a pause for some seconds, and a dataset is published meanwhile, which the
scheduler saves in the background, or none. The difference of the seconds is the cost of one save; with
``checkpoint_every="10m"`` there is one in 600 seconds. To find nothing to save costs the same on both sides, and is not
counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import dask.array as da
import numpy as np
from distributed import Client, wait

from hpcgpu import LocalGPUCluster
from hpcgpu.checkpoints.versions import numbered

#: Bytes of a piece.
PIECE = 128 << 20
#: Seconds between two saves of the cluster, while one runs against the computation.
EVERY = 2.0
MINUTES_10 = 600.0


def dd(place: Path, streams: int, pieces: int) -> float:
    """Return the seconds that `dd` takes to write so many pieces in each of so many streams."""
    place.mkdir()
    began = time.perf_counter()
    one = f'dd if=/dev/zero of="$0-$n" bs=1M count={PIECE >> 20} conv=fsync status=none'
    stream = f"for n in $(seq {pieces}); do {one}; done"
    running = [subprocess.Popen(["sh", "-ec", stream, place / str(number)]) for number in range(streams)]
    if any(process.wait() for process in running):
        raise SystemExit("dd has failed")
    seconds = time.perf_counter() - began
    shutil.rmtree(place)
    return seconds


def random_array(client: Client, workers: int, pieces: int) -> da.Array:
    """Return an array of random numbers, with so many pieces on each worker."""
    rows = PIECE // 8 // 1024
    array = client.persist(da.random.default_rng().random((workers * pieces * rows, 1024), chunks=(rows, 1024)))
    wait(array)
    client.rebalance(array)
    return array


def saved(cluster: LocalGPUCluster, array: da.Array, name: str) -> float:
    """Return the seconds of a save."""
    os.sync()
    began = time.perf_counter()
    cluster.checkpoint(array, name=name, keep=3)
    return time.perf_counter() - began


def against_dd(cluster: LocalGPUCluster, client: Client, place: Path, workers: int, pieces: int, rounds: int) -> None:
    """Measure and print the speed of saves."""
    size = workers * pieces * PIECE / 1e9
    print(f"{size:.1f} GB in {workers * pieces} pieces, {workers} workers and streams; GB/s, each line one round")
    print(f"{'dd':>8}{'first':>8}{'changed':>9}{'unchanged':>11}     of dd: first, changed")
    ratios = []
    for number in range(rounds):
        os.sync()
        seconds = [dd(place / "dd", workers, pieces)]
        array = random_array(client, workers, pieces)
        seconds.append(saved(cluster, array, f"data-{number}"))
        array = random_array(client, workers, pieces)
        seconds += [saved(cluster, array, f"data-{number}"), saved(cluster, array, f"data-{number}")]
        began = time.perf_counter()
        shutil.rmtree(place / f"data-{number}")
        removed = (time.perf_counter() - began) / 2 / size
        ratios.append((seconds[0] / seconds[1], seconds[0] / seconds[2]))
        speeds = [size / value for value in seconds]
        print(
            "{:8.2f}{:8.2f}{:9.2f}{:11.2f}".format(*speeds),
            "             {:.2f}, {:.2f}".format(*ratios[-1]),
            flush=True,
        )
        del array
    first, changed = (statistics.median(values) for values in zip(*ratios, strict=True))
    print(f"a save removes an older version at its end, which is not in these figures: {removed:.2f} s for each GB")
    print(f"median: first {first:.2f} x dd, changed {changed:.2f} x dd")


def work(_: int, seconds: float) -> None:
    """Use the processor for as long as these seconds are on a processor of its own."""
    end = time.thread_time() + seconds
    numbers = np.random.default_rng(0).random(200_000)
    while time.thread_time() < end:
        np.sin(numbers)


def against_work(client: Client, place: Path, workers: int, pieces: int, seconds: float, rounds: int) -> None:
    """Measure and print what a save costs a computation."""
    size = workers * pieces * PIECE / 1e9
    print(
        f"\nall {workers} workers compute; seconds without a save, and with one of {size:.1f} GB, each line one round"
    )
    extra = []
    for number in range(rounds):
        took = []
        for name in ("", f"dataset-{number}"):
            array = random_array(client, workers, pieces)
            os.sync()
            began = time.perf_counter()
            computing = client.map(work, range(int(workers * seconds * 10)), seconds=0.1, pure=False)
            if name:
                client.publish_dataset(array, name=name)
            wait(computing)
            took.append(time.perf_counter() - began)
            if name:
                if not numbered(place / name):
                    raise SystemExit("it was not saved while the computation ran: raise --seconds")
                client.unpublish_dataset(name)
                shutil.rmtree(place / name)
            del array, computing
        extra.append(took[1] - took[0])
        print(f"{took[0]:8.2f}{took[1]:8.2f}     {extra[-1]:.2f} more", flush=True)
    middle = statistics.median(extra)
    print(
        f'median: a save costs {middle:.2f} s, so checkpoint_every="10m" costs {100 * middle / MINUTES_10:.2f} % '
        f"({100 * middle / MINUTES_10 / size:.2f} % for each GB)"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk that is measured")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pieces", type=int, default=8, help="of 128 MiB, for each worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="that a computation takes without a save")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        place = Path(temporary)
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = str(place / "queue")
        options = {"gpus_per_node": 0, "cores": 1, "memory": "6GB", "quiet": True, "poll_interval": 1}
        with (
            LocalGPUCluster(
                jobs=arguments.workers,
                cluster_directory=place / "clusters",
                checkpoint_directory=place / "saved",
                checkpoint_every=EVERY,
                **options,
            ) as cluster,
            Client(cluster) as client,
        ):
            cluster.wait_for_workers(arguments.workers)
            (place / "saved").mkdir(mode=0o700)
            given = place / "saved", arguments.workers, arguments.pieces
            against_dd(cluster, client, *given, arguments.rounds)
            against_work(client, *given, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()
