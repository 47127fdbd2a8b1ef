"""The clusters of this user, from their directories.

It finds them, queries which of their jobs live, and stops a cluster whose client is gone.
"""

from __future__ import annotations

import os
import stat
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcgpu.batch import batch_system, registry
from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.batch.monitor import presumed_ended
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.display.words import listed
from hpcgpu.errors import (
    BatchError,
    CertificateError,
    ClusterError,
    ClusterExists,
    ClusterWarning,
    Damaged,
    NoCluster,
    NotTrusted,
    OptionError,
    OtherQueue,
)
from hpcgpu.options import values
from hpcgpu.posix.printable import printable
from hpcgpu.remote.queries import check_queue, note_ends, query
from hpcgpu.runtime.reach import answers
from hpcgpu.scripts.render import script_name
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory, Submit

__all__ = [
    "Found",
    "batch_of",
    "close_ended",
    "directories",
    "ended_by_itself",
    "find",
    "live_jobs",
    "locate",
    "renamed",
    "standing",
    "stop",
    "stop_all",
    "submitted",
    "system_of",
    "unclosed",
    "unended",
]


#: Seconds without any change after which a cluster without jobs
#: is closed where it is not known whether its program lives.
_UNSEEN = 600.0
#: Seconds after which `stop` cancels a job again that is still there.
_CANCEL_AGAIN = 10.0
#: Seconds that a submit may take whose client was killed.
_SUBMIT = 10.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """A cluster that has a directory.

    Attributes
    ----------
    directory : ClusterDirectory
    system : str
        Name of its batch system; empty if its files do not contain it.
    created : float
        Epoch seconds.
    jobs : list of JobStatus
        Those of its jobs that have not ended.
    problem : str
        What is not known, and what is wrong with its files.
    known : bool
        Whether the queue answered.
    readable : bool
        Whether this version of hpcgpu can read its files.
    """

    directory: ClusterDirectory
    system: str
    created: float
    jobs: list[JobStatus]
    problem: str
    known: bool
    readable: bool = True


def renamed(directory: ClusterDirectory) -> bool:
    """Whether a later cluster has taken its name."""
    return "~" in directory.path.name


def directories(root: Path) -> list[ClusterDirectory]:
    """Return the cluster directories in a directory.

    They have a journal or a ``cluster.json``. Those renamed to ``NAME~...`` are included, and those that others have
    made; links of others are not.
    """
    found = []
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                # A link of somebody else may lead to a filesystem that does not answer.
                there = stat.S_ISDIR(about.st_mode) or (
                    stat.S_ISLNK(about.st_mode) and about.st_uid in (0, os.geteuid())
                )
                if there and not entry.name.startswith(".") and _is_cluster(root / entry.name):
                    found.append(ClusterDirectory(root / entry.name))
    return sorted(found, key=lambda directory: directory.path)


def _warn(path: Path, error: NotTrusted) -> None:
    warnings.warn(printable(str(error), None), ClusterWarning, stacklevel=4)


def find(roots: Iterable[Path], refuse: Callable[[Path, NotTrusted], None] = _warn) -> list[Found]:
    """Return the clusters of these directories that were not closed, oldest first.

    A damaged one is included, with what is wrong.

    Those that were renamed for a later one of their name are among them while they have jobs. Scripts of ``hpcgpu
    render`` are a cluster from their launch on.

    Parameters
    ----------
    roots : iterable of Path
        Directories in which each cluster has its own.
    refuse : callable, optional
        Is given the directory of a cluster that others can change, which is left out, and the reason. Default: warns.
    """
    found = [one for root in roots for directory in directories(root) if (one := _open(directory, refuse)) is not None]
    return sorted((one for one in found if one.jobs or not renamed(one.directory)), key=lambda one: one.created)


def unclosed(directory: ClusterDirectory, *, any_format: bool = False) -> ClusterDirectory | None:
    """Return a cluster that was launched and not closed; None otherwise, also if it was removed just now."""
    with suppress(FileNotFoundError):
        there = ClusterDirectory.there(directory.path, any_format=any_format)
        if not there.closed and not there.only_scripts:
            return there
    return None


