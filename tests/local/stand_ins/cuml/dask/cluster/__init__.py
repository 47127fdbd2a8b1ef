"""What `cuml.dask.cluster.KMeans` (26.10) does to a client: it persists the data, makes a communicator of RAFT of the
workers that have it, and trains by a task on each of them, with the parts that are there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy
from distributed import futures_of, get_worker, wait
from raft_dask.common import Comms, local_handle


async def _places_of_parts(data: Any, client: Any) -> dict[str, list[Any]]:
    parts = futures_of(client.persist(data))
    await wait(parts)
    who_has = await client.who_has(parts)
    found = defaultdict(list)
    for part in parts:
        found[next(iter(who_has[part.key]))].append(part)
    return dict(found)


def _fit(session: bytes, parts: list[Any], n_clusters: int) -> Any:
    """On each rank: move the centres to the middle of the rows of all ranks that are nearest to them."""
    group, rows = local_handle(session, get_worker()), numpy.concatenate(parts)
    centres = group.exchange(rows[:n_clusters])[0]
    for _ in range(3):
        nearest = ((rows[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        own = [(rows[nearest == n].sum(axis=0), (nearest == n).sum()) for n in range(n_clusters)]
        every = group.exchange(own)
        centres = numpy.array(
            [sum(rank[n][0] for rank in every) / sum(rank[n][1] for rank in every) for n in range(n_clusters)]
        )
    return centres


class KMeans:
    def __init__(self, *, client: Any, n_clusters: int) -> None:
        self.client, self.n_clusters = client, n_clusters

    def fit(self, data: Any) -> KMeans:
        parts = self.client.sync(_places_of_parts, data, self.client)
        comms = Comms(client=self.client)
        comms.init(workers=tuple(parts))
        try:
            centres = [
                self.client.submit(_fit, comms.sessionId, own, self.n_clusters, workers=[address], pure=False)
                for address, own in parts.items()
            ]
            self.client.gather(centres)
        finally:
            comms.destroy()
        self.cluster_centers_ = centres[0].result()
        return self
