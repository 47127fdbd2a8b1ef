"""The lines of a check: what was checked, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from hpcgpu.display.text import columns

if TYPE_CHECKING:
    from hpcgpu.runtime.check import JobReport

__all__ = ["Grade", "Line", "LineJSON", "as_json", "import_lines", "text"]

#: Seconds of `import dask.distributed` from which a packed environment is advised (benchmarks/results/environment.txt).
_SLOW_IMPORT = 20.0

Grade = Literal["ok", "warning", "failure"]


class LineJSON(TypedDict):
    """A line of a check."""

    #: ``login``, ``scheduler job`` or ``worker job``.
    where: str
    what: str
    #: ``ok``, ``warning`` or ``failure``.
    grade: Grade
    found: str
    #: What to do; empty if there is nothing to do.
    advice: str


@dataclass(frozen=True)
class Line:
    """One thing that was checked.

    Attributes
    ----------
    where : str
        ``"login"``, ``"scheduler job"`` or ``"worker job"``.
    what : str
    grade : {"ok", "warning", "failure"}
    found : str
    advice : str
        What to do; empty if there is nothing to do.
    """

    where: str
    what: str
    grade: Grade
    found: str
    advice: str = ""


def text(lines: Iterable[Line], width: int) -> str:
    """Return the lines as a table; what to do stands behind an arrow."""
    rows = [
        (line.where, line.what, line.grade, f"{line.found.rstrip('.')} -> {line.advice}" if line.advice else line.found)
        for line in lines
    ]
    return columns(("where", "what", "", "found"), rows, width)


def as_json(lines: Iterable[Line]) -> list[LineJSON]:
    """Return the lines for ``--json``."""
    return [LineJSON(where=li.where, what=li.what, grade=li.grade, found=li.found, advice=li.advice) for li in lines]


def import_lines(where: str, found: JobReport) -> Iterator[Line]:
    """Yield how long an import takes in a job; a packed environment helps where many nodes read the same files."""
    seconds = found.get("import_seconds")
    if seconds is None:
        return
    slow = seconds > _SLOW_IMPORT and found.get("import_shared", False) and not found.get("container")
    advice = (
        "a node can unpack the environment on its own disk: set stage to an archive made by conda-pack or venv-pack"
    )
    yield Line(
        where,
        "import",
        "warning" if slow else "ok",
        f"dask.distributed takes {seconds:.1f} s from {found.get('import_filesystem') or 'an unknown filesystem'}",
        advice if slow else "",
    )
