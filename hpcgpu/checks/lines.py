"""The lines of a check: what was checked, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, TypedDict, cast

from hpcgpu.display.text import columns

__all__ = ["Grade", "Line", "LineJSON", "text"]

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

    def as_json(self) -> LineJSON:
        """Return what ``--json`` prints."""
        return cast(LineJSON, asdict(self))


def text(lines: Iterable[Line], width: int) -> str:
    """Return the lines as a table; what to do stands behind an arrow."""
    rows = [
        (line.where, line.what, line.grade, f"{line.found.rstrip('.')} -> {line.advice}" if line.advice else line.found)
        for line in lines
    ]
    return columns(("where", "what", "", "found"), rows, width)
