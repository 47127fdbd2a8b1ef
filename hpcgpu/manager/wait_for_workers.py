"""Waits for the workers of a cluster, shows why it waits, and fails when the wait can no longer succeed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from distributed.exceptions import WorkerStartTimeoutError

from hpcgpu.dask_scheduler.held_workers import none_words
from hpcgpu.display.counts_and_durations import counted
from hpcgpu.display.progress import Progress, waiting_for
from hpcgpu.errors import BatchError, ClusterError
from hpcgpu.existing_clusters.query_jobs import ended_by_itself
from hpcgpu.jobs.job import Job
from hpcgpu.jobs.job_phases import Draining
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.posix.threads import in_thread
from hpcgpu.state.cluster_state import ClusterState

#: Seconds between two checks of all jobs.
_CHECK_INTERVAL = 0.5


def what_jobs_wait_for(state: ClusterState, jobs: Iterable[Job]) -> str:
    """Describe the jobs that the user waits for, and report if the queue does not answer."""
    text = waiting_for(job.info(now=state.now) for job in jobs)
    problem = state.dispatcher.monitor.error
    return f"{text} (the queue does not answer: {problem})" if problem else text


def what_drains_wait_for(jobs: Collection[WorkerJob]) -> str:
    """Describe what these jobs, which must end, wait for."""
    held = ", ".join(job.name for job in jobs if isinstance(job.phase, Draining) and job.phase.held_by_program)
    if held:
        return f"a program that holds workers of {held}"
    names = ", ".join(job.name for job in jobs)
    return f"{names} to finish running tasks and to move data" if names else "the queue"


async def wait_for_workers(state: ClusterState, n_workers: int | None, timeout: float | None, *, quiet: bool) -> None:
    """Wait until this number of workers is connected and ready.

    See `hpcgpu.cluster.gpucluster.GPUCluster.wait_for_workers`.
    """
    deadline = time.monotonic() + timeout if timeout is not None else math.inf
    next_check, why, by_hand = -math.inf, "", _ByHand(state)
    with Progress(quiet) as progress:
        while True:
            state.changed.clear()
            state.check()
            _check_usable(state, n_workers)
            wanted = state.registry.wanted_workers if n_workers is None else n_workers
            there = len(state.known_workers)
            if (there >= wanted or state.phase.superseded) and await _ready(state) >= wanted:
                return
            if state.phase.superseded:  # the other program reports why the jobs wait
                progress.update(f"cluster {state.name}: waiting for {counted(wanted, 'worker')}", state.phase.not_ours)
            elif (now := time.monotonic()) >= next_check:  # not at each connected worker: this examines all jobs
                next_check = now + _CHECK_INTERVAL
                missing = _incomplete(state)
                await _check_within_reach(state, wanted, missing, by_hand)
                why = _why_not_there(state, missing)
                progress.update(
                    f"cluster {state.name}: waiting for {counted(wanted, 'worker')}", f"{there} connected; {why}"
                )
            if time.monotonic() > deadline:
                error = WorkerStartTimeoutError(there, wanted, timeout)
                error.add_note(f"cluster {state.name}: {why}")
                raise error
            with suppress(TimeoutError):
                await asyncio.wait_for(state.changed.wait(), _CHECK_INTERVAL)


class HoldWait:
    """The wait of a program for workers to hold. The scheduler gives them; this notices if it never can.

    Parameters
    ----------
    state : ClusterState
    n_workers : int
    resources : mapping
        What each of them must have; empty: a GPU.
    beside : collection of str
        The job of each worker that the program holds already, until it has held these.
    """

    def __init__(
        self, state: ClusterState, n_workers: int, resources: Mapping[str, float], beside: Collection[str]
    ) -> None:
        self._state, self._n_workers, self._resources, self._beside = state, n_workers, resources, beside
        self._by_hand = _ByHand(state)

    async def check(self) -> str:
        """Return what workers of this kind wait for; empty if all are connected.

        Raises
        ------
        ClusterError
            The cluster will not have so many workers of this kind, or it has ended.
        """
        state = self._state
        _check_usable(state, self._n_workers)
        if not state.managed:  # only its manager decides how many workers it will have
            return ""
        jobs = {job.name: job for job in state.registry.worker_jobs}
        there = sum(name not in jobs or self._can_serve(jobs[name].group) for name in self._beside)
        missing = [job for job in _incomplete(state) if self._can_serve(job.group)]
        none = none_words(self._resources)
        await _check_within_reach(state, self._n_workers + there, missing, self._by_hand, self._can_serve, none)
        return _why_not_there(state, missing) if missing else ""

    def _can_serve(self, group: WorkerGroup) -> bool:
        return group.can_be_held(self._resources)


def _check_usable(state: ClusterState, n_workers: int | None) -> None:
    """Raise `ClusterError` if the cluster has ended, or if this program cannot wait for workers of another manager."""
    if state.phase.lost:
        raise ClusterError(state.phase.lost)
    if state.phase.closing:
        raise ClusterError(state.phase.not_ours or f"cluster {state.name} is closed")
    directory = state.dispatcher.directory
    if state.phase.superseded and (n_workers is None or directory.closing or ended_by_itself(directory)):
        raise ClusterError(state.phase.not_ours)


def _incomplete(state: ClusterState) -> list[WorkerJob]:
    """Return the jobs whose workers are not all connected."""
    active = state.registry.active.values()
    return [job for job in active if len(job.workers) < job.group.options.workers_per_job]


async def _ready(state: ClusterState) -> int:
    """Query the scheduler: a worker that has just connected is not ready yet."""
    client = await in_thread(state.present_client)
    if client is None:
        return -1
    try:
        if state.phase.superseded:  # the stream of events is not opened again
            await client.workers()
        return await client.running()
    except (OSError, TimeoutError):
        state.poll_now.set()
        return -1


def _why_not_there(state: ClusterState, missing: Collection[WorkerJob]) -> str:
    """Return why workers are missing: the state of their jobs, and what prevents further jobs."""
    if state.phase.restarting and state.scheduler is not None:
        return f"the next scheduler is not there yet: {what_jobs_wait_for(state, state.scheduler.entries)}"
    groups = state.registry.groups.values()
    halted = [job for job in [state.halted_scheduler] if job is not None]
    kept_out = [group.reason for group in groups if group.short or not missing]
    failed = [f"the last failure: {group.failures.last}" for group in groups if group.failures.last]
    waiting = [what_jobs_wait_for(state, jobs) for jobs in (halted, missing) if jobs]
    return "; ".join([*waiting, *kept_out, *failed])


class _ByHand:
    """Worker jobs that the user submitted by hand, with the cluster's own script."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._queried = -math.inf
        self._workers: int | None = None

    async def workers(self) -> int | None:
        """Return how many workers they have or will have; None while the queue has not answered."""
        dispatcher, now = self._state.dispatcher, time.monotonic()
        if now - self._queried >= dispatcher.monitor.cadence.poll_interval:
            self._queried = now
            place = dispatcher.directory.path.resolve()
            with suppress(BatchError):
                found = await in_thread(dispatcher.batch.marked, lambda path: path.parent.resolve() == place)
                own = {job.job_id for job in self._state.registry.jobs.values()}
                groups = {group.script.name: group for group in self._state.registry.groups.values()}
                scripts = [path.name for job_id, path in found.items() if job_id not in own and path.name in groups]
                self._workers = sum(groups[name].options.workers_per_job for name in scripts)
        return self._workers


