"""What the jobs of a cluster did, ``usage.jsonl``: the scheduler writes it, for the bill.

The file has a line for each job that had workers, and one for the scheduler itself. A damaged line loses only its own
record.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked_files, json_records

FILE = "usage.jsonl"
#: Decimal places of its numbers.
_DIGITS = 2


@dataclass
class Quantity:
    """A number that was sampled again and again.

    Attributes
    ----------
    total : float
        Sum of its values, each multiplied by the seconds that it applies to.
    seconds : float
        Seconds for which the value is known.
    peak : float
    """

    total: float = 0.0
    seconds: float = 0.0
    peak: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        """Record a value that applies for this many seconds."""
        self.total += value * seconds
        self.seconds += seconds
        self.peak = max(self.peak, value)

    @property
    def mean(self) -> float | None:
        """The mean; None if no value was ever recorded."""
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
        Epoch seconds at which the job began, by its own clock.
    last : float
        Epoch seconds at which one of its workers was last connected.
    gpus : int
        GPUs whose workers were ever connected.
    firsts : list of float
        For each worker that ever had tasks, epoch seconds at which it had some for the first time. For a scheduler,
        when it was there.
    seconds, busy : float
        Seconds in which workers were connected, and seconds in which they had tasks or their GPU computed. If two
        workers were connected, a second counts twice.
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
        Tasks that its workers did, and tasks that were lost with workers: those that a lost worker had, and its results
        that no other worker had and that somebody wanted.
    sent : int
        Bytes that its workers sent to others.
    spilled : int or None
        The most bytes that its workers had on disk; None if it is not known.
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
class UsageFile:
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
    """Return the line of a job; a field with its initial value is left out."""
    kept = {
        one.name: value
        for one in dataclasses.fields(job)
        if (value := getattr(job, one.name)) != _default(one) or one.name == "id"
    }
    return json.dumps(_rounded(kept), separators=(",", ":")) + "\n"


def read(directory: Path) -> UsageFile:
    """Return what the scheduler has written of a cluster; empty if it wrote nothing."""
    file = directory / FILE
    try:
        lines = checked_files.read(file).split(b"\n")
    except FileNotFoundError:
        return UsageFile({}, False, [])
    except OSError as error:
        return UsageFile({}, False, [f"{file} cannot be read: {error.strerror}"])
    jobs, problems, whole = dict[str, JobUsage](), list[str](), True
    for number, content in enumerate(lines, 1):
        if not content.strip():
            continue
        try:
            job = json_records.parse(content, JobUsage, f"line {number} of {file}")
        except Damaged as error:
            problems.append(str(error))
            continue
        if job.id:
            jobs[job.id] = job
        else:
            whole = False
    return UsageFile(jobs, whole and not problems, problems)


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
