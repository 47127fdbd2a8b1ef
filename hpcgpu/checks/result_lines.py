"""The lines of a check: what was checked, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpcgpu.display.text_columns import columns

Grade = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Line:
    """A line of a check.

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
    """Return the lines as a table; the advice follows an arrow."""
    rows = [
        (line.where, line.what, line.grade, f"{line.found.rstrip('.')} -> {line.advice}" if line.advice else line.found)
        for line in lines
    ]
    return columns(("where", "what", "", "found"), rows, width)
