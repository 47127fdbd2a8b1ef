"""The submit description: commands of HTCondor in comments at the head of a job script. Pure.

HTCondor's scripts have no directives of their own. So the lines ``#HTCONDOR request_gpus = 2`` hold the commands of the
submit description, and `description` returns them for condor_submit.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcgpu.batch.directive_syntax import (
    CLUSTER_SETS,
    NEVER_STARTS,
    ONE_JOB,
    RESUBMITTED,
    Syntax,
    refuse_control_characters,
)
from hpcgpu.errors import OptionError

PREFIX = "#HTCONDOR"
#: The attribute of a job that holds the path of its script.
SCRIPT = "HpcgpuScript"


def description(script: str) -> Iterator[str]:
    """Yield the commands at the head of a job script."""
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            return
        if line.startswith(PREFIX + " "):
            yield line.removeprefix(PREFIX).strip()


def command(value: object) -> str:
    """Return the value of a command, which may hold macros and expressions: one line that does not go on."""
    text = str(value)
    refuse_control_characters(text)
    if text.endswith("\\"):
        raise OptionError(f"{text!r} ends with a backslash, after which HTCondor reads the next line too: remove it")
    return text


def literal(value: object) -> str | None:
    """Return a text in which HTCondor expands no macro."""
    if value is None:
        return None
    text = command(value)
    if "$$" in text:
        raise OptionError(f"{text!r} holds $$, which HTCondor always expands: remove it")
    return text.replace("$", "$(DOLLAR)")


def string(value: object) -> str | None:
    """Return a string in double quotes, in which a backslash has a meaning only before a double quote."""
    if value is None:
        return None
    escaped = command(value).replace('"', '\\"')
    return literal(f'"{escaped}"')


def argument(value: object) -> str:
    """Return one argument of a program, in HTCondor's new syntax of `arguments`."""
    doubled = str(value).replace('"', '""').replace("'", "''")
    return str(literal(f"\"'{doubled}'\""))


def mebibytes(size: int | None) -> int | None:
    """Return an amount of memory as HTCondor counts it."""
    return None if size is None else -(-size // 2**20)


SYNTAX = Syntax(
    prefix=PREFIX,
    quote=command,
    assigned=True,
    refused={
        "queue": ONE_JOB,
        "universe": "hpcgpu submits jobs of the vanilla universe, which containers can be in (container=...)",
        "hold": NEVER_STARTS,
        "periodic_release": RESUBMITTED,
        "periodic_remove": CLUSTER_SETS,
        "on_exit_remove": RESUBMITTED,
        "max_retries": RESUBMITTED,
        "leave_in_queue": "hpcgpu reads how a job ended in the history",
    },
    filters={"literal": literal, "string": string, "argument": argument, "mebibytes": mebibytes},
)
