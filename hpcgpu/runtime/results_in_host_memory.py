"""A serializer that sends results from GPU memory as copies in host memory, for clients without a GPU.

A client on a login node cannot hold device memory. A scheduler that received a result over UCX cannot send device
memory over TCP: by default its connection breaks (`distributed.comm.tcp` takes the buffer of each frame, and a
`rmm.DeviceBuffer` has none).
"""

from __future__ import annotations

import io
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
from distributed.protocol import serialize
from distributed.protocol.serialize import register_serialization_family

_ARRAYS, _OTHERS = "hpcgpu-host", "hpcgpu-host-pickle"
#: Serializers for a client without a GPU, in this order: objects in GPU memory, types that Dask supports, objects that
#: hold GPU objects; the last one turns failures into messages.
SERIALIZERS = [_ARRAYS, "dask", _OTHERS, "error"]
#: Libraries of GPU objects, and the functions that copy their objects to the host.
_COPIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "cupy": ("get", lambda x: x.get()),
    "cupyx": ("get", lambda x: x.get()),
    "cudf": ("to_pandas", lambda x: x.to_pandas()),
}
_GPU_WORDS = re.compile(r"\b(cupyx?|cudf|pylibcudf|cuml|cugraph|rmm|numba\.cuda|torch|cuda\w*)\b", re.IGNORECASE)


class _OnDevice(TypeError):
    """An object cannot be copied to the host; the message is for the user."""


def host_copy(value: Any) -> Any:
    """Return the copy in host memory of an object in GPU memory; any other object is returned itself.

    CuPy arrays become NumPy's, CuPy's sparse matrices SciPy's, cuDF's frames, series and indices pandas'.

    Raises
    ------
    TypeError
        No copy of this kind of GPU object is supported; the message says what to do.
    """
    kind = type(value)
    method, copy = _COPIES.get(kind.__module__.split(".", 1)[0], ("", None))
    if copy is not None and hasattr(kind, method):
        return copy(value)
    if hasattr(kind, "__cuda_array_interface__") and _has_interface(value):
        raise _OnDevice(
            f"a result is a {kind.__module__}.{kind.__qualname__} in GPU memory. This client has no GPU, and hpcgpu "
            "cannot copy this type. Return a host copy from the task (such as .cpu().numpy(), .copy_to_host(), "
            ".get()), or keep the result on the workers"
        )
    return value


def _has_interface(value: Any) -> bool:
    """Whether an object is in GPU memory.

    Each tensor of torch has the attribute. It raises for tensors on the CPU and for tensors with gradients.
    """
    try:
        if getattr(value, "is_cuda", None) is not None:
            return bool(value.is_cuda)
        return value.__cuda_array_interface__ is not None
    except Exception:
        return False


class _Header(dict[str, Any]):
    """A header that keeps its serializer, so that clients without hpcgpu can read the frames."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "serializer":
            super().__setitem__(key, value)


def _dumps(value: Any) -> tuple[dict[str, Any], list[Any]]:
    """Serialize an object in GPU memory as its host copy."""
    try:
        copy = host_copy(value)
    except _OnDevice as error:
        return _failed(error)
    if copy is value:
        raise NotImplementedError  # distributed tries the next serializer
    header, frames = serialize(copy, serializers=["dask", "pickle"], on_error="raise")
    return _Header(header), list(frames)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles all GPU objects inside an object, at any depth, as their host copies."""

    def reducer_override(self, value: Any) -> Any:
        copy = host_copy(value)
        if copy is value:
            return super().reducer_override(value)
        return operator.getitem, ([copy], 0)  # a function that every client has


def _pickle(value: Any) -> tuple[dict[str, Any], list[Any]]:
    """Pickle as distributed does, see `distributed.protocol.serialize.pickle_dumps`."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    except _OnDevice as error:
        return _failed(error)
    frames = [buffer.raw() for buffer in buffers]
    return _Header(serializer="pickle", writeable=tuple(not frame.readonly for frame in frames)), [
        file.getvalue(),
        *frames,
    ]


def _failed(error: _OnDevice) -> tuple[dict[str, Any], list[Any]]:
    return _Header(serializer="error"), [str(error).encode()]


def _loads(header: dict[str, Any], frames: list[Any]) -> Any:
    raise TypeError("nothing is serialized under this name")


def register() -> None:
    """Register the serializers in this process."""
    register_serialization_family(_ARRAYS, _dumps, _loads)
    register_serialization_family(_OTHERS, _pickle, _loads)


def with_advice(error: BaseException) -> BaseException:
    """Return an error with advice if the scheduler could not rebuild GPU objects in a graph.

    Otherwise return the error itself.

    Dask's own text names only different environments as the cause.
    """
    cause = error.__cause__
    if not isinstance(error, RuntimeError) or cause is None:  # the scheduler raises it from the error of the graph
        return error
    words = f"{type(cause).__module__}.{type(cause).__qualname__}: {cause}"
    found = _GPU_WORDS.search(words)
    if found is None:
        return error
    advice = RuntimeError(
        f"the graph holds GPU objects ({found.group()}), which the scheduler could not rebuild: {words}. The "
        "scheduler needs a GPU and the workers' software for that. Start it with a GPU "
        "(scheduler={'gpus_per_node': 1}), create such objects in tasks, or send them with client.scatter and "
        "use the future in the graph"
    )
    advice.__cause__ = cause
    return advice
