"""The jobs of a cluster: one object each, joining what the queue says with what the Dask scheduler says.

`Dispatcher` is the one way to the batch system: it keeps the journal around every submit and knows every id that must be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed.deploy.spec import ProcessInterface

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.batch.monitor import Monitor, View
from hpcgpu.batch.reasons import explain
from hpcgpu.display.jobinfo import JobInfo
from hpcgpu.errors import AmbiguousSubmit, BatchError, BatchUnavailable, ClusterError, NameLost, Superseded
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling.failures import Outcome, classify
from hpcgpu.scaling.repair import Absence
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory, Contact

if TYPE_CHECKING:
    from hpcgpu.cluster.groups import WorkerGroup

__all__ = ["Dispatcher", "Job", "SchedulerJob", "WorkerJob"]

_SUBMITS_AT_ONCE = 4
#: Lines and characters of a log that are shown, and bytes of its end that are read for that.
_LOG_TAIL, _LOG_LENGTH, _LOG_READ = 20, 8000, 2**20
#: What our own extension of the scheduler writes when something is wrong.
_OWN_WORDS = "distributed.hpcgpu - ERROR"
#: Characters of it that are repeated.
_SAID = 300
#: What Slurm without cgroups (seen on 22.05.8, where the state is FAILED), and the kernel's killer, write into a job's log.
_MEMORY_KILL = re.compile(r"exceeded (job )?memory limit|oom[-_ ]kill|out[- ]of[- ]memory handler", re.IGNORECASE)


class Dispatcher:
    """Submits, queries and cancels the jobs of one cluster.

    Parameters
    ----------
    batch : BatchSystem
    directory : ClusterDirectory
        Holds the journal: the intent is written before a submit, the id after it.
    manager : int
        Number of this program among the cluster's managers; see `ClusterDirectory.take_over`.
    """

    def __init__(self, batch: BatchSystem, directory: ClusterDirectory, manager: int) -> None:
        self.batch = batch
        self.directory = directory
        self.token = directory.token()
        self.manager = manager
        self.monitor = Monitor(batch)
        self.submits = asyncio.Semaphore(_SUBMITS_AT_ONCE)
        self.cancelled: set[str] = set()
        self.closing = False
        self._ids: dict[str, str] = {}
        self._uncertain: set[str] = set()
        self._in_flight: set[str] = set()
        self.trouble = ""
        self._changed = threading.Condition()

    def adopt(self, name: str, job_id: str, *, submitted: float) -> None:
        """Take over a job that an earlier manager submitted."""
        self._ids[name] = job_id
        self.monitor.watch(job_id, name, now=submitted)

    def check_manager(self) -> None:
        """Raise `Superseded` when another program has taken the cluster over, `NameLost` when its name belongs to a later one."""
        if not self.directory.is_of(self.token):
            raise NameLost(f"cluster {self.directory.path.name} lost its name: {self.directory.path} is the directory of another one now")
        latest = self.directory.manager()
        if latest is not None and latest.number > self.manager:
            raise Superseded(
                f"cluster {self.directory.path.name} was taken over by {latest}; this program does not scale it any more. "
                f"from_name({self.directory.path.name!r}) takes it back"
            )

    async def submit(
        self, script: Path, *, name: str, kind: str, group: str = "default", after: str | None = None, exclude: Collection[str] = ()
    ) -> str:
        """Submit a job and watch it; see `BatchSystem.submit`. At most four commands run at a time.

        Raises
        ------
        Superseded
            Another program manages the cluster.
        """
        async with self.submits:
            return await in_thread(self._submit, script, name, kind, group, after, exclude)

    def _submit(self, script: Path, name: str, kind: str, group: str, after: str | None, exclude: Collection[str]) -> str:
        with self._changed:
            if self.closing:
                raise BatchError("the cluster is closing")
            self._in_flight.add(name)
        try:
            self.check_manager()
            self.directory.intend(name, kind, group)
            try:
                self.check_manager()  # after the intent: who takes over now either reads that, or is seen here
                logs, wanted = saved.logs(self.directory), lambda: not self.closing
                job_id = self.batch.submit(script, job_name=name, logs=logs, after=after, exclude=exclude, wanted=wanted)
            except AmbiguousSubmit:
                self._uncertain.add(name)
                raise
            except NameLost:  # the journal is another cluster's by now
                raise
            except BatchError:
                self.directory.refused(name)
                raise
            # First of all, so that nothing that fails below can lose it.
            self._ids[name] = job_id
            self.monitor.watch(job_id, name, now=time.time())
            self._note(self.directory.submitted, name, job_id)  # where that fails the intent is on disk: the job can be found by its name
            if self.closing:  # while sbatch was under way
                self.cancelled.add(job_id)
                self.batch.cancel([job_id])
            else:
                self._leave_none_behind(name, job_id)
            return job_id
        finally:
            with self._changed:
                self._in_flight.discard(name)
                self._changed.notify_all()

    def _leave_none_behind(self, name: str, job_id: str) -> None:
        """Cancel what was submitted while another manager took over, or the name was lost: nobody else may have learned of it."""
        try:
            self.check_manager()
        except (Superseded, NameLost) as error:
            self.cancelled.add(job_id)
            if isinstance(error, Superseded):
                self._note(self.directory.cancel, [name])  # for that one, if it has learned of it
            self.batch.cancel([job_id])
            raise

    def will_cancel(self, names: Collection[str]) -> None:
        """Write into the journal that these jobs are not wanted any more, before anything is done about it.

        A manager that takes the cluster over completes what this one began, and takes the jobs neither for wanted nor for failed.

        Raises
        ------
        Superseded
            Another program manages the cluster.
        """
        self.check_manager()
        self._note(self.directory.cancel, names)

    def keep(self, names: Collection[str]) -> None:
        """Take `will_cancel` back, unless another program manages the cluster: that one has decided."""
        with contextlib.suppress(Superseded, NameLost):
            self.check_manager()
            self._note(self.directory.keep, names)

    def resize(self, group: str, jobs: int | None) -> None:
        """Write into the journal how many worker jobs the user wants in a group."""
        self._note(self.directory.resize, group, jobs)

    def note_end(self, name: str, job_id: str | None) -> None:
        """Write into the journal that a job was seen to have ended."""
        self._note(self.directory.ended, name, job_id)

    def _note(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write into the journal what must not fail because the disk is full; not into that of a later cluster of this name."""
        try:
            if self.directory.is_of(self.token):
                write(*arguments)
        except OSError as error:
            self.trouble = f"the journal in {self.directory.path} cannot be written: {error.strerror}"

    async def poll(self, job_ids: Collection[str] | None = None) -> None:
        """Ask the queue once about these jobs (default: all that have not ended) and take what it answers."""
        alive = self.monitor.alive()
        answer = await in_thread(self.monitor.ask, alive if job_ids is None else alive & frozenset(job_ids))
        self.monitor.take(answer, now=time.time())

    async def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Cancel jobs by one command; those that are cancelled or have ended already are left out."""
        ids = (set(job_ids) & self.monitor.alive()) - self.cancelled
        if not ids:
            return
        if not only_pending:
            self.cancelled |= ids
        try:
            await in_thread(self._cancel, ids, only_pending)
        except BatchError:
            self.cancelled -= ids
            raise

    def _cancel(self, ids: set[str], only_pending: bool) -> None:
        self.check_manager()
        self.batch.cancel(ids, only_pending=only_pending)

    def cancel_all(self, timeout: float) -> None:
        """Cancel every job of the cluster and keep new ones from being submitted. Blocks; works at interpreter exit too.

        Right after the command to the queue the credentials are removed, and the directory is marked: this program may be killed while it
        waits. Does nothing where another program manages the cluster by now: the jobs are not this one's any more. Where the name was lost
        it cancels what it submitted.

        Parameters
        ----------
        timeout : float
            Seconds to wait for submits that are under way; each cancels itself when it learns its id.

        Raises
        ------
        BatchUnavailable
            The queue did not take the cancellation, or a submit is still under way.
        """
        self.closing = True
        named = True
        with contextlib.suppress(OSError):
            try:
                self.check_manager()
            except Superseded:
                return
            except NameLost:
                named = False
        ids = set(self._ids.values()) - self.monitor.ended()
        self.cancelled |= ids
        troubles = []
        try:
            if ids:
                self.batch.cancel(ids)
        except BatchError as error:
            troubles.append(str(error))
        if named:
            self._lock_out()
        for name in sorted(self._uncertain if named else ()):  # a job of that name would be the other cluster's
            try:
                self.batch.cancel(self.batch.find(name))
                self._uncertain.discard(name)
            except BatchError as error:
                troubles.append(f"whether job {name!r} exists is not known: {error}")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_flight, timeout):
                troubles.append(f"the submit of {', '.join(sorted(self._in_flight))} is still under way")
        if troubles:
            raise BatchUnavailable("; ".join(troubles))

    def _lock_out(self) -> None:
        """Remove the credentials, and mark the directory: nothing of this cluster can begin any more."""
        with contextlib.suppress(OSError):
            self.directory.remove_secrets()
            if not self.directory.closing:
                self.directory.begin_close()

    def left(self) -> list[str]:
        """Jobs that may still be in the queue: ids in the order of their submits, and names of those whose id is not known."""
        # What was cancelled and is not known any more has gone; what the queue merely forgot may run.
        views = self.monitor.views
        gone = self.monitor.ended() | {i for i in self.cancelled if i in views and views[i].missing_since is not None}
        return [i for i in list(self._ids.values()) if i not in gone] + sorted(self._uncertain | self._in_flight)


class Job(ProcessInterface):  # type: ignore[misc]
    """A batch job as distributed's SpecCluster handles it.

    Parameters
    ----------
    dispatcher : Dispatcher
    script : Path
    name : str
        Name of the job, and of its workers, or the beginning of theirs.
    logs : Path
        Directory of the logs.
    """

    kind = ""

    def __init__(self, dispatcher: Dispatcher, script: Path, name: str, logs: Path) -> None:
        super().__init__(name=name)
        self.dispatcher = dispatcher
        self.script = script
        self.name = name
        self.logs = logs
        self.created = time.time()
        self.job_id: str | None = None
        self.workers: dict[str, str] = {}

    @property
    def view(self) -> View | None:
        """What the queue says."""
        return self.dispatcher.monitor.views.get(self.job_id or "")

    @property
    def queue_status(self) -> JobStatus:
        """What the queue says, or that it was not submitted yet. A connected worker proves that its job runs."""
        view = self.view
        if view is None:
            return JobStatus(job_id="", state=JobState.PENDING, name=self.name, reason="")
        if self.workers and view.missing_since is not None:
            return replace(view.status, state=JobState.RUNNING, reason="")
        return view.status

    @property
    def pending(self) -> bool:
        """Whether the job waits in the queue, as far as is known."""
        return not self.workers and self.queue_status.state is JobState.PENDING

    @property
    def submitted(self) -> float:
        """Epoch seconds of its submit."""
        return self.view.submitted if self.view else self.created

    @property
    def log(self) -> Path:
        """The job's log, stdout and stderr."""
        return self.logs / self.dispatcher.batch.log_name(self.name, self.job_id or "")

    def log_tail(self, lines: int = _LOG_TAIL, node: int | None = None) -> str:
        """Return the end of the log, and what our own extension said before it; of one node of several, where its lines are labelled."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_READ))
                found = file.read(_LOG_READ).decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log at {self.log}: {error.strerror})"
        if node is not None:  # `srun` says of what ended badly: "srun: error: n1: task 1: Exited with exit code 3"
            found = [line for line in found if line.startswith(f"{node}: ") or f": task {node}: " in line] or found
        said = [line for line in found[:-lines] if _OWN_WORDS in line]  # why it ended, before all that ending says
        return printable("\n".join([*said[-1:], *found[-lines:]]), _LOG_LENGTH, lines=True)

    def info(self, *, now: float) -> JobInfo:
        """Describe the job."""
        status = self.queue_status
        state = JobState.RUNNING if self.workers and status.state is JobState.PENDING else status.state
        if self.job_id is None:
            reason = "it is being submitted"
        elif self.view is None or (not self.view.asked and not self.workers):
            reason = "the queue has not been asked about it yet"
        elif state is JobState.RUNNING:
            reason = self.shortage(now=now)
        else:
            reason = explain(status)
        until = status.start if status.start and state is not JobState.PENDING else now
        return JobInfo(
            id=self.job_id or "",
            kind=self.kind,
            name=self.name,
            state=state.value,
            reason=reason,
            waited=max(0.0, until - self.submitted),
            node=status.node,
            workers=len(self.workers),
            log=self.log,
        )

    def shortage(self, *, now: float) -> str:
        """Return what a running job lacks; empty if it lacks nothing."""
        return ""

    def obituary(self) -> str:
        """Return what happened to a job that ended, in one line that stands for itself, and the end of its log."""
        tail = self.log_tail()
        said = [line.partition(f"{_OWN_WORDS} - hpcgpu: ")[2][:_SAID] for line in tail.splitlines()]
        why = "; ".join([self._end(), *[words for words in said if words][:1]])
        return f"{self.kind} job {self.job_id} ({self.name}) {why}. Log: {self.log}\n{tail}"

    def _end(self) -> str:
        return f"{self.queue_status.state.value}: {explain(self.queue_status)}"

    async def close(self) -> None:
        """Cancel the job."""
        if self.job_id is not None:
            await self.dispatcher.cancel([self.job_id])
        await super().close()


class WorkerJob(Job):
    """A job of Dask workers. `start` returns once it is submitted.

    Parameters
    ----------
    group : WorkerGroup
    after : callable
        Returns the id of the scheduler job while that has not started, else None.

    Attributes
    ----------
    leaving : bool
        It was chosen to be given up.
    retired : set of str
        Addresses of its workers that were told to take no more tasks.
    processing, nbytes, wanted, actors : int
        Tasks that its workers have, bytes that they hold, those of them that somebody still wants, and actors that live on them.
    memory : float
        Bytes that its workers may use; infinite without a limit.
    worked : bool
        Whether its workers have had tasks or data.
    idle_since : float or None
        Epoch seconds since which all its workers are there and have nothing to do.
    absence : Absence
        Workers that it lacks while it runs.
    judged_at : float or None
        Since when they count as lost for good, which was said.
    doubtful : bool
        An earlier manager submitted it, and the queue does not know it: it has ended, most likely.
    """

    kind = "worker"

    def __init__(
        self,
        dispatcher: Dispatcher,
        script: Path,
        name: str,
        logs: Path,
        *,
        group: WorkerGroup,
        after: Callable[[], str | None],
    ) -> None:
        super().__init__(dispatcher, script, name, logs)
        self.group = group
        self._after = after
        self.joined_at: float | None = None
        self.ended_at: float | None = None
        self.opening: asyncio.Task[None] | None = None
        self.leaving = False
        self.retired = set[str]()
        self.wait_known = False
        self.processing = 0
        self.nbytes = 0
        self.wanted = 0
        self.actors = 0
        self.memory = 0.0
        self.worked = False
        self.idle_since: float | None = None
        self.complete = False
        self.retry_at = 0.0
        self.stable = False
        self.doubtful = False
        self.absence = Absence()
        self.judged_at: float | None = None

    @property
    def judged(self) -> bool:
        """Whether it lacks workers for good."""
        return self.judged_at is not None

    def shortage(self, *, now: float) -> str:
        """Return which workers a running job lacks, and what becomes of it."""
        if not self.absence or (self.leaving and not self.judged):
            return ""
        if not self.judged:
            return self.absence.outlook(self.group.options.death_timeout, now=now)
        words = self.absence.words(now=now)
        if self.leaving:
            return f"{words}; its data moves, and another job takes its place"
        if self.group.failures.paused:
            return f"{words}; it goes on without, {self.group.failures.paused}"
        return f"{words}; it works on, and another job takes its place"

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return not self.queue_status.state.ended

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        lasted = (self.ended_at or time.time()) - self.joined_at if self.joined_at is not None else None
        outcome = classify(self.queue_status.state, lasted=lasted, worked=self.worked)
        if outcome in {Outcome.FAILED, Outcome.NEVER_CONNECTED} and _MEMORY_KILL.search(self.log_tail()):
            return Outcome.OUT_OF_MEMORY
        return outcome

    def seconds_used(self, *, now: float) -> float:
        """Return how long it has run."""
        status = self.queue_status
        if status.state is JobState.PENDING and not self.workers:
            return 0.0
        began = status.start or self.joined_at
        return max(0.0, (self.ended_at or now) - began) if began is not None else 0.0

    async def start(self) -> None:
        """Submit."""
        self.job_id = await self.dispatcher.submit(
            self.script, name=self.name, kind=self.kind, group=self.group.name, after=self._after(), exclude=self.group.excluded()
        )
        await super().start()

    def _end(self) -> str:
        outcome = self.outcome
        if outcome is Outcome.OUT_OF_MEMORY:
            asked = self.group.options.memory
            limit = f"{format_bytes(asked)} per node" if asked else "the default of the queue"
            return f"{self.queue_status.state.value}: it used more memory than it asked for ({limit})"
        text = super()._end()
        if outcome is Outcome.NEVER_CONNECTED:
            text += "; none of its workers had connected"
        return text

    def joined(self, address: str, worker: str, *, now: float) -> None:
        """Take note of a connected worker."""
        self.workers[address] = worker
        self.absence = replace(self.absence, joined=self.absence.joined | {worker})  # it may be lost before the next decision
        self.joined_at = self.joined_at or now


class SchedulerJob(Job):
    """The job of the Dask scheduler. `start` returns when the scheduler can be reached.

    Parameters
    ----------
    patience : float
        Seconds that the running job may take to publish its contact.
    """

    kind = "scheduler"

    def __init__(self, dispatcher: Dispatcher, script: Path, name: str, logs: Path, patience: float) -> None:
        super().__init__(dispatcher, script, name, logs)
        self.patience = patience
        self.contact: Contact | None = None
        self._warned: set[str] = set()

    def end_is_near(self, *, now: float) -> str:
        """Return a warning when four fifths of its walltime are over, and when 15 min are left, once each; empty otherwise."""
        status = self.queue_status
        if status.state is not JobState.RUNNING or status.start is None or status.end is None:
            return ""
        left = status.end - now
        due = [mark for mark, limit in (("80 %", (status.end - status.start) / 5), ("15 min", 900.0)) if left <= limit]
        if not set(due) - self._warned:
            return ""
        self._warned.update(due)
        return (
            f"the walltime of the scheduler job {self.job_id} ends in {max(0.0, left) / 60:.0f} min, and the cluster with it: fetch your "
            f"results. For the next one, scheduler={{'walltime': ...}} gives it more time"
        )

    async def submit(self) -> None:
        """Submit, without waiting for anything."""
        self.job_id = await self.dispatcher.submit(self.script, name=self.name, kind=self.kind)

    async def reached(self) -> None:
        """Wait until the scheduler can be reached."""
        await self

    async def start(self) -> None:
        """Wait for the contact. Time in the queue does not count.

        Raises
        ------
        ClusterError
            The job ended, or runs and publishes nothing.
        """
        if self.job_id is None:
            await self.submit()
        pause, running_since = 0.1, None
        while self.contact is None:
            contact = await in_thread(self.dispatcher.directory.contact)
            if contact is not None and contact.job_id == self.job_id:
                self.contact = contact
                break
            status = self.queue_status
            if status.state.ended:
                raise ClusterError(self.obituary())
            if status.state is JobState.RUNNING:
                running_since = running_since or time.monotonic()
                if time.monotonic() - running_since > self.patience:
                    raise ClusterError(
                        f"scheduler job {self.job_id} runs on {status.node}, but published no contact within {self.patience:g} s. "
                        f"If {self.dispatcher.directory.path} is not on a filesystem that login and compute nodes share, "
                        f"set cluster_directory. Log: {self.log}\n{self.log_tail()}"
                    )
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 1.2)
        self.address, self.external_address = self.contact.workers, self.contact.client
        await super().start()
