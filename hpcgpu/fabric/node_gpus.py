"""GPUs of this node, as NVML reports them. This module does not use CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def whole_uuids(visible: str) -> str:
    """Return a value of CUDA_VISIBLE_DEVICES with whole UUIDs.

    CUDA accepts the beginning of a UUID, and some batch systems write no more. NVML does not, and Dask queries NVML.
    """
    entries = visible.split(",")
    if all(_whole(entry) for entry in entries):
        return visible
    with nvml() as library:
        if library is None:
            return visible
        devices = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        found = [library.nvmlDeviceGetUUID(device) for device in devices]
    uuids = [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in found]  # pynvml before 11.5: bytes
    return ",".join(entry if _whole(entry) else _completed(entry, uuids) for entry in entries)


def _completed(beginning: str, uuids: Sequence[str]) -> str:
    """Return the only UUID that begins like this; what was given if none does, or several."""
    found = [uuid for uuid in uuids if uuid.lower().startswith(beginning.lower())]
    return found[0] if len(found) == 1 else beginning


def _whole(entry: str) -> bool:
    return not entry.startswith("GPU-") or len(entry) >= len("GPU-") + 36


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