def _open(directory: ClusterDirectory, refuse: Callable[[Path, NotTrusted], None]) -> Found | None:
    """Return an unclosed cluster. What cannot be read costs this one alone."""
    try:
        there = unclosed(directory, any_format=True)
        return _examine(there) if there is not None else None
    except NotTrusted as error:
        refuse(directory.path, error)
        return None
    except FileNotFoundError:  # removed or renamed just now
        return None
    except OSError as error:
        return Found(directory=directory, system="", created=0.0, jobs=[], problem=str(error), known=False)


def _examine(directory: ClusterDirectory) -> Found:
    jobs, system, created, known = list[JobStatus](), "", directory.modified, False
    other = directory.other_format()
    problem = [other] if other else directory.damage()
    with suppress(OSError, Damaged):
        created = directory.created
    if not other and (directory.path / "options.json").exists():
        try:
            saved.read(directory)
        except OptionError as error:
            problem.append(str(error))
    try:
        system = system_of(directory)
        jobs = live_jobs(directory, batch_system(system))
        known = True
    except (BatchError, Damaged, OSError) as error:
        problem = list(dict.fromkeys([*problem, str(error)]))
    return Found(
        directory=directory,
        system=system,
        created=created,
        jobs=jobs,
        problem="; ".join(problem),
        known=known,
        readable=not other,
    )


def system_of(directory: ClusterDirectory) -> str:
    """Return the name of a cluster's batch system. Without a readable ``cluster.json`` its scripts show it.

    Raises
    ------
    Damaged
        Neither shows it.
    """
    try:
        system = directory.system
        if system in registry.names():
            return system
        raise Damaged(f"{directory.path / 'cluster.json'} is damaged: unknown batch system {system[:40]!a}")
    except (OSError, Damaged) as error:
        for system in registry.names():
            if (directory.path / script_name(system, "worker")).exists():
                return system
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{directory.path / 'cluster.json'} cannot be read: {error.strerror}") from error


def batch_of(directory: ClusterDirectory) -> BatchSystem:
    """Return the batch system of a cluster; see `system_of`."""
    return batch_system(system_of(directory))


def locate(name: str | Path, *, any_format: bool = False) -> ClusterDirectory:
    """Return the directory of one cluster.

    Parameters
    ----------
    name : str or Path
        Its name, which is looked for where the configuration has clusters, or the path of its directory.
    any_format : bool, default False
        Whether another version of hpcgpu may have made it: it can be stopped, and nothing else.

    Raises
    ------
    NoCluster
        There is none, or several have that name.
    NotTrusted
        Others can change its directory.
    OtherFormat
        Another version of hpcgpu made it, and this one cannot read it.
    """
    directory = _at(name) if "/" in str(name) else _named(str(name))
    if not any_format:
        directory.check_format()
    return directory


def _at(path: str | Path) -> ClusterDirectory:
    path = path.expanduser() if isinstance(path, Path) else values.directory("the name of the cluster", path)
    if not _is_cluster(path):
        raise NoCluster(f"{path} is not the directory of a cluster")
    return ClusterDirectory.there(path.absolute(), any_format=True)


def _named(name: str) -> ClusterDirectory:
    roots = cluster_directories()
    there = [ClusterDirectory.there(root / name, any_format=True) for root in roots if _is_cluster(root / name)]
    chosen = [directory for directory in there if not directory.closed] or there
    if len(chosen) > 1:
        raise NoCluster(
            f"several clusters are named {name}: give the path of one of them: {', '.join(str(d.path) for d in chosen)}"
        )
    if not chosen:
        raise NoCluster(f"there is no cluster named {name!r} in {', '.join(map(str, roots))}. {_existing(roots)}")
    return chosen[0]


def _existing(roots: Iterable[Path]) -> str:
    """Return a sentence that names the clusters in these directories, and one on scripts that were never launched."""
    clusters, scripts = list[str](), list[str]()
    for directory in (found for root in roots for found in directories(root)):
        with suppress(OSError, NotTrusted):  # of others
            there = ClusterDirectory.there(directory.path, any_format=True)
            if not renamed(there) and not there.closed:
                kind = clusters
                with suppress(OSError):
                    kind = scripts if there.only_scripts else clusters
                kind.append(there.path.name)
    text = f"Existing clusters: {printable(', '.join(sorted(clusters)) or 'none')}"
    return f"{text}. Scripts that were not launched: {printable(', '.join(sorted(scripts)))}" if scripts else text


