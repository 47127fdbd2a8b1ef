"""Reads the JSON that hpcgpu keeps in files, and checks its shape.

A damaged file is an error, with a sentence for the user.

All but `read` is pure. This module does not depend on the purpose of the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked_files

_T = TypeVar("_T")


def read(path: Path, shape: type[_T], *, surrogates: bool = False) -> _T:
    """Return the content of a JSON file; see `parse`.

    Raises
    ------
    OSError
        It is not there, cannot be read, or is not of this user; see `hpcgpu.posix.checked_files`.
    Damaged
        It holds something else.
    """
    return parse(checked_files.read(path), shape, str(path), surrogates=surrogates)


def parse(content: bytes, shape: type[_T], what: str, *, surrogates: bool = False) -> _T:
    """Return JSON as an object of a shape.

    The shape is a dataclass, or a type such as ``dict[str, int]``. A path is ``{"path": TEXT}``.

    Keys that the dataclass does not have are left out: a later release may have written them.

    Parameters
    ----------
    content : bytes
    shape : type
    what : str
        What is read, for the message.
    surrogates : bool, default False
        Whether text may hold bytes that are not UTF-8, as Python keeps them.

    Raises
    ------
    Damaged
        It is no JSON, or has another shape.
    """
    try:
        value = json.loads(content.decode(), parse_constant=_no_constant)
        return typing.cast("_T", convert(value, shape, surrogates=surrogates))
    except UnicodeDecodeError as error:
        raise Damaged(f"{what} is damaged: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise Damaged(f"{what} is damaged: {error if content else 'it is empty'}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} is damaged: {error}") from error


def convert(value: Any, shape: Any, where: str = "", *, surrogates: bool = False) -> Any:
    """Return what JSON holds as an object of the shape.

    Raises
    ------
    ValueError
        It has another shape.
    """
    if shape is Any:
        return value
    if isinstance(shape, type):  # most are
        if dataclasses.is_dataclass(shape):
            return _object(value, shape, where, surrogates)
        return _scalar(value, shape, where, surrogates)
    origin = typing.get_origin(shape)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, typing.get_args(shape), where, surrogates)
    if origin in (list, tuple, dict):
        return _container(value, shape, where, surrogates)
    return _scalar(value, shape, where, surrogates)


def _one_of(value: Any, shapes: tuple[Any, ...], where: str, surrogates: bool) -> Any:
    for shape in shapes:
        with contextlib.suppress(ValueError):
            return convert(value, shape, where, surrogates=surrogates)
    raise _wrong(value, where)


def _container(value: Any, shape: Any, where: str, surrogates: bool) -> Any:
    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if origin is dict and isinstance(value, dict):
        keys = [convert(key, str, where, surrogates=surrogates) for key in value]
        return {key: convert(value[key], arguments[1], _path_of(where, key), surrogates=surrogates) for key in keys}
    if origin is dict or not isinstance(value, list):
        raise _wrong(value, where)
    of_any_length = origin is list or arguments[-1] is Ellipsis
    shapes = arguments[:1] * len(value) if of_any_length else arguments
    if len(shapes) != len(value):
        raise _wrong(value, where)
    return origin(convert(item, one, where, surrogates=surrogates) for item, one in zip(value, shapes, strict=True))


def _scalar(value: Any, shape: Any, where: str, surrogates: bool) -> Any:
    if shape is Path and isinstance(value, dict) and value.keys() == {"path"}:
        return Path(convert(value["path"], str, where, surrogates=surrogates))
    if isinstance(shape, type) and issubclass(shape, enum.Enum) and isinstance(value, str):
        return shape(value)
    if shape is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < 1e15 or not math.isfinite(value):
            raise _wrong(value, where)
        return float(value)
    if not isinstance(shape, type) or type(value) is not shape:
        raise _wrong(value, where)
    if (
        isinstance(value, str)
        and not (surrogates or value.isascii())
        and any("\ud800" <= one <= "\udfff" for one in value)
    ):
        raise ValueError(f"{where or 'it'} is not Unicode")
    return value


def _wrong(value: Any, where: str) -> ValueError:
    return ValueError(f"{where or 'it'} is {_short(value)}")


def _object(value: Any, shape: Any, where: str, surrogates: bool) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is {_short(value)}, not an object")
    given = {}
    for name, one, required in _fields(shape):
        if name in value:
            given[name] = convert(value[name], one, _path_of(where, name), surrogates=surrogates)
        elif required:
            raise ValueError(f"{_path_of(where, name)} is missing")
    return shape(**given)


@functools.cache
def _fields(shape: Any) -> list[tuple[str, Any, bool]]:
    """Return the fields of a dataclass: name, shape, and whether it has no default."""
    hints, missing = typing.get_type_hints(shape), dataclasses.MISSING
    return [
        (field.name, hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(shape)
    ]


def _path_of(where: str, name: str) -> str:
    return f"{where}.{name}" if where else repr(name)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
