"""Directives for Slurm: ``#SBATCH`` lines, and values in Slurm's notation.

The lines themselves are in ``templates/slurm/directives.j2``.

sbatch's parser is no shell: a backslash escapes in every kind of quotes, variables are not expanded, an unquoted ``#``
begins a comment (seen on a real sbatch 22.05.8 and in the source of its ``get_argument``). So `shlex.quote` would be
wrong.
"""

from __future__ import annotations

import math

from hpcgpu.batch.directive_syntax import CLUSTER_SETS, CLUSTER_WAITS, NEVER_STARTS, ONE_JOB, RESUBMITTED, Syntax


def time(seconds: int | None) -> str | None:
    """Return ``[days-]hours:minutes:seconds``."""
    if seconds is None:
        return None
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"


def memory(size: int | None) -> str | None:
    """Return an amount of memory in GiB if that is exact, else in MiB rounded up.

    Slurm's units are powers of 1024.
    """
    if size is None:
        return None
    return f"{size // 2**30}G" if size % 2**30 == 0 else f"{math.ceil(size / 2**20)}M"


SYNTAX = Syntax(
    prefix="#SBATCH",
    refused={
        **dict.fromkeys(("--array", "-a"), ONE_JOB),
        **dict.fromkeys(("--wait", "-W"), CLUSTER_WAITS),
        **dict.fromkeys(("--dependency", "-d", "--parsable"), CLUSTER_SETS),
        **dict.fromkeys(("--hold", "-H"), NEVER_STARTS),
        "--requeue": RESUBMITTED,
        "--test-only": "nothing would be submitted",
        "--wrap": "the job runs hpcgpu's script",
    },
    filters={"slurm_time": time, "slurm_memory": memory},
)