async def _check_within_reach(
    state: ClusterState,
    wanted: int,
    missing: Iterable[WorkerJob],
    by_hand: _ByHand,
    can_serve: Callable[[WorkerGroup], bool] = lambda group: True,
    none: str = "",
) -> None:
    """Raise `ClusterError` if this number of workers can never be reached.

    The plan has fewer workers in the groups that count, or its jobs cannot start, and nothing will change that. `none`
    says that no group counts.
    """
    groups = [group for group in state.registry.groups.values() if can_serve(group)]
    active = [job for job in state.registry.active.values() if can_serve(job.group)]
    own = {a for job in state.registry.worker_jobs if job.active or not can_serve(job.group) for a in job.workers}
    others = len(state.known_workers - own)
    now = state.now
    within_reach = others + sum(group.possible_jobs(now=now) * group.options.workers_per_job for group in groups)
    within_reach -= sum(len(job.work.absence.since) for job in active if job.lost_workers and job.group.failures.paused)
    unschedulable = [job for job in missing if state.failures.unschedulable([job.name])]
    if within_reach - sum(job.group.options.workers_per_job for job in unschedulable) < wanted:
        state.check_schedulable(unschedulable)
    if within_reach >= wanted or (hand := await by_hand.workers()) is None:
        return
    within_reach += max(0, hand - others)
    if within_reach < wanted:
        jobs = sum(group.possible_jobs(now=now) for group in groups)
        advice = _advice(groups, wanted - hand) if groups else none
        why = next(filter(None, (group.stopped(now=now) for group in groups)), advice)
        also = f" and in those that you submitted ({counted(hand, 'worker')})" if hand else ""
        there = f"{counted(within_reach, 'worker')} in {counted(jobs, 'job')}{also}"
        raise ClusterError(f"cluster {state.name} will have only {there}, but the program waits for {wanted}: {why}")


def _advice(groups: Collection[WorkerGroup], n_workers: int) -> str:
    """Return how the user gets so many workers in one of these groups."""
    names = [group.name for group in groups]
    return f"call scale({n_workers})" if DEFAULT in names else f"call scale({n_workers}, worker_group={names[0]!r})"
