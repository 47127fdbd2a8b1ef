"""Which events of a cluster are reported to an absent user, and when. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcgpu.display.words import counted, duration
from hpcgpu.options.options_and_defaults import DEFAULT
from hpcgpu.scaling.walltime_margin import ends_soon

#: Events that occur once in the life of a cluster, also if its manager changes.
ONCE = frozenset({"ready", "ending", "ended"})


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event of a cluster.

    Attributes
    ----------
    event : str
        ``"ready"``: all workers of the first request are connected. ``"job_lost"``: a worker job ended early, or
        lacks workers. ``"paused"``: a group of workers gets no more jobs. ``"budget"``: 80 % of its budget of GPU
        hours is used, or all of it. ``"ending"``: the walltime of the scheduler job ends soon. ``"ended"``: the cluster
        has ended.
    cluster : str
        Its name.
    message : str
        What happened, for people.
    time : float
        Epoch seconds.
    """

    event: str
    cluster: str
    message: str
    time: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a manager sees of its cluster at one moment.

    Attributes
    ----------
    workers, wanted : int
        How many are connected, and how many there should be.
    paused : mapping
        Why each worker group gets no more jobs, by the name of the group; empty if it gets some.
    scheduler : str
        The id of the scheduler job while it runs, else empty.
    start, end : float or None
        Epoch seconds of its start and of the end of its walltime.
    """

    workers: int = 0
    wanted: int = 0
    paused: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    start: float | None = None
    end: float | None = None


class Events:
    """Decides which events are due.

    Parameters
    ----------
    name : str
        The cluster's name.
    notice : float
        Seconds before the end of the scheduler's walltime at which the event ``"ending"`` is due.
    """

    def __init__(self, name: str, notice: float) -> None:
        self.name = name
        self.notice = notice
        self._reported = set[str]()
        self._paused = dict[str, str]()

    def due(self, seen: Seen, *, now: float) -> list[tuple[str, str]]:
        """Return the events that are new, each with a message."""
        found: list[tuple[str, str]] = []
        if seen.workers >= seen.wanted > 0 and self._first("ready"):
            found.append(("ready", f"cluster {self.name} is ready: {counted(seen.workers, 'worker')} connected"))
        for group, why in seen.paused.items():
            if why and why != self._paused.get(group):
                which = f"cluster {self.name}" if group == DEFAULT else f"worker group {group} of cluster {self.name}"
                found.append(("paused", f"{which} gets no more jobs: {why}"))
        self._paused = dict(seen.paused)
        soon = seen.scheduler and seen.end is not None and ends_soon(seen.start, seen.end, self.notice, now=now)
        if soon and seen.end is not None and self._first("ending"):
            left = duration(max(0.0, seen.end - now))
            found.append(
                (
                    "ending",
                    f"the walltime of the scheduler job {seen.scheduler} ends in {left}, and cluster {self.name} with "
                    "it: save your results",
                )
            )
        return found

    def _first(self, event: str) -> bool:
        new = event not in self._reported
        self._reported.add(event)
        return new
