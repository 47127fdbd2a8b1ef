"""The directory of a job's files, the modules that its tasks can import, and the end of its walltime.

Also the credentials of a cluster that lives in the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.errors import BatchError, LaunchError, NotTrusted
from hpcgpu.posix.ownership import weaknesses
from hpcgpu.runtime import scratch
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.directory import ClusterDirectory


def temporary_place(arguments: argparse.Namespace) -> Path:
    """Remove the option `local_directory` from the command; return the directory for Dask's temporary directory.

    Raises
    ------
    LaunchError
        It cannot be made, or others can change its content.
    """
    command: list[str] = arguments.command
    given = None
    if "--local-directory" in command:
        at = command.index("--local-directory")
        given = scratch.expanded(command[at + 1], os.environ)
        del command[at : at + 2]
    try:
        return scratch.temporary_directory(given)
    except (NotTrusted, OSError) as error:
        raise LaunchError(scratch.refusal(given, error)) from error


def import_from_working_directory() -> None:
    """Let tasks import modules from the submit directory, unless others can write there.

    Dask's own command allows this too.

    The job script starts Python with ``-P``. Without it, Python would search there first, also for its own modules.
    """
    with contextlib.suppress(OSError):
        place = Path.cwd()
        found = [weakness for weakness in weaknesses(place, group_may_write=True) if not weakness.by_group]
        if found:
            print(
                f"hpcgpu: tasks cannot import modules from {place}: {found[0].why}",
                file=sys.stderr,
                flush=True,
            )
        elif sys.flags.safe_path:
            sys.path.append(str(place))


def end_of_walltime(own: OwnJob, batch: BatchSystem) -> float | None:
    """Return the end of this job's walltime, epoch seconds.

    The queue is queried if the environment does not contain it.
    """
    if own.end is not None:
        return own.end
    with contextlib.suppress(BatchError):  # compute nodes may lack the queue's commands
        if status := batch.poll([own.job_id]).get(own.job_id):
            return status.end
    return None


def make_credentials(directory: ClusterDirectory, own: OwnJob | None, batch: BatchSystem) -> None:
    """Make the credentials of a cluster that lives in this job; they are valid as long as the job."""
    end = end_of_walltime(own, batch) if own is not None else None
    certificates_and_keys.create(directory, end - time.time() if end is not None else None, waits=False)


def remove_secrets(directory: ClusterDirectory, token: str, job_id: str) -> None:
    """Remove the credentials of a cluster whose scheduler job ends.

    Scripts of ``hpcgpu render`` keep theirs, because they may be launched again.

    Only the scheduler job of the contact removes them; without a contact, the scheduler job of the journal.
    """
    with contextlib.suppress(OSError):
        contact = directory.contact()
        known = {submit.job_id for submit in directory.submits() if submit.kind == "scheduler"} - {None}
        own = contact.job_id == job_id if contact is not None else job_id in known or not known
        if own and directory.has_token(token) and not (directory.path / "launch.sh").exists():
            directory.remove_secrets()
