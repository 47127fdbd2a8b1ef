"""The jobs of the embedded queue as data: their records, their directives, and which may start. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcgpu.batch.base import JobState
from hpcgpu.errors import SubmitRefused


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job, as its file records it."""

    job_id: str
    name: str
    output: str
    cwd: str
    script: str = ""  # its path at the submit
    gpus: int = 0  # how many it requests
    devices: list[str] = field(default_factory=list)  # which ones it has
    walltime: float | None = None  # seconds
    after: str | None = None  # the job that must start, or end, before
    after_end: str | None = None  # the job that must end before
    state: JobState = JobState.PENDING
    verdict: JobState | None = (
        None  # for a job that is being ended: its state then, if that does not depend on the exit code
    )
    reason: str = ""
    start: float | None = None
    end: float | None = None
    exit_code: int | None = None
    supervisor: list[int] = field(default_factory=list)  # pid and start time, see `_identity`
    # the same of the script's shell, which leads the session of the job
    leader: list[int] = field(default_factory=list)


def startable(records: Sequence[JobRecord], gpus: Sequence[str], slots: int) -> list[tuple[JobRecord, list[str]]]:
    """Return the jobs that may start now, with the GPUs that each gets: first come, first served.

    A job that waits for another one lets later jobs pass; a job that waits for a GPU or a slot does not.

    Parameters
    ----------
    records : sequence of JobRecord
        The live jobs, in order of submission.
    gpus : sequence of str
        All GPUs of the machine.
    slots : int
        How many jobs may run at once.
    """
    active = [job for job in records if job.state in (JobState.RUNNING, JobState.COMPLETING)]
    taken = {device for job in active for device in job.devices}
    free = [device for device in gpus if device not in taken]
    room = slots - len(active)
    waiting = {job.job_id for job in records if job.state is JobState.PENDING}
    live = {job.job_id for job in records}
    starts = []
    for job in records:
        if job.job_id not in waiting or job.after in waiting or job.after_end in live:
            continue
        if job.gpus > len(free) or room < 1:
            break
        starts.append((job, free[: job.gpus]))
        free, room = free[job.gpus :], room - 1
        waiting.remove(job.job_id)
    return starts


def with_reasons(records: Sequence[JobRecord]) -> list[JobRecord]:
    """Return the pending jobs with the reason why each cannot start now."""
    pending = [job for job in records if job.state is JobState.PENDING]
    ids, live = {job.job_id for job in pending}, {job.job_id for job in records}
    explained, reason = [], "Resources"
    for job in pending:
        if job.after in ids or job.after_end in live:
            explained.append(replace(job, reason="Dependency"))
        else:
            explained.append(replace(job, reason=reason))
            reason = "Priority"
    return explained


def read_directives(text: str) -> dict[str, Any]:
    """Fields of a `JobRecord` from the ``#HPCGPU --option=value`` lines at the head of a script."""
    fields: dict[str, Any] = {}
    for line in text.split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        if not re.match(r"#HPCGPU(\s|$)", line):
            continue
        match = re.fullmatch(r'#HPCGPU\s+--([\w-]+)=(?:"((?:[^"\\]|\\["\\])*)"|([^\s"]+))\s*', line)
        if match is None:
            raise SubmitRefused(
                f'`{line}` is not a directive of the form `#HPCGPU --option=value` or `#HPCGPU --option="value"`'
            )
        option, quoted, plain = match.groups()
        value = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        if option == "job-name":
            fields["name"] = value
        elif option == "output":
            fields["output"] = value
        elif option == "gpus" and re.fullmatch("[0-9]+", value):
            fields["gpus"] = int(value)
        elif option == "time" and (parts := re.fullmatch("(?:(?:([0-9]+)-)?([0-9]+):([0-9]+):)?([0-9]+)", value)):
            days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
            # 0: no limit, as in Slurm
            fields["walltime"] = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds) or None
        elif option in ("gpus", "time"):
            raise SubmitRefused(f"`{value}` is not a valid value of the directive --{option}")
        else:
            raise SubmitRefused(
                f"unknown directive --{option}: this queue knows --job-name, --output, --gpus and --time"
            )
    return fields
