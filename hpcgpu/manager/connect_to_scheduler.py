"""Connects this program to the scheduler of its cluster, and compares their software."""

from __future__ import annotations

from distributed.security import Security

from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient, Workers
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.manager.take_over import running_scheduler
from hpcgpu.runtime.scheduler_connection import no_answer

#: Seconds that the scheduler may take to report its software.
_ENVIRONMENT_TIMEOUT = 30.0


class Connector:
    """Connects to the scheduler of one cluster.

    Parameters
    ----------
    reconciler : Reconciler
    security : Security

    Attributes
    ----------
    waits_for : str
        The address of the scheduler whose answer it waits for; empty otherwise.
    """

    def __init__(self, reconciler: Reconciler, security: Security) -> None:
        self.reconciler = reconciler
        self.security = security
        self.waits_for = ""

    async def connect(self, address: str) -> SchedulerClient:
        """Connect to the scheduler; raise or warn if its software and that of this program are incompatible."""
        self.reconciler.state.messages.log(f"the scheduler is at {address}")
        client = SchedulerClient(address, self.security, self._workers_joined, self.reconciler.worker_left)
        self.waits_for = address
        try:
            await client.listen(None)  # the scheduler may be busy: many clients may use it already
            await self._compare_software(client)
        except BaseException:
            await client.close()
            raise
        finally:
            self.waits_for = ""
        return client

    async def connect_to_running(self, *, security: bool) -> SchedulerClient | None:
        """Connect to the scheduler of a cluster that this program wants to take over; return None if it has ended.

        Parameters
        ----------
        security : bool
            Whether the cluster has credentials.
        """
        state = self.reconciler.state
        while (running := await running_scheduler(state, security=security)) is not None:
            try:
                client = await self.connect(running)
            except OSError:  # after half a minute
                if await running_scheduler(state, security=security) == running:
                    raise
            else:  # a busy scheduler takes its time, so the queue is asked again
                await running_scheduler(state, security=security)
                return client
        return None

    def _workers_joined(self, joined: Workers, known: Workers) -> None:
        for address, worker in joined.items():
            self.reconciler.worker_joined(address, worker["name"])
        self.reconciler.compare_environments(joined, known)
        self.reconciler.state.changed.set()

    async def _compare_software(self, client: SchedulerClient) -> None:
        """Raise or warn if the software of this program and of the scheduler is incompatible.

        If the scheduler is too busy to answer, nothing is compared.
        """
        messages, environment = self.reconciler.state.messages, self.reconciler.environment
        if environment.mode == "off":
            return
        try:
            environment.scheduler = await client.environment(_ENVIRONMENT_TIMEOUT)
        except (OSError, TimeoutError) as error:
            messages.log(f"software was not compared, because the scheduler did not answer: {no_answer(error)}")
            return
        fatal, differing = environment.check({})
        if fatal:
            raise ClusterError(fatal)
        if differing:
            messages.log(differing)
            warn(differing)
