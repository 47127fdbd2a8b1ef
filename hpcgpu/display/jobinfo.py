"""What people see of one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["JobInfo"]


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

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {**asdict(self), "log": str(self.log)}
