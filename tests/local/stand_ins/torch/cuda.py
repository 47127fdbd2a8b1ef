"""The devices of this process, as CUDA_VISIBLE_DEVICES lists them."""

from __future__ import annotations

import os


def device_count() -> int:
    return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))


def set_device(index: int) -> None:
    if not 0 <= index < device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")
