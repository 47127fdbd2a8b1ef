"""Numbers with their nouns."""

from __future__ import annotations

__all__ = ["counted"]


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
