"""Whether and when a running job with missing workers is replaced.

Pure: the connected workers and the time in, a decision out.

A nanny that restarts its worker needs seconds, and the processes of one job do not start at the same moment. A worker
that is away for longer than ``death_timeout`` has ended for good: its own process stops looking for the scheduler then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.display.words import counted

__all__ = ["Absence", "may_go", "observe"]


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Workers that are missing from a running job; false if there are none.

    Attributes
    ----------
    names : sequence of str
        Workers of the whole job, node by node.
    nodes : int
        Nodes of the job.
    since : mapping of str to float
        The absent workers, and since when each is absent.
    joined : frozenset of str
        Workers that have been there at any time.
    """

    names: Sequence[str] = ()
    nodes: int = 1
    since: Mapping[str, float] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.since)

    @property
    def node(self) -> int | None:
        """Index of the first node that lacks workers, where the job has several."""
        if self.nodes == 1 or not self.since:
            return None
        return min(self.names.index(name) for name in self.since) * self.nodes // len(self.names)

    def left(self, timeout: float, *, now: float) -> float:
        """Return the seconds until the worker that is away for longest counts as gone; negative if it does already."""
        return min(self.since.values(), default=now) + timeout - now

    def words(self, *, now: float) -> str:
        """Return what is missing and since when."""
        ago = f"{now - min(self.since.values(), default=now):.0f} s"
        count = f"{len(self.since)} of {counted(len(self.names), 'worker')}"
        where = f" on its node {self.node}" if self.node is not None else ""
        return (
            f"lost {count}{f'{where},' if where else ''} {ago} ago"
            if self.since.keys() & self.joined
            else f"{count}{where} missing, {ago} after the first connected"
        )

    def outlook(self, timeout: float, *, now: float) -> str:
        """Return what is missing, and what happens next."""
        what = "it does" if len(self.since) == 1 else "they do"
        back = "come back" if self.since.keys() & self.joined else "connect"
        return (
            f"{self.words(now=now)}; replaced if {what} not {back} within {max(0.0, self.left(timeout, now=now)):.0f} s"
        )


def observe(before: Absence, names: Sequence[str], nodes: int, there: Collection[str], *, now: float) -> Absence:
    """Join the present workers with what was known.

    Nothing is absent before the first worker has come: a job without any ends by itself.

    Parameters
    ----------
    before : Absence
    names : sequence of str
        Workers that the job should have, node by node.
    nodes : int
        Nodes of the job.
    there : collection of str
        Names of those that are connected.
    now : float
        Epoch seconds.
    """
    joined = before.joined | set(there)
    absent = [name for name in names if name not in there] if joined and len(there) < len(names) else []
    return Absence(
        names=tuple(names), nodes=nodes, since={name: before.since.get(name, now) for name in absent}, joined=joined
    )


def may_go(short: int, whole: int, target: int, *, comes: bool) -> int:
    """Return how many of the jobs that are to be replaced may go now.

    Each works on until another job's workers are there in its place. One at a time may go before: where the site has no
    room for both, the other can only start then.

    Parameters
    ----------
    short : int
        Jobs that are to be replaced and still work.
    whole : int
        Jobs that have all their workers.
    target : int
        The number of jobs that the group should have.
    comes : bool
        Whether a job waits in the queue or starts, or could not be submitted for want of room.
    """
    return max(0, min(short, short + whole - target + comes))
