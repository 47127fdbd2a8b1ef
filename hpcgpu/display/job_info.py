"""One job, as it is shown to people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """A job.

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
        Its Dask workers that are connected.
    log : Path
        Its log.
    group : str
        Its worker group; empty for the scheduler job.
    gpus : int
        GPUs that it requests.
    submitted : float
        Seconds since 1970 of its submit.
    started, ended : float or None
        Seconds since 1970 of its start and end; None where it has not started, has not ended, or where it is not known.
    expected_start : float or None
        Seconds since 1970 at which the queue expects to start a pending job, by its own estimate; None if it has none.
    usual_wait : float or None
        Seconds that earlier jobs of its group waited, by hpcgpu's records; None if none has started yet.
    time_left : float or None
        Seconds of its walltime that are left; None unless it runs.
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
