"""Numbers with their nouns, and lists that stay short."""

from __future__ import annotations

from collections.abc import Iterable

#: More jobs than this are summarised.
MANY = 20
#: If there are more, this many are named.
_NAMED = 5


def counted(number: float, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural.

    Examples are ``1 worker``, ``2 workers``, ``0 jobs`` and ``1.5 GPU hours``.

    Parameters
    ----------
    number : float
    noun : str
        In the singular.
    plural : str, optional
        Default: the noun with an ``s``.
    """
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {plural or noun + 's'}"


def listed(words: Iterable[str], separator: str = " ") -> str:
    """Return words in a row; for more than twenty, the first five and the number of the others."""
    every = list(words)
    if len(every) <= MANY:
        return separator.join(every)
    return f"{separator.join(every[:_NAMED])} and {len(every) - _NAMED} more"


def duration(seconds: float) -> str:
    """Return a duration for people: ``42 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
