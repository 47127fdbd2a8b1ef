"""The only access to the batch system: writes the journal around every submit, and has every id to cancel."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcgpu.batch.base import After, BatchSystem, JobState, JobStatus, state_named
from hpcgpu.display.counts_and_durations import MANY, listed
from hpcgpu.errors import AmbiguousSubmit, BatchError, BatchUnavailable, Damaged, NameLost, SubmitRefused, Superseded
from hpcgpu.options.shared_options_and_defaults import Options, WorkerOptions
from hpcgpu.polling.queue_monitor import GRACE, Monitor, View, presumed_ended
from hpcgpu.posix.full_disk import cannot_be_written
from hpcgpu.posix.threads import in_thread
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End, Submit
from hpcgpu.store.removed_directory import RemovalWatch

SUBMITS_AT_ONCE = 4
#: Seconds for which the queue must not have a job whose submit got no answer, before a cluster that ends counts it as
#: never submitted. While the cluster lives, it is `GRACE`, because the cluster would submit another job instead.
_LATE = 10.0
#: How often a living cluster still queries the queue for such a job, and the seconds between: it may come after all.
_LATE_QUERIES, _LATE_INTERVAL = 12, 300.0


class Ending(enum.Enum):
    """How far the end of all jobs of a cluster is."""

    NONE = "the cluster continues"
    REQUESTED = "no job is submitted any more; the queue has not cancelled all jobs yet"
    CANCELLED = "the queue has cancelled all jobs"
    OVERTAKEN = "the jobs belong to another program by now"


@dataclass(frozen=True)
class Cancel:
    """A cancel that this program has sent to the batch system for a job.

    Attributes
    ----------
    at : float
        Epoch seconds.
    only_pending : bool
        It has no effect on a job that runs.
    refused : bool
        The queue has refused it, or its answer is lost: it may have cancelled the job nevertheless.
    forgotten : bool
        The queue had forgotten the job before, so this cancel did not end it.
    """

    at: float
    only_pending: bool = False
    refused: bool = False
    forgotten: bool = False


@dataclass
class _Unanswered:
    """A submit that got no answer: how many answers of the queue did not show its job, the first and the last one.

    `late_queries` are the answers since the job counts as never submitted.
    """

    answers: int = 0
    first: float = math.inf
    last: float = -math.inf
    late_queries: int = 0

    def missed(self, *, now: float) -> None:
        """Record an answer of the queue without the job."""
        self.late_queries += self.never_accepted(GRACE)
        self.answers, self.first, self.last = self.answers + 1, min(self.first, now), now

    def due(self, *, now: float) -> bool:
        """Whether to look the job up: at each poll until it counts as never submitted, then seldom, for an hour."""
        seldom = self.late_queries < _LATE_QUERIES and now - self.last >= _LATE_INTERVAL
        return seldom or not self.never_accepted(GRACE)

    def never_accepted(self, grace: float) -> bool:
        """Whether the queue has answered for so long without the job that it counts as never submitted."""
        return presumed_ended(missing=self.last - self.first, answers=self.answers, grace=grace)


class Dispatcher:
    """Submits, queries and cancels the jobs of one cluster.

    Parameters
    ----------
    batch : BatchSystem
    directory : ClusterDirectory
        Holds the journal: the intent is written before a submit, the id after it.
    manager : int
        Number of this program among the cluster's managers; see `ClusterDirectory.take_over`.
    clock : callable, default time.time
        Returns epoch seconds.
    """

    def __init__(
        self, batch: BatchSystem, directory: ClusterDirectory, manager: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self.batch = batch
        self.directory = directory
        self.token = directory.token()
        self._gone = RemovalWatch(directory, self.token)
        self.manager = manager
        self.monitor = Monitor(batch)
        self.submits = asyncio.Semaphore(SUBMITS_AT_ONCE)
        #: The last cancel of each job, by id.
        self.cancels: dict[str, Cancel] = {}
        self.ending = Ending.NONE
        self._ids: dict[str, str] = {}
        self._unanswered: dict[str, _Unanswered] = {}
        self._in_flight: set[str] = set()
        self.problem = ""
        self._changed = threading.Condition()

    @property
    def closing(self) -> bool:
        """Whether all jobs must end, so that none is submitted any more."""
        return self.ending is not Ending.NONE

    def adopt(self, name: str, job_id: str, *, submitted: float) -> None:
        """Take over a job that an earlier manager submitted."""
        self._ids[name] = job_id
        self.monitor.watch(job_id, name, now=submitted)

    def adopt_ended(self, submit: Submit) -> None:
        """Take over a job that has ended, as the journal reports."""
        assert submit.job_id is not None
        how = submit.how or End(state=JobState.UNKNOWN.value)
        state = state_named(how.state)
        status = JobStatus(
            job_id=submit.job_id,
            name=submit.name,
            state=state if state.ended else JobState.FAILED,
            start=how.start,
            end=how.end,
        )
        self._ids[submit.name] = submit.job_id
        self.monitor.views[submit.job_id] = View(status, submit.time)

    def forget(self, name: str) -> None:
        """Forget a job that the queue has reported as ended; the journal has it."""
        job_id = self._ids.pop(name, "")
        self.cancels.pop(job_id, None)
        self.monitor.views.pop(job_id, None)

    def cancelled(self, job_id: str | None) -> bool:
        """Whether this program cancels a job now, or has cancelled it.

        A cancel of pending jobs, and a refused one, may have no effect, so they do not count.
        """
        cancel = self.cancels.get(job_id or "")
        return cancel is not None and not (cancel.only_pending or cancel.refused)

    def cancel_had_no_effect(self, job_id: str) -> None:
        """Forget a cancel of pending jobs, or a refused one, of a job that runs."""
        if not self.cancelled(job_id):
            self.cancels.pop(job_id, None)

    def expect(self, name: str) -> None:
        """Look up, from now on, a job whose submit got no answer, or none that this program has seen."""
        self._unanswered[name] = _Unanswered()

    def expects(self, name: str) -> bool:
        """Whether it is not known if the queue has the job of that name."""
        return name in self._unanswered

    def id_of(self, name: str) -> str | None:
        """Return the id of the job of that name; None before it is known."""
        return self._ids.get(name)

    def check_manager(self) -> None:
        """Raise `Superseded` or `NameLost` if the cluster or its name now belongs to another program.

        `Superseded`: another program has taken the cluster over. `NameLost`: a later cluster has the name, or the
        directory was removed.
        """
        if not self.directory.is_of(self.token):
            raise NameLost(
                f"cluster {self.directory.path.name} cannot continue, because another cluster now has its name and its "
                f"directory {self.directory.path}"
            )
        if why := self._gone.check(now=self.clock()):
            raise NameLost(f"cluster {self.directory.path.name} cannot continue, because {why}")
        latest = self.directory.manager()
        if latest is not None and latest.number > self.manager:
            raise Superseded(
                f"cluster {self.directory.path.name} was taken over by {latest}; this program no longer scales it. "
                f"from_name({self.directory.path.name!r}) takes it back"
            )

    async def submit(
        self,
        script: Path,
        *,
        name: str,
        kind: str,
        group: str = "default",
        after: After | None = None,
        exclude: Collection[str] = (),
    ) -> str:
        """Submit a job and watch it; see `BatchSystem.submit`. At most four commands run at a time.

        Raises
        ------
        Superseded
            Another program manages the cluster.
        """
        async with self.submits:
            return await in_thread(self._submit, script, name, kind, group, after, exclude)

    def _submit(
        self, script: Path, name: str, kind: str, group: str, after: After | None, exclude: Collection[str]
    ) -> str:
        with self._changed:
            if self.closing:
                raise BatchError("the cluster is closing")
            self._in_flight.add(name)
        try:
            self.check_manager()
            self.directory.intend(name, kind, group, after.job_id if after is not None and after.ended else "")
            try:
                # after the intent: a program that takes over now either reads the intent, or is detected here
                self.check_manager()
                job_id = self._submit_to_queue(script, name, kind, after, exclude)
            except AmbiguousSubmit:
                self.expect(name)
                raise
            except NameLost:  # the journal belongs to another cluster by now
                raise
            except BatchError as error:
                self.directory.refused(name, str(error))
                raise
            # Keep the id first, so that no failure below can lose it.
            self._ids[name] = job_id
            self.monitor.watch(job_id, name, now=self.clock())
            # if this write fails, the intent is on disk: the job can be found by its name
            self._note(self.directory.submitted, name, job_id)
            if self.closing:  # the close began while sbatch ran
                self._record_cancel({job_id})
                self.batch.cancel([job_id])
            else:
                self._leave_none_behind(name, job_id)
            return job_id
        finally:
            with self._changed:
                self._in_flight.discard(name)
                self._changed.notify_all()

    def _submit_to_queue(
        self, script: Path, name: str, kind: str, after: After | None, exclude: Collection[str]
    ) -> str:
        logs, wanted = saved_options.logs(self.directory), lambda: not self.closing
        submit = partial(self.batch.submit, script, job_name=name, logs=logs, after=after, wanted=wanted)
        try:
            return submit(exclude=exclude)
        except SubmitRefused:
            # Slurm refuses a job that no other node can run: without a scheduler the cluster would be lost.
            if not exclude or kind != "scheduler":
                raise
            return submit(exclude=())

    def _leave_none_behind(self, name: str, job_id: str) -> None:
        """Cancel a job that was submitted while another manager took over, or while the name was lost.

        Possibly no other program has a record of the job.
        """
        try:
            self.check_manager()
        except (Superseded, NameLost) as error:
            self._record_cancel({job_id})
            if isinstance(error, Superseded):
                self._note(self.directory.cancel, [name])  # for the new manager, if it has read the intent
            self.batch.cancel([job_id])
            raise

    def will_cancel(self, names: Collection[str]) -> None:
        """Record in the journal that these jobs are no longer wanted, before the first action.

        A manager that takes the cluster over then completes what this one began. It treats the jobs neither as wanted
        nor as failed.

        Raises
        ------
        Superseded
            Another program manages the cluster.
        """
        self.check_manager()
        self._note(self.directory.cancel, names)

    def keep(self, names: Collection[str]) -> None:
        """Revoke `will_cancel`, unless another program manages the cluster: then that program decides."""
        with contextlib.suppress(Superseded, NameLost):
            self.check_manager()
            self._note(self.directory.keep, names)

    def save_groups(self, options: Options, groups: Mapping[str, WorkerOptions]) -> None:
        """Write the options of the worker groups into the cluster directory."""
        self._note(saved_options.write, self.directory, options, groups)

    def note_ends(self, jobs: Mapping[str, str | None]) -> None:
        """Write into the journal that jobs have ended, and how, in one write; ids by name.

        For a job that the queue forgot, the end is the time when it was first missing. The cause is our cancel, or it
        is unknown.
        """
        how = {name: end for name, id_ in jobs.items() if id_ is not None and (end := self._end(id_)) is not None}
        self._note(self.directory.ended, jobs, how)

    def _end(self, job_id: str) -> End | None:
        view = self.monitor.views.get(job_id)
        if view is None or not (view.status.state.ended or view.missing_since is not None):
            return None
        cancelled = self.cancelled(job_id) and not self.cancels[job_id].forgotten
        return End.of(view.status, gone=view.missing_since, cancelled=cancelled)

    def _note(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write into the cluster directory; a full disk is only reported.

        Nothing is written into the directory of a later cluster of this name.
        """
        try:
            if self.directory.is_of(self.token):
                write(*arguments)
        except OSError as error:
            self.problem = cannot_be_written(self.directory.path, error)

    async def poll(self, job_ids: Collection[str] | None = None) -> None:
        """Query the queue once for these jobs (default: all that have not ended) and record its answer."""
        alive = self.monitor.alive()
        answer = await in_thread(self.monitor.query, alive if job_ids is None else alive & frozenset(job_ids))
        waits = any(not one.never_accepted(GRACE) for one in list(self._unanswered.values()))
        self.monitor.record(answer, now=self.clock(), waiting=True if waits else None)

    def to_look_up(self) -> list[str]:
        """Return the jobs whose submit got no answer, and which are to be looked up now.

        A close looks up all of them: it is the last chance to find a job that the queue accepted much later.
        """
        now = self.clock()
        return [name for name, one in list(self._unanswered.items()) if self.closing or one.due(now=now)]

    async def look_up(self, name: str) -> Submit | None:
        """Look up a job in the queue whose submit got no answer.

        Returns
        -------
        Submit or None
            What is new; None if it is not known yet whether the queue has the job. Without an id, the job counts as
            never submitted. The journal then records that it is not wanted: a later manager ends it if it appears.
            If it appears while this program manages the cluster, it is a job like any other.

        Raises
        ------
        BatchError
            The queue does not answer, or the cluster or its name belongs to another program.
        """
        return await in_thread(self._look_up, name)

    def _look_up(self, name: str) -> Submit | None:
        self.check_manager()  # a job of this name might be another cluster's
        one = self._unanswered.get(name)
        if one is None:  # another thread has found it
            return None
        late = one.never_accepted(GRACE)
        # read each time: an earlier manager that still lives writes the outcome of its submit
        submit = {kept.name: kept for kept in self.directory.submits()}.get(name) or Submit(name, "worker")
        if submit.refused:
            self._unanswered.pop(name, None)
            return submit
        if ids := [submit.job_id] if submit.job_id is not None else self.batch.find(name):
            self._found(name, ids)
            if late and submit.job_id is None and not self.closing and submit.kind == "worker":
                self._note(self.directory.keep, [name])
                submit = replace(submit, unwanted=False)
            return replace(submit, job_id=ids[-1])
        one.missed(now=self.clock())
        if self.closing and one.never_accepted(_LATE):
            self._unanswered.pop(name, None)
        elif one.never_accepted(GRACE) and not late:
            self._note(self.directory.cancel, [name])
            return submit
        return None

    def _found(self, name: str, ids: list[str]) -> None:
        """Record the job of a submit that got no answer; cancel it if the cluster is closing.

        Raises
        ------
        BatchError
            The queue has accepted several attempts of the submit, and does not cancel the others. They are looked up
            again.
        """
        if ids[:-1]:
            self.batch.cancel(ids[:-1])
        self._ids[name] = ids[-1]
        self.monitor.watch(ids[-1], name, now=self.clock())
        self._unanswered.pop(name, None)
        self._note(self.directory.submitted, name, ids[-1])
        if self.closing:
            self.batch.cancel(ids[-1:])
            self._record_cancel(ids)

    async def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False, forgotten: bool = False) -> None:
        """Cancel jobs by one command; skip jobs that are already cancelled or have ended.

        With `forgotten`, also those that only count as ended, because the queue does not show them: it may be wrong.
        """
        not_ended = set(job_ids) - self.monitor.ended()
        alive = self.monitor.alive()
        ids = {i for i in (not_ended if forgotten else not_ended & alive) if not self.cancelled(i)}
        if not ids:
            return
        # a cancel is not why the queue has forgotten the others
        self._record_cancel(ids & alive, only_pending=only_pending)
        try:
            await in_thread(self._cancel, ids, only_pending)
        except BatchError:
            self._refused(ids)
            raise

    def _cancel(self, ids: set[str], only_pending: bool) -> None:
        self.check_manager()
        self.batch.cancel(ids, only_pending=only_pending)

    def cancel_all(self, timeout: float, why: str = "") -> None:
        """Cancel every job of the cluster, and refuse new ones.

        Blocks. It also works at interpreter exit.

        Directly after the cancel command it removes the credentials and marks the directory: this program may be killed
        while it waits. If another program manages the cluster by now, it does nothing, because the jobs belong to that
        program. If the name was lost, it cancels the jobs that this program submitted.

        Parameters
        ----------
        timeout : float
            Seconds to wait for submits that are under way; each cancels its job when it gets the id.
        why : str, optional
            Why the cluster ends, if no person wanted that.

        Raises
        ------
        BatchUnavailable
            The queue did not accept the cancellation, or a submit is still under way.
        """
        self.ending, named = Ending.REQUESTED, True
        with contextlib.suppress(OSError):
            try:
                self.check_manager()
            except Superseded:
                self.ending = Ending.OVERTAKEN
                return
            except NameLost:
                named = False
        ids = set(self._ids.values()) - self.monitor.ended()
        new = {job_id for job_id in ids if not self.cancelled(job_id)}
        self._record_cancel(new)
        problems = []
        try:
            if ids:
                self.batch.cancel(ids)
        except BatchError as error:
            self._refused(new)
            problems.append(str(error))
        if named:
            self._lock_out(why)
        # if the name was lost, a job of that name would belong to the other cluster
        for name in self.to_look_up() if named else ():
            try:
                self._look_up(name)
            except (BatchError, OSError) as error:
                problems.append(f"it is not known whether job {name!r} exists: {error}")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_flight, timeout):
                problems.append(f"the submission of {listed(sorted(self._in_flight), ', ')} is still under way")
        if problems:
            raise BatchUnavailable("; ".join(problems))
        self.ending = Ending.CANCELLED

    def _record_cancel(self, ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Record a cancel before it is sent: its answer may be lost."""
        now, over = self.clock(), math.inf
        with contextlib.suppress(OSError, Damaged):
            over = self.directory.ended_at() or math.inf  # stopped by another program
        for job_id in ids:
            since = self._missing_since(job_id)
            self.cancels[job_id] = Cancel(now, only_pending, forgotten=since is not None and since < over)

    def _refused(self, ids: Iterable[str]) -> None:
        self.cancels |= {i: replace(self.cancels[i], refused=True) for i in ids if i in self.cancels}

    def _missing_since(self, job_id: str) -> float | None:
        view = self.monitor.views.get(job_id)
        return view.missing_since if view is not None else None

    def _lock_out(self, why: str) -> None:
        """Remove the credentials, and mark the directory: no job of this cluster can start any more."""
        with contextlib.suppress(OSError):
            self.directory.remove_secrets()
            if not self.directory.closing:
                self.directory.begin_close(why)

    def advice(self) -> str:
        """Return advice for the user: how to cancel the remaining jobs."""
        with contextlib.suppress(OSError):
            if not self.directory.is_of(self.token):  # `hpcgpu stop` would stop the other cluster
                left = self.left()
                which = f": {' '.join(left)}" if len(left) > MANY else ""  # the message names only the first jobs
                return f"Cancel them with the batch system's own command{which}"
        return f"`hpcgpu stop {self.directory.in_shell}` cancels what is left"

    def left(self) -> list[str]:
        """Return the jobs that may still be in the queue.

        These are ids in the order of submission, and names of jobs whose id is not known.
        """
        gone = self.gone()
        return [i for i in list(self._ids.values()) if i not in gone] + sorted(
            self._unanswered.keys() | self._in_flight
        )

    def gone(self) -> frozenset[str]:
        """Return the ids of jobs that have ended. An unknown job counts as ended only if it was cancelled."""
        cancelled = filter(self.cancelled, list(self.cancels))
        return self.monitor.ended() | {i for i in cancelled if self._missing_since(i) is not None}
