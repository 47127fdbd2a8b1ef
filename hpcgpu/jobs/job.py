"""One job of a cluster: combines the reports of the queue and of the Dask scheduler into one phase."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import OWN_CANCEL, cancel_of_ours, explain
from hpcgpu.display.job_info import JobInfo
from hpcgpu.existing_clusters.describe_jobs import job_info
from hpcgpu.jobs.job_phases import Active, Draining, Ended, Phase, Planned, Queued, Running, Submitting, Work
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.polling.queue_monitor import View
from hpcgpu.posix import checked_files
from hpcgpu.posix.full_disk import is_full
from hpcgpu.posix.printable import printable
from hpcgpu.scaling.decide_actions import Drain

#: Most lines and characters of a log that are shown, and how many bytes at its end are read to find them.
_LOG_TAIL, _LOG_LENGTH, _LOG_READ = 20, 8000, 2**20
#: What Slurm without cgroups (seen on 22.05.8, where the state
#: is FAILED), and the kernel's killer, write into a job's log.
_MEMORY_KILL = re.compile(r"exceeded (job )?memory limit|oom[-_ ]kill|out[- ]of[- ]memory handler", re.IGNORECASE)
#: Why a job that must end still runs.
HELD = "it ends when a program that holds its workers lets them go"
#: What `hpcgpu.runtime.stage` writes if it unpacks an environment into memory.
_IN_MEMORY = re.compile(r"hpcgpu: unpacking .* into (\S+), which is memory")
#: What our own extension of the scheduler writes when something is wrong.
_OWN_WORDS = "distributed.hpcgpu - ERROR"
#: Most characters of that error that a report repeats.
_MESSAGE_LENGTH = 300


def nodes_to_avoid(directives: Iterable[str], lost: Collection[str]) -> list[str]:
    """Return the nodes that a job avoids: those on which jobs were lost, and those that the directives exclude.

    Empty if none was lost: then the directives of the script count.
    """
    own: list[str] = []
    for text in directives if lost else ():
        option, _, value = text.replace("=", " ", 1).strip().partition(" ")
        if option in ("-x", "--exclude"):
            own += shlex.split(value)
    return [*own, *lost]


class Job:
    """A job in a batch queue.

    Parameters
    ----------
    dispatcher : Dispatcher
    script : Path
    name : str
        Name of the job. The names of its workers are equal to it, or begin with it.
    logs : Path
        Directory of the logs.

    Attributes
    ----------
    phase : Phase
        Where it is between planned and ended.
    job_id : str or None
        The batch system's id; None before the submit.
    workers : dict of str to str
        Names of its connected workers by address.
    released : bool
        Whether the user has requested that this very job ends, by the names of its workers.
    """

    kind = ""
    #: GPUs that it requests.
    gpus = 0

    def __init__(self, dispatcher: Dispatcher, script: Path, name: str, logs: Path) -> None:
        self.dispatcher = dispatcher
        self.script = script
        self.name = name
        self.logs = logs
        self.created = dispatcher.clock()
        self.phase: Phase = Planned()
        self.job_id: str | None = None
        self.workers: dict[str, str] = {}
        self.released = False

    def __repr__(self) -> str:
        return f"<{self.kind} job {self.job_id or self.name}: {type(self.phase).__name__.lower()}>"

    # Transitions

    def submitting(self, phase: Submitting) -> None:
        """Planned -> submitting."""
        assert isinstance(self.phase, Planned), self.phase
        self.phase = phase

    def record_id(self, job_id: str, *, presumed_ended: bool = False, wait_known: bool = False) -> None:
        """Planned or submitting -> queued: the batch system has the job. A job that drains continues to drain."""
        self.job_id = job_id
        queued = Queued(presumed_ended=presumed_ended, wait_known=wait_known)
        if isinstance(self.phase, Draining):
            self.phase.before = queued
        else:
            self.phase = queued

    def observe(self, *, now: float) -> None:
        """Move on to the phase that the queue and the connected workers prove."""
        if self.job_id is None:
            return
        if self.proven:
            self.dispatcher.monitor.proven(self.job_id)
        phase, status = self.phase, self.queue_status
        if isinstance(phase, Ended):
            # the queue had only forgotten the job, and one of its processes is connected again
            if not status.state.ended:
                self.dispatcher.cancel_had_no_effect(self.job_id)
                self.phase = Running(phase.work, proven_after=self.view)
        elif status.state.ended:
            self._end(status, now=now)
        elif isinstance(phase, Draining):
            phase.before = self._observed(phase.before, status.state, self.job_id, now=now)
        else:
            self.phase = self._observed(phase, status.state, self.job_id, now=now)

    def _observed(self, phase: Active, state: JobState, job_id: str, *, now: float) -> Active:
        if isinstance(phase, Queued) and (self.proven or state in (JobState.RUNNING, JobState.COMPLETING)):
            if state is not JobState.COMPLETING:  # a job that is completing may never have run
                self.dispatcher.cancel_had_no_effect(job_id)
            phase = Running(Work(wait_known=phase.wait_known), phase.retry_at)
        elif isinstance(phase, Running) and state is JobState.PENDING:
            # requeued: the data of its workers is lost, and the time of its first run does not count as a wait
            phase = Queued(retry_at=phase.retry_at, wait_known=True)
            self.dispatcher.cancel_had_no_effect(job_id)
        if isinstance(phase, Running) and self.proven:
            phase.proven_after = self.view
        if isinstance(phase, Running) and self.workers:
            phase.work.joined_at = phase.work.joined_at or now
        return phase

    def _end(self, status: JobStatus, *, now: float) -> None:
        phase = self.phase
        before = phase.before if isinstance(phase, Draining) else phase
        drained = isinstance(phase, Draining) or self._cancel_confirmed
        at = self.cancelled_at or (status.end if status.end is not None and status.end <= now else now)
        presumed = isinstance(before, Queued) and before.presumed_ended
        self.phase = Ended(at, self.work, drained=drained, presumed=presumed)

    def drain(self, why: Drain, *, begun: bool = True) -> None:
        """Planned, submitting, queued or running -> draining."""
        assert not isinstance(self.phase, Draining | Ended), self.phase
        self.phase = Draining(self.phase, why, begun=begun)

    def return_to_plan(self, *, retry_at: float = 0.0) -> None:
        """Draining -> what it was before; it is not drained again before `retry_at`."""
        if isinstance(self.phase, Draining):
            self.phase = self.phase.before
            if isinstance(self.phase, Queued | Running):
                self.phase.retry_at = retry_at

    # From the phase

    @property
    def work(self) -> Work:
        """What its workers do, or did. Empty before the job runs."""
        phase = self.phase.before if isinstance(self.phase, Draining) else self.phase
        return phase.work if isinstance(phase, Running | Ended) else Work()

    @property
    def cancelled_at(self) -> float | None:
        """Epoch seconds at which it was cancelled, if it drains: the queue may report it for longer."""
        cancelled = isinstance(self.phase, Draining) and self.dispatcher.cancelled(self.job_id)
        return self.dispatcher.cancels[self.job_id or ""].at if cancelled else None

    @property
    def draining(self) -> bool:
        """Whether it drains."""
        return isinstance(self.phase, Draining)

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return not isinstance(self.phase, Ended)

    @property
    def active(self) -> bool:
        """Whether it is neither draining nor ended."""
        return not isinstance(self.phase, Draining | Ended)

    @property
    def submit_task(self) -> asyncio.Task[None] | None:
        """The task that submits it, while the submit is under way."""
        phase = self.phase.before if isinstance(self.phase, Draining) else self.phase
        return phase.task if isinstance(phase, Submitting) else None

    @property
    def lost_workers(self) -> bool:
        """Whether it lacks workers for good."""
        return self.work.lost_at is not None

    @property
    def retry_at(self) -> float:
        """Epoch seconds before which it is not drained again."""
        return self.phase.retry_at if isinstance(self.phase, Queued | Running) else 0.0

    # From the queue

    @property
    def proven(self) -> bool:
        """Whether one of its processes is connected, which proves that it runs."""
        return bool(self.workers)

    @property
    def view(self) -> View | None:
        """The last report of the queue on this job."""
        return self.dispatcher.monitor.views.get(self.job_id or "")

    @property
    def queue_status(self) -> JobStatus:
        """The queue's status. A process that is connected, or was connected after the report, proves that it runs."""
        view = self.view
        if view is None:
            state = JobState.RUNNING if self.proven else JobState.PENDING
            return JobStatus(job_id="", state=state, name=self.name, reason="")
        waits = view.status.state is JobState.PENDING
        if (self.proven and (waits or view.missing_since is not None)) or (waits and self._proven_after(view)):
            return replace(view.status, state=JobState.RUNNING, reason="", expected_start=None)
        return view.status

    def _proven_after(self, view: View) -> bool:
        """Whether one of its processes was connected after the queue sent this report."""
        phase = self.phase.before if isinstance(self.phase, Draining) else self.phase
        return isinstance(phase, Running) and phase.proven_after is view

    @property
    def pending(self) -> bool:
        """Whether the job waits in the queue, as far as is known."""
        return self.queue_status.state is JobState.PENDING

    @property
    def submitted(self) -> float:
        """Epoch seconds of its submit."""
        return self.view.submitted if self.view else self.created

    def seconds_used(self, *, now: float) -> float:
        """Return how long it has run."""
        status = self.queue_status
        if status.state is JobState.PENDING:
            return 0.0
        until = self.phase.at if isinstance(self.phase, Ended) else self.cancelled_at or now
        began = status.start or self.work.joined_at
        return max(0.0, until - began) if began is not None else 0.0

    # For people

    @property
    def log(self) -> Path:
        """The job's log, stdout and stderr."""
        return self.logs / self.dispatcher.batch.log_name(self.name, self.job_id or "")

    def _log_end(self) -> str:
        try:
            return checked_files.end(self.log, _LOG_READ).decode(errors="replace")
        except OSError as error:
            return f"(no log at {self.log}: {error.strerror})"

    def log_tail(self, node: int | None = None) -> str:
        """Return the end of the log, and before it the errors of our scheduler extension.

        With `node`, return only the lines of that node, if the log labels them.
        """
        found = self._log_end().splitlines()
        if node is not None:  # `srun` reports a failed task: "srun: error: n1: task 1: Exited with exit code 3"
            found = [line for line in found if line.startswith(f"{node}: ") or f": task {node}: " in line] or found
        # the line with the cause, which is above the many lines of the shutdown
        messages = [line for line in found[:-_LOG_TAIL] if _OWN_WORDS in line]
        return printable("\n".join([*messages[-1:], *found[-_LOG_TAIL:]]), _LOG_LENGTH, lines=True)

    @property
    def _cancel_confirmed(self) -> bool:
        """Whether hpcgpu sent a cancel, also one without an answer, and the queue confirms it or has forgotten the job.

        Some queues forget a cancelled job at once.
        """
        forgotten = self.view is not None and self.view.missing_since is not None
        gone = self.queue_status.state is JobState.CANCELLED or forgotten
        return gone and self.job_id in self.dispatcher.cancels

    def info(self, *, now: float) -> JobInfo:
        """Describe the job as it is now. It is never shown as pending or running if that is known to be wrong."""
        status = self.queue_status
        state = status.state
        ends = state is JobState.COMPLETING or not (state.ended or self.proven)
        if ends and self.dispatcher.cancelled(self.job_id):
            state, reason = JobState.COMPLETING, OWN_CANCEL
        elif self.job_id is None:
            reason = "it is being submitted"
            if self.dispatcher.expects(self.name):
                reason = "it is not known yet whether the queue has it"
        elif state is JobState.PENDING and (self.view is None or not self.view.polled):
            reason = "the queue has not reported it yet"
        elif state is JobState.RUNNING and not status.halted:
            held = isinstance(self.phase, Draining) and self.phase.held_by_program
            reason = HELD if held else self.shortage(now=now) or self.idleness(now=now)
        elif cancel_of_ours(state, decided=self.dispatcher.cancelled(self.job_id) or self._cancel_confirmed):
            state, reason = JobState.CANCELLED, OWN_CANCEL
        else:
            reason = explain(status, kind=self.kind)
        return job_info(
            status,
            state,
            id=self.job_id or "",
            kind=self.kind,
            name=self.name,
            group=self.group_name,
            reason=reason,
            submitted=self.submitted,
            began=self._began(state),
            ended=self.phase.at if isinstance(self.phase, Ended) else None,
            workers=len(self.workers),
            log=self.log,
            gpus=self.gpus,
            usual_wait=self.usual_wait if state is JobState.PENDING else None,
            now=now,
        )

    @property
    def group_name(self) -> str:
        """The name of its worker group; empty if it is not a worker job."""
        return ""

    @property
    def usual_wait(self) -> float | None:
        """Seconds that jobs of this kind waited before."""
        return None

    def _began(self, state: JobState) -> float | None:
        """Return the time from which it runs, by the queue or by its first process; None while it waits."""
        return None if state is JobState.PENDING else self.queue_status.start or self.connected_at

    @property
    def connected_at(self) -> float | None:
        """Epoch seconds at which its first process was connected."""
        return self.work.joined_at

    def shortage(self, *, now: float) -> str:
        """Return what a running job lacks; empty if it lacks nothing."""
        return ""

    def idleness(self, *, now: float) -> str:
        """Return when a running job ends because it has no work; empty if it does not."""
        return ""

    def failure_report(self) -> str:
        """Return what happened to a job that ended, in one self-contained line, and the end of its log."""
        tail = self.log_tail()
        messages = [line.partition(f"{_OWN_WORDS} - hpcgpu: ")[2][:_MESSAGE_LENGTH] for line in tail.splitlines()]
        full = self.queue_status.state is JobState.FAILED and is_full(self.logs)
        why = "; ".join(
            [
                self._how_it_ended(),
                *[words for words in messages if words][:1],
                *[f"the disk of {self.logs} is full, so its log may lack the reason"] * full,
            ]
        )
        return f"{self.kind} job {self.job_id} ({self.name}) {why}. Log: {self.log}\n{tail}"

    @property
    def killed_for_memory(self) -> bool:
        """Whether its log shows that it used more memory than its limit."""
        return _MEMORY_KILL.search(self.log_tail()) is not None

    def _how_it_ended(self) -> str:
        status, dispatcher = self.queue_status, self.dispatcher
        # by this program, or by another program that stopped the whole cluster
        decided = dispatcher.cancelled(self.job_id)
        if cancel_of_ours(status.state, decided=decided, ended=status.end, closed=dispatcher.directory.ended_at()):
            return f"{JobState.CANCELLED.value}: {OWN_CANCEL}"
        if status.state is JobState.FAILED and self.killed_for_memory:
            status = replace(status, state=JobState.OUT_OF_MEMORY)
        text = f"{self.queue_status.state.value}: {explain(status, kind=self.kind)}"
        if status.state is JobState.OUT_OF_MEMORY and (staged := _IN_MEMORY.search(self._log_end())):
            text += (
                f"; {staged[1]}, where its environment is, is memory too: set `local_directory` to a disk of the node"
            )
        return text
