"""A CuPy that pretends: its arrays cannot be rebuilt in a process without CUDA_VISIBLE_DEVICES, as without a GPU."""

import os

import numpy
from distributed.protocol import dask_deserialize, dask_serialize


class CUDARuntimeError(RuntimeError):
    """What CuPy raises."""


CUDARuntimeError.__module__ = "cupy_backends.cuda.api.runtime"


class ndarray:
    """An array that claims to be on a GPU."""

    __cuda_array_interface__ = property(lambda self: {"data": (0, False)})

    def __init__(self, values):
        self.values = values

    def __reduce__(self):
        return _on_device, (self.values,)

    def get(self):
        return self.values

    def sum(self):
        return self.values.sum()


def _on_device(values):
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return ndarray(values)


def arange(n):
    """Return an array."""
    return ndarray(numpy.arange(n))


# What distributed registers for the real one, see distributed/protocol/cupy.py.
@dask_serialize.register(ndarray)
def _(array):
    return {"dtype": array.values.dtype.str}, [memoryview(array.values)]


@dask_deserialize.register(ndarray)
def _(header, frames):
    return _on_device(numpy.frombuffer(frames[0], header["dtype"]))
