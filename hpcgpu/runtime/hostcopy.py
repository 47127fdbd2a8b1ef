"""Results that live in GPU memory, for clients that have no GPU: a serializer that sends a copy in host memory.

A client on a login node cannot hold device memory, and a scheduler that got a result over UCX cannot pass device memory on over TCP: by
default its connection breaks (`distributed.comm.tcp` takes the buffer of each frame, and a `rmm.DeviceBuffer` has none).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from distributed.protocol import serialize
from distributed.protocol.serialize import register_serialization_family

__all__ = ["SERIALIZERS", "host_copy", "register", "with_advice"]

NAME = "hpcgpu-host"
#: Serializers of what goes to a client without a GPU; the last turns failures into messages.
SERIALIZERS = [NAME, "dask", "pickle", "error"]
#: Containers are looked into so deep.
_DEPTH = 10
#: Types of which there may be many, and which hold nothing.
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
#: Libraries of GPU objects, and how their objects are copied to the host.
_COPIES: dict[str, Callable[[Any], Any]] = {
    "cupy": lambda x: x.get(),
    "cupyx": lambda x: x.get(),
    "cudf": lambda x: x.to_pandas(),
}
_GPU_WORDS = re.compile(r"\b(cupyx?|cudf|pylibcudf|cuml|cugraph|rmm|numba\.cuda|torch|cuda\w*)\b", re.IGNORECASE)


class _OnDevice(TypeError):
    """An object cannot be copied to the host; the message is for the user."""


def host_copy(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value with its GPU objects replaced by copies in host memory; the very same object if it holds none.

    CuPy arrays become NumPy's, CuPy's sparse matrices SciPy's, cuDF's frames, series and indices pandas'; in lists, tuples, sets and
    dicts too.

    Raises
    ------
    TypeError
        It holds another object in GPU memory; the message says what to do.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, set) and depth:
        items = [host_copy(item, depth - 1) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
    if kind is dict and depth:
        copies = {key: host_copy(item, depth - 1) for key, item in value.items()}
        return value if all(copies[key] is item for key, item in value.items()) else copies
    library = kind.__module__.split(".", 1)[0]
    on_device = hasattr(kind, "__cuda_array_interface__") and _has_interface(value)
    if library in _COPIES and (on_device or hasattr(kind, "get" if library.startswith("cupy") else "to_pandas")):
        return _COPIES[library](value)
    if on_device:
        raise _OnDevice(
            f"a result is a {kind.__module__}.{kind.__qualname__} in GPU memory, which this client cannot hold, and hpcgpu cannot copy to "
            f"the host: return a host copy from the task (such as .cpu().numpy(), .copy_to_host(), .get()), or keep it on the workers"
        )
    return value


def _has_interface(value: Any) -> bool:
    """Whether it is in GPU memory: torch has the attribute for each tensor, and raises where the tensor is on the CPU."""
    try:
        return value.__cuda_array_interface__ is not None
    except Exception:
        return False


class _Header(dict[str, Any]):
    """A header that keeps the serializer of the host copy, so that any client can read it, also one that has no hpcgpu."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "serializer":
            super().__setitem__(key, value)


def _dumps(value: Any) -> tuple[dict[str, Any], list[Any]]:
    try:
        copy = host_copy(value)
    except _OnDevice as error:
        return _Header(serializer="error"), [str(error).encode()]
    if copy is value:
        raise NotImplementedError  # the next serializer is asked
    header, frames = serialize(copy, serializers=["dask", "pickle"], on_error="raise")
    return _Header(header), list(frames)


def _loads(header: dict[str, Any], frames: list[Any]) -> Any:
    raise TypeError("nothing is serialized under this name")


def register() -> None:
    """Make the serializer known in this process."""
    register_serialization_family(NAME, _dumps, _loads)


def with_advice(error: BaseException) -> BaseException:
    """Return what the user shall read where the scheduler could not rebuild a graph because of GPU objects in it; else the error itself.

    Dask's own text speaks of different environments alone.
    """
    cause = error.__cause__
    if not isinstance(error, RuntimeError) or "deserialization of the task graph" not in str(error) or cause is None:
        return error
    words = f"{type(cause).__module__}.{type(cause).__qualname__}: {cause}"
    found = _GPU_WORDS.search(words)
    if found is None:
        return error
    advice = RuntimeError(
        f"the graph holds GPU objects ({found.group()}), which the scheduler could not rebuild: {words}. It needs a GPU and the workers' "
        f"software for that: start it with a GPU (scheduler={{'gpus_per_node': 1}}), or make such objects in tasks, or send them by "
        f"client.scatter and put the future into the graph"
    )
    advice.__cause__ = cause
    return advice
