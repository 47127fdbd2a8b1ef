"""What a worker has that is paused is saved, on a real scheduler and workers in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.core import Status

import hpcgpu
from hpcgpu.checkpoints import pieces
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.dask_worker.gpu_metrics import GPUS


def no_gpu() -> None:
    raise TypeError("this worker has no GPU")


class Array:
    """A result that is in the memory of a GPU: no other worker can have it."""

    def __reduce__(self) -> Any:
        return no_gpu, ()


Array.__module__ = "cugraph"  # as the scheduler sees the type of a result on a GPU


def on_gpu() -> Array:
    return Array()


async def save_on_gpu(place: Path) -> None:
    async with (
        Scheduler(port=0, dashboard_address=":0") as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard_address=":0", memory_limit=0) as gpu,
        Worker(scheduler.address, nthreads=1, dashboard_address=":0", memory_limit=0) as cpu,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        scheduler.add_plugin(Extension(scheduler, None))
        scheduler.workers[gpu.address].extra[GPUS] = [{}]
        array = client.submit(on_gpu, workers=[gpu.address], pure=False)
        await wait(array)
        assert scheduler.tasks[array.key].type == "cugraph.Array"
        gpu.status = Status.paused
        while scheduler.workers[gpu.address] in scheduler.running:
            await asyncio.sleep(0.01)
        saving = asyncio.ensure_future(hpcgpu.checkpoint(client, [array], place, name="demo"))  # type: ignore[arg-type]
        while not (writes := [task for task in scheduler.tasks.values() if task.prefix.name == pieces.WRITES]):
            await asyncio.sleep(0.01)
        assert writes[0] in scheduler.unrunnable
        on_cpu = await hpcgpu.checkpoint(client, [client.submit(int, 7)], place, name="other", quiet=True)  # type: ignore[misc]
        assert on_cpu.size and not cpu.state.has_what
        gpu.status = Status.running
        saved = await saving
        assert saved.written


def test_a_result_on_the_gpu_of_a_paused_worker_is_saved_by_it_when_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(asyncio.wait_for(save_on_gpu(tmp_path), 60))
    assert "0 of 1 piece for 0 s, 1 worker paused because the memory is full" in capsys.readouterr().err
