"""The state of a cluster, seen from any program.

It joins the journal, the queue and the scheduler. It changes nothing and manages nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.batch.cadence import POLL_INTERVAL, Cadence
from hpcgpu.batch.reasons import FORGOTTEN, OWN_CANCEL, cancel_of_ours, explain
from hpcgpu.display.jobinfo import JobInfo, JobJSON
from hpcgpu.errors import BatchError, OptionError
from hpcgpu.posix.threads import run
from hpcgpu.remote.lookup import batch_of, ended_by_itself, locate, submitted, system_of
from hpcgpu.remote.queries import looked_up
from hpcgpu.remote.unfinished import unfinished
from hpcgpu.runtime import dashboard
from hpcgpu.runtime.reach import no_answer, scheduler_of
from hpcgpu.runtime.wire import GPUState, GroupState, SchedulerState
from hpcgpu.scaling import units
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory, Contact, Submit
from hpcgpu.store.journal import End

__all__ = ["GPUInfo", "Observer", "Snapshot", "SnapshotJSON", "assemble", "gpu_seconds", "snapshot"]

#: Jobs that have ended which are shown: the last ones.
_PAST = 1000
#: Seconds for one answer of the scheduler.
_TIMEOUT = 10.0


class GPUJSON(TypedDict):
    """A GPU of a worker job that runs."""

    #: The name of its job, and of its Dask worker.
    job: str
    worker: str
    node: str
    #: What the driver calls it; empty if it does not say.
    model: str
    #: Per cent of the time in which it computes; null if the driver does not say.
    utilization: float | None
    #: Bytes; null if the driver does not say.
    memory_used: int | None
    memory_total: int | None
    #: Watts; null if the driver does not say.
    power: float | None
    #: Seconds since 1970 since when it computes nothing; null while it computes.
    idle_since: float | None


class SnapshotJSON(TypedDict):
    """A cluster at one moment."""

    #: Seconds since 1970 at which it was taken.
    time: float
    name: str
    #: The name of its batch system.
    system: str
    #: The cluster directory.
    directory: str
    #: ``not launched``, ``waiting``, ``running``, ``closed``, ``ended`` or ``unreachable``.
    state: str
    #: Dask workers that are connected.
    workers: int
    #: GPUs of the worker jobs that run.
    gpus: int
    #: The address of the scheduler; empty while it does not run.
    scheduler: str
    #: The address of the dashboard; empty while the scheduler does not run.
    dashboard: str
    #: Why workers use this protocol.
    fabric: str
    #: The program that scales it, and how; empty if none does.
    manager: str
    #: Whether it continues without the program that started it.
    detached: bool
    #: Seconds of the scheduler job's walltime that are left: the cluster ends then. Null unless it is known.
    time_left: float | None
    #: GPU hours of its jobs so far, the scheduler job included.
    gpu_hours: float
    groups: list[GroupState]
    jobs: list[JobJSON]
    #: GPUs of the connected workers.
    devices: list[GPUJSON]
    #: Failures and warnings that the user has not seen yet.
    warnings: list[str]
    #: What is not known, and why; empty if all is known.
    problem: str


@dataclass(frozen=True, kw_only=True)
class GPUInfo:
    """One GPU of a worker job that runs, as its worker's last heartbeat reported it.

    Attributes
    ----------
    job, worker, node : str
        Names of its job, its Dask worker and its node.
    model : str
        What the driver calls it; empty if it does not say.
    utilization : float or None
        Per cent of the time in which it computes.
    memory_used, memory_total : int or None
        Bytes.
    power : float or None
        Watts.
    idle_since : float or None
        Epoch seconds since when it computes nothing; None while it computes.
    """

    job: str
    worker: str
    node: str = ""
    model: str = ""
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    idle_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A cluster at one moment: its jobs, GPUs, groups, time left and GPU hours.

    ``hpcgpu status``, ``hpcgpu top``, the widget and the page in Jupyter all show this.

    Attributes
    ----------
    time : float
        Epoch seconds at which it was taken.
    name, system, directory : str
    state : str
        ``"not launched"`` (scripts of ``hpcgpu render`` that submitted nothing yet), ``"waiting"`` (its scheduler job
        waits or starts), ``"running"``, ``"closed"``, ``"ended"`` (its scheduler job has ended, though nobody closed
        it) or ``"unreachable"`` (the scheduler does not answer, though its job runs, or the queue does not answer
        either).
    workers, gpus : int
        Dask workers that are connected, and GPUs of the worker jobs that run.
    scheduler, dashboard : str
        Addresses; empty while the scheduler is not there.
    fabric : str
        Why workers talk over this protocol.
    manager : str
        The program that scales it, and how it does; empty if nobody does.
    detached : bool
        Whether it outlives the programs that manage it.
    time_left : float or None
        Seconds of the scheduler job's walltime that are left: the cluster ends then. None unless it is known.
    gpu_hours : float
        Of its jobs so far, the scheduler job included.
    groups : list of GroupState
        Each worker group: how many jobs are wanted and why, its budget, whether it is paused.
    jobs : list of JobInfo
        Those that have not ended, and the last thousand of those that have.
    devices : list of GPUInfo
        GPUs of the connected workers.
    warnings : list of str
        Failures and warnings that the user has not seen yet.
    problem : str
        Why something of this is not known.
    """

    time: float
    name: str
    system: str
    directory: str
    state: str
    workers: int = 0
    gpus: int = 0
    scheduler: str = ""
    dashboard: str = ""
    fabric: str = ""
    manager: str = ""
    detached: bool = False
    time_left: float | None = None
    gpu_hours: float = 0.0
    groups: list[GroupState] = field(default_factory=list)
    jobs: list[JobInfo] = field(default_factory=list)
    devices: list[GPUInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problem: str = ""

    def as_json(self) -> SnapshotJSON:
        """Return what ``--json`` prints."""
        return cast(SnapshotJSON, asdict(self) | {"jobs": [job.as_json() for job in self.jobs]})


class HasSnapshot(Protocol):
    """A cluster in this program."""

    def snapshot(self) -> Snapshot: ...


def snapshot(cluster: str | Path | HasSnapshot) -> Snapshot:
    """Return a cluster as it is now: its jobs, GPUs, groups, time left and GPU hours.

    The queue and the scheduler are queried once. A program that wants a snapshot again and again uses `Observer`.

    Parameters
    ----------
    cluster : str, Path or GPUCluster
        The name of a cluster, the path of its directory, or the cluster itself.

    Raises
    ------
    NoCluster
        There is no cluster of that name.
    NotTrusted
        Others can change its directory.
    OtherFormat
        Another version of hpcgpu made it.
    Damaged
        Its files do not tell which batch system it uses.
    """
    return Observer(locate(cluster)).snapshot() if isinstance(cluster, str | Path) else cluster.snapshot()


def assemble(
    jobs: list[JobInfo], gpus: Iterable[GPUState], groups: list[GroupState], *, now: float, **facts: Any
) -> Snapshot:
    """Join jobs, GPUs and groups into a snapshot.

    Parameters
    ----------
    jobs : list of JobInfo
    gpus : iterable of GPUState
    groups : list of GroupState
    now : float
        Epoch seconds.
    **facts
        Other fields of the snapshot.
    """
    names = {job.name: None for job in jobs}
    running = [job for job in jobs if job.state == JobState.RUNNING.value]
    scheduler = next((job for job in running if job.kind == "scheduler"), None)
    by_groups = sum(group["gpu_hours"] for group in groups)
    others = [job for job in jobs if not groups or job.kind == "scheduler"]  # a group counts its worker jobs itself
    return Snapshot(
        time=now,
        gpus=sum(job.gpus for job in running if job.kind == "worker"),
        time_left=scheduler.time_left if scheduler is not None else None,
        gpu_hours=by_groups + sum(gpu_seconds(job, now=now) for job in others) / 3600,
        groups=groups,
        jobs=jobs,
        devices=[GPUInfo(job=units.job_of(gpu["worker"], names) or "", **gpu) for gpu in gpus],
        **facts,
    )


def gpu_seconds(job: JobInfo, *, now: float) -> float:
    """Return what a job has used so far: its GPUs, times the seconds that it has run; 0 if its end is not known."""
    ended = now if job.ended is None and not JobState(job.state).ended else job.ended
    return job.gpus * max(0.0, ended - job.started) if job.started is not None and ended is not None else 0.0


class Observer:
    """A cluster seen from any program, again and again.

    The queue is polled as often as `hpcgpu.batch.cadence` says for the ``poll_interval`` of the cluster, and the
    scheduler is queried each time.

    Parameters
    ----------
    directory : ClusterDirectory
    """

    def __init__(self, directory: ClusterDirectory) -> None:
        self.directory = directory
        kept = _kept(directory)
        self._cadence = Cadence(kept.options.cluster.poll_interval if kept is not None else POLL_INTERVAL)
        self._submits: dict[str, Submit] = {}
        self._past: list[Submit] = []
        self._statuses: dict[str, JobStatus] = {}
        self._journal_size = -1
        #: The workers, where the scheduler answered; None before it was asked.
        self._workers: frozenset[str] | None = None
        self._problem = ""
        self._one_at_a_time = threading.Lock()

    def snapshot(self) -> Snapshot:
        """Return the cluster as it is now; blocks."""
        with self._one_at_a_time:
            return self._snapshot()

    def _snapshot(self) -> Snapshot:
        directory, now = self.directory, time.time()
        batch = batch_of(directory)
        self._poll(batch, now=now)
        problem = [self._problem] if self._problem else []
        contact = directory.contact()
        answer: SchedulerState | None = None
        if contact is not None:
            try:
                answer = run(_query(contact, directory))
            except (OSError, TimeoutError, ValueError) as error:  # a damaged address, or certificate
                problem.append(f"the scheduler at {contact.client} does not answer: {no_answer(error)}")
        self._look_soon(answer, now=now)
        # what a manager said that has left is not true now
        manager = answer["manager"] if answer is not None and answer["manager"]["present"] else None
        groups = manager["groups"] if manager is not None else []
        rest = unfinished(directory, now=now, managed=manager is not None)
        jobs = self._jobs(batch, answer, groups, now=now)
        return assemble(
            jobs,
            answer["gpus"] if answer is not None else [],
            groups,
            now=now,
            name=directory.path.name,
            system=system_of(directory),
            directory=str(directory.path),
            state=_state(directory, jobs, answer is not None, bool(problem)),
            workers=len(answer["workers"]) if answer is not None else 0,
            scheduler=contact.client if contact is not None and answer else "",
            dashboard=dashboard.link(contact) if answer else "",
            fabric=contact.fabric if contact is not None and answer else "",
            manager=_manager(directory, contact, answer) if answer is not None else "",
            detached=directory.detached,
            warnings=manager["warnings"] if manager is not None else [],
            problem="; ".join([*problem, *filter(None, [rest]), *directory.damage()]),
        )

    def soon(self) -> None:
        """Let the next snapshot poll the queue: something has just changed."""
        self._cadence.soon(now=time.time())
        self._cadence.next_poll = float("-inf")

    def _look_soon(self, answer: SchedulerState | None, *, now: float) -> None:
        """Look at the queue soon if workers, or the scheduler, have come or gone: their jobs start or end."""
        workers = frozenset([*answer["workers"], "the scheduler"] if answer is not None else [])
        if self._workers is not None and workers != self._workers:
            self._cadence.soon(now=now)
        self._workers = workers

    def _poll(self, batch: BatchSystem, *, now: float) -> None:
        """Query the queue for all jobs, if it is time to; soon after the journal has changed."""
        size = self.directory.journal_size
        if self._journal_size not in (-1, size):
            self._cadence.soon(now=now)
        if not self._cadence.due(now=now):
            return
        self._journal_size = size
        try:
            submits = submitted(self.directory, batch)
            statuses = {i: one for i, one in self._statuses.items() if i in submits and one.state.ended}
            statuses |= looked_up({i: one for i, one in submits.items() if i not in statuses}, batch)
        except BatchError as error:
            self._problem = str(error)
            self._cadence.failed(now=now)
            return
        self._submits, self._statuses, self._problem = submits, statuses, ""
        self._past = [submit for submit in self.directory.submits() if submit.ended and submit.job_id not in submits]
        states = {job_id: statuses[job_id].state if job_id in statuses else None for job_id in submits}
        waiting = any(state in (JobState.PENDING, JobState.UNKNOWN, None) for state in states.values())
        self._cadence.answered(states, now=now, waiting=waiting)

    def _jobs(
        self, batch: BatchSystem, answer: SchedulerState | None, groups: list[GroupState], *, now: float
    ) -> list[JobInfo]:
        names = {submit.name: None for submit in self._submits.values()}
        connected = Counter(units.job_of(worker, names) for worker in (answer["workers"] if answer is not None else []))
        waits = {group["name"]: group["usual_wait"] for group in groups}
        kept, logs = _kept(self.directory), saved.logs(self.directory)
        found = [
            _ended(submit, submit.how, logs / batch.log_name(submit.name, submit.job_id or ""), kept)
            for submit in self._past[-_PAST:]
            if submit.how is not None
        ]
        for job_id, submit in self._submits.items():
            log, workers = logs / batch.log_name(submit.name, job_id), connected[submit.name]
            job = _info(submit, job_id, self._statuses.get(job_id), workers, answer is not None, log, now=now)
            usual = waits.get(job.group) if job.state == JobState.PENDING.value else None
            gpus = kept.gpus(submit.kind, submit.group) if kept is not None else None
            found.append(replace(job, gpus=gpus or 0, usual_wait=usual))
        ours = {submit.name for submit in [*self._past, *self._submits.values()] if submit.cancelled}
        return sorted((_whose(job, ours, self.directory.over()) for job in found), key=lambda job: job.submitted)


async def _query(contact: Contact, directory: ClusterDirectory) -> SchedulerState:
    async with scheduler_of(directory, contact) as scheduler:
        state: SchedulerState = await asyncio.wait_for(scheduler.hpcgpu_state(), _TIMEOUT)
        return state


def _state(directory: ClusterDirectory, jobs: list[JobInfo], answers: bool, problem: bool) -> str:
    if directory.closed:
        return "closed"
    if answers:
        return "running"
    if directory.only_scripts:
        return "not launched"
    scheduler = next((job for job in jobs if job.kind == "scheduler"), None)
    # a contact may be left of a scheduler that was killed; and the queue may have forgotten the job of one that ended
    forgotten = scheduler is None or scheduler.state == JobState.UNKNOWN.value
    if (scheduler is not None and JobState(scheduler.state).ended) or (forgotten and ended_by_itself(directory)):
        return "ended"
    return "unreachable" if problem else "ended" if scheduler is None else "waiting"


def _info(  # noqa: PLR0913  # what is known of one job, from four places
    submit: Submit, job_id: str, status: JobStatus | None, connected: int, answers: bool, log: Path, *, now: float
) -> JobInfo:
    """Describe a job: a process that is connected proves that it runs, whatever the queue reported before."""
    proven = connected > 0 or (submit.kind == "scheduler" and answers)
    if proven and (status is None or status.state in (JobState.PENDING, JobState.UNKNOWN)):
        state, reason = JobState.RUNNING, ""
    elif status is None:
        state, reason = JobState.UNKNOWN, "the queue does not know it"
    else:
        quiet = status.state is JobState.RUNNING and not status.suspended
        state, reason = status.state, "" if quiet else explain(status, kind=submit.kind)
    began, ends = (status.start, status.end) if status is not None else (None, None)
    return JobInfo(
        id=job_id,
        kind=submit.kind,
        name=submit.name,
        state=state.value,
        reason=reason,
        waited=max(0.0, (began or now) - submit.time),
        node=status.node if status is not None else "",
        workers=connected,
        log=log,
        group=submit.group if submit.kind == "worker" else "",
        submitted=submit.time,
        started=began,
        ended=ends if state.ended else None,
        expected_start=status.expected_start if status is not None and state is JobState.PENDING else None,
        time_left=max(0.0, ends - now) if state is JobState.RUNNING and ends is not None else None,
    )


def _ended(submit: Submit, how: End, log: Path, kept: saved.Saved | None) -> JobInfo:
    """Describe a job that has ended, as the journal has it."""
    named = next((state for state in JobState if state.value == how.state), JobState.UNKNOWN)
    return JobInfo(
        id=submit.job_id or "",
        kind=submit.kind,
        name=submit.name,
        state=named.value,
        reason=FORGOTTEN if named is JobState.UNKNOWN else explain(JobStatus(job_id="", state=named), kind=submit.kind),
        waited=max(0.0, (how.start or how.end or submit.time) - submit.time),
        node="",
        workers=0,
        log=log,
        group=submit.group if submit.kind == "worker" else "",
        gpus=(kept.gpus(submit.kind, submit.group) or 0) if kept is not None else 0,
        submitted=submit.time,
        started=how.start,
        ended=how.end,
    )


def _whose(job: JobInfo, ours: Collection[str], over: float | None) -> JobInfo:
    """Say of a job that hpcgpu cancelled it, where the journal has that, whatever the queue calls its end.

    Parameters
    ----------
    job : JobInfo
    ours : collection of str
        Names of the jobs that a manager decided to end.
    over : float or None
        When the cluster was closed or stopped, epoch seconds. The clocks of the queue and of this machine may differ.
    """
    own = cancel_of_ours(JobState(job.state), decided=job.name in ours, ended=job.ended, over=over)
    return replace(job, state=JobState.CANCELLED.value, reason=OWN_CANCEL) if own else job


def _kept(directory: ClusterDirectory) -> saved.Saved | None:
    try:
        return saved.read(directory)
    except OptionError:  # another release's; the rest is worth showing
        return None


def _manager(directory: ClusterDirectory, contact: Contact | None, answer: SchedulerState) -> str:
    latest, said = directory.manager(), answer["manager"]
    if contact is not None and not contact.job_id and latest is not None:  # the scheduler is in the manager's process
        return str(latest)
    if said["problem"]:
        return said["problem"]
    if latest is None or said["number"] < latest.number or not said["present"]:
        return said["about"] if said["number"] == 0 else ""
    return f"{latest}: {said['about']}" if said["about"] else str(latest)
