"""What stands in for PyTorch on CPUs: as much of it as the example of docs/libraries.rst uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from . import cuda as cuda
from . import nn as nn
from . import optim as optim


class device:
    def __init__(self, name: str) -> None:
        self.type, _, index = name.partition(":")
        self.index = int(index) if index else None


class Tensor:
    """Values with the function that gives their gradients to what they were computed from."""

    def __init__(self, values: Any, device: str = "cpu", backward: Callable[[Any], None] | None = None) -> None:
        self.values, self.device, self._backward = numpy.asarray(values), device, backward

    def sum(self) -> Tensor:
        return Tensor(self.values.sum(), self.device, lambda grad: self.backward(grad * numpy.ones_like(self.values)))

    def backward(self, grad: Any = 1.0) -> None:
        if self._backward is not None:
            self._backward(grad)

    def item(self) -> Any:
        return self.values.item()


def rand(*shape: int, device: str = "cpu") -> Tensor:
    return Tensor(numpy.random.default_rng().random(shape), device)
