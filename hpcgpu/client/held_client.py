"""A client that uses only the workers that a program holds, for libraries that use all workers of a client."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import dask
from distributed import Client

#: Methods of a client that compute on `workers`; Dask's own annotation may name them instead.
_COMPUTE = frozenset({"submit", "map", "compute", "persist", "get"})
#: Further methods that use or list `workers`: by default all workers of the cluster.
_USE_OR_LIST = frozenset(
    {"scatter", "replicate", "rebalance", "has_what", "nthreads", "ncores", "processing", "profile", "get_worker_logs"}
)
#: Arguments of `Client.run` that say how a call runs, with their default values.
_HOW_IT_RUNS = {"wait": True, "nanny": False, "on_error": "raise"}


class HeldClient:
    """A client whose calls and tasks use only the workers that a program holds, unless they name others.

    cudf-polars and RAFT make a communicator of all workers that their client lists, and then call functions on all
    workers. A worker that joins the cluster between the two fails, or lets the others wait for ever.

    Parameters
    ----------
    client : distributed.Client
        All else is its own, also futures. `isinstance` counts this object as such a client.
    addresses : sequence of str
        Of the held workers, in the order of their ranks.
    call : callable
        Runs a function on workers as `Client.run` does, and raises an error as soon as one of them fails or is lost.
    watched : callable
        Waits for a call, and raises an error as soon as a held worker is lost.
    """

    def __init__(
        self,
        client: Client,
        addresses: Sequence[str],
        call: Callable[..., Awaitable[Any]],
        watched: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self._client, self._addresses, self._call, self._watched = client, list(addresses), call, watched

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._client)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name not in _COMPUTE | _USE_OR_LIST:
            return found
        signature = inspect.signature(found)

        @functools.wraps(found)
        def on_held_workers(*arguments: Any, **options: Any) -> Any:
            given = signature.bind(*arguments, **options)
            annotated = name in _COMPUTE and "workers" in dask.get_annotations()
            if given.arguments.get("workers") is None and not annotated:
                given.arguments["workers"] = self._addresses
            return found(*given.args, **given.kwargs)

        return on_held_workers

    def get_executor(self, **options: Any) -> Any:
        """Return what `Client.get_executor` returns, for the held workers."""
        return self._client.get_executor(**{"workers": self._addresses, **options})

    def who_has(self, futures: Any = None, **options: Any) -> Any:
        """Return what `Client.who_has` returns; of data on held workers only these."""
        return self._client.sync(self._who_has, futures, options)

    async def _who_has(self, futures: Any, options: Mapping[str, Any]) -> dict[Any, Any]:
        found = await self._client.who_has(futures, **options)
        for key, addresses in found.items():
            held = [address for address in self._addresses if address in addresses]
            found[key] = type(addresses)(held) if held else addresses
        return found  # type: ignore[no-any-return]

    def run(self, function: Callable[..., Any], *arguments: Any, workers: Any = None, **options: Any) -> Any:
        """Run a function as `Client.run` does; raise an error as soon as it fails on a worker, or a worker is lost.

        With `wait`, `nanny` or `on_error`, and on other workers, the call waits for all workers as `Client.run` does.
        """
        chosen = self._addresses if workers is None else workers
        for argument, default in _HOW_IT_RUNS.items():
            if argument in options and options[argument] == default:
                del options[argument]
        if _HOW_IT_RUNS & options.keys() or not set(chosen) <= set(self._addresses):
            return self._client.sync(
                self._watched, lambda: self._client.run(function, *arguments, workers=chosen, **options)
            )
        return self._client.sync(self._call, function, arguments, options, chosen)

    def scheduler_info(self, n_workers: int = -1, **options: Any) -> dict[str, Any]:
        """Return what `Client.scheduler_info` returns, with the held workers only."""
        if self._client.asynchronous:  # as Dask documents it: what it has from before, without workers
            return self._client.scheduler_info(n_workers=-1, **options)  # type: ignore[no-any-return]
        # Dask's own method returns no workers if the client updates what it has from before at this moment.
        info = self._client.sync(self._client.scheduler.identity, n_workers=-1)
        return {**info, "workers": {one: info["workers"][one] for one in self._addresses if one in info["workers"]}}
