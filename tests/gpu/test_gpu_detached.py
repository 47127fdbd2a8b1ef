"""A cluster on a real GPU that its program has left goes on with another scheduler."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.existing_clusters.lookup import locate
from tests.conftest import live
from tests.gpu.conftest import DRY_RUN, Measured
from tests.gpu.test_gpu import MEMORY, OPTIONS, Until, is_on_gpu, on_gpu
from tests.helpers import hpcgpu as command_line
from tests.local.test_detached_restarts import lose_scheduler
from tests.local.test_restarted_scheduler import end_scheduler
from tests.local.test_scheduler_before_walltime import ends_soon, reaches_walltime

pytestmark = pytest.mark.gpu

NUMBERS = 1000 if DRY_RUN else 32_000_000


@pytest.mark.parametrize("protocol", ["ucx", "tcp"])
def test_it_has_its_arrays_on_the_gpu_again(
    queue: LocalQueue, until: Until, measured: Measured, protocol: str, tmp_path: Path
) -> None:
    """First the scheduler is killed; then the next one reaches its walltime, while another one waits on the GPU."""
    pytest.importorskip("cupy")
    if protocol == "ucx":
        pytest.importorskip("distributed_ucxx")
    options = OPTIONS | MEMORY | {"protocol": protocol, "checkpoint_directory": tmp_path}
    with LocalGPUCluster(
        name="left", jobs=2, on_scheduler_end="restart", scheduler={"walltime": "4h"}, **options
    ) as cluster:
        cluster.wait_for_workers(2)
        with cluster.get_client() as client:
            arrays = client.map(on_gpu, [NUMBERS, NUMBERS + 1])
            client.publish_dataset(kept=arrays)
            cluster.checkpoint(arrays, name="kept")
            del arrays
        cluster.detach()
    workers = {name: queue.find(name) for name in ("left-0", "left-1")}
    with hpcgpu.connect("left", quiet=True) as client:

        def goes_on_after(end: Callable[[], None], how: str) -> None:
            began = time.monotonic()
            lose_scheduler(client, end)
            client.wait_for_workers(2)
            measured(f"left-{protocol}: scheduler {how}, all workers again", f"{time.monotonic() - began:.1f} s")
            again = client.get_dataset("kept")
            total = client.gather(client.map(lambda x: int(x.sum()), again))
            measured(f"left-{protocol}: ... and the arrays on the GPU", f"{time.monotonic() - began:.1f} s")
            assert total == [n * (n - 1) // 2 for n in (NUMBERS, NUMBERS + 1)]
            assert DRY_RUN or all(client.gather(client.map(is_on_gpu, again)))

        until(lambda: queue.find("left-scheduler2"), "the next one is in the queue")
        goes_on_after(lambda: end_scheduler(client, signal.SIGKILL), "killed")
        until(lambda: queue.find("left-scheduler3"), "the next one is in the queue")
        [present] = queue.find("left-scheduler2")
        ends_soon(queue, present)
        until(lambda: queue.find("left-scheduler4"), "one more, which does not wait for the end")
        logs = locate("left").logs
        until(lambda: any("takes over" in log.read_text() for log in logs.glob("*scheduler4-*")), "it waits in its job")
        goes_on_after(lambda: reaches_walltime(queue, present), "at its walltime")
    assert {name: queue.find(name) for name in workers} == workers, "their jobs go on"
    assert command_line("stop", "left").returncode == 0
    assert live(queue) == []
