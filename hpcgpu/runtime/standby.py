"""A scheduler job that was submitted before the present one has ended: it waits until then.

A dependency on the present job would hold it in the queue instead. But a job that is held gains no priority by its age
on Slurm (without ``ACCRUE_ALWAYS``) and PBS, so that it would begin to wait when it is needed.
"""

from __future__ import annotations

import importlib
import sys
import time

from hpcgpu.batch.base import BatchSystem, JobState, state_named
from hpcgpu.batch.poll_interval import Cadence
from hpcgpu.errors import LaunchError
from hpcgpu.runtime.scheduler_connection import ConnectionResult, SchedulerWatch, identify
from hpcgpu.scaling.scheduler_restarts import STANDBY, ended_too_early
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Seconds between two looks at the journal, and between two connections to the scheduler.
_LOOK, _PROBE = 2.0, 60.0
#: Seconds for which connections are refused until the scheduler counts as ended, if the queue cannot be queried.
_REFUSED = 120.0


def wait_until_alone(directory: ClusterDirectory, batch: BatchSystem, own_id: str) -> bool:
    """Wait until the present scheduler job has ended, if this one was submitted to follow it.

    The manager writes the end into the journal. If there is no manager any more, the queue reports it.

    Returns
    -------
    bool
        Whether this job was submitted to follow; false if somebody has submitted it by hand.

    Raises
    ------
    LaunchError
        The cluster has ended, or this job is not needed any more.
    """
    present: _Present | None = None
    while _planned(directory, own_id):
        try:
            contact = directory.certain_contact()
        except (OSError, ValueError):  # a filesystem that fails for a moment proves nothing
            time.sleep(_LOOK)
            continue
        if contact is None or contact.job_id == own_id:
            return True
        if present is None or present.contact != contact:
            present = _Present(contact, directory, batch)
        state = present.end(now=time.monotonic())
        if state is not None and not ended_too_early(state):
            raise LaunchError(f"the scheduler job {contact.job_id} has ended as intended: this job ends too")
        if state is not None:
            return True
        if not present.said:
            present.said = True
            which = f"cluster {directory.path.name} has a scheduler in job {contact.job_id}"
            print(f"hpcgpu: {which}. This job waits: {STANDBY}", file=sys.stderr, flush=True)
            importlib.import_module("distributed.scheduler")  # takes long on a busy filesystem
        time.sleep(_LOOK)
    return False


def _planned(directory: ClusterDirectory, own_id: str) -> bool:
    """Whether a manager has submitted this job.

    The id may not be in the journal yet.

    Raises
    ------
    LaunchError
        The cluster has ended, or the manager does not want this job any more.
    """
    if directory.closing or (directory.encrypted and not directory.tls.is_dir()):
        raise LaunchError(f"the cluster in {directory.path} is closed: this job ends")
    submits = [one for one in directory.submits() if one.kind == "scheduler" and not one.refused]
    submits = [one for one in submits if one.job_id == own_id] or [one for one in submits if one.job_id is None]
    if submits and all(one.cancelled for one in submits):
        raise LaunchError("the cluster does not need this scheduler job any more: it ends")
    return bool(submits)


class _Present:
    """The scheduler job that works now.

    Parameters
    ----------
    contact : Contact
        Of its scheduler.
    directory : ClusterDirectory
    batch : BatchSystem
    """

    def __init__(self, contact: Contact, directory: ClusterDirectory, batch: BatchSystem) -> None:
        self.contact = contact
        self.said = False
        self._directory = directory
        self._watch = SchedulerWatch(directory, batch, Cadence(_PROBE), job_id=contact.job_id)
        self._probe_at = 0.0
        self._refused_since: float | None = None

    def end(self, *, now: float) -> JobState | None:
        """Return how it has ended; None if it has not, as far as is known."""
        for submit in self._directory.submits():
            if submit.job_id == self.contact.job_id and submit.ended:
                state = state_named(submit.how.state) if submit.how is not None else JobState.UNKNOWN
                return state if state.ended else JobState.FAILED
        if now < self._probe_at:
            return None
        self._probe_at = now + _PROBE
        found = identify(self.contact, self._directory)
        if found is ConnectionResult.ACCEPTED:
            self._refused_since = None
            return None
        status = self._watch.poll(now=now)
        if status is not None:
            return status.state if status.state.ended else None
        if found is not ConnectionResult.REFUSED:  # it may only be busy or suspended
            self._refused_since = None
            return None
        self._refused_since = self._refused_since if self._refused_since is not None else now
        return JobState.FAILED if self._watch.error and now - self._refused_since >= _REFUSED else None