def _is_cluster(path: Path) -> bool:
    """Return whether a cluster has this directory; PermissionError if the user may not enter it."""
    for name in ("cluster.json", "journal.jsonl"):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path / name)
            return True
    return False


def live_jobs(directory: ClusterDirectory, batch: BatchSystem) -> list[JobStatus]:
    """Return the jobs of a cluster that have not ended, as its queue reports.

    Raises
    ------
    BatchUnavailable
        The queue does not answer, or is not that of the cluster.
    """
    return [status for status in query(submitted(directory, batch), batch).values() if not status.state.ended]


def submitted(directory: ClusterDirectory, batch: BatchSystem) -> dict[str, Submit]:
    """Return the jobs of a cluster that are not known to have ended, by id.

    A job without a known id is looked up by its name.

    Raises
    ------
    BatchUnavailable
        The queue does not answer, or is not that of the cluster.
    """
    check_queue(directory, batch)
    jobs: dict[str, Submit] = {}
    for submit in directory.submits():
        if submit.refused or submit.ended:
            continue
        ids = [submit.job_id] if submit.job_id is not None else batch.find(submit.name)
        jobs |= dict.fromkeys(ids, submit)
    return jobs


def stop(
    directory: ClusterDirectory,
    batch: BatchSystem,
    *,
    timeout: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> list[JobStatus]:
    """Cancel every job of a cluster, and no other; return those that are left after the timeout.

    Its client, if it is alive, stops when the scheduler is gone. Jobs that it submits meanwhile are cancelled too.

    Raises
    ------
    BatchUnavailable
        The queue does not answer, or is not that of the cluster: nothing is known of the jobs.
    """
    check_queue(directory, batch)
    deadline = time.monotonic() + timeout
    directory.remove_secrets()
    with suppress(OSError):  # on a full disk the jobs are nevertheless cancelled
        if not directory.closing:
            directory.begin_close()
    empty, again, seen = 0, dict[str, float](), dict[str, JobStatus]()
    while True:
        jobs = live_jobs(directory, batch)
        seen |= {job.job_id: job for job in jobs}
        empty = 0 if jobs else empty + 1
        if presumed_ended(missing=0.0, answers=empty, cancelled=True) and not _submitting(directory, now=time.time()):
            note_ends(directory, batch, seen)
            directory.close()
            return []
        if time.monotonic() > deadline:
            # an epilog may take minutes, but the job cannot continue
            left = [job for job in jobs if job.state is not JobState.COMPLETING]
            if jobs and not left and not _submitting(directory, now=time.time()):
                directory.close()
            return left
        now = time.monotonic()
        if any(now >= again.get(job.job_id, now) for job in jobs):
            batch.cancel([job.job_id for job in jobs])
            again = {job.job_id: now + _CANCEL_AGAIN for job in jobs}
        sleep(1.0)


def stop_all(directory: ClusterDirectory) -> None:
    """Cancel every job of a cluster, as `stop` does.

    Raises
    ------
    ClusterError
        Jobs are left.
    BatchUnavailable
        The queue does not answer.
    """
    if left := [job.job_id for job in stop(directory, batch_of(directory))]:
        raise ClusterError(
            f"still in the queue: {listed(left, ', ')}. Stop the cluster again. If they stay, cancel them with the "
            "batch system's own command"
        )


def _submitting(directory: ClusterDirectory, *, now: float) -> bool:
    """Whether a submit of a killed client may still be under way.

    Its command has a session of its own, and survives the client.
    """
    return any(
        s.job_id is None and not s.refused and not s.ended and now - s.time < _SUBMIT for s in directory.submits()
    )


def standing(directory: ClusterDirectory, batch: BatchSystem) -> tuple[list[JobStatus], list[str]]:
    """Return the jobs of a cluster that have not ended, and those that nobody knows.

    The latter are ids, or names where there is no id.

    The queue alone says which live. Not knowing is no proof: only the journal, the queue or the accounting can say that
    a job has ended. There are two exceptions, where a job that is not known has ended too: the embedded queue never
    forgets a live job, on the machine that it is on; and a scheduler that ends removes the keys of its cluster.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    """
    jobs = submitted(directory, batch)
    answer = query(jobs, batch)
    live = [status for status in answer.values() if not status.state.ended]
    accounted = batch.ended(set(jobs) - set(answer))
    over = {i for i, status in accounted.items() if status.state.ended and i in jobs and status.name == jobs[i].name}
    found = list(jobs.values())
    no_id = [
        s.name for s in directory.submits() if s.job_id is None and not s.refused and not s.ended and s not in found
    ]
    manager = directory.manager()
    remembered = batch.remembers and manager is not None and manager.lives is not None
    return live, [] if remembered or ended_by_itself(directory) else [
        *(i for i in jobs if i not in answer and i not in over),
        *no_id,
    ]


def ended_by_itself(directory: ClusterDirectory) -> bool:
    """Whether the scheduler job has removed the keys at its end.

    `stop` removes them too, before the jobs have ended.
    """
    return not directory.tls.is_dir() and not directory.dashboard_token() and not directory.closing


def close_ended(found: Iterable[Found], *, now: Callable[[], float] = time.time) -> list[Found]:
    """Close the clusters that have ended by themselves; return the others.

    A cluster is marked as closed, and its credentials are removed.

    A cluster has ended when each of its jobs is known to have ended (see `standing`), its scheduler does not answer,
    and nobody may be about to submit a job: the program that managed it has ended, or, where that is not known, nothing
    has changed for a while. A cluster with jobs that nobody knows is returned with a word on that.
    """
    left = []
    for one in found:
        if one.known and not one.jobs and not one.problem and _unmanaged(one.directory, now=now()):
            try:
                live, unknown = standing(one.directory, batch_system(one.system))
                if unknown:
                    one = replace(one, problem=_unknown(one.directory, unknown))
                elif not live and _left_alone(one.directory, now=now()) and not _answers(one.directory):
                    note_ends(one.directory, batch_system(one.system))
                    _close(one.directory)
                    continue
            except (BatchError, CertificateError, OSError, ValueError):  # nothing is known now
                pass
        left.append(one)
    return left


def _unknown(directory: ClusterDirectory, jobs: list[str]) -> str:
    return (
        f"the queue of this machine does not know its jobs {listed(jobs, ', ')}. They may be in the queue of another "
        f"machine. If they have ended, run: hpcgpu stop {directory.in_shell}"
    )


def _close(directory: ClusterDirectory) -> None:
    with suppress(OSError):
        if (directory.path / "launch.sh").exists():  # may be launched again, with the same credentials
            directory.withdraw()
        else:
            directory.remove_secrets()
        directory.close()


def _answers(directory: ClusterDirectory) -> bool:
    contact = directory.contact()
    return contact is not None and answers(contact, directory)


def unended(directory: ClusterDirectory, batch: BatchSystem) -> list[str]:
    """Return the ids of the jobs of a cluster that have not ended.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    ClusterExists
        It is not known whether they have ended.
    """
    try:
        live, unknown = standing(directory, batch)
    except OtherQueue as error:
        raise ClusterExists(f"{error}. Or choose another name") from None
    if unknown and not live:
        raise ClusterExists(
            f"a cluster named {directory.path.name!r} may still have jobs (see {directory.path}): "
            f"{_unknown(directory, unknown)}. Or choose another name"
        )
    return sorted(job.job_id for job in live)


def _unmanaged(directory: ClusterDirectory, *, now: float) -> bool:
    """Whether no program is known to live that manages the cluster, and no submit is under way."""
    manager = directory.manager()
    return not (manager is not None and manager.lives) and not _submitting(directory, now=now)


def _left_alone(directory: ClusterDirectory, *, now: float) -> bool:
    if (directory.path / "launch.sh").exists() and not directory.submits():
        return False  # scripts that a person will launch
    manager = directory.manager()
    lives = manager.lives if manager is not None else None
    contact = directory.contact()
    in_program = contact is not None and not contact.job_id  # its scheduler
    unchanged = now - max([directory.modified, *directory.times()])
    return directory.closing or lives is False or (not in_program and unchanged > _UNSEEN)
