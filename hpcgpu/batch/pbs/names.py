"""The name of a job as PBS accepts it; pure, for the scripts and for the submit."""

from __future__ import annotations

import re

#: Variable of a PBS job that holds its full name.
VARIABLE = "HPCGPU_PBS_JOB"

_LONGEST = 15


def pbs_prefix(name: str) -> str:
    """Return a name in which characters that PBS does not accept are replaced."""
    name = re.sub(r"[^A-Za-z0-9_+-]", "_", name)
    return name if name[:1].isalpha() else f"j{name}"


def pbs_name(name: str) -> str:
    """Return the value of ``-N`` for a job's name: at most 15 characters.

    Old releases and every ``qstat`` cut names there.

    The end is kept, ``-12`` or ``-scheduler``, and as much of the beginning as fits. The name may contain letters,
    digits and ``- _ +``, and begins with a letter (OpenPBS, ``check_job_name``). It need not be unique: `VARIABLE`
    identifies the job.
    """
    name = pbs_prefix(name)
    end = match[0] if (match := re.search(r"-(\d{1,8}|scheduler)$", name)) else ""
    return name[: min(len(name), _LONGEST) - len(end)].rstrip("-") + end
