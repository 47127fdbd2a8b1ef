"""Start of the workers of one job from a slow filesystem: directly, by the fork server, and staged, by turns.

The environment, and the archive of it, are on a filesystem that takes a time for each lookup and for each read of up
to 128 KiB (slowfs.c, which needs gcc and libfuse3-dev). It is mounted anew for each start, so nothing of it is in
memory. The archive is unpacked on the disk of this machine. The standard library is that of the base Python, on the
disk too.

- directly: each worker imports its modules itself (``worker_start="spawn"``)
- fork server: the node imports them once (``worker_start="forkserver"``, the default)
- staged: the option `stage`, with the fork server; the node unpacks the archive first
- shared: likewise, where another job of the user has unpacked it

Measured: seconds from the submit of a job of `dask cuda worker` on pretended GPUs, on the embedded queue, until all
workers are connected to a scheduler that already runs. A second table has the time of ``import dask.distributed`` in a
new process for several delays, which `hpcgpu check --in-job` measures. Run it with
``python benchmarks/environment.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu_stub")]
WAYS = ("directly", "fork server", "staged", "shared")
#: Packages of the tests, which no user has.
LEFT_OUT = (
    "playwright",
    "mypy",
    "*__mypyc*",
    "jedi",
    "debugpy",
    "babel",
    "jupyterlab",
    "sphinx",
    "docutils",
    "xgboost*",
)


class Slow:
    """An environment and its archive on a slow filesystem.

    Parameters
    ----------
    place : Path
        A directory on the disk.
    """

    def __init__(self, place: Path) -> None:
        self.program, self.source, self.mount = place / "slowfs", place / "source", place / "slow"
        flags = subprocess.run(
            ["pkg-config", "fuse3", "--cflags", "--libs"], check=True, capture_output=True, text=True
        ).stdout
        code = Path(__file__).with_name("slowfs.c")
        subprocess.run(["gcc", "-O2", code, "-o", self.program, *flags.split()], check=True)
        self.mount.mkdir()
        environment = self.source / "env"
        shutil.copytree(sys.prefix, environment, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        for link in packages.glob("*hpcgpu*.pth"):  # an editable install
            link.unlink()
        shutil.copytree(ROOT / "hpcgpu", packages / "hpcgpu", dirs_exist_ok=True)
        shutil.copytree(ROOT / "templates", packages / "hpcgpu" / "templates", dirs_exist_ok=True)
        subprocess.run([environment / "bin" / "python", "-c", "import distributed, dask_cuda.cli, hpcgpu"], check=True)
        subprocess.run(["tar", "-C", environment, "--zstd", "-cf", self.source / "env.tar.zst", "."], check=True)
        self.python, self.archive = self.mount / "env" / "bin" / "python", self.mount / "env.tar.zst"

    def sizes(self) -> str:
        """Return what there is to read."""
        files = [path for path in (self.source / "env").rglob("*") if path.is_file() and not path.is_symlink()]
        size = sum(path.stat().st_size for path in files)
        packed = (self.source / "env.tar.zst").stat().st_size
        return f"{len(files)} files of {size / 2**20:.0f} MiB; the archive has {packed / 2**20:.0f} MiB"

    @contextmanager
    def mounted(self, milliseconds: float) -> Iterator[None]:
        """Mount it, with nothing in memory."""
        delay = f"{1000 * milliseconds:.0f}"
        settings = {
            "SLOWFS_SOURCE": str(self.source),
            "SLOWFS_MICROSECONDS": delay,
            "SLOWFS_READ_MICROSECONDS": delay,
        }
        subprocess.run([self.program, "-o", "auto_cache", self.mount], check=True, env=os.environ | settings)
        try:
            yield
        finally:
            subprocess.run(["fusermount3", "-u", "-z", self.mount], check=True)

    def seconds_to_import(self, milliseconds: float) -> float:
        """Time ``import dask.distributed`` in a new process."""
        with self.mounted(milliseconds):
            started = time.monotonic()
            subprocess.run([self.python, "-P", "-c", "import dask.distributed"], check=True)
            return time.monotonic() - started


def measure(slow: Slow, way: str, workers: int, milliseconds: float, disk: Path) -> list[float]:
    """Start one job, or with ``"staged"`` two jobs; return for each the seconds until its workers are connected."""
    from hpcgpu import LocalGPUCluster

    staged = {"stage": str(slow.archive)} if way == "staged" else {}
    with (
        slow.mounted(milliseconds),
        LocalGPUCluster(
            gpus_per_node=workers,
            scheduler="local",
            protocol="tcp",
            python=str(slow.python),
            worker_start="spawn" if way == "directly" else "forkserver",
            local_directory=str(disk),
            quiet=True,
            **staged,
        ) as cluster,
    ):
        seconds = []
        for jobs in range(1, 3 if staged else 2):
            started = time.monotonic()
            cluster.scale(jobs=jobs)
            while len(cluster.scheduler_info["workers"]) < jobs * workers:
                time.sleep(0.02)
            seconds.append(time.monotonic() - started)
        return seconds


def starts(slow: Slow, workers: int, milliseconds: float, repeat: int, disk: Path) -> dict[str, float]:
    """Measure each way by turns; return the medians."""
    runs: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        runs["directly"] += measure(slow, "directly", workers, milliseconds, disk)
        runs["fork server"] += measure(slow, "fork server", workers, milliseconds, disk)
        first, second = measure(slow, "staged", workers, milliseconds, disk)
        runs["staged"].append(first)
        runs["shared"].append(second)
    return {way: statistics.median(done) for way, done in runs.items()}


def tables(slow: Slow, arguments: argparse.Namespace, disk: Path) -> None:
    """Print both tables."""
    head = "".join(f"{way:>14}" for way in WAYS)
    print(slow.sizes())
    print(f"\nSeconds until all workers are connected, and the ratio to directly; a delay of {arguments.slow:g} ms")
    print(f"{'workers':>8}{head}", flush=True)
    for workers in arguments.workers:
        found = starts(slow, workers, arguments.slow, arguments.repeat, disk)
        cells = [f"{seconds:.1f} ({seconds / found['directly']:.2f})" for seconds in found.values()]
        print(f"{workers:>8}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
    print(f"\nThe same for four workers, by the time of the import\n{'delay':>8}{'import (s)':>12}{head}", flush=True)
    for delay in arguments.delays:
        seconds = statistics.median(slow.seconds_to_import(delay) for _ in range(arguments.repeat))
        found = starts(slow, 4, delay, 1, disk)
        row = "".join(f"{value:>14.1f}" for value in found.values())
        print(f"{f'{delay:g} ms':>8}{seconds:>12.1f}{row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--slow", type=float, default=2.0, metavar="MS", help="delay of the first table")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 0.5, 1, 2, 4], help="those of the second")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    import build

    with tempfile.TemporaryDirectory() as temporary:
        os.environ.update(build.environment(build.build(Path(temporary) / "stub")))
        os.environ["STUBNVML_COUNT"] = str(2 * max([4, *arguments.workers]))
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = f"{temporary}/queue"
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = f"{temporary}/clusters"
        from hpcgpu.batch.local.queue import LocalQueue

        LocalQueue(Path(temporary) / "queue", gpus=2 * max([4, *arguments.workers])).check()
        slow, disk = Slow(Path(temporary)), Path(temporary) / "disk"
        measure(slow, "staged", 1, 0.0, disk)  # not counted
        tables(slow, arguments, disk)


if __name__ == "__main__":
    main()
