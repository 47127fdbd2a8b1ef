"""What a cluster needs of its Dask scheduler.

The scheduler is a job, the job of a cluster to which this program attaches, or runs in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpcgpu.cluster.job import Job
from hpcgpu.store.directory import Contact

__all__ = ["Scheduler"]


class Scheduler(Protocol):
    """A Dask scheduler.

    Attributes
    ----------
    in_process : bool
        Whether it runs in this program, and ends with it.
    contact : Contact or None
        How it is reached, once it can be reached.
    address, external_address : str or None
        Where workers, and clients, reach it.
    """

    in_process: bool

    @property
    def contact(self) -> Contact | None: ...

    @property
    def address(self) -> str | None: ...

    @property
    def external_address(self) -> str | None: ...

    @property
    def held(self) -> object:
        """What users get as ``cluster.scheduler``: the job, or the `distributed.Scheduler` in this process."""
        ...

    @property
    def entries(self) -> Sequence[Job]:
        """Its jobs in the queue: one or none."""
        ...

    @property
    def submit_done(self) -> bool:
        """Whether worker jobs may be submitted."""
        ...

    @property
    def dependency(self) -> str | None:
        """The id of the job that must have started before worker jobs may."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it has ended, as the queue reports."""
        ...

    def heard(self, answers: bool) -> None:
        """Record whether it answers now: one that does proves that its job runs."""
        ...

    async def submit(self) -> None:
        """Request it, without waiting for anything."""
        ...

    async def reach(self) -> None:
        """Wait until it can be reached."""
        ...

    def end_is_near(self, *, now: float) -> str:
        """Return a warning that its walltime ends soon, once; empty otherwise."""
        ...

    def loss_report(self, cluster: str) -> str:
        """Return the report for the user when it has ended."""
        ...

    async def close(self) -> None:
        """End it, unless it ends with its job."""
        ...
