"""How many of N clusters break: each starts on the embedded queue, a client of its own computes a small result, and it
closes.

``python benchmarks/clusters.py --clusters 100`` prints a line for each cluster that broke, and ends with status 1 if
any did. It needs no GPU and no batch system: the GPUs pretend (tests/gpu_stub). TLS is on, as it is by default, so that
this also shows whether Python's and OpenSSL's versions work together; docs/tested.md has what came of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import ssl
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu_stub"))

#: Words in a log that say that a connection ended which nobody closed.
DROPPED = ("CommClosedError", "StreamClosedError", "BrokenPipeError", "Stream is closed")


def one(workers: int, timeout: float) -> None:
    """Start a cluster, compute, close it."""
    from distributed.comm import CommClosedError

    from hpcgpu import LocalGPUCluster

    with LocalGPUCluster(
        jobs=workers,
        gpus_per_node=1,
        scheduler={"gpus_per_node": 0},
        protocol="tcp",
        poll_interval=0.5,
        quiet=True,
        death_timeout=timeout,
    ) as cluster:
        with cluster.get_client() as client:
            client.wait_for_workers(workers, timeout=timeout)
            futures = client.map(lambda x: x + 1, range(20))
            assert client.gather(futures) == list(range(1, 21))
            client.run(lambda: None)
        here = str(cluster.get_logs())
    if found := [word for word in DROPPED if word in here]:
        lines = [line for line in here.splitlines() if any(word in line for word in found)]
        raise CommClosedError(f"it worked, but its logs tell of connections that broke: {lines[0]}")


def main() -> int:
    """Run the clusters and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clusters", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2, help="jobs of each, with one GPU worker")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that the workers of one may take")
    arguments = parser.parse_args()

    import build

    from hpcgpu.batch.local.queue import LocalQueue

    print(f"Python {platform.python_version()}, {ssl.OPENSSL_VERSION}", flush=True)
    broken, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpcgpu-clusters-") as place:
        os.environ |= build.environment(build.build(Path(place) / "gpu_stub"))
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = f"{place}/queue"
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = f"{place}/clusters"
        os.environ["DASK_TEMPORARY_DIRECTORY"] = f"{place}/dask"
        LocalQueue(gpus=4).check()
        for number in range(1, arguments.clusters + 1):
            try:
                one(arguments.workers, arguments.timeout)
            except Exception as error:
                broken += 1
                print(f"cluster {number}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if number % 10 == 0:
                print(f"{number} clusters, {broken} broken, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{arguments.clusters} clusters, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
