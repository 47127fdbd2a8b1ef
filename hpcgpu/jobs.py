"""The jobs of a cluster: one object each, joining what the queue says with what the Dask scheduler says.

`Dispatcher` is the one way to the batch system: it keeps the journal around every submit and knows every id that must be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distributed.deploy.spec import ProcessInterface

from hpcgpu.batch.base import AmbiguousSubmit, BatchError, BatchSystem, JobState, JobStatus
from hpcgpu.batch.monitor import Monitor, View
from hpcgpu.batch.reasons import explain
from hpcgpu.directory import ClusterDirectory, Contact

__all__ = ["ClusterError", "Dispatcher", "JobInfo", "SchedulerJob", "WorkerJob", "in_thread"]

_T = TypeVar("_T")
_SUBMITS_AT_ONCE = 4
_LOG_TAIL = 20


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked; the message holds job id, the queue's own words, and where the log is."""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job, for people.

    Attributes
    ----------
    id : str
        The batch system's id; empty while the submit is under way.
    kind : str
        ``"scheduler"`` or ``"worker"``.
    name : str
    state : str
    reason : str
        Why it waits or ended, in words.
    waited : float
        Seconds between submit and start, or until now.
    node : str
    workers : int
        Dask workers of it that are connected.
    log : Path
    """

    id: str
    kind: str
    name: str
    state: str
    reason: str
    waited: float
    node: str
    workers: int
    log: Path


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Run a blocking function in a daemon thread of its own.

    Not an executor: its threads are joined before atexit callbacks run, and a hanging queue command would keep the interpreter from
    cancelling the other jobs. At interpreter exit no thread can be started; the function then runs here.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=work, name=f"hpcgpu-{getattr(function, '__name__', 'call')}", daemon=True).start()
    except RuntimeError:
        return function(*arguments)
    return await future


class Dispatcher:
    """Submits, queries and cancels the jobs of one cluster.

    Parameters
    ----------
    batch : BatchSystem
    directory : ClusterDirectory
        Holds the journal: the intent is written before a submit, the id after it.
    """

    def __init__(self, batch: BatchSystem, directory: ClusterDirectory) -> None:
        self.batch = batch
        self.directory = directory
        self.monitor = Monitor(batch)
        self.submits = asyncio.Semaphore(_SUBMITS_AT_ONCE)
        self.cancelled: set[str] = set()
        self.closing = False
        self._ids: dict[str, str] = {}
        self._uncertain: set[str] = set()
        self._in_flight = 0
        self._changed = threading.Condition()

    async def submit(self, script: Path, *, name: str, kind: str, after: str | None = None) -> str:
        """Submit a job and watch it; see `BatchSystem.submit`. At most four commands run at a time."""
        async with self.submits:
            job_id = await in_thread(self._submit, script, name, kind, after)
        self.monitor.watch(job_id, name, now=time.time())
        return job_id

    def _submit(self, script: Path, name: str, kind: str, after: str | None) -> str:
        with self._changed:
            if self.closing:
                raise BatchError("the cluster is closing")
            self._in_flight += 1
        try:
            self.directory.intend(name, kind)
            try:
                job_id = self.batch.submit(script, job_name=name, after=after)
            except AmbiguousSubmit:
                self._uncertain.add(name)
                raise
            except BatchError:
                self.directory.refused(name)
                raise
            self._ids[name] = job_id  # first of all, so that nothing that fails below can lose it
            self.directory.submitted(name, job_id)
            if self.closing:  # while sbatch was under way
                self.cancelled.add(job_id)
                self.batch.cancel([job_id])
            return job_id
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

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
        await in_thread(lambda: self.batch.cancel(ids, only_pending=only_pending))

    def cancel_all(self, timeout: float) -> None:
        """Cancel every job of the cluster and keep new ones from being submitted. Blocks; works at interpreter exit too.

        Parameters
        ----------
        timeout : float
            Seconds to wait for submits that are under way; each cancels itself when it learns its id.

        Raises
        ------
        BatchUnavailable
            The queue did not take the cancellation.
        """
        self.closing = True
        ended = {job_id for job_id, view in self.monitor.views.items() if view.status.state.ended}
        ids = set(self._ids.values()) - ended
        self.cancelled |= ids
        try:
            if ids:
                self.batch.cancel(ids)
            for name in sorted(self._uncertain):
                self.batch.cancel(self.batch.find(name))
        finally:
            with self._changed:
                self._changed.wait_for(lambda: self._in_flight == 0, timeout)

    def left(self) -> list[str]:
        """Ids of the jobs that may still be in the queue, in the order of their submits."""
        alive = self.monitor.alive()
        return [i for i in self._ids.values() if i in alive or i not in self.monitor.views]


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
        return view.status

    @property
    def pending(self) -> bool:
        """Whether the job waits in the queue, as far as is known."""
        return not self.workers and self.queue_status.state is JobState.PENDING

    @property
    def log(self) -> Path:
        """The job's log, stdout and stderr."""
        return self.logs / f"{self.name}-{self.job_id}.log"

    def log_tail(self, lines: int = _LOG_TAIL) -> str:
        """Return the end of the log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError as error:
            return f"(no log at {self.log}: {error.strerror})"
        return "\n".join(text.splitlines()[-lines:])

    def info(self, *, now: float) -> JobInfo:
        """Describe the job."""
        status = self.queue_status
        state = JobState.RUNNING if self.workers and status.state is JobState.PENDING else status.state
        if self.job_id is None:
            reason = "it is being submitted"
        elif self.view is None or (not self.view.asked and not self.workers):
            reason = "the queue has not been asked about it yet"
        elif state is JobState.RUNNING:
            reason = ""
        else:
            reason = explain(status)
        submitted = self.view.submitted if self.view else self.created
        until = status.start if status.start and state is not JobState.PENDING else now
        return JobInfo(
            id=self.job_id or "",
            kind=self.kind,
            name=self.name,
            state=state.value,
            reason=reason,
            waited=max(0.0, until - submitted),
            node=status.node,
            workers=len(self.workers),
            log=self.log,
        )

    def obituary(self) -> str:
        """Return what happened to a job that ended, with the end of its log."""
        return (
            f"{self.kind} job {self.job_id} ({self.name}) {self.queue_status.state.value}: {explain(self.queue_status)}. "
            f"Log: {self.log}\n{self.log_tail()}"
        )

    async def close(self) -> None:
        """Cancel the job."""
        if self.job_id is not None:
            await self.dispatcher.cancel([self.job_id])
        await super().close()


class WorkerJob(Job):
    """A job of Dask workers. `start` returns once it is submitted.

    Parameters
    ----------
    after : callable
        Returns the id of the scheduler job while that has not started, else None.
    """

    kind = "worker"

    def __init__(self, dispatcher: Dispatcher, script: Path, name: str, logs: Path, after: Callable[[], str | None]) -> None:
        super().__init__(dispatcher, script, name, logs)
        self._after = after
        self.joined_at: float | None = None
        self.opening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Submit."""
        self.job_id = await self.dispatcher.submit(self.script, name=self.name, kind=self.kind, after=self._after())
        await super().start()

    def joined(self, address: str, worker: str, *, now: float) -> None:
        """Take note of a connected worker."""
        self.workers[address] = worker
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
