"""The driver's data on a worker's GPU: sent once when the worker registers, and with each of its heartbeats.

distributed has the metric ``gpu``, but its workers do not send it: they copy the table of metrics before they detect
the GPU (``Worker.__init__``). That metric also lacks the power.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypedDict, TypeVar

from dask import config

from hpcgpu.batch.cuda_visible_devices import VARIABLE
from hpcgpu.fabric.node_gpus import first_device

_T = TypeVar("_T")

#: Key under which a worker reports how many GPUs its job has on the node; also the variable in its environment.
GPUS = "HPCGPU_GPUS"
#: The name of both in a worker's messages to the scheduler.
METRIC = "hpcgpu-gpu"
#: The name of the metric with the bytes that a worker has sent to others.
SENT = "hpcgpu-sent"


class Model(TypedDict):
    """Model and memory of a GPU."""

    #: Empty if the driver does not report it.
    model: str
    #: Bytes; None if the driver does not report it.
    memory_total: int | None


class GPUUse(TypedDict):
    """Use of a GPU now. None if the driver does not report a value: a MIG device has no utilization and no power."""

    #: Per cent.
    utilization: float | None
    #: Bytes.
    memory_used: int | None
    #: Watts.
    power: float | None


class Device:
    """The GPU of this process: the first that it sees. This does not use CUDA."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handle: Any = None
        if not config.get("distributed.diagnostics.nvml", default=True):
            return
        with suppress(Exception):  # no library, no driver, no such GPU: pynvml has one exception class for each
            import pynvml

            pynvml.nvmlInit()
            self._handle = first_device(pynvml, os.environ.get(VARIABLE))
            self._library = pynvml

    def model(self) -> Model:
        """Return the model of the GPU."""
        name = self._query(lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu))
        return Model(
            model=name.decode(errors="replace") if isinstance(name, bytes) else name or "",
            memory_total=self._query(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)),
        )

    def read(self) -> GPUUse:
        """Return the present use of the GPU."""
        return GPUUse(
            utilization=self._query(lambda nvml, gpu: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
            memory_used=self._query(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
            power=self._query(lambda nvml, gpu: float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000),
        )

    def _query(self, question: Callable[[Any, Any], _T]) -> _T | None:
        if self._library is None:
            return None
        try:
            return question(self._library, self._handle)
        except Exception:  # not supported, or the GPU is lost: a heartbeat must not fail because of it
            return None
