"""One job, as it is shown to people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict, cast

__all__ = ["JobInfo", "JobJSON"]


class JobJSON(TypedDict):
    """A job."""

    #: The id that the batch system gave it; empty while the submit is under way.
    id: str
    #: ``scheduler`` or ``worker``.
    kind: str
    name: str
    state: str
    #: Why it waits or ended, in words.
    reason: str
    #: Seconds between submit and start, or until now.
    waited: float
    node: str
    #: Its Dask workers that are connected.
    workers: int
    #: Its log.
    log: str
    #: Its worker group; empty for the scheduler job.
    group: str
    #: GPUs that it requests.
    gpus: int
    #: Seconds since 1970 of its submit, its start and its end; null where it has not started, has not ended, or where
    #: it is not known.
    submitted: float
    started: float | None
    ended: float | None
    #: Seconds since 1970 at which the queue expects to start it, by the queue's own estimate; null if it has none.
    expected_start: float | None
    #: Seconds that such jobs of this cluster waited before, by what hpcgpu has learned; null if none has started yet.
    usual_wait: float | None
    #: Seconds of its walltime that are left; null unless it runs.
    time_left: float | None


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job, for people.

    Attributes
    ----------
    id : str
        The batch system's id; empty while the submit is under way.
    kind : str
        ``"scheduler"`` or ``"worker"``.
    name : str
    state : str
    reason : str
        Why it waits or ended, in words.
    waited : float
        Seconds between submit and start, or until now.
    node : str
    workers : int
        Dask workers of it that are connected.
    log : Path
    group : str
        Its worker group; empty for the scheduler job.
    gpus : int
        GPUs that it requests.
    submitted : float
        Epoch seconds of its submit.
    started, ended : float or None
        Epoch seconds of its start and end, as far as they are known.
    expected_start : float or None
        Epoch seconds at which the queue expects to start a pending job, by its own estimate.
    usual_wait : float or None
        Seconds that jobs of this group waited before: what hpcgpu has learned.
    time_left : float or None
        Seconds that are left of the walltime of a running job.
    """

    id: str
    kind: str
    name: str
    state: str
    reason: str
    waited: float
    node: str
    workers: int
    log: Path
    group: str = ""
    gpus: int = 0
    submitted: float = 0.0
    started: float | None = None
    ended: float | None = None
    expected_start: float | None = None
    usual_wait: float | None = None
    time_left: float | None = None

    def as_json(self) -> JobJSON:
        """Return it as ``--json`` prints it."""
        return cast(JobJSON, asdict(self) | {"log": str(self.log)})
