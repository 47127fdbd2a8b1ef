"""What the driver says of a worker's GPU: once as the worker registers, and with each of its heartbeats.

distributed has such a metric too, ``gpu``, but its workers miss it: they copy the table of metrics before they find out
that there is a GPU (``Worker.__init__``), and it has no power.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypedDict, TypeVar

from dask import config

from hpcgpu.batch.visible import VARIABLE
from hpcgpu.fabric.gpus import first_device

__all__ = ["METRIC", "SENT", "Device", "Model", "Reading"]

_T = TypeVar("_T")

#: The name of both in what a worker tells the scheduler.
METRIC = "hpcgpu-gpu"
#: The same of the bytes that a worker has given to others.
SENT = "hpcgpu-sent"


class Model(TypedDict):
    """What a GPU is."""

    #: Empty if the driver does not say.
    model: str
    #: Bytes; None if the driver does not say.
    memory_total: int | None


class Reading(TypedDict):
    """What a GPU does now. Each is None if the driver does not say: a MIG device has no utilization and no power."""

    #: Per cent.
    utilization: float | None
    #: Bytes.
    memory_used: int | None
    #: Watts.
    power: float | None


class Device:
    """The GPU of this process: the first that it sees. CUDA is not touched."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handle: Any = None
        if not config.get("distributed.diagnostics.nvml", default=True):
            return
        with suppress(Exception):  # no library, no driver, no such GPU; pynvml has an exception for each
            import pynvml

            pynvml.nvmlInit()
            self._handle = first_device(pynvml, os.environ.get(VARIABLE))
            self._library = pynvml

    def model(self) -> Model:
        """Return what the GPU is."""
        name = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu))
        return Model(
            model=name.decode(errors="replace") if isinstance(name, bytes) else name or "",
            memory_total=self._ask(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)),
        )

    def read(self) -> Reading:
        """Return what the GPU does now."""
        return Reading(
            utilization=self._ask(lambda nvml, gpu: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
            memory_used=self._ask(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
            power=self._ask(lambda nvml, gpu: float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000),
        )

    def _ask(self, question: Callable[[Any, Any], _T]) -> _T | None:
        if self._library is None:
            return None
        try:
            return question(self._library, self._handle)
        except Exception:  # not supported, or the GPU is lost: a heartbeat must not fail for it
            return None
