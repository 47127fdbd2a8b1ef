"""Directives for Grid Engine: ``#$`` lines, and values in its notation. Pure."""

from __future__ import annotations

import math
import re

from hpcgpu.batch.directive_syntax import CLUSTER_SETS, CLUSTER_WAITS, ONE_JOB, RESUBMITTED, Syntax, quoted

#: Before names that qsub refuses, and before names that begin like this themselves.
_MARK = "j."


def gridengine_name(name: str) -> str:
    """Return the value of ``-N`` for a job's name: it may not begin with a digit."""
    return _MARK + name if name[:1].isdigit() or name.startswith(_MARK) else name


def full_name(name: str) -> str:
    """Return the job's name from the value of ``-N``."""
    return name.removeprefix(_MARK)


def group(account: str | None, account_as: str) -> str:
    """Return the option for a group, with a space behind it; empty if the account is none."""
    return f"-g {account} " if account and account_as == "group" else ""


def command_line(script: str) -> list[str]:
    """Return the options of a script that qsub takes on its command line only."""
    match = re.search(r"^#qsub (-g) (\S+)$", script, re.MULTILINE)
    return [*match.groups()] if match else []


def time(seconds: int | None) -> str | None:
    """Return ``hours:minutes:seconds``; Grid Engine has no days."""
    if seconds is None:
        return None
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def seconds(text: str) -> float | None:
    """Return the seconds of ``h:m:s``, or of a number of seconds; None if it is neither, such as INFINITY."""
    parts = text.split(":")
    if len(parts) > 3 or not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        return None
    return float(sum(int(part) * 60**power for power, part in enumerate(reversed(parts))))


def per_slot(size: int | None, slots: int | None) -> str | None:
    """Return the memory of one slot: Grid Engine multiplies a request by the slots of the job."""
    return None if size is None else f"{math.ceil(size / (slots or 1) / 2**20)}M"


def quoted_value(value: object) -> str:
    """Quote a value for a directive; the two of ``-pe smp 8`` are not one word."""
    return str(value) if re.fullmatch(r"[\w.-]+ [0-9]{1,9}", str(value), re.ASCII) else quoted(value)


SYNTAX = Syntax(
    prefix="#$",
    quote=quoted_value,
    keyed=("-l",),
    words=True,
    refused={
        "-t": ONE_JOB,
        "-sync": CLUSTER_WAITS,
        "-now": CLUSTER_WAITS,
        "-hold_jid": CLUSTER_SETS,
        "-terse": CLUSTER_SETS,
        "-V": "set env, or job_script_prologue: the environment of a login node can break jobs",
        "-r": RESUBMITTED,
        "-h": "the job would wait forever",
        "-b": "the cluster submits a script",
    },
    filters={"gridengine_name": gridengine_name, "gridengine_time": time, "group": group, "per_slot": per_slot},
)
