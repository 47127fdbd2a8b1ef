"""One job, as it is shown to people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

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

    def as_json(self) -> JobJSON:
        """Return it as ``--json`` prints it."""
        return JobJSON(
            id=self.id,
            kind=self.kind,
            name=self.name,
            state=self.state,
            reason=self.reason,
            waited=self.waited,
            node=self.node,
            workers=self.workers,
            log=str(self.log),
        )
