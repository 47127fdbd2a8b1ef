"""dask-cuda's benchmarks run on a cluster by the lines of the page, with `--type cpu` and small sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU

pytestmark = pytest.mark.shows("dask-cuda's benchmarks, with `--type cpu`")

PAGE = (Path(__file__).parents[2] / "docs" / "network.rst").read_text()
SMALL = {
    "local_cudf_merge": "--chunk-size 1000",
    "local_cudf_shuffle": "--partition-size 100kB --in-parts 4",
    "local_cudf_groupby": "--chunk-size 1000 --in-parts 4",
    "local_cupy": "--size 100 --chunk-size 50",
}


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    with LocalGPUCluster(**CPU, jobs=2) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


def lines(benchmark: str, way: str) -> str:
    """The block of the page that runs a benchmark in this way, with a small size on CPUs."""
    found = re.findall(r"^\.\. code-block:: bash\n\n((?:   .*\n|\n)+)", PAGE, re.MULTILINE)
    [block] = [one for one in found if "dask_cuda.benchmarks" in one and way in one]
    cpu = f"dask_cuda.benchmarks.{benchmark} --type cpu --runs 1 --warmup-runs 0 {SMALL[benchmark]}"
    return re.sub(r"dask_cuda\.benchmarks\.\w+", cpu, textwrap.dedent(block))


def run(script: str, **environment: str) -> str:
    own = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environment
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_by_the_address_that_the_status_shows(cluster: LocalGPUCluster) -> None:
    address = json.loads(run(f"hpcgpu status {cluster.name} --json"))["scheduler"]
    said = run(lines("local_cudf_shuffle", "SECURITY_LOADER").replace("tls://10.0.0.3:34567", address))
    assert re.search(r"Number of workers +\| 2\n", said) and len(re.findall(r"^\d +\| tls://", said, re.MULTILINE)) == 2


@pytest.mark.parametrize("benchmark", ["local_cudf_groupby", "local_cupy"])
def test_by_the_scheduler_file(cluster: LocalGPUCluster, benchmark: str, tmp_path: Path) -> None:
    # It marks ranges for NVIDIA's profiler, only in the program.
    (tmp_path / "nvtx.py").write_text("def start_range(**_): return None\ndef end_range(_): return None\n")
    script = lines(benchmark, "--scheduler-file").replace("~/.hpcgpu/clusters/demo", str(cluster.directory.path))
    assert re.search(r"Number of workers +\| 2\n", run(script, PYTHONPATH=str(tmp_path)))


def test_on_a_cluster_that_is_started_for_it(queue: LocalQueue) -> None:
    line = lines("local_cudf_merge", "hpcgpu run").replace("--gpus-per-node 4", "--gpus-per-node 0 --system local")
    assert re.search(r"Number of workers +\| 2\n", run(line))
