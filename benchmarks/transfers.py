"""How fast data goes between workers of one node, and what CPU time it takes, for each way to connect them.

``python benchmarks/transfers.py --workers 4 8`` starts one cluster for each way on the embedded queue, all at the same
time. It needs no GPU: the GPUs pretend (tests/gpu_stub). The ways take turns, several rounds, so that other load on the
machine meets all of them alike; the table has the fastest of each.
"""

from __future__ import annotations

import argparse
import os
import platform
import ssl
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import psutil
from distributed import Client, wait

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import ClusterWarning
from hpcgpu.fabric import connection_report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu_stub"))

WAYS: dict[str, dict[str, Any]] = {
    "plain TCP": {"protocol": "tcp", "security": False},
    "authenticated": {"protocol": "tcp", "security": "authenticated"},
    "TLS": {"protocol": "tcp"},
}
if find_spec("distributed_ucxx") is not None:
    WAYS["UCX, TCP"] = {"protocol": "ucx", "ucx_env": {"UCX_TLS": "tcp,self"}}
    # UCX uses shared memory for ucxx's connections only if it says that it notices the end of the other side. `cma`
    # cannot say so. hpcgpu leaves out `sysv`, whose segments members of the user's group can attach to.
    memory = {"UCX_TLS": "posix,tcp,self", "UCX_POSIX_ERROR_HANDLING": "y"}
    WAYS["UCX, shared memory"] = {"protocol": "ucx", "ucx_env": memory}
#: Bytes of one transfer, and of the array that is rechunked.
TRANSFER, SHUFFLE = 400_000_000, 512 * 2**20
#: How often `bench` sends what it sends.
SENT = 5


class Measured:
    """A cluster that is measured again and again, and the best of what it does."""

    def __init__(self, way: dict[str, Any], workers: int, stack: ExitStack) -> None:
        options = {"gpus_per_node": workers, "scheduler": {"gpus_per_node": 1}, "poll_interval": 1.0, "quiet": True}
        self.cluster = stack.enter_context(LocalGPUCluster(jobs=1, **options, **way))
        self.client = stack.enter_context(Client(self.cluster, set_as_default=False))
        self.client.wait_for_workers(workers, timeout=300)
        self._pids = list(self.client.run(os.getpid).values())
        #: By name of what is measured: seconds, and seconds of CPU of all workers.
        self.found: dict[str, list[tuple[float, float]]] = {"transfer": [], "shuffle": []}
        self.transports: tuple[str, ...] = ()
        self._shuffle()  # loads modules

    def measure(self) -> None:
        """Send and rechunk once more."""
        workers = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        found: list[connection_report.Measurement] = []

        def bench() -> None:
            found[:] = self.client.sync(
                connection_report.bench, self.client.scheduler, workers, [TRANSFER], device=False
            )

        used = self._timed(bench)[1] / SENT
        self.transports = found[0].link.transports
        self.found["transfer"].append((TRANSFER / found[0].bandwidth[TRANSFER], used))
        self.found["shuffle"].append(self._timed(self._shuffle))

    def _shuffle(self) -> None:
        """Rechunk an array from rows to columns: each worker sends to each other one."""
        side = int((SHUFFLE / 8) ** 0.5)
        rows = self._there(da.random.random((side, side), chunks=(side // 16, side)))
        self._there(rows.rechunk((side, side // 16)))

    def _there(self, array: Any) -> Any:
        there = self.client.persist(array)
        with self.client.as_current():
            wait(there, timeout=300)
        return there

    def _timed(self, work: Callable[[], Any]) -> tuple[float, float]:
        used, began = self._cpu(), time.perf_counter()
        work()
        return time.perf_counter() - began, self._cpu() - used

    def _cpu(self) -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self._pids)


def compare(workers: int, rounds: int, ways: list[str]) -> None:
    """Start a cluster for each way, measure them in turn, and print the table."""
    with ExitStack() as stack:
        clusters: dict[str, Measured] = {}
        for name in ways:
            print(f"{workers} workers, {name}", file=sys.stderr)
            clusters[name] = Measured(WAYS[name], workers, stack)
        for number in range(rounds):
            print(f"round {number + 1}", file=sys.stderr)
            for one in clusters.values():
                one.measure()
        print(f"\n{workers} workers, best of {rounds} rounds, load {os.getloadavg()[0]:.0f}; in brackets the median of")
        print("the ratios to plain TCP in the same round")
        print(f"{'':20}{'400 MB to one other worker':34}{'rechunk of 512 MiB':32}carried by")
        plain = clusters["plain TCP"].found
        for name, one in clusters.items():
            transfer, shuffle = (
                (min(s for s, _ in one.found[what]), min(c for _, c in one.found[what]), ratio(plain[what], found))
                for what, found in one.found.items()
            )
            print(
                f"{name:20}{TRANSFER / transfer[0] / 1e9:.2f} GB/s ({transfer[2]:.2f} x), CPU {transfer[1]:.2f} s   "
                f"{shuffle[0]:.2f} s ({shuffle[2]:.2f} x), CPU {shuffle[1]:.2f} s   {', '.join(one.transports)}"
            )


def ratio(plain: list[tuple[float, float]], one: list[tuple[float, float]]) -> float:
    """Return how fast something is, compared with plain TCP in the same round."""
    return statistics.median(p / o for (p, _), (o, _) in zip(plain, one, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="plain TCP must be one of them")
    arguments = parser.parse_args()

    import build

    warnings.simplefilter("ignore", ClusterWarning)  # security=False
    ucx = f", UCXX {version('distributed-ucxx-cu12')}" if "UCX, TCP" in WAYS else ""
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Linux {platform.release()}")
    print(f"Python {platform.python_version()}, {ssl.OPENSSL_VERSION}, distributed {version('distributed')}{ucx}")
    with tempfile.TemporaryDirectory(prefix="transfers-") as place:
        os.environ |= build.environment(build.build(Path(place) / "gpu_stub"))
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = f"{place}/queue"
        gpus = len(WAYS) * (max(arguments.workers) + 1)
        os.environ["STUBNVML_COUNT"] = str(gpus)
        dask.config.set({"temporary-directory": f"{place}/dask", "hpcgpu.cluster-directory": f"{place}/clusters"})
        LocalQueue(gpus=gpus).check()
        for workers in arguments.workers:
            compare(workers, arguments.rounds, arguments.ways)


if __name__ == "__main__":
    main()
