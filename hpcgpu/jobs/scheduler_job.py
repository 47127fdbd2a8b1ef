"""The job of the Dask scheduler: this program submits it, or attaches to a cluster that has it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path

from hpcgpu.batch.base import After, JobState
from hpcgpu.client import lost_scheduler
from hpcgpu.errors import ClusterError
from hpcgpu.jobs.job import Job, nodes_to_avoid
from hpcgpu.jobs.job_phases import Submitting
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling.scheduler_restarts import STANDBY, ended_too_early
from hpcgpu.store.contact import Contact

#: Seconds between two checks of the contact: the first ones, and at most.
_PAUSE, _LAST_PAUSE = 0.1, 1.0
#: Seconds by which a walltime ends earlier than before, if an operator has shortened it.
_SHORTENED = 60.0


class SchedulerJob(Job):
    """A scheduler in a job of the batch queue.

    Parameters
    ----------
    dispatcher, script, name, logs
        See `Job`.
    timeout : float
        Seconds that the running job may take to publish its contact.
    gpus : int, default 1
        GPUs that it requests.

    Attributes
    ----------
    restarts : bool
        Whether another scheduler job follows if it ends too early.
    standby : bool
        Whether it was submitted before it is needed, and takes over when the present scheduler job ends.
    after_end : str or None
        The job that must end before the queue starts this one.
    directives : sequence of str
        Its `job_extra_directives`.
    lost_node : str
        The node that failed under the last scheduler job, which this one avoids.
    """

    kind = "scheduler"
    in_process = False

    def __init__(
        self,
        dispatcher: Dispatcher,
        script: Path,
        name: str,
        logs: Path,
        timeout: float,
        gpus: int = 1,
    ) -> None:
        super().__init__(dispatcher, script, name, logs)
        self.timeout = timeout
        self.gpus = gpus
        self.restarts = self.standby = False
        self.after_end: str | None = None
        self.directives: Sequence[str] = ()
        self.lost_node = ""
        self.contact: Contact | None = None
        self.reached_at: float | None = None
        self.answers = False
        self._warned: set[str] = set()
        self._ends: float | None = None

    @property
    def address(self) -> str | None:
        """The address for workers."""
        return self.contact.workers if self.contact is not None else None

    @property
    def external_address(self) -> str | None:
        """The address for clients."""
        return self.contact.client if self.contact is not None else None

    @property
    def for_users(self) -> object:
        """The value of ``cluster.scheduler`` for users."""
        return self

    @property
    def entries(self) -> list[Job]:
        """Its entries in the queue."""
        return [self]

    @property
    def submit_done(self) -> bool:
        """Whether worker jobs may be submitted: they follow it directly."""
        return self.job_id is not None

    @property
    def dependency(self) -> str | None:
        """The job that worker jobs must wait for."""
        return self.job_id if self.contact is None else None

    @property
    def ended(self) -> bool:
        """Whether its job has ended."""
        return self.queue_status.state.ended

    @property
    def lost_too_early(self) -> bool:
        """Whether its job has ended, and another scheduler job should follow."""
        directory = self.dispatcher.directory
        return self.restarts and ended_too_early(self.queue_status.state) and not directory.closing

    @property
    def proven(self) -> bool:
        """Whether the scheduler answers, which proves that its job runs."""
        return self.answers

    @property
    def connected_at(self) -> float | None:
        """Epoch seconds at which the scheduler was reached."""
        return self.reached_at

    def record_answer(self, answers: bool) -> None:
        """Record whether the scheduler answers now."""
        self.answers = answers

    def end_is_near(self, *, now: float) -> str:
        """Return a warning that the walltime ends soon; empty otherwise.

        The first warning comes after four fifths of the walltime. Another comes when 15 min are left, if that is later.
        Another comes when an operator has shortened the walltime.
        """
        status = self.view.status if self.view is not None else self.queue_status
        # before the job runs, the queue's estimate of its end may change; while it is suspended, its end moves
        if status.state is not JobState.RUNNING or status.start is None or status.suspended:
            return ""
        if status.end is None:
            self._ends = math.inf
            return ""
        left, share = status.end - now, (status.end - status.start) / 5
        shortened = self._ends is not None and status.end < self._ends - _SHORTENED
        self._ends = status.end
        due = [mark for mark, limit in (("80 %", share), ("15 min", min(900.0, share))) if left <= limit]
        if not shortened and not set(due) - self._warned:
            return ""
        self._warned.update(due)
        minutes = f"{left / 60:.0f} min" if left >= 60 else "less than a minute"
        ends = f"{'was shortened: it ' * shortened}ends in {minutes}"
        what = ", and all results with it: another one follows" if self.restarts else ", and the cluster with it"
        return (
            f"the walltime of the scheduler job {self.job_id} {ends}{what}: fetch your results. Next time, request "
            "more with scheduler={'walltime': ...}"
        )

    def idleness(self, *, now: float) -> str:
        """Return what it waits for if it runs before its time."""
        return STANDBY if self.standby else ""

    def loss_report(self, cluster: str, *, restarts: bool = False) -> str:
        """Return the report for the user when its job has ended, for example because somebody cancelled it.

        Parameters
        ----------
        cluster : str
        restarts : bool, default False
            Whether another scheduler job follows.
        """
        consequence = lost_scheduler.RESTARTED if restarts else lost_scheduler.CANCELLED
        return lost_scheduler.loss(cluster, self.failure_report(), consequence)

    async def submit(self) -> None:
        """Submit it without a wait. A job to which this program attaches was submitted before."""
        if self.job_id is None:
            self.submitting(Submitting())
            after = After(self.after_end, ended=True) if self.after_end is not None else None
            avoided = nodes_to_avoid(self.directives, [self.lost_node] if self.lost_node else [])
            submit = self.dispatcher.submit(self.script, name=self.name, kind=self.kind, after=after, exclude=avoided)
            self.record_id(await submit)

    async def wait_until_reachable(self) -> None:
        """Wait for the contact. Time in the queue does not count.

        Raises
        ------
        ClusterError
            The job ended, or runs and publishes nothing.
        """
        pause, running_since = _PAUSE, None
        while self.contact is None:
            contact = await in_thread(self.dispatcher.directory.contact)
            if contact is not None and contact.job_id == self.job_id:
                self.contact = contact
                self.reached_at, self.answers = self.dispatcher.clock(), True
                self.observe(now=self.reached_at)
                return
            status = self.queue_status
            if status.state.ended:
                raise ClusterError(self.failure_report())
            if status.state is JobState.RUNNING:
                running_since = running_since or time.monotonic()
                if time.monotonic() - running_since > self.timeout:
                    raise ClusterError(
                        f"scheduler job {self.job_id} runs on {status.node}, but published no contact within "
                        f"{self.timeout:g} s. If {self.dispatcher.directory.path} is not on a filesystem that login "
                        f"and compute nodes share, set cluster_directory. Log: {self.log}\n{self.log_tail()}"
                    )
            await asyncio.sleep(pause)
            pause = min(_LAST_PAUSE, pause * 1.2)

    async def close(self) -> None:
        """Do nothing: its job is cancelled with all others."""
