"""Answers the clients of this program whose scheduler is lost: why, and where the next one is."""

from __future__ import annotations

import asyncio
import time
import weakref

from hpcgpu.client import lost_scheduler
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store.directory import ClusterDirectory

#: Seconds until this program notices that its connection to the scheduler is broken.
_NOTICED = 1.0


def answer_clients(state: ClusterState, address: str, *, restarts: bool) -> None:
    """Answer the clients that lose this scheduler. From now on this program manages the cluster through it.

    Parameters
    ----------
    state : ClusterState
    address : str
        Of the scheduler.
    restarts : bool
        Whether another scheduler may follow it.
    """
    of, directory = weakref.ref(state), state.dispatcher.directory
    job_id = next((job.job_id for job in state.scheduler.entries), None) if state.scheduler is not None else None
    lost_scheduler.explain_loss(address, lambda: _why_lost(of, directory, address, job_id or ""))
    if restarts:
        lost_scheduler.follow(address, lambda: _next_address(of, directory, address, job_id or ""))


async def _why_lost(
    of: weakref.ref[ClusterState], directory: ClusterDirectory, address: str, scheduler_job: str
) -> str:
    """Wait until it is known why a scheduler is lost, and return that.

    Empty if the scheduler lived until this program closed the cluster. If the queue reports no end in time, it may
    report why the scheduler job does nothing. If this program has left the cluster, the queue and the journal answer.
    """
    began = time.monotonic()
    while (state := of()) is not None and not (state.phase.closing or state.phase.left):
        if why := state.phase.lost or state.lost_schedulers.get(address):
            return why.partition("\n")[0]
        if time.monotonic() - began > lost_scheduler.END_REPORTED and (halted := state.halted_scheduler) is not None:
            return lost_scheduler.no_answer(state.name, halted.queue_status)
        del state
        await asyncio.sleep(0.1)
    if state is None or state.phase.left:
        return await lost_scheduler.end_in_queue(directory, scheduler_job)
    if address in state.lost_schedulers:
        return f"cluster {state.name} was closed before it had another scheduler"
    return ""


async def _next_address(
    of: weakref.ref[ClusterState], directory: ClusterDirectory, address: str, scheduler_job: str
) -> str:
    """Wait until the next scheduler is reached, and return its address; empty if there is none, or this one lives."""
    began = time.monotonic()
    while (state := of()) is not None and state.phase.managed:
        client = state.client
        if client is not None and client.address != address:
            return client.address
        if client is not None and client.listening and time.monotonic() - began > _NOTICED:
            return ""
        del state, client
        await asyncio.sleep(0.1)
    if state is None or state.phase.left:  # then another program may restart the scheduler
        return await lost_scheduler.next_contact(directory, address, scheduler_job)
    return ""
