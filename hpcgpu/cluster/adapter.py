"""Makes a `Manager` a `distributed.deploy.spec.SpecCluster`, as users and tools expect.

It holds no state of the cluster: its properties read, its methods send commands. Of SpecCluster these still run: the
constructor, the event loop in a thread, `sync`, ``async with``, `get_client`, `get_logs` and the exit hook.

SpecCluster's handling of grouped workers, of dead jobs and of a dead scheduler is broken (distributed #4069, #9102), so
that planning, retirement, status, start and end are overridden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar, Self

from distributed.core import Status
from distributed.deploy.spec import SpecCluster

from hpcgpu.cluster.adaptive import GPUAdaptive
from hpcgpu.cluster.manager import Manager
from hpcgpu.cluster.notify import Callbacks
from hpcgpu.cluster.plan import Planner
from hpcgpu.cluster.reconciler import Reconciler
from hpcgpu.cluster.state import ClusterState
from hpcgpu.cluster.worker_job import WorkerJob
from hpcgpu.errors import ClusterError, Superseded
from hpcgpu.options.common import Options
from hpcgpu.scaling import units
from hpcgpu.scaling.wanted import Command
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["Adapter"]


class Adapter(SpecCluster):  # type: ignore[misc]
    """A SpecCluster whose jobs a `Manager` manages.

    Parameters
    ----------
    manager : Manager
    asynchronous, loop
        See `distributed.deploy.spec.SpecCluster`.
    """

    system: ClassVar[str]
    directory: ClusterDirectory
    _callbacks = Callbacks()

    def __init__(self, manager: Manager, *, asynchronous: bool, loop: Any) -> None:
        self.manager = manager
        manager.reconciler.send = self._order
        super().__init__(
            worker={"cls": WorkerJob, "options": {}},
            asynchronous=asynchronous,
            loop=loop,
            name=manager.options.cluster.name,
            security=manager.security,
        )

    # Views, which SpecCluster has as attributes that its constructor sets

    @property
    def options(self) -> Options:
        """What the cluster was asked for."""
        return self.manager.options

    @property
    def reconciler(self) -> Reconciler:
        """What decides on its jobs."""
        return self.manager.reconciler

    @property
    def _state(self) -> ClusterState:
        return self.manager.state

    @property
    def status(self) -> Status:
        """Whether it is starting, running, failed, or closed."""
        return self.manager.status

    @status.setter
    def status(self, status: Status) -> None:
        pass

    @property
    def scheduler_comm(self) -> Any:
        """The RPC of its scheduler; None while there is none."""
        return self.manager.client.rpc if self.manager.client is not None else None

    @scheduler_comm.setter
    def scheduler_comm(self, comm: None) -> None:
        pass

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """What the scheduler reports of itself and of all workers."""
        return self.manager.client.info if self.manager.client is not None else {"workers": {}}

    @scheduler_info.setter
    def scheduler_info(self, info: object) -> None:
        pass

    @property
    def scheduler(self) -> Any:
        """The scheduler, once it was requested: its job, or the scheduler in this process."""
        return self._state.scheduler.held if self._state.scheduler is not None else None

    @scheduler.setter
    def scheduler(self, scheduler: None) -> None:
        pass

    @property
    def workers(self) -> dict[str, WorkerJob]:
        """The jobs that are neither draining nor ended, by name."""
        return self._state.registry.active

    @workers.setter
    def workers(self, workers: object) -> None:
        pass

    @property
    def worker_spec(self) -> dict[str, Any]:
        """The same jobs, as SpecCluster specifies workers."""
        return dict.fromkeys(self._state.registry.active, self.new_spec)

    @worker_spec.setter
    def worker_spec(self, spec: object) -> None:
        pass

    @property
    def shutdown_on_close(self) -> bool:
        """Whether the end of this program closes the cluster; upstream's exit hook reads it."""
        return self._state.ownership.ends_at_exit and not self._state.phase.left

    @shutdown_on_close.setter
    def shutdown_on_close(self, close: bool) -> None:
        pass

    @property
    def adaptive(self) -> GPUAdaptive | None:
        """Adaptive scaling of the default group, or of the first group that has it."""
        groups = self._state.registry.groups.values()
        return next((group.adaptive for group in groups if group.adaptive is not None), None)

    @property
    def _adaptive(self) -> GPUAdaptive | None:
        """The same, for distributed's widget."""
        return self.adaptive

    @_adaptive.setter
    def _adaptive(self, adaptive: object) -> None:
        pass

    @Planner
    def plan(self) -> set[str]:
        """Names of the workers that the cluster is to have."""
        return {worker for job in self.workers.values() for worker in units.workers_of(job.name, job.group.options)}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are in the plan."""
        return self.plan

    def new_worker_spec(self) -> dict[str, Any]:
        """Return name and specification of the next worker job; names are never used twice."""
        return {self._state.registry.new_name(): self.new_spec}

    # What upstream calls

    def _log(self, log: str) -> None:
        self.manager.messages.log(log)

    def _correct_state(self) -> asyncio.Future[Any]:
        """Submit the jobs that were planned; returns what waits for that, but not for jobs that drain."""
        self.reconciler.submitter.submit_planned()
        submits = [job.submit_task for job in self._state.registry.worker_jobs if job.submit_task is not None]
        return asyncio.gather(*submits, return_exceptions=True)

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Drain the jobs all of whose workers are named. Names of jobs count too.

        Parameters
        ----------
        workers : iterable of str
            Names of workers or of jobs.
        """
        self._check_usable()
        self.reconciler.scale_down({str(worker) for worker in workers})
        self.reconciler.submitter.submit_planned()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    def _check_usable(self) -> None:
        """Raise `ClusterError` if the cluster has failed, or if this program has closed it."""
        self.manager.check_usable()

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Run a call in the event loop, which alone changes the state.

        Wait for it, unless that would block the caller's own loop.
        """
        self._check_usable()

        async def acted() -> None:
            act()

        if self.called_from_running_loop:
            act()
        elif self.asynchronous:
            self.loop.add_callback(act)
        else:
            self.sync(acted)

    def _act(self, act: Callable[[], None]) -> None:
        """Change the cluster, in the event loop; raise `ClusterError` if another program has taken it over."""
        self._check_usable()
        try:
            self._state.dispatcher.check_manager()
        except Superseded as error:
            why = str(error)
            self._in_loop(lambda: self._state.supersede(why))
            raise ClusterError(why) from error
        self._in_loop(act)

    def _order(self, command: Command, adaptive: GPUAdaptive | None = None) -> None:
        """Let the manager do what the user orders."""
        self._act(lambda: self.manager.order(command, adaptive))

    async def _start(self) -> None:
        await self.manager.start()

    def __await__(self) -> Generator[Any, Any, Self]:
        async def _() -> Self:
            try:
                await self._start()
                await self._correct_state()
            except asyncio.CancelledError:
                if not self.manager.may_stay:
                    await self._close()
                raise
            return self

        return _().__await__()

    async def __aenter__(self) -> Self:
        if not self.manager.begun:
            await self
        return self

    async def _detach(self) -> None:
        await self.manager.detach()

    async def _close(self) -> None:
        await self.manager.close()
