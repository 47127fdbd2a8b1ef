"""What `raft_dask.common.Comms` (26.10) does to a client: it gives the workers ranks by their GPUs, makes an id in the
process of the scheduler or of one worker, and sets up all workers, each in its event loop. Each of these steps waits
for all ranks. Tasks with the id of the session use the communicator then.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

import meeting


def _state(process: Any) -> dict[bytes, Any]:
    return vars(process).setdefault("_raft_comm_state", {})


def _id_of_scheduler(session: bytes, dask_scheduler: Any) -> tuple[str, int]:
    _state(dask_scheduler)[session] = place = meeting.listen(meeting.own_host())
    return place


def _id_of_worker(session: bytes, dask_worker: Any) -> tuple[str, int]:
    return meeting.listen(meeting.own_host())


async def _set_up(session: bytes, place: tuple[str, int], ranks: dict[str, int], dask_worker: Any) -> None:
    """It holds the event loop, as NCCL does."""
    _state(dask_worker)[session] = meeting.Group("raft_dask", place, ranks[dask_worker.address], len(ranks))


def _destroy(session: bytes, dask_worker: Any) -> None:
    _state(dask_worker).pop(session).close()


def _destroy_on_scheduler(session: bytes, dask_scheduler: Any) -> None:
    del _state(dask_scheduler)[session]


def _own_gpus() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def local_handle(session: bytes, dask_worker: Any) -> meeting.Group:
    return _state(dask_worker)[session]


class Comms:
    def __init__(self, client: Any, nccl_root_location: str = "scheduler") -> None:
        self.client, self.nccl_root_location, self.sessionId = client, nccl_root_location, uuid.uuid4().bytes

    def worker_info(self, workers: Sequence[str]) -> dict[str, dict[str, int]]:
        gpus = self.client.run(_own_gpus, workers=workers)
        in_order = sorted(gpus, key=lambda address: (address.rsplit(":", 1)[0], gpus[address], address))
        return {address: {"rank": rank} for rank, address in enumerate(in_order)}

    def init(self, workers: Sequence[str] | None = None) -> None:
        self.worker_addresses = list(self.client.scheduler_info()["workers"] if workers is None else workers)
        ranks = {address: info["rank"] for address, info in self.worker_info(self.worker_addresses).items()}
        if self.nccl_root_location == "worker":
            first = self.worker_addresses[:1]
            [place] = self.client.run(_id_of_worker, session=self.sessionId, workers=first, wait=True).values()
        else:
            place = self.client.run_on_scheduler(_id_of_scheduler, session=self.sessionId)
        self.client.run(_set_up, self.sessionId, place, ranks, workers=self.worker_addresses, wait=True)

    def destroy(self) -> None:
        self.client.run(_destroy, self.sessionId, wait=True, workers=self.worker_addresses)
        if self.nccl_root_location == "scheduler":
            self.client.run_on_scheduler(_destroy_on_scheduler, self.sessionId)
