"""What stands in for CuPy on CPUs: as much of it as the example of NCCL in docs/libraries.rst uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy


class ndarray:
    """An array whose memory NCCL reads and writes by its address."""

    def __init__(self, values: Any) -> None:
        self.values, self.size = values, values.size
        self.data = SimpleNamespace(ptr=values.ctypes.data)


def ones(size: int, dtype: str) -> ndarray:
    return ndarray(numpy.ones(size, dtype))


def asnumpy(array: ndarray) -> Any:
    return array.values.copy()
