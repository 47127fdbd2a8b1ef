"""How fast data goes between workers, and what CPU time it takes, with each value of the option ``security``.

``python benchmarks/transfers.py`` starts clusters of four workers on the embedded queue. It needs no GPU. The ways take
turns, several rounds, so that other load on the machine meets all of them alike; the table has the fastest of each.
"""

from __future__ import annotations

import argparse
import os
import platform
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import psutil
from distributed import Client, wait

from hpcgpu import LocalGPUCluster
from hpcgpu.fabric import report

WAYS: dict[str, bool | str] = {"plain TCP": False, "authenticated": "authenticated", "TLS": True}
#: Bytes of one transfer, and of the array that is rechunked.
TRANSFER, SHUFFLE = 400_000_000, 512 * 2**20


def cpu(pids: list[int]) -> float:
    """Return the seconds of CPU that processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def timed(pids: list[int], work: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds that something took, and the seconds of CPU of these processes."""
    used, began = cpu(pids), time.perf_counter()
    work()
    return time.perf_counter() - began, cpu(pids) - used


def shuffle(client: Client) -> None:
    """Rechunk an array from rows to columns: each worker sends to each other one."""
    side = int((SHUFFLE / 8) ** 0.5)
    rows = wait_for(client, da.random.random((side, side), chunks=(side // 16, side)))
    wait_for(client, rows.rechunk((side, side // 16)))


def wait_for(client: Client, array: Any) -> Any:
    """Compute an array on the workers, and return it."""
    there = client.persist(array)
    wait(there)
    return there


def measure(security: bool | str, runs: int) -> dict[str, float]:
    """Return what one cluster does."""
    options: dict[str, Any] = {"gpus_per_node": 0, "cores": 1, "protocol": "tcp", "poll_interval": 0.5, "quiet": True}
    with LocalGPUCluster(jobs=4, security=security, **options) as cluster, Client(cluster) as client:
        client.wait_for_workers(4)
        pids = list(client.run(os.getpid).values())
        workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        found: list[report.Measurement] = []

        def bench() -> None:
            found[:] = client.sync(report.bench, client.scheduler, workers, [TRANSFER], device=False)

        transfers = [(timed(pids, bench)[1], max(found[0].bandwidth.values())) for _ in range(runs)]
        shuffles = [timed(pids, lambda: shuffle(client)) for _ in range(runs + 1)][1:]  # the first one loads modules
        return {
            "transfer": max(speed for _, speed in transfers) / 1e9,
            "transfer CPU": min(used for used, _ in transfers) / 5,  # `bench` sends it five times
            "shuffle": min(seconds for seconds, _ in shuffles),
            "shuffle CPU": min(used for _, used in shuffles),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="of each measurement in one cluster")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="transfers-"))
    os.environ["HPCGPU_QUEUE_DIRECTORY"] = str(place / "queue")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, security in WAYS.items():
            found[way].append(measure(security, arguments.runs))
    load = f"load {os.getloadavg()[1]:.0f}"
    print(f"{os.cpu_count()} cores, {load}, Python {platform.python_version()}, {ssl.OPENSSL_VERSION}")
    print(f"{'':15}transfer of 400 MB                  rechunk of 512 MiB, four workers")
    best = {
        way: {k: (max if k == "transfer" else min)(one[k] for one in rounds) for k in rounds[0]}
        for way, rounds in found.items()
    }
    plain = best["plain TCP"]
    for way, one in best.items():
        faster = {"transfer": one["transfer"] / plain["transfer"], "shuffle": plain["shuffle"] / one["shuffle"]}
        print(
            f"{way:15}{one['transfer']:.2f} GB/s ({faster['transfer']:.2f} x), CPU {one['transfer CPU']:.2f} s   "
            f"{one['shuffle']:.2f} s ({faster['shuffle']:.2f} x), CPU {one['shuffle CPU']:.2f} s"
        )


if __name__ == "__main__":
    main()
