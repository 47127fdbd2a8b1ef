"""Whether and when a running job with missing workers is replaced.

Pure functions of the connected workers and the time.

A nanny needs some seconds to restart its worker, and the processes of one job do not start at the same moment. A worker
that is absent for longer than ``death_timeout`` has ended for good: after that time its process stops trying to connect
to the scheduler.

A job that has no worker left does no work. Its node may have rebooted, and some queues still report such a job as
running for minutes. So it gets less time: enough for a nanny to restart its worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.display.counts_and_durations import counted

#: Seconds to wait for a job that has no worker left.
_NONE_LEFT = 60.0


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Workers that are missing from a running job; false if none are missing.

    Attributes
    ----------
    names : sequence of str
        Workers of the whole job, node by node.
    nodes : int
        Nodes of the job.
    since : mapping of str to float
        The absent workers, and since when each is absent.
    joined : frozenset of str
        Workers that have been connected at any time.
    known : bool
        Whether the queue lists the job. A job that is not listed may have lost its network together with its node, so
        it gets the whole time.
    """

    names: Sequence[str] = ()
    nodes: int = 1
    since: Mapping[str, float] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    known: bool = True

    def __bool__(self) -> bool:
        return bool(self.since)

    def with_worker(self, worker: str) -> Absence:
        """Return the missing workers after this worker has joined: it may be lost before `observe` runs."""
        since = {name: at for name, at in self.since.items() if name != worker}
        return replace(self, since=since, joined=self.joined | {worker})

    @property
    def none_left(self) -> bool:
        """Whether the job has no worker left."""
        return bool(self.since) and len(self.since) == len(self.names)

    def loss_timeout(self, timeout: float) -> float:
        """Return how many seconds to wait for missing workers."""
        return min(timeout, _NONE_LEFT) if self.none_left and self.known else timeout

    @property
    def node(self) -> int | None:
        """Index of the first node that lacks workers, if the job has several nodes."""
        if self.nodes == 1 or not self.since:
            return None
        return min(self.names.index(name) for name in self.since) * self.nodes // len(self.names)

    def seconds_left(self, timeout: float, *, now: float) -> float:
        """Return the seconds until the worker that is absent longest counts as lost; negative after that time."""
        left = min(self.since.values(), default=now) + timeout - now
        return min(left, max(self.since.values()) + self.loss_timeout(timeout) - now) if self.none_left else left

    def words(self, *, now: float) -> str:
        """Return a text on the missing workers, and since when they are missing."""
        ago = f"{now - min(self.since.values(), default=now):.0f} s"
        count = f"{len(self.since)} of {counted(len(self.names), 'worker')}"
        where = f" on its node {self.node}" if self.node is not None else ""
        return (
            f"lost {count}{f'{where},' if where else ''} {ago} ago"
            if self.since.keys() & self.joined
            else f"{count}{where} missing, {ago} after the first connected"
        )

    def outlook(self, timeout: float, *, now: float) -> str:
        """Return a text on the missing workers, and on what happens next."""
        what = "it does" if len(self.since) == 1 else "they do"
        back = "come back" if self.since.keys() & self.joined else "connect"
        left = max(0.0, self.seconds_left(timeout, now=now))
        return f"{self.words(now=now)}; replaced if {what} not {back} within {left:.0f} s"


def observe(
    before: Absence, names: Sequence[str], nodes: int, there: Collection[str], *, now: float, known: bool = True
) -> Absence:
    """Update the absence with the workers that are connected now.

    No worker counts as absent before the first one has joined: a job without any worker ends by itself.

    Parameters
    ----------
    before : Absence
    names : sequence of str
        Workers that the job should have, node by node.
    nodes : int
        Nodes of the job.
    there : collection of str
        Names of the connected workers.
    now : float
        Epoch seconds.
    known : bool, default True
        Whether the queue lists the job.
    """
    joined = before.joined | set(there)
    absent = [name for name in names if name not in there] if joined and len(there) < len(names) else []
    since = {name: before.since.get(name, now) for name in absent}
    return Absence(names=tuple(names), nodes=nodes, since=since, joined=joined, known=known)


def jobs_that_may_end(short: int, whole: int, target: int, *, comes: bool) -> int:
    """Return how many of the jobs that must be replaced may end now.

    Each job continues until the workers of its replacement are connected. One job at a time may end earlier: if the
    site has no room for both, the replacement can start only after that.

    Parameters
    ----------
    short : int
        Jobs that must be replaced and still work.
    whole : int
        Jobs that have all their workers.
    target : int
        The number of jobs that the group should have.
    comes : bool
        Whether a job waits in the queue or starts, or could not be submitted because the site has no room.
    """
    return max(0, min(short, short + whole - target + comes))
