"""A scheduler job that was submitted before the present one has ended: it waits until then.

A dependency on the present job would hold it in the queue instead. But a job that is held gains no priority by its age
on Slurm (without ``ACCRUE_ALWAYS``) and PBS, so that it would begin to wait when it is needed. So only the next job of
a detached cluster is held like that, for an end that nobody expects: its manager may end with the scheduler job.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus, OwnJob, state_named
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.errors import BatchError, LaunchError
from hpcgpu.polling.poll_interval import Cadence
from hpcgpu.posix.full_disk import file_error
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime.scheduler_connection import (
    ConnectionResult,
    SchedulerWatch,
    check_alone,
    check_wanted,
    identify,
    proves_life,
)
from hpcgpu.scaling.scheduler_restarts import STANDBY, ended_too_early, too_many
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End, Submit
from hpcgpu.store.present_scheduler import present_scheduler, unexpected_ends

#: Seconds between two checks of the journal, and between two connections to the scheduler.
_INTERVAL, _PROBE = 2.0, 10.0
#: Seconds for which connections are refused until the scheduler counts as ended, if no program manages the cluster and
#: the queue cannot be queried.
_REFUSED = 120.0
#: Seconds for which the files of the cluster may be unusable, at least: a shared filesystem can fail for a while.
_UNUSABLE = 600.0
#: Bytes of a file that must fit into the cluster directory before a scheduler starts.
_ROOM = 65536


def wait_until_alone(directory: ClusterDirectory, batch: BatchSystem, own: OwnJob, timeout: float = _UNUSABLE) -> None:
    """Wait until the present scheduler job has ended, if this one was submitted to follow it.

    The manager writes the end into the journal. If there is no manager any more, the queue reports it, and this job
    writes it.

    A scheduler without room for its contact would be reached by nobody. So this waits for room, as long as the worker
    jobs wait for a scheduler.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    own : OwnJob
    timeout : float, optional
        Seconds for which the files of the cluster may be unusable, if that is longer than ten minutes.

    Raises
    ------
    LaunchError
        The cluster has ended, this job is not needed any more, another job runs the scheduler, or the files of the
        cluster cannot be read or written.
    """
    timeout = max(timeout, _UNUSABLE)
    standby = _Standby(directory, batch, own)
    failing_since: float | None = None
    while True:
        now = time.monotonic()
        try:
            if standby.may_start(now=now):
                directory.write("room", bytes(_ROOM)).unlink()
                return
            failing_since = None
        except (OSError, ValueError) as error:  # a filesystem that fails for a while proves nothing
            why = file_error(error) if isinstance(error, OSError) else str(error)
            if failing_since is None:
                failing_since = now
                write_stderr(f"{why}. This job tries again, for {duration(timeout)} at most")
            elif now - failing_since > timeout:
                unusable = f"the files of cluster {directory.path.name} have not been usable for {duration(timeout)}"
                raise LaunchError(f"{unusable}: {why}. This job ends") from error
        time.sleep(_INTERVAL)


class _Standby:
    """This scheduler job, before it starts its scheduler.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    own : OwnJob
    """

    def __init__(self, directory: ClusterDirectory, batch: BatchSystem, own: OwnJob) -> None:
        self._directory, self._batch, self._own_job = directory, batch, own
        self._present: _Present | None = None
        self._planned = False

    def may_start(self, *, now: float) -> bool:
        """Whether it is time to start the scheduler.

        Raises
        ------
        LaunchError
            It never will be.
        OSError, ValueError
            The files of the cluster cannot be read now.
        """
        directory, own = self._directory, self._own_job
        if directory.closing or (directory.encrypted and not directory.tls.is_dir()):
            raise LaunchError(f"the cluster in {directory.path} is closed: this job ends")
        contact = directory.certain_contact()
        schedulers = [one for one in directory.submits() if one.kind == "scheduler" and not one.refused]
        mine = _mine(schedulers, own)
        if mine is None and self._planned:
            raise ValueError("the journal does not name this job any more")
        self._planned = mine is not None
        if mine is not None:  # perhaps without an id
            check_wanted(mine)
        served = contact.job_id if contact is not None else ""
        if mine is not None and served != own.job_id:
            after = schedulers[schedulers.index(mine) + 1 :]
            if any(one.job_id == served for one in after):
                raise LaunchError(f"scheduler job {served} has replaced this one: it ends")
            if not self._alone(mine, schedulers[: schedulers.index(mine)], contact, now=now):
                return False
        check_alone(directory, own.job_id)
        return True

    def _alone(self, mine: Submit, earlier: Sequence[Submit], contact: Contact | None, *, now: float) -> bool:
        """Whether the scheduler job that this one follows has ended; raise `LaunchError` if that was intended."""
        submit = present_scheduler(earlier, contact.job_id if contact is not None else "")
        if submit is None or submit.unwanted:
            return True
        by_contact = contact if contact is not None and contact.job_id == submit.job_id else None
        if self._present is None or (self._present.submit.name, self._present.contact) != (submit.name, by_contact):
            self._present = _Present(submit, by_contact, self._directory, self._batch)
        self._present.submit = submit
        held = bool(mine.after_end) and mine.after_end == submit.job_id
        state = self._present.end(started_by_it=held, now=now)
        why = f"the scheduler job {submit.job_id} has ended as intended" if state and not ended_too_early(state) else ""
        unmanaged = self._unmanaged() if state else False
        if unmanaged and not why:  # no manager counts the restarts
            why = too_many(sorted(unexpected_ends(self._directory.submits()))[:-1], now=time.time())
        if state and why and unmanaged:  # no manager ends the worker jobs, which wait for this scheduler
            from hpcgpu.store import saved_options  # imports Dask's configuration

            log = saved_options.logs(self._directory) / self._batch.log_name(submit.name, submit.job_id or "")
            ended = f"scheduler job {submit.job_id} ({submit.name}) {state.value}. Log: {log}"
            gone = f"the scheduler of cluster {self._directory.path.name} is gone, and its worker jobs end: {ended}"
            self._directory.begin_close(f"{gone}. It is not restarted, because {why}")
        if why:
            raise LaunchError(f"no scheduler is started: {why}. This job ends")
        if state is None and not self._present.reported:
            self._present.reported = True
            which = f"cluster {self._directory.path.name} has a scheduler in job {submit.job_id}"
            write_stderr(f"{which}. This job waits: {STANDBY}")
            importlib.import_module("distributed.scheduler")  # takes long on a busy filesystem
        return state is not None

    def _unmanaged(self) -> bool:
        """Whether nobody manages the cluster until it has another scheduler."""
        manager = self._directory.manager()
        gone = manager is None or manager.left or manager.in_scheduler_job
        return gone and self._directory.wanted().manager_in_scheduler_job


def record_failure(directory: ClusterDirectory, own: OwnJob) -> None:
    """Write into the journal that this scheduler job ends before it has a scheduler: nobody waits for it any more."""
    with suppress(OSError):
        how = JobStatus(job_id=own.job_id, state=JobState.FAILED, end=time.time())
        directory.ended({own.name: own.job_id}, {own.name: End.of(how)})


def _mine(schedulers: Sequence[Submit], own: OwnJob) -> Submit | None:
    """Return what the journal records of this job; None if somebody has submitted it by hand.

    Its id may not be in the journal yet.
    """
    by_id = [one for one in schedulers if one.job_id == own.job_id]
    by_name = [one for one in schedulers if one.job_id is None and one.name == own.name]
    return next(iter([*by_id, *by_name]), None)


class _Present:
    """The scheduler job that works now.

    Parameters
    ----------
    submit : Submit
    contact : Contact or None
        Of its scheduler; None if it has removed that, because it ends.
    directory : ClusterDirectory
    batch : BatchSystem
    """

    def __init__(
        self, submit: Submit, contact: Contact | None, directory: ClusterDirectory, batch: BatchSystem
    ) -> None:
        self.submit, self.contact = submit, contact
        self.reported = False
        self._directory, self._batch = directory, batch
        self._watch = SchedulerWatch(directory, batch, Cadence(_PROBE), job_id=submit.job_id or "")
        self._probe_at = 0.0
        self._refused_since: float | None = None

    def end(self, *, started_by_it: bool, now: float) -> JobState | None:
        """Return how it has ended; None if it has not, as far as is known.

        Parameters
        ----------
        started_by_it : bool
            Whether the queue held this job until that end: it counts if the queue cannot be queried here.
        now : float
            Of `time.monotonic`.
        """
        if self.submit.ended:
            return self._in_journal()
        if now < self._probe_at:
            return None
        self._probe_at = now + _PROBE
        found = identify(self.contact, self._directory) if self.contact is not None else ConnectionResult.REFUSED
        status = self._watch.poll(now=now) if found is not ConnectionResult.ACCEPTED else None
        unknown = started_by_it and self._watch.error and found is not ConnectionResult.ACCEPTED
        if unknown or (status is not None and status.state.ended):
            return self._record(status)
        if status is not None or found is not ConnectionResult.REFUSED:  # it may only be busy or suspended
            self._refused_since = None
            return None
        self._refused_since = self._refused_since if self._refused_since is not None else now
        manager = self._directory.manager()
        managed = manager is not None and manager.lives is not False  # then the manager writes the end
        if self._watch.error and not managed and now - self._refused_since >= _REFUSED:
            return self._record(None)
        return None

    def _in_journal(self) -> JobState | None:
        if self.contact is not None and proves_life(identify(self.contact, self._directory), self.contact):
            return None  # the queue was wrong, or it is just ending
        return _state(self.submit.how or End())

    def _record(self, status: JobStatus | None) -> JobState:
        """Write its end into the journal: it ends at its start if the batch system runs it again. Return how it ended.

        Parameters
        ----------
        status : JobStatus or None
            What the queue reports; None if it does not answer.
        """
        now, job_id = time.time(), self.submit.job_id
        if status is None or status.forgotten:  # it only counts as ended
            with suppress(BatchError):
                self._batch.cancel([job_id] if job_id is not None else [])
            how = End.of(status or JobStatus(job_id=job_id or "", state=JobState.UNKNOWN), gone=now)
        else:
            how = End.of(replace(status, end=status.end or now))
        self._directory.ended({self.submit.name: job_id}, {self.submit.name: how})
        return _state(how)


def _state(how: End) -> JobState:
    """Return how a scheduler job has ended; a job with an unknown end has failed."""
    state = state_named(how.state)
    return state if state.ended else JobState.FAILED
