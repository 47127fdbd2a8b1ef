"""What `cudf_polars.engine.dask.DaskEngine` (26.10) does to a client: it counts the workers, sets up the first, then
all of them, and runs each query on all of them. Each step but the first ends when all ranks have arrived.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any

import meeting


def _set_up_root(dask_worker: Any) -> tuple[str, int]:
    return meeting.listen(dask_worker.ip)


def _set_up(attribute: str, addresses: list[str], place: tuple[str, int], dask_worker: Any) -> None:
    rank = addresses.index(dask_worker.address)
    setattr(dask_worker, attribute, meeting.Group("cudf_polars", place, rank, len(addresses)))


def _evaluate(attribute: str, query: Callable[..., Any], arguments: Any, dask_worker: Any) -> tuple[int, Any]:
    group = getattr(dask_worker, attribute)
    return group.rank, query(group, *arguments)


def _tear_down(attribute: str, dask_worker: Any) -> None:
    getattr(dask_worker, attribute).close()
    delattr(dask_worker, attribute)


class DaskEngine:
    def __init__(self, *, dask_client: Any, engine_options: dict[str, Any] | None = None) -> None:
        self.client, self.engine_options = dask_client, engine_options
        self.attribute = f"_cudf_polars_mp_context_{uuid.uuid4().hex}"
        addresses = list(dask_client.scheduler_info(n_workers=-1)["workers"])
        self.nranks = len(addresses)
        if not addresses:
            raise RuntimeError("No workers found in the Dask cluster.")
        [place] = dask_client.run(_set_up_root, workers=addresses[:1]).values()
        dask_client.run(functools.partial(_set_up, self.attribute), addresses, place)

    def evaluate(self, query: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns, in the order of the ranks."""
        answers = self.client.run(functools.partial(_evaluate, self.attribute), query, arguments)
        return [answer for _, answer in sorted(answers.values(), key=lambda pair: pair[0])]

    def shutdown(self) -> None:
        self.client.run(functools.partial(_tear_down, self.attribute))

    def __enter__(self) -> DaskEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
