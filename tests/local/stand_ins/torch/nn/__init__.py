"""A layer with gradients."""

from __future__ import annotations

from typing import Any

import numpy


class Linear:
    """Its parameters begin at random, so they differ between processes."""

    def __init__(self, n_in: int, n_out: int) -> None:
        from torch import Tensor

        random = numpy.random.default_rng()
        self.weight, self.bias = Tensor(random.random((n_out, n_in))), Tensor(random.random(n_out))

    def parameters(self) -> list[Any]:
        return [self.weight, self.bias]

    def to(self, device: str) -> Linear:
        for parameter in self.parameters():
            parameter.device = device
        return self

    def __call__(self, inputs: Any) -> Any:
        from torch import Tensor

        if inputs.device != self.weight.device:
            raise RuntimeError("Expected all tensors to be on the same device")

        def backward(grad: Any) -> None:
            self.weight.grad = self.weight.grad + grad.T @ inputs.values
            self.bias.grad = self.bias.grad + grad.sum(axis=0)

        return Tensor(inputs.values @ self.weight.values.T + self.bias.values, inputs.device, backward)
