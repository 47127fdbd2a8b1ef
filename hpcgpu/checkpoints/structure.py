"""Takes data apart into results that Dask can write one by one, and puts it together again.

Data are Dask collections and futures, alone or in lists, tuples and dictionaries; other values stay as they are.
"""

from __future__ import annotations

import inspect
import io
import re
import secrets
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from dask.base import is_dask_collection
from dask.core import flatten
from distributed import Client, Future, futures_of

from hpcgpu.errors import OptionError

#: Keys of Dask end with the hash of what is computed, or with a random number.
_TOKEN = re.compile(r"-([0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})$")


@dataclass(frozen=True)
class _Collection:
    """The place of a collection.

    Attributes
    ----------
    empty : dask collection
        The collection without results.
    keys : list
        The keys of its results, in order.
    """

    empty: Any
    keys: list[Any]


@dataclass(frozen=True)
class _Result:
    """The place of a future.

    Attributes
    ----------
    key : object
        The key of the future.
    """

    key: Any = None


def _of_dask(key: Any) -> bool:
    """Whether Dask has made a key: it has a token, and so another result has another key."""
    name = key[0] if isinstance(key, tuple) else key
    return isinstance(name, str) and _TOKEN.search(name) is not None


def take_apart(data: Any, client: Client) -> tuple[Any, list[Future]]:
    """Return the structure of data, which can be pickled, and the futures of its results, in order.

    Collections that are not persisted are computed.

    Raises
    ------
    OptionError
        A future belongs to another client.
    """
    if any(future.client is not client for future in futures_of(data)):
        raise OptionError("checkpoint: the data belong to another client: call it with that client")
    futures: list[Future] = []

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Future):
            futures.append(leaf)
            return _Result(leaf.key)
        if not is_dask_collection(leaf):
            return leaf
        persisted = client.persist(leaf)
        keys = list(flatten(persisted.__dask_keys__()))
        futures.extend(client.get(persisted.__dask_graph__(), keys, sync=False))
        rebuild, arguments = persisted.__dask_postpersist__()
        return _Collection(rebuild(dict.fromkeys(keys), *arguments), keys)

    return _each(data, keep), futures


def put_together(
    structure: Any, submit: Callable[[Sequence[Any]], list[Future]], *, known: Container[Any] | None = None
) -> Any:
    """Return the data of a structure.

    Parameters
    ----------
    structure : object
    submit : callable
        Returns futures with these keys, for the next results in order.
    known : container, optional
        The keys that Dask has. What was saved with other keys gets those. Default: all get new keys.
    """
    suffix = secrets.token_hex(8)  # Dask may have results with the keys of the original data

    def rebuilt(leaf: Any) -> Any:
        if isinstance(leaf, _Result):
            old = known is not None and leaf.key not in known and _of_dask(leaf.key)
            return submit([leaf.key if old else f"restored-{secrets.token_hex(16)}"])[0]
        if not isinstance(leaf, _Collection):
            return leaf
        if known is not None and all(key not in known and _of_dask(key) for key in leaf.keys):
            rebuild, arguments = leaf.empty.__dask_postpersist__()
            return rebuild(dict(zip(leaf.keys, submit(leaf.keys), strict=True)), *arguments)
        keys = [_renamed(key, suffix) for key in leaf.keys]
        rebuild, arguments = leaf.empty.__dask_postpersist__()
        options: dict[str, Any] = {}
        if "rename" in inspect.signature(rebuild).parameters:  # collections of dask.dataframe name themselves
            options["rename"] = {_name(key): _renamed(_name(key), suffix) for key in leaf.keys}
        return rebuild(dict(zip(keys, submit(keys), strict=True)), *arguments, **options)

    return _each(structure, rebuilt)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Refuses futures: outside of the cluster they mean nothing."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Future):
            raise TypeError(
                "a future is inside of an object, where it cannot be saved: put it into a list, tuple or dictionary"
            )
        return super().reducer_override(value)


def pickled(structure: Any) -> bytes:
    """Return a structure as bytes.

    Raises
    ------
    Exception
        It cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file).dump(structure)
    return file.getvalue()


def _name(key: Any) -> str:
    name: str = key[0] if isinstance(key, tuple) else key
    return name


def _renamed(key: Any, suffix: str) -> Any:
    return (f"{key[0]}-{suffix}", *key[1:]) if isinstance(key, tuple) else f"{key}-{suffix}"


def _each(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return data in which each leaf is changed."""
    if type(data) is dict:
        return {key: _each(value, change) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(_each(value, change) for value in data)
    return change(data)
