"""Makes this program the manager of a cluster that another program started.

It takes over the jobs that the journal and the queue show. When this happens is decided elsewhere: the user calls
`GPUCluster.from_name`, or scales a cluster that has no manager (`hpcgpu.orders.change_size`). In the scheduler job,
`hpcgpu.dask_scheduler.keep_manager_running` decides it when a cluster that scales itself has no manager.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpcgpu.batch.base import JobState
from hpcgpu.display.counts_and_durations import counted
from hpcgpu.errors import BatchError, BatchUnavailable, ClusterError
from hpcgpu.existing_clusters.query_jobs import query_with_accounting, submitted, without_id
from hpcgpu.jobs.job_phases import Submitting
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.jobs.submit_and_cancel import Cancel
from hpcgpu.manager.cancel_all import CLOSE_TIMEOUT
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.decide_actions import Drain
from hpcgpu.scaling.scheduler_restarts import KnownScheduler, roles
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import Submit
from hpcgpu.store.present_scheduler import unexpected_ends


def program(*, in_scheduler_job: bool = False) -> str:
    """Return a description of this program, for people."""
    name = "hpcgpu in the scheduler job" if in_scheduler_job else _called()
    return f"{name} (process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')})"


def _called() -> str:
    """Return the name by which the user knows this program: the notebook of a kernel, the script, or the command."""
    script = Path(sys.argv[0])
    if "ipykernel" in sys.modules and (notebook := os.environ.get("JPY_SESSION_NAME")):  # the Jupyter server sets it
        return f"notebook {printable(Path(notebook).name, 100)}"
    name = script.parent.name if script.name == "__main__.py" else script.name
    name = "python" if name in ("", "-", "-c", "-m") else name
    command = sys.argv[1] if name == "hpcgpu" and len(sys.argv) > 1 and sys.argv[1].isalpha() else ""
    return f"{name} {command}".rstrip()


async def running_scheduler(state: ClusterState, *, security: bool) -> str | None:
    """Return the address of the scheduler of a cluster that this program wants to take over; None if it does not run.

    This changes nothing. What can prevent a take-over is checked before `attach`, because a cluster keeps its present
    manager until then.

    Parameters
    ----------
    state : ClusterState
    security : bool
        Whether the cluster has credentials.

    Raises
    ------
    ClusterError
        The cluster is ending, or it is not known yet whether the queue has its scheduler job.
    BatchUnavailable
        The queue does not answer.
    """
    directory, batch = state.dispatcher.directory, state.dispatcher.batch
    jobs: dict[str, Submit] = await in_thread(submitted, directory, batch)
    statuses = await in_thread(query_with_accounting, jobs, batch)
    _check_scheduler(state, directory, jobs)
    ended = {job_id for job_id, status in statuses.items() if status.state.ended}
    schedulers = {job_id for job_id, submit in jobs.items() if submit.kind == "scheduler"} - ended
    if not schedulers:  # `attach` reports how it ended
        return None
    if security and not directory.tls.is_dir():
        raise ClusterError(
            f"cluster {state.name} is ending: its credentials were removed. Start a new one when its jobs have ended"
        )
    contact = await in_thread(directory.contact)
    return contact.client if contact is not None and contact.job_id in schedulers else None


async def attach(state: ClusterState, new_job: Callable[[str], SchedulerJob]) -> SchedulerJob | None:
    """Take over the jobs that the cluster has.

    Parameters
    ----------
    state : ClusterState
        Its registry has the groups, without jobs.
    new_job : callable
        Returns a job of the scheduler, of a given name.

    Returns
    -------
    SchedulerJob or None
        The scheduler job that was submitted to follow the present one, if there is one.

    Raises
    ------
    ClusterError
        The scheduler job has ended, or another program has just taken the cluster over.
    BatchUnavailable
        The queue does not answer.
    """
    directory, dispatcher = state.dispatcher.directory, state.dispatcher
    in_job, after = state.ownership.in_scheduler_job, state.ownership.after
    record = directory.take_over(program(in_scheduler_job=in_job), in_scheduler_job=in_job, after=after)
    dispatcher.manager = record.number
    unanswered = without_id(directory)
    jobs: dict[str, Submit] = await in_thread(submitted, directory, dispatcher.batch)
    _check_scheduler(state, directory, jobs)
    used = [worker_names.sequence(submit.name, state.name) for submit in directory.submits()]
    state.registry.sequence = max([-1, *(number for number in used if number is not None)]) + 1
    for job_id, submit in jobs.items():
        dispatcher.adopt(submit.name, job_id, submitted=submit.time)
    await dispatcher.poll()
    if dispatcher.monitor.error:
        raise BatchUnavailable(dispatcher.monitor.error)
    names = {submit.name for submit in jobs.values()}
    left = {submit.name: submit for submit in unanswered if submit.name not in names}
    contact = await in_thread(directory.contact)
    known = _known_schedulers(state, jobs, left)
    present, next_one, surplus = roles(known, contact.job_id if contact is not None else None)
    kept = {job.job_id or job.name: job for job in (present, next_one) if job is not None}
    made: dict[KnownScheduler | None, SchedulerJob] = {}
    for key, submit in {**jobs, **left}.items():
        if submit.kind != "scheduler" and key in jobs:
            _attach_worker_job(state, submit, key, directory.wanted().sizes)
        elif submit.kind != "scheduler":
            _expect_worker_job(state, submit)
        elif key in kept:
            made[kept[key]] = _attach_scheduler_job(state, new_job(submit.name), submit, key if key in jobs else None)
    await _end_surplus(state, surplus)
    scheduler, following = made.get(present), made.get(next_one)
    gone = _gone_scheduler(directory) if scheduler is None or scheduler.job_id is None else None
    if gone is not None:
        scheduler, following = _attach_gone_scheduler(state, gone, new_job(gone.name)), scheduler or following
    if scheduler is not None:
        state.scheduler = scheduler
    if following is not None:
        following.standby = True
        if scheduler is None or following.after_end != scheduler.job_id:
            following.after_end = None
    _count_earlier(state, directory, jobs)
    state.restarted = unexpected_ends(one for one in directory.submits() if gone is None or one.name != gone.name)
    await _check(state, scheduler, directory)
    state.messages.log(f"took over {counted(len(jobs), 'job')}")
    return following


def _known_schedulers(
    state: ClusterState, jobs: Mapping[str, Submit], unanswered: Mapping[str, Submit]
) -> list[KnownScheduler]:
    """Return the scheduler jobs that may live. The queue was polled before."""
    views = state.dispatcher.monitor.views
    return [
        KnownScheduler(
            name=submit.name,
            job_id=key if key in jobs else None,
            alive=not views[key].status.state.ended if key in jobs else not submit.unwanted,
            wanted=not submit.unwanted,
        )
        for key, submit in {**jobs, **unanswered}.items()
        if submit.kind == "scheduler"
    ]


async def _end_surplus(state: ClusterState, surplus: Iterable[KnownScheduler]) -> None:
    """Cancel scheduler jobs, also those that come into the queue later."""
    dispatcher = state.dispatcher
    for job in surplus:
        if job.job_id is None:
            dispatcher.expect(job.name)
    if unwanted := [job.name for job in surplus if job.wanted]:
        dispatcher.will_cancel(unwanted)
    with suppress(BatchError):  # then each ends as soon as it reads the journal
        await dispatcher.cancel([job.job_id for job in surplus if job.job_id is not None])


def _gone_scheduler(directory: ClusterDirectory) -> Submit | None:
    """Return the last scheduler job whose end an earlier manager has recorded; None if none has ended."""
    schedulers = [one for one in directory.submits() if one.kind == "scheduler" and one.job_id is not None]
    return next((one for one in reversed(schedulers) if one.ended and not one.unwanted), None)


def _attach_gone_scheduler(state: ClusterState, submit: Submit, job: SchedulerJob) -> SchedulerJob:
    """Take over a scheduler job that has ended, as the journal reports: another one may follow."""
    assert submit.job_id is not None
    state.dispatcher.adopt_ended(submit)
    job.record_id(submit.job_id)
    job.observe(now=state.now)
    state.registry.add(job)
    return job


def _check_scheduler(state: ClusterState, directory: ClusterDirectory, jobs: Mapping[str, Submit]) -> None:
    """Raise `ClusterError` if the scheduler job may still come into the queue: the cluster is not over then.

    The submit command has its own session, and survives the program that runs it. If an earlier scheduler job has
    ended, this program waits for the job that should follow it, or submits another one.
    """
    if any(submit.kind == "scheduler" for submit in jobs.values()) or _gone_scheduler(directory) is not None:
        return
    if any(submit.kind == "scheduler" for submit in without_id(directory)):
        raise ClusterError(
            f"cluster {state.name} cannot be taken over: it is not known yet whether the queue has its scheduler job. "
            f"Try again in a minute. If the job never comes, run: hpcgpu stop {directory.in_shell}"
        )


async def _check(state: ClusterState, scheduler: SchedulerJob | None, directory: ClusterDirectory) -> None:
    """Raise `ClusterError` if there is nothing to attach to."""
    if scheduler is None and not any(submit.kind == "scheduler" for submit in directory.submits()):
        raise ClusterError(
            f"cluster {state.name} cannot be taken over: its journal in {directory.path} does not name its "
            f"scheduler job. `hpcgpu stop {directory.in_shell}` ends it"
        )
    if scheduler is not None and scheduler.lost_too_early:
        return
    if scheduler is None or scheduler.ended:
        await in_thread(state.dispatcher.cancel_all, CLOSE_TIMEOUT)
        what = scheduler.failure_report() if scheduler is not None else "it has no scheduler job"
        raise ClusterError(f"cluster {state.name} has ended and cannot be taken over: {what}")


def _attach_scheduler_job(state: ClusterState, job: SchedulerJob, submit: Submit, job_id: str | None) -> SchedulerJob:
    """Take over a scheduler job, perhaps one that the queue does not show yet."""
    job.after_end = submit.after_end or None
    if job_id is None:
        state.dispatcher.expect(job.name)
        job.submitting(Submitting())
    else:
        job.record_id(job_id)
        job.observe(now=state.now)
    state.registry.add(job)
    return job


def _expect_worker_job(state: ClusterState, submit: Submit) -> None:
    """Take over the submit of a worker job that the queue does not show yet. It counts as a job, if it is wanted."""
    state.dispatcher.expect(submit.name)
    if not submit.unwanted and submit.group in state.registry.groups:
        state.registry.worker_job(submit.name, state.registry.group(submit.group)).submitting(Submitting())


def _attach_worker_job(state: ClusterState, submit: Submit, job_id: str, sizes: Mapping[str, int]) -> None:
    """Take over a worker job. The queue was polled for it before."""
    views = state.dispatcher.monitor.views
    known = views[job_id].status.state if job_id in views else JobState.UNKNOWN
    if submit.unwanted and known is JobState.UNKNOWN:  # it has ended as intended; if not, `close` cancels it
        return
    job = state.registry.worker_job(submit.name, state.registry.group(submit.group))
    # This program has not seen when the workers of a running job connected, so their wait is not learned.
    job.record_id(job_id, presumed_ended=known is JobState.UNKNOWN, wait_known=known is not JobState.PENDING)
    over = known.ended or known is JobState.COMPLETING
    if submit.group not in state.registry.groups:
        job.drain(Drain.DELETED, begun=over)
    elif over or submit.unwanted:
        job.drain(Drain.ZERO if sizes.get(job.group.name) == 0 else Drain.UNWANTED, begun=over)
    if known is JobState.COMPLETING:
        state.dispatcher.cancels[job_id] = Cancel(state.now)  # it needs no other one
    job.observe(now=state.now)


def _count_earlier(state: ClusterState, directory: ClusterDirectory, jobs: Mapping[str, Submit]) -> None:
    """Count the GPU time of the jobs that have ended: it is part of the cluster's GPU hours and of their maximum."""
    for submit in directory.submits():
        group, how = state.registry.groups.get(submit.group), submit.how
        if submit.kind != "worker" or submit.job_id in jobs or group is None or how is None:
            continue
        if how.start is not None and how.end is not None:
            group.count_earlier(how.end - how.start)
