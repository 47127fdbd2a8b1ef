"""When a job would start, by ``sbatch --test-only``, and the limits of its partitions that this does not check.

``sbatch --test-only`` says when a job would start also where the partition is down or its time limit is too short: such
a job is accepted and waits for ever. sinfo has both. Pure; seen on Slurm 22.05.8.
"""

from __future__ import annotations

import re
import time

from hpcgpu.batch.base import Reasons
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.reasons import advice
from hpcgpu.posix.printable import printable

__all__ = ["SINFO", "limits", "read_test", "seconds"]

#: Partition (with a star behind it: the default one), whether it is up, longest time.
SINFO = "%P|%a|%l"
_STARTS = re.compile(
    r"to start at (?P<start>\S{1,40})(?: using \d+ processors?)?(?: on nodes? (?P<nodes>\S{1,200}))?"
    r"(?: in partition (?P<partition>\S{1,200}))?"
)
#: The reason with which a job waits in a partition that is not up.
_NOT_UP = {"down": "PartitionDown", "drain": "PartitionDown", "inact": "PartitionInactive"}


def read_test(returncode: int, words: str, reasons: Reasons) -> tuple[Estimate, str]:
    """Return what ``sbatch --test-only`` says, and the partition that it names; empty if it names none."""
    if returncode != 0:
        said = f"{words or f'exit code {returncode}'}{advice(words, reasons)}"
        return Estimate(limits=(said,)), ""
    match = _STARTS.search(words)
    if match is None:
        return Estimate(known=(f"sbatch --test-only says: {words or 'nothing'}",)), ""
    return Estimate(start=_epoch(match["start"]), place=match["nodes"] or ""), match["partition"] or ""


def limits(sinfo: str, partition: str, walltime: float | None, reasons: Reasons) -> tuple[str, ...]:
    """Return why a job would wait for ever in a partition, empty: in the default one."""
    for line in printable(sinfo, None, lines=True).split("\n"):
        parts = line.strip().split("|")
        if len(parts) != 3:
            continue
        name, available, limit = parts[0].removesuffix("*"), *parts[1:]
        if name != partition and (partition or not parts[0].endswith("*")):
            continue
        found = []
        if code := _NOT_UP.get(available.lower()):
            found.append(_explained(code, f"sinfo: partition {name} is {available}", reasons))
        longest = seconds(limit)
        if walltime is not None and longest is not None and walltime > longest:
            said = f"sinfo: partition {name} has the time limit {limit}"
            found.append(_explained("PartitionTimeLimit", said, reasons))
        return tuple(found)
    return ()


def _explained(code: str, said: str, reasons: Reasons) -> str:
    known = reasons.pending(code)
    return f"{known[1]} [{code}; {said}]" if known else f"{code} [{said}]"


def _epoch(text: str) -> float | None:
    """Parse a time, also where a site's wrapper of sbatch drops ``SLURM_TIME_FORMAT``."""
    if re.fullmatch("[0-9]{1,18}", text):
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def seconds(text: str) -> float | None:
    """Parse ``[days-]hours:minutes:seconds``, or a part of it; None for "infinite"."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6}(?::\d{1,6}){0,2})", text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match[2].split(":")]
    if match[1] is not None:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
        parts = [*parts, 0, 0][:3]
    elif len(parts) == 1:  # minutes
        parts = [0, parts[0], 0]
    hours, minutes, rest = [0, *parts][-3:]
    return float(((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + rest)
