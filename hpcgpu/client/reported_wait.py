"""Why a cluster that another program manages has not more workers: its manager has reported it to the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from distributed import Client

from hpcgpu.dask_scheduler.held_workers import are_of_kind, none_words
from hpcgpu.dask_scheduler.rpc_types import ManagerState

#: Seconds until the first query of the scheduler, seconds between two, and seconds for its answer.
_FIRST, _AGAIN, _ANSWER = 2.0, 5.0, 5.0


class ReportedWait:
    """The wait of a program for workers of a cluster to which it has only connected.

    Parameters
    ----------
    client : distributed.Client
    resources : mapping
        What each of them must have; empty: a GPU.
    """

    def __init__(self, client: Client, resources: Mapping[str, float]) -> None:
        self._client, self._resources = client, resources
        self._next, self._why = time.monotonic() + _FIRST, ""

    async def check(self) -> str:
        """Return why there are not more workers; empty if that is not known."""
        if time.monotonic() >= self._next:
            with suppress(TimeoutError, OSError, ValueError):  # a busy scheduler: the last answer is shown
                state = await asyncio.wait_for(self._client.scheduler.hpcgpu_state(), _ANSWER)
                self._why = why_not_more(state["manager"], self._resources)
            self._next = time.monotonic() + _AGAIN
        return self._why


def why_not_more(manager: ManagerState, resources: Mapping[str, float]) -> str:
    """Return what the manager reports about the size of each worker group that has workers of a kind.

    Empty if the cluster never had a manager.
    """
    if not manager["present"]:
        return "no program manages the cluster, so it submits no more jobs" if manager["number"] else ""
    groups = [one for one in manager["groups"] if are_of_kind(resources, one["resources"], one["gpus_per_node"])]
    if manager["groups"] and not groups:
        return none_words(resources)
    several = len(manager["groups"]) > 1
    return "; ".join(
        f"worker group {group['name']}: {group['paused'] or group['reason']}"
        if several
        else group["paused"] or group["reason"]
        for group in groups
    )
