"""Copies in host memory of what lives in GPU memory, and the sentence where a graph with such objects cannot be
rebuilt.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy
import pytest
from distributed.protocol import deserialize, serialize, to_serialize

from hpcgpu.runtime import results_in_host_memory
from hpcgpu.runtime.results_in_host_memory import SERIALIZERS, host_copy, with_advice


class OnGPU:
    """Claims to be in GPU memory."""

    __cuda_array_interface__ = {"data": (1, False)}  # noqa: RUF012


class LikeTorchOnCPU:
    """Has the attribute, and raises where it is asked for."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("Can't get __cuda_array_interface__ on non-CUDA tensor type")


class LikeTorch:
    """A tensor that keeps gradients: its memory is the GPU's, and its interface raises."""

    is_cuda = True

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


def test_a_tensor_that_keeps_gradients_is_in_gpu_memory_too() -> None:
    with pytest.raises(TypeError, match="LikeTorch in GPU memory"):
        host_copy(LikeTorch())


@pytest.mark.parametrize("value", [1, "text", None, [1], {"a": 1}, LikeTorchOnCPU()])
def test_what_is_on_the_host_stays_the_very_same(value: Any) -> None:
    assert host_copy(value) is value


def test_what_cannot_be_copied_reports_what_it_is_and_what_to_do() -> None:
    with pytest.raises(
        TypeError, match=r"a result is a .*OnGPU in GPU memory.* Return a host copy from the task \(such as \.cpu\(\)"
    ):
        host_copy(OnGPU())


@pytest.mark.parametrize("value", [{"a": [1, (2, "x")]}, b"bytes", list(range(10)), {1, 2}, ValueError("x")])
def test_everything_else_travels_as_ever(value: Any) -> None:
    results_in_host_memory.register()
    header, frames = serialize(to_serialize(value), serializers=SERIALIZERS)
    assert repr(deserialize(header, frames)) == repr(value)
    assert "hpcgpu" not in str(header), "a client that knows nothing of hpcgpu can read it"


def test_failures_travel_as_messages() -> None:
    results_in_host_memory.register()
    for value in (OnGPU(), [OnGPU()], ValueError(OnGPU())):
        header, frames = serialize(to_serialize(value), serializers=SERIALIZERS)
        with pytest.raises(TypeError, match="OnGPU in GPU memory"):
            deserialize(header, frames)


def like_cupy() -> Any:
    """An array of a library whose arrays have the method `get` and are in GPU memory."""
    kind = type("ndarray", (OnGPU,), {"__module__": "cupy", "get": lambda self: numpy.arange(4)})
    return kind()


class Holder:
    """A result of the user, which holds others."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_client_without_hpcgpu_gets_arrays_as_copies_in_host_memory() -> None:
    results_in_host_memory.register()
    header, frames = serialize(to_serialize(like_cupy()), serializers=SERIALIZERS)
    assert "hpcgpu" not in str(header)
    assert deserialize(header, frames).tolist() == [0, 1, 2, 3]


def test_arrays_inside_a_result_can_be_written_where_they_could_be_before() -> None:
    results_in_host_memory.register()
    fixed, free = numpy.arange(3), numpy.arange(3)
    fixed.flags.writeable = False
    header, frames = serialize(to_serialize(Holder([fixed, free, like_cupy()])), serializers=SERIALIZERS)
    held = deserialize(header, [bytes(frame) for frame in frames]).held  # as they come from the network
    assert [array.flags.writeable for array in held] == [False, True, True]


def broken_graph(cause: Exception) -> RuntimeError:
    error = RuntimeError("Error during deserialization of the task graph. This frequently occurs if ...")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "cause",
    [
        ModuleNotFoundError("No module named 'cupy'"),
        RuntimeError("CUDA error: no device"),
        ImportError("libcudart.so: cudf needs it"),
    ],
)
def test_a_graph_that_failed_for_gpu_objects_is_explained(cause: Exception) -> None:
    advice = with_advice(broken_graph(cause))
    assert advice.__cause__ is cause, "its traceback is shown too"
    assert str(cause) in str(advice) and "Start it with a GPU (scheduler={'gpus_per_node': 1})" in str(advice)
    assert str(pickle.loads(pickle.dumps(advice))) == str(advice), "it reaches the client"


@pytest.mark.parametrize(
    "error", [ValueError("cupy"), broken_graph(ModuleNotFoundError("No module named 'mine'")), RuntimeError("cudf")]
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert with_advice(error) is error
