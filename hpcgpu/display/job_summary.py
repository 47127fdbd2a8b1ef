"""Many jobs in a few words: how many are in each state, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from hpcgpu.posix.printable import printable

#: The words of the queue at the end of a reason.
_OWN_WORDS = re.compile(r"\[([^\[\]]{1,40})\]$")
#: The most reasons that are named for one state, and the most characters of a reason.
_REASONS, _LENGTH = 3, 40
#: Rows that represent many jobs.
_ROWS = 10


class _Shown(Protocol):
    """A job that is shown to people."""

    @property
    def kind(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


_S = TypeVar("_S", bound=_Shown)


def summary(jobs: Iterable[_Shown]) -> str:
    """Return ``812 running, 180 pending: Priority (150), Resources (30)``: the most frequent first."""
    reasons: dict[str, Counter[str]] = {}
    for job in jobs:
        reasons.setdefault(job.state, Counter())[_reason(job)] += 1
    parts = []
    for state, counts in sorted(reasons.items(), key=lambda item: -item[1].total()):
        named = [(reason, count) for reason, count in counts.most_common() if reason]
        shown = [f"{reason} ({count})" for reason, count in named[:_REASONS]]
        if others := sum(count for _, count in named[_REASONS:]):
            shown.append(f"other reasons ({others})")
        parts.append(f"{counts.total()} {state}{': ' * bool(shown)}{', '.join(shown)}")
    return "; ".join(parts) if any(": " in part for part in parts) else ", ".join(parts)


def examples(jobs: Sequence[_S]) -> list[_S]:
    """Return a few of many jobs: the first of each kind, state and reason, then the first of the others."""
    first: dict[tuple[str, str, str], int] = {}
    for number, job in enumerate(jobs):
        first.setdefault((job.kind, job.state, _reason(job)), number)
    chosen = list(dict.fromkeys([*first.values(), *range(min(_ROWS, len(jobs)))]))[:_ROWS]
    return [jobs[number] for number in sorted(chosen)]


def _reason(job: _Shown) -> str:
    """Return why a job is in its state, in the queue's own word if it gave one; numbers differ, so they are removed."""
    own = _OWN_WORDS.search(job.reason)
    text = printable(own[1] if own else re.sub(r"\d+", "N", job.reason))
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."
