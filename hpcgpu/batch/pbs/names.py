"""The name of a job as PBS accepts it; pure, for the scripts and for the submit."""

from __future__ import annotations

import re

__all__ = ["VARIABLE", "pbs_name", "pbs_prefix"]

#: Variable of a PBS job that holds its whole name.
VARIABLE = "HPCGPU_PBS_JOB"

_LONGEST = 15


def pbs_prefix(name: str) -> str:
    """Return a name with other characters where PBS does not accept its own."""
    name = re.sub(r"[^A-Za-z0-9_+-]", "_", name)
    return name if name[:1].isalpha() else f"j{name}"


def pbs_name(name: str) -> str:
    """Return the value of ``-N`` for a job's name: at most 15 characters.

    Old releases and every ``qstat`` cut names there.

    The end is kept, ``-12`` or ``-scheduler``, and as much of the beginning as there is room for. Letters, digits and
    ``- _ +`` may stand in it, a letter first (OpenPBS, ``check_job_name``). It need not be unique: jobs are told apart
    by `VARIABLE`.
    """
    name = pbs_prefix(name)
    end = match[0] if (match := re.search(r"-(\d{1,8}|scheduler)$", name)) else ""
    return name[: min(len(name), _LONGEST) - len(end)].rstrip("-") + end
