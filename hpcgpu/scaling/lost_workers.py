"""Whether and when a running job with missing workers is replaced.

Pure: the connected workers and the time in, a decision out.

A nanny that restarts its worker needs seconds, and the processes of one job do not start at the same moment. A worker
that is away for longer than ``death_timeout`` has ended for good: its own process stops looking for the scheduler then.

A job that has no worker left works nothing. Its node may have rebooted, and some queues call it running for minutes. So
it gets less time: enough for a nanny that restarts its worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.display.words import counted

__all__ = ["Absence", "may_go", "observe"]


#: Seconds for which a job that has no worker left is waited for.
_NONE_LEFT = 60.0


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
    known : bool
        Whether the queue knows the job. One that vanished may have been cut off with its node, and has the whole time.
    """

    names: Sequence[str] = ()
    nodes: int = 1
    since: Mapping[str, float] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    known: bool = True

    def __bool__(self) -> bool:
        return bool(self.since)

    @property
    def none_left(self) -> bool:
        """Whether the job has no worker at all any more."""
        return bool(self.since) and len(self.since) == len(self.names)

    def patience(self, timeout: float) -> float:
        """Return the seconds for which missing workers are waited for."""
        return min(timeout, _NONE_LEFT) if self.none_left and self.known else timeout

    @property
    def node(self) -> int | None:
        """Index of the first node that lacks workers, where the job has several."""
        if self.nodes == 1 or not self.since:
            return None
        return min(self.names.index(name) for name in self.since) * self.nodes // len(self.names)

    def left(self, timeout: float, *, now: float) -> float:
        """Return the seconds until the worker that is away for longest counts as gone; negative if it does already."""
        left = min(self.since.values(), default=now) + timeout - now
        return min(left, max(self.since.values()) + self.patience(timeout) - now) if self.none_left else left

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


def observe(
    before: Absence, names: Sequence[str], nodes: int, there: Collection[str], *, now: float, known: bool = True
) -> Absence:
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
    known : bool, default True
        Whether the queue knows the job.
    """
    joined = before.joined | set(there)
    absent = [name for name in names if name not in there] if joined and len(there) < len(names) else []
    since = {name: before.since.get(name, now) for name in absent}
    return Absence(names=tuple(names), nodes=nodes, since=since, joined=joined, known=known)


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
