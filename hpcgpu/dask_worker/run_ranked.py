"""Runs a function on the workers that a program holds, each with its rank in the environment, as torchrun sets it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distributed.utils import has_arg, iscoroutinefunction

from hpcgpu.posix.threads import in_thread

if TYPE_CHECKING:
    from distributed.worker import Worker


def free_port(host: str) -> int:
    """Return a port of an address of this node on which nothing listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


async def run_ranked(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    environments: Mapping[str, Mapping[str, str]],
    dask_worker: Worker,
) -> Any:
    """Run a function; one that is not asynchronous in a thread of its own, so that the worker still answers.

    Parameters
    ----------
    function : callable
    arguments, options
        The arguments of the function. It gets its worker as `dask_worker` if it has such an argument, as with
        `Client.run`.
    environments : mapping
        The variables of each worker, by its address.
    dask_worker : distributed.Worker
        This worker; `Client.run` adds it.

    Raises
    ------
    RuntimeError
        The function has called ``sys.exit`` with an error. Without one it returns None.
    """
    given = {"dask_worker": dask_worker} if has_arg(function, "dask_worker") else {}
    with _variables(environments[dask_worker.address]):
        try:
            if iscoroutinefunction(function):
                return await function(*arguments, **options, **given)
            return await in_thread(lambda: function(*arguments, **options, **given))
        except SystemExit as end:  # the main function of a program; it must not end the worker, nor its job
            if end.code in (None, 0):
                return None
            name = getattr(function, "__name__", "the function")
            raise RuntimeError(f"{name} ended by sys.exit({end.code!r})") from end


#: The variables of the calls that run now, the last one last; and those of the worker itself, None for a missing one.
_running: list[Mapping[str, str]] = []
_own: dict[str, str | None] = {}


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment; when the last call has ended they are as before.

    A call whose set has lost a member may still run when the worker has the next call: the last call has its variables.
    """
    if not _running:
        _own.clear()
        _own.update({name: os.environ.get(name) for name in values})
    _running.append(values)
    os.environ.update(values)
    try:
        yield
    finally:
        _running[:] = [one for one in _running if one is not values]
        for name, value in (_running[-1] if _running else _own).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
