"""Numbers with their nouns, and lists that stay short."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MANY", "counted", "listed"]

#: More jobs than this are summarised.
MANY = 20
#: Of these so many are named.
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
    """Return words in a row; of more than twenty the first five, and how many there are besides."""
    every = list(words)
    if len(every) <= MANY:
        return separator.join(every)
    return f"{separator.join(every[:_NAMED])} and {len(every) - _NAMED} more"
