"""Gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SGD:
    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = 0.0

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.values = parameter.values - self.lr * parameter.grad
