"""What the jobs of a cluster did, ``usage.jsonl``: the scheduler keeps it, for the bill.

A line for each job that had workers, and one for the scheduler itself. A line that is damaged costs itself alone.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked, records

__all__ = ["FILE", "JobUsage", "Kept", "line", "read"]

FILE = "usage.jsonl"
#: Digits of its numbers after the point.
_DIGITS = 2
#: Seconds for which it is read again: the scheduler replaces it, and some filesystems remember names for five.
_PATIENCE = 6.0


@dataclass
class Quantity:
    """A number that was sampled again and again.

    Attributes
    ----------
    total : float
        Sum of its values, each times the seconds that it stands for.
    seconds : float
        For which it is known.
    peak : float
    """

    total: float = 0.0
    seconds: float = 0.0
    peak: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        """Record a value that stands for so many seconds."""
        self.total += value * seconds
        self.seconds += seconds
        self.peak = max(self.peak, value)

    @property
    def mean(self) -> float | None:
        """The mean; None if it was never known."""
        return self.total / self.seconds if self.seconds else None


@dataclass(kw_only=True)
class JobUsage:
    """What the workers of one job did, all together.

    Attributes
    ----------
    id, name : str
        Of the job.
    kind : str
        ``"worker"`` or ``"scheduler"``.
    began : float or None
        Epoch seconds at which the job began, as it knows itself.
    last : float
        Epoch seconds at which one of its workers was connected last.
    gpus : int
        GPUs whose workers were ever connected.
    firsts : list of float
        For each worker that ever had tasks, epoch seconds at which it had some for the first time.
    seconds, busy : float
        Seconds in which workers were connected, and those of them in which they had tasks or their GPU computed: of two
        workers they count twice.
    utilization : Quantity
        Of the GPUs, per cent.
    working : Quantity
        The same while they were busy.
    memory : Quantity
        Of the GPUs, bytes.
    memory_total : int or None
        Bytes of one GPU.
    model : str
    done, lost : int
        Tasks that its workers did, and that were lost with workers: those that they had, and results that nobody else
        had and somebody wanted.
    sent : int
        Bytes that its workers gave to others.
    spilled : int or None
        The most bytes that its workers had on disk; None where nobody knows.
    """

    id: str
    name: str = ""
    kind: str = "worker"
    began: float | None = None
    last: float = 0.0
    gpus: int = 0
    firsts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    utilization: Quantity = field(default_factory=Quantity)
    working: Quantity = field(default_factory=Quantity)
    memory: Quantity = field(default_factory=Quantity)
    memory_total: int | None = None
    model: str = ""
    done: int = 0
    lost: int = 0
    sent: int = 0
    spilled: int | None = None


@dataclass(frozen=True)
class Kept:
    """The file, as far as it can be read.

    Attributes
    ----------
    jobs : dict
        By job id.
    whole : bool
        Whether it has all jobs that ever had workers.
    problems : list of str
        What is wrong with it, a sentence each.
    """

    jobs: dict[str, JobUsage]
    whole: bool
    problems: list[str]


def line(job: JobUsage) -> str:
    """Return the line of a job, short: what is as at the start is left out."""
    kept = {
        one.name: value
        for one in dataclasses.fields(job)
        if (value := getattr(job, one.name)) != _default(one) or one.name == "id"
    }
    return json.dumps(_rounded(kept), separators=(",", ":")) + "\n"


def read(directory: Path) -> Kept:
    """Return what the scheduler has kept of a cluster; empty if it kept nothing."""
    file = directory / FILE
    try:
        lines = checked.read(file, patience=_PATIENCE).split(b"\n")
    except FileNotFoundError:
        return Kept({}, False, [])
    except OSError as error:
        return Kept({}, False, [f"{file} cannot be read: {error.strerror}"])
    jobs, problems, whole = dict[str, JobUsage](), list[str](), True
    for number, content in enumerate(lines, 1):
        if not content.strip():
            continue
        try:
            job = records.parse(content, JobUsage, f"line {number} of {file}")
        except Damaged as error:
            problems.append(str(error))
            continue
        if job.id:
            jobs[job.id] = job
        else:
            whole = False
    return Kept(jobs, whole and not problems, problems)


def _default(one: dataclasses.Field[object]) -> object:
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Quantity):
        return {name: round(number, _DIGITS) for name, number in dataclasses.asdict(value).items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {name: _rounded(one) for name, one in value.items()} if isinstance(value, dict) else value
