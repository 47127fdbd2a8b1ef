"""Closes the clusters that have ended by themselves: no job is left, and no program manages them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from hpcgpu.batch import batch_system
from hpcgpu.errors import BatchError, CertificateError
from hpcgpu.existing_clusters.lookup import Found
from hpcgpu.existing_clusters.query_jobs import live_and_unknown, note_ends, submitting, unknown_jobs
from hpcgpu.runtime.scheduler_connection import answers
from hpcgpu.store.directory import ClusterDirectory

#: Seconds without any change after which a cluster without jobs is closed if it is not known whether its program
#: lives.
_UNSEEN = 600.0


def close_ended(found: Iterable[Found], *, now: Callable[[], float] = time.time) -> list[Found]:
    """Close the clusters that have ended by themselves; return the others.

    A cluster is marked as closed, and its credentials are removed.

    A cluster has ended when each of its jobs is known to have ended (`live_and_unknown`), its scheduler does not
    answer, and no program may be about to submit a job: the program that managed it has ended, or, if that is not
    known, nothing has changed for a while. A cluster with unknown jobs is returned with a message about them.
    """
    left = []
    for one in found:
        if one.known and not one.jobs and not one.problem and _unmanaged(one.directory, now=now()):
            try:
                live, unknown = live_and_unknown(one.directory, batch_system(one.system))
                if unknown:
                    one = replace(one, problem=unknown_jobs(one.directory, unknown))
                elif not live and _is_abandoned(one.directory, now=now()) and not _answers(one.directory):
                    note_ends(one.directory, batch_system(one.system))
                    _close(one.directory)
                    continue
            except (BatchError, CertificateError, OSError, ValueError):  # the state is not known now
                pass
        left.append(one)
    return left


def _close(directory: ClusterDirectory) -> None:
    with suppress(OSError):
        if (directory.path / "launch.sh").exists():  # the scripts may be launched again, with the same credentials
            directory.withdraw()
        else:
            directory.remove_secrets()
        directory.close()


def _answers(directory: ClusterDirectory) -> bool:
    contact = directory.contact()
    return contact is not None and answers(contact, directory)


def _unmanaged(directory: ClusterDirectory, *, now: float) -> bool:
    """Whether no live program is known that manages the cluster, and no submit is in progress."""
    manager = directory.manager()
    return not (manager is not None and manager.lives) and not submitting(directory, now=now)


def _is_abandoned(directory: ClusterDirectory, *, now: float) -> bool:
    if (directory.path / "launch.sh").exists() and not directory.submits():
        return False  # scripts that a person will launch
    manager = directory.manager()
    lives = manager.lives if manager is not None else None
    contact = directory.contact()
    in_program = contact is not None and not contact.job_id  # its scheduler
    unchanged = now - max([directory.modified, *directory.times()])
    return directory.closing or lives is False or (not in_program and unchanged > _UNSEEN)
