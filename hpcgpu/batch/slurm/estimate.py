"""When a job would start, by ``sbatch --test-only``. Pure; seen on Slurm 22.05.8.

The test reports a start even if the partition is down or its time limit is too short: Slurm accepts such a job, and the
job waits for ever. The rules of the partitions contain both, see `hpcgpu.batch.queues.Rules`.
"""

from __future__ import annotations

import re
import time

from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.reasons import advice
from hpcgpu.batch.slurm.reasons import REASONS

_STARTS = re.compile(
    r"to start at (?P<start>\S{1,40})(?: using \d+ processors?)?(?: on nodes? (?P<nodes>\S{1,200}))?"
    r"(?: in partition (?P<partition>\S{1,200}))?"
)


def read_test(returncode: int, words: str) -> Estimate:
    """Return the estimate from the output of ``sbatch --test-only``."""
    if returncode != 0:
        refusal = f"{words or f'exit code {returncode}'}{advice(words, REASONS)}"
        return Estimate(limits=(refusal,))
    match = _STARTS.search(words)
    if match is None:
        return Estimate(known=(f"sbatch --test-only says: {words or 'nothing'}",))
    start, place, queue = epoch(match["start"]), match["nodes"] or "", match["partition"] or ""
    return Estimate(start=start, place=place, tested=True, queue=queue)


def epoch(text: str) -> float | None:
    """Parse a time, also where a site's wrapper of a command drops ``SLURM_TIME_FORMAT``; None for "Unknown"."""
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
