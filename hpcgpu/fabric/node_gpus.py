"""GPUs of this node, as NVML reports them. This module does not use CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcgpu.batch.cuda_visible_devices import visible_devices


@contextmanager
def nvml() -> Iterator[Any]:
    """Yield pynvml, initialized; None if there is no driver or no library."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # pynvml has one exception class for each error
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpus_on_node() -> int | None:
    """Count the GPUs of this node; None if NVML reports none."""
    with nvml() as library:
        return int(library.nvmlDeviceGetCount()) if library is not None else None


def first_device(library: Any, visible: str | None) -> Any:
    """Return NVML's handle of the first GPU that a process sees.

    Parameters
    ----------
    library : module
        What `nvml` yields.
    visible : str or None
        CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG UUIDs; None if it is not set.

    Raises
    ------
    LookupError
        The process sees no GPU.
    pynvml.NVMLError
        There is no such GPU.
    """
    devices = visible_devices("0" if visible is None else visible)
    if not devices:
        raise LookupError("this process sees no GPU")
    first = devices[0]
    return (
        library.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else library.nvmlDeviceGetHandleByUUID(first)
    )
