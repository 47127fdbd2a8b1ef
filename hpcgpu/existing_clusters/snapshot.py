"""The state of a cluster, seen from any program.

It joins the journal, the queue and the scheduler. It changes nothing and manages nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.dask_scheduler.rpc_types import GPUState, GroupState, SchedulerState
from hpcgpu.display.job_info import JobInfo
from hpcgpu.errors import BatchError
from hpcgpu.existing_clusters.between_schedulers import NO_SCHEDULER, Restart, between_schedulers
from hpcgpu.existing_clusters.describe_jobs import as_the_journal_records, described
from hpcgpu.existing_clusters.lookup import batch_of, locate, system_of
from hpcgpu.existing_clusters.query_jobs import ended_by_itself, query_with_accounting, submitted
from hpcgpu.existing_clusters.unsubmitted_jobs import unfinished
from hpcgpu.polling.poll_interval import POLL_INTERVAL, Cadence
from hpcgpu.posix.threads import run
from hpcgpu.runtime import dashboard_access
from hpcgpu.runtime.scheduler_connection import answer_of, unreachable
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.scheduler_restarts import STANDBY
from hpcgpu.store import saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import Submit
from hpcgpu.store.present_scheduler import present_scheduler

#: Most ended jobs that are shown: the last ones.
_PAST = 1000
#: Seconds for one answer of the scheduler.
_TIMEOUT = 10.0


@dataclass(frozen=True, kw_only=True)
class GPUInfo:
    """A GPU of a worker job that runs. The facts are those of its worker's last heartbeat.

    Attributes
    ----------
    job, worker, node : str
        Names of its job, its Dask worker and its node.
    model : str
        The driver's name of the GPU; empty if it does not report one.
    utilization : float or None
        Per cent of the time in which it computes; None if the driver does not report it.
    memory_used, memory_total : int or None
        Bytes; None if the driver does not report it.
    power : float or None
        Watts; None if the driver does not report it.
    idle_since : float or None
        Seconds since 1970 since when it computes nothing; None while it computes.
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
    """A cluster at one moment.

    It has the jobs, GPUs, groups, time left and GPU hours. ``hpcgpu status``, ``hpcgpu top``, the widget and the page
    in Jupyter all show this.

    Attributes
    ----------
    time : float
        Time of the snapshot, seconds since 1970.
    name : str
    system : str
        The name of its batch system.
    directory : str
        The cluster directory.
    state : str
        ``"not launched"`` (scripts of ``hpcgpu render`` that submitted nothing yet), ``"waiting"`` (its scheduler job
        waits or starts), ``"running"``, ``"restarting"`` (its scheduler job has ended, and another one is to come),
        ``"closed"``, ``"ended"`` (its scheduler job has ended, or all its jobs are about to end) or ``"unreachable"``
        (the scheduler does not answer, though its job runs, or the queue does not answer either).
    workers, gpus : int
        Dask workers that are connected, and GPUs of the worker jobs that run.
    scheduler, dashboard : str
        Addresses; empty while the scheduler is not there.
    fabric : str
        Why workers use this protocol.
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
        Jobs that have not ended, and the last thousand ended jobs.
    devices : list of GPUInfo
        GPUs of the connected workers.
    restart : list of str
        After the end of a scheduler job, until the next scheduler is there: how it ended, what the next scheduler job
        does, and what the worker jobs that wait for it cost. Empty otherwise.
    end : str
        Why it has ended, with the job and its log; empty if it has not, if a person wanted it, or if that is not known.
    warnings : list of str
        Failures and warnings that the user has not seen yet.
    problem : str
        Unknown facts, and the reason; empty if all is known.
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
    restart: list[str] = field(default_factory=list)
    end: str = ""
    warnings: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def idle(self) -> int:
        """GPUs on which nothing runs."""
        return sum(gpu.idle_since is not None for gpu in self.devices)

    @property
    def utilization(self) -> float | None:
        """Mean use of the GPUs in per cent, of those whose use is known."""
        known = [gpu.utilization for gpu in self.devices if gpu.utilization is not None]
        return sum(known) / len(known) if known else None

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return asdict(self) | {"jobs": [asdict(job) | {"log": str(job.log)} for job in self.jobs]}


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
        Its files do not show which batch system it uses.
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
    scheduler = next((job for job in running if job.kind == "scheduler" and job.reason != STANDBY), None)
    by_groups = sum(group["gpu_hours"] for group in groups)
    others = [job for job in jobs if not groups or job.kind == "scheduler"]  # a group counts its worker jobs itself
    return Snapshot(
        time=now,
        gpus=sum(job.gpus for job in running if job.kind == "worker"),
        time_left=scheduler.time_left if scheduler is not None else None,
        gpu_hours=by_groups + sum(gpu_seconds(job, now=now) for job in others) / 3600,
        groups=groups,
        jobs=jobs,
        devices=[GPUInfo(job=worker_names.job_of(gpu["worker"], names) or "", **gpu) for gpu in gpus],
        **facts,
    )


def gpu_seconds(job: JobInfo, *, now: float) -> float:
    """Return what a job has used so far: its GPUs, times the seconds that it has run; 0 if its end is not known."""
    ended = now if job.ended is None and not JobState(job.state).ended else job.ended
    return job.gpus * max(0.0, ended - job.started) if job.started is not None and ended is not None else 0.0


class Observer:
    """A cluster seen from any program, again and again.

    The queue is polled as often as `hpcgpu.polling.poll_interval` allows with the ``poll_interval`` of the cluster, and
    the scheduler is queried each time.

    Parameters
    ----------
    directory : ClusterDirectory
    """

    def __init__(self, directory: ClusterDirectory) -> None:
        self.directory = directory
        kept = saved_options.read_if_known(directory)
        self._cadence = Cadence(kept.options.cluster.poll_interval if kept is not None else POLL_INTERVAL)
        self._submits: dict[str, Submit] = {}
        self._past: list[Submit] = []
        self._statuses: dict[str, JobStatus] = {}
        self._journal_size = -1
        #: The workers, if the scheduler answered; None before the first query.
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
        if contact is not None and not self._ended(contact.job_id):
            try:
                answer = run(answer_of(directory, contact, lambda scheduler: scheduler.hpcgpu_state(), _TIMEOUT))
            except (OSError, TimeoutError, ValueError) as error:  # a damaged address, or certificate
                problem.append(unreachable(f"the scheduler at {contact.client}", error))
        self._poll_soon(answer, now=now)
        # the report of a manager that has left is out of date
        manager = answer["manager"] if answer is not None and answer["manager"]["present"] else None
        groups = manager["groups"] if manager is not None else []
        rest = unfinished(directory, now=now, managed=manager is not None)
        present = contact.job_id if contact is not None and not self._ended(contact.job_id) else None
        jobs = self._jobs(batch, answer, present, groups, now=now)
        restart = between_schedulers(directory, jobs, now=now) if answer is None else None
        state = "restarting"
        if restart is None or not restart.comes:
            state = _state(directory, jobs, answer is not None, bool(problem))
        if restart is not None:
            jobs = [_waits_for_scheduler(job, restart) for job in jobs]
        return assemble(
            jobs,
            answer["gpus"] if answer is not None else [],
            groups,
            now=now,
            name=directory.path.name,
            system=system_of(directory),
            directory=str(directory.path),
            state=state,
            workers=len(answer["workers"]) if answer is not None else 0,
            scheduler=contact.client if contact is not None and answer else "",
            dashboard=dashboard_access.link(contact) if answer else "",
            fabric=contact.fabric if contact is not None and answer else "",
            manager=_manager(directory, contact, answer) if answer is not None else "",
            detached=directory.detached,
            restart=restart.sentences if restart is not None else [],
            end=directory.why_ended(),
            warnings=manager["warnings"] if manager is not None else [],
            problem="; ".join([*problem, *filter(None, [rest]), *directory.damage()]),
        )

    def soon(self) -> None:
        """Let the next snapshot poll the queue, because something has just changed."""
        self._cadence.soon(now=time.time())
        self._cadence.next_poll = float("-inf")

    def _poll_soon(self, answer: SchedulerState | None, *, now: float) -> None:
        """Poll the queue soon if workers or the scheduler have connected or left: their jobs start or end."""
        workers = frozenset([*answer["workers"], "the scheduler"] if answer is not None else [])
        if self._workers is not None and workers != self._workers:
            self._cadence.soon(now=now)
        self._workers = workers

    def _ended(self, job_id: str) -> bool:
        """Whether a job has ended according to queue or journal: a killed scheduler leaves its contact behind."""
        if job_id in self._statuses and self._statuses[job_id].state.ended:
            return True
        return self.directory.has_ended(job_id)

    def _poll(self, batch: BatchSystem, *, now: float) -> None:
        """Query the queue for all jobs, if it is time to; soon, and again, after the journal has changed."""
        size, first = self.directory.journal_size, self._journal_size == -1
        recent = first and max(self.directory.times(), default=0.0) > now - self._cadence.poll_interval
        if recent or (not first and self._journal_size != size):
            self._cadence.soon(now=now)
        if not self._cadence.due(now=now):
            return
        self._journal_size = size
        try:
            submits = submitted(self.directory, batch)
            statuses = {i: one for i, one in self._statuses.items() if i in submits and one.state.ended}
            statuses |= query_with_accounting({i: one for i, one in submits.items() if i not in statuses}, batch)
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
        self,
        batch: BatchSystem,
        answer: SchedulerState | None,
        present: str | None,
        groups: list[GroupState],
        *,
        now: float,
    ) -> list[JobInfo]:
        """Return all jobs; `present` is the id of the scheduler job that has not ended, also if it does not answer."""
        names = {submit.name: None for submit in self._submits.values()}
        connected = Counter(
            worker_names.job_of(worker, names) for worker in (answer["workers"] if answer is not None else [])
        )
        waits = {group["name"]: group["usual_wait"] for group in groups}
        kept, logs = saved_options.read_if_known(self.directory), saved_options.logs(self.directory)
        found = [
            replace(described(submit, None, now=now), log=logs / batch.log_name(submit.name, submit.job_id or ""))
            for submit in self._past[-_PAST:]
            if submit.how is not None
        ]
        ids = list(self._submits)
        follow = ids[ids.index(present) + 1 :] if present in ids else []  # the present one, if they are schedulers
        for job_id, submit in self._submits.items():
            log, workers = logs / batch.log_name(submit.name, job_id), connected[submit.name]
            proven = workers > 0 or (submit.kind == "scheduler" and answer is not None and job_id == present)
            job = described(submit, self._statuses.get(job_id), proven=proven, now=now)
            job = replace(job, id=job_id, workers=workers, log=log)
            if job.kind == "scheduler" and job.state == JobState.RUNNING.value and job_id in follow:
                job = replace(job, reason=job.reason or STANDBY)
            usual = waits.get(job.group) if job.state == JobState.PENDING.value else None
            found.append(replace(job, usual_wait=usual))
        if kept is not None:
            found = [replace(job, gpus=kept.gpus(job.kind, job.group) or 0) for job in found]
        submits = {submit.name: submit for submit in self.directory.submits()}  # the journal may be newer than the poll
        closed = self.directory.ended_at()
        return sorted(
            (as_the_journal_records(job, submits.get(job.name), closed) for job in found), key=lambda job: job.submitted
        )


def _waits_for_scheduler(job: JobInfo, restart: Restart) -> JobInfo:
    """Report of a worker job whose workers have ended with their scheduler why it has none."""
    had = job.started is not None and restart.since is not None and job.started < restart.since
    runs = job.kind == "worker" and job.state == JobState.RUNNING.value and not job.reason
    return replace(job, reason=NO_SCHEDULER) if runs and had else job


def _state(directory: ClusterDirectory, jobs: list[JobInfo], answers: bool, problem: bool) -> str:
    if directory.closed:
        return "closed"
    if directory.closing:
        return "ended"
    if answers:
        return "running"
    if directory.only_scripts:
        return "not launched"
    contact, schedulers = directory.contact(), [job for job in jobs if job.kind == "scheduler"]
    present = present_scheduler(directory.submits(), contact.job_id if contact is not None else "")
    named = [job for job in schedulers if present is not None and job.name == present.name]
    scheduler = next(reversed(named or schedulers), None)
    # a contact may be left of a scheduler that was killed; and the queue may have forgotten the job of one that ended
    forgotten = scheduler is None or scheduler.state == JobState.UNKNOWN.value
    if (scheduler is not None and JobState(scheduler.state).ended) or (forgotten and ended_by_itself(directory)):
        return "ended"
    return "unreachable" if problem else "ended" if scheduler is None else "waiting"


def _manager(directory: ClusterDirectory, contact: Contact | None, answer: SchedulerState) -> str:
    latest, reported = directory.manager(), answer["manager"]
    if contact is not None and not contact.job_id and latest is not None:  # the scheduler is in the manager's process
        return str(latest)
    if reported["problem"]:
        return reported["problem"]
    if latest is None:
        return ""
    if reported["number"] < latest.number or not reported["present"]:  # for a moment after a restart, too
        return f"{latest}: it is not connected to the scheduler" if latest.lives else ""
    return f"{latest}: {reported['about']}" if reported["about"] else str(latest)
