"""What is reported of a cluster whose scheduler has ended, and whose worker jobs wait for the next one.

All that shows a cluster takes its words from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import FORGOTTEN
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.job_table import why
from hpcgpu.errors import OptionError
from hpcgpu.existing_clusters.query_jobs import ended_by_itself
from hpcgpu.posix.full_disk import is_full
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.managers import ManagerRecord

#: Why a worker job runs without workers.
NO_SCHEDULER = "its workers have ended with the scheduler, and it waits for the next one"


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The time between two schedulers of a cluster.

    Attributes
    ----------
    since : float or None
        Epoch seconds at which the scheduler job ended; None if that is not known.
    comes : bool
        Whether there is a next scheduler job, or a program that may submit it.
    sentences : list of str
        How the scheduler has ended, what the next scheduler job does, and what the worker jobs cost meanwhile.
    """

    since: float | None
    comes: bool
    sentences: list[str]


def between_schedulers(directory: ClusterDirectory, jobs: Sequence[JobInfo], *, now: float) -> Restart | None:
    """Return what happens until the next scheduler of a cluster is there; None if no scheduler job has ended too early.

    Parameters
    ----------
    directory : ClusterDirectory
        Its scheduler does not answer.
    jobs : sequence of JobInfo
    now : float
        Epoch seconds.
    """
    options, manager, contact = saved_options.read_if_known(directory), directory.manager(), directory.contact()
    if options is None:
        return None
    if options.options.cluster.on_scheduler_end != "restart" or directory.closing or ended_by_itself(directory):
        return None
    schedulers = [job for job in jobs if job.kind == "scheduler"]
    over = [job for job in schedulers if has_ended(job)]
    dropped = {submit.name for submit in directory.submits() if submit.unwanted}
    there = [job for job in schedulers if job not in over and job.name not in dropped]
    served = contact.job_id if contact is not None else ""
    if (manager is None or manager.left) and not there:  # then no other scheduler follows
        return None
    if not over or any(job.id == served for job in there):
        return None
    # without a contact it is the one that ended last: one that should have followed it ended before
    ended = next((job for job in over if job.id == served), max(over, key=lambda job: job.ended or job.submitted))
    if any(job.submitted < ended.submitted for job in there):
        return None
    following = there[-1] if there else None
    comes = following is not None or (manager is not None and manager.lives is not False)
    ago = f" {duration(max(0.0, now - ended.ended))} ago" if ended.ended is not None else ""
    how = ": ".join(filter(None, [ended.state, ended.reason]))
    noticed = directory.has_ended(ended.id)
    sentences = [
        f"scheduler job {ended.id} has ended{ago} ({how})",
        _next(following, manager, directory.path.name, noticed=noticed, now=now),
        _full(directory),
        _waiting(jobs, options, ended.ended, now=now),
    ]
    return Restart(since=ended.ended, comes=comes, sentences=[*filter(None, sentences)])


def next_scheduler_job(directory: ClusterDirectory, live: Iterable[JobStatus]) -> str:
    """Return in words which of the live jobs of a cluster follows its scheduler, which has ended; empty if it has not.

    It needs no more than the queue's list of live jobs.
    """
    ids, contact = [job.job_id for job in live], directory.contact()
    if contact is None or not contact.job_id or contact.job_id in ids or directory.closing:
        return ""
    schedulers = [one.job_id for one in directory.submits() if one.kind == "scheduler" and one.job_id in ids]
    return f"its scheduler has ended, and job {schedulers[-1]} is its next scheduler job" if schedulers else ""


def has_ended(job: JobInfo) -> bool:
    """Whether a job has ended, also one whose end the queue has forgotten."""
    return JobState(job.state).ended or job.reason == FORGOTTEN


def _next(job: JobInfo | None, manager: ManagerRecord | None, name: str, *, noticed: bool, now: float) -> str:
    """Return what the next scheduler job does; `noticed`: the journal has the end of the last one."""
    if job is None and manager is not None and manager.lives is False:
        return (
            f"no program submits the next scheduler job, because {manager} has ended: "
            f"`from_name({name!r})` takes the cluster over and submits it"
        )
    if job is None or not job.id:
        return f"{manager} submits the next scheduler job"
    if job.state == JobState.RUNNING.value:
        reason = f": {job.reason}" * bool(job.reason)
        does = "its scheduler starts" if noticed else "takes over within a minute or two, when it notices the end"
        return f"the next scheduler job {job.id} runs on {job.node or 'its node'}, and {does}{reason}"
    reason = why(job, now=now)
    return f"the next scheduler job {job.id} is {job.state} for {duration(job.waited)}" + f": {reason}" * bool(reason)


def _full(directory: ClusterDirectory) -> str:
    """Return that the next scheduler cannot write its address, and what to do; empty if it can."""
    full = is_full(directory.path)
    return f"its address cannot be written: the disk of {directory.path} is full. Make room there" if full else ""


def _waiting(jobs: Iterable[JobInfo], options: saved_options.Saved, since: float | None, *, now: float) -> str:
    """Return which worker jobs wait for the next scheduler, for how long at most, and what that costs."""
    workers = [job for job in jobs if job.kind == "worker" and job.started is not None]
    waiting = [job for job in workers if job.state == JobState.RUNNING.value and not job.workers]
    if not waiting:
        return ""
    one, gpus = len(waiting) == 1, sum(job.gpus for job in waiting)
    keeps = f"{'keeps its' if one else 'keep their'} {counted(gpus, 'GPU')} and " if gpus else ""
    limits = [most for job in waiting if (most := _longest(job, options)) is not None]
    text = f"{counted(len(waiting), 'worker job')} {keeps}wait{'s' * one} for it"
    if limits:
        bounds = dict.fromkeys(map(duration, (min(limits), max(limits))))
        text += f", {' to '.join(bounds)} at most (restart_wait)"
    if gpus and since is not None:
        paid = sum(job.gpus * max(0.0, (job.ended or now) - max(since, job.started or now)) for job in workers)
        text += f": {counted(gpus, 'GPU hour')} in an hour, {paid / 3600:.2f} so far"
    return text


def _longest(job: JobInfo, options: saved_options.Saved) -> float | None:
    """Return how many seconds a worker job waits for the next scheduler, as `hpcgpu.runtime.next_scheduler` does."""
    if wait := options.options.cluster.restart_wait:
        return wait
    with suppress(OptionError):  # a group that is not known here
        return options.worker(job.group).death_timeout + job.waited
    return None
