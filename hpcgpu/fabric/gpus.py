"""GPUs of this node, as NVML sees them. CUDA is not touched."""

from __future__ import annotations

__all__ = ["gpus_on_node"]


def gpus_on_node() -> int | None:
    """Count the GPUs of this node with NVML, which touches no GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no library: pynvml has an exception for each
        return None
