"""Requested jobs that were not submitted, from the journal: the program was killed, or the queue refused a job."""

from __future__ import annotations

from hpcgpu.display.counts_and_durations import counted
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.posix.printable import printable
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import Submit

#: Seconds without an entry in the journal after which a program on another machine does not submit the rest.
_QUIET = 600.0


def unfinished(directory: ClusterDirectory, *, now: float, managed: bool = False, left: bool = False) -> str:
    """Return which requested jobs were not submitted, and the command that completes the cluster.

    Empty if all were submitted, or while a program may still submit them.

    Parameters
    ----------
    directory : ClusterDirectory
    now : float
        Epoch seconds.
    managed : bool, default False
        Whether a program is known to manage the cluster.
    left : bool, default False
        Whether the program that manages it is about to leave it.
    """
    wanted, submits = directory.wanted(), directory.submits()
    sizes = wanted.sizes
    if managed or not sizes or not (left or _abandoned(directory, now=now)):
        return ""
    word, missing = directory.in_shell, list[str]()
    there = [submit for submit in submits if not submit.refused]
    if wanted.closing:
        return _refusal(submits)
    if not any(submit.kind == "scheduler" for submit in there):
        contact = directory.contact()
        in_program = contact is not None and not contact.job_id
        return "" if in_program else f"its scheduler job was not submitted. To remove it, run: hpcgpu stop {word}"
    for group, requested in sizes.items():
        have = sum(_counts(submit, group) for submit in there)
        if have < requested:
            of = "" if group == DEFAULT else f" of group {group!r}"
            which = "" if group == DEFAULT else f" --worker-group {group}"
            verb = "was" if requested == 1 else "were"
            number = f"only {have}" if have else "none"
            missing.append(
                f"{counted(requested, 'worker job')}{of} {verb} asked for, and {number} submitted. To submit the rest, "
                f"run: hpcgpu scale {word} --jobs {requested}{which}"
            )
    return "; ".join([*missing, *filter(None, [_refusal(submits) if missing else ""])])


def _abandoned(directory: ClusterDirectory, *, now: float) -> bool:
    """Whether no program may still be about to submit jobs."""
    manager = directory.manager()
    if manager is None or manager.left or manager.lives is False:
        return True
    return manager.lives is None and now - max(directory.times(), default=0.0) > _QUIET


def _counts(submit: Submit, group: str) -> bool:
    return submit.kind == "worker" and submit.group == group and not submit.unwanted


def _refusal(submits: list[Submit]) -> str:
    """Return why the last refused job was refused."""
    refused = [submit for submit in submits if submit.refused and submit.why]
    if not refused:
        return ""
    return f"{refused[-1].kind} job {refused[-1].name} was not submitted: {printable(refused[-1].why)}"
