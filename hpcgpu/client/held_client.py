"""A client that uses only the workers that a program holds, for libraries that use all workers of a client."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from distributed import Client

#: Methods of a client that take the argument `workers`.
_ON_WORKERS = frozenset({"submit", "map", "compute", "persist", "scatter", "get"})


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
    watched : callable
        Waits for a call, and raises an error as soon as a held worker is lost.
    """

    def __init__(
        self,
        client: Client,
        addresses: Sequence[str],
        watched: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self._client, self._addresses, self._watched = client, list(addresses), watched

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._client)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name not in _ON_WORKERS:
            return found

        @functools.wraps(found)
        def on_held_workers(*arguments: Any, workers: Any = None, **options: Any) -> Any:
            return found(*arguments, workers=self._addresses if workers is None else workers, **options)

        return on_held_workers

    def run(self, function: Callable[..., Any], *arguments: Any, workers: Any = None, **options: Any) -> Any:
        """Run a function as `Client.run` does; raise `ClusterError` as soon as a held worker is lost."""
        chosen = self._addresses if workers is None else workers
        return self._client.sync(
            self._watched, lambda: self._client.run(function, *arguments, workers=chosen, **options)
        )

    def scheduler_info(self, n_workers: int = -1, **options: Any) -> dict[str, Any]:
        """Return what `Client.scheduler_info` returns, with the held workers only."""
        info = self._client.scheduler_info(n_workers=-1, **options)
        return {**info, "workers": {one: info["workers"][one] for one in self._addresses if one in info["workers"]}}
