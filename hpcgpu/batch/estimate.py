"""What a batch system reports about a job before it is submitted."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgpu.posix.printable import printable


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a batch system reports about one job that is not submitted. Its words are made `printable`.

    Attributes
    ----------
    start : float or None
        Epoch seconds at which the batch system expects to start it; None if it gives no time.
    place : str
        The nodes on which it would start; empty if they are not known.
    limits : tuple of str
        Why it would be refused, or would never start: in the batch system's own words, with what they mean.
    known : tuple of str
        What else is known, for people.
    tested : bool
        The batch system tried the submit and accepted it: nodes, account and the like are right.
    queue : str
        The queue to which it would go, by that test; empty if the test does not name it.
    """

    start: float | None = None
    place: str = ""
    limits: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    tested: bool = False
    queue: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", printable(self.place))
        object.__setattr__(self, "queue", printable(self.queue))
        for name in ("limits", "known"):
            object.__setattr__(self, name, tuple(printable(text) for text in getattr(self, name)))
