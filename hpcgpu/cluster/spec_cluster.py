"""Adapts a `Manager` to `distributed.deploy.spec.SpecCluster`, which users and tools expect.

It holds no state of the cluster: its properties read, its methods send commands. It uses these parts of SpecCluster:
the constructor, `sync`, ``with``, `get_client`, `get_logs` and the exit hook.

SpecCluster does not handle grouped workers, dead jobs and a dead scheduler correctly (distributed #4069, #9102), so
planning, retirement, status, start and end are here. SpecCluster plans and starts nothing, because its constructor runs
in the event loop, where it leaves the start to who awaits it, and because the public names that lead to its own start,
plan and end are overridden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self

from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.utils import LoopRunner, NoOpAwaitable, in_async_call, sync

from hpcgpu.cluster.adaptive_state import GPUAdaptive
from hpcgpu.errors import ClusterError, Superseded
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.manager.manager import Manager
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.manager.submit_planned import wait_for_submits
from hpcgpu.notify import Callbacks
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.plan import Planner
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.wanted_state import Command
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store.directory import ClusterDirectory

#: Attributes that SpecCluster assigns. The manager has their values, so the assignments have no effect.
_OF_MANAGER = frozenset(
    {"scheduler", "scheduler_comm", "scheduler_info", "shutdown_on_close", "status", "worker_spec", "workers"}
)


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
        self._thread = LoopRunner(loop, asynchronous)
        self._in_program = asynchronous or (loop is not None and in_async_call(loop))
        construct = partial(
            super().__init__,
            worker={"cls": WorkerJob, "options": {}},
            asynchronous=True,
            name=manager.options.cluster.name,
            security=manager.security,
        )
        if self._in_program:
            construct(loop=self._thread.loop)
            return
        self._thread.start()

        async def construct_in_loop() -> None:
            construct(loop=self._thread.loop)

        sync(self._thread.loop, construct_in_loop)
        self.sync(self._begin)

    # Views. In SpecCluster these are attributes that its constructor sets

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _OF_MANAGER:
            super().__setattr__(name, value)

    @property
    def options(self) -> Options:
        """The options of the cluster."""
        return self.manager.options

    @property
    def name(self) -> str:
        """Its name."""
        return self.options.cluster.name

    @property
    def reconciler(self) -> Reconciler:
        """The reconciler that manages its jobs."""
        return self.manager.reconciler

    @property
    def _state(self) -> ClusterState:
        return self.manager.state

    @property
    def status(self) -> Status:
        """Whether it is starting, running, failed, or closed."""
        return self.manager.status

    @property
    def scheduler_comm(self) -> Any:
        """The RPC of its scheduler; None while there is none."""
        return self.manager.client.rpc if self.manager.client is not None else None

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """What the scheduler reports of itself and of all workers."""
        return self.manager.client.info if self.manager.client is not None else {"workers": {}}

    @property
    def scheduler(self) -> Any:
        """The scheduler, once it was requested: its job, or the scheduler in this process."""
        return self._state.scheduler.for_users if self._state.scheduler is not None else None

    @property
    def workers(self) -> dict[str, WorkerJob]:
        """The jobs that are neither draining nor ended, by name."""
        return self._state.registry.active

    @property
    def worker_spec(self) -> dict[str, Any]:
        """The same jobs, as SpecCluster specifies workers."""
        return dict.fromkeys(self._state.registry.active, self.new_spec)

    @property
    def shutdown_on_close(self) -> bool:
        """Whether the end of this program closes the cluster; upstream's exit hook reads it."""
        return self._state.ownership.ends_at_exit and not self._state.phase.left

    @property
    def adaptive(self) -> GPUAdaptive | None:
        """Adaptive scaling of the default group, or of the first group that has adaptive scaling."""
        groups = self._state.registry.groups.values()
        scaled = ((group, group.adaptive) for group in groups)
        return next((GPUAdaptive(group, record, self._order) for group, record in scaled if record is not None), None)

    @Planner
    def plan(self) -> set[str]:
        """Names of the workers that the cluster should have."""
        return {
            worker for job in self.workers.values() for worker in worker_names.workers_of(job.name, job.group.options)
        }

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are in the plan."""
        return self.plan

    def new_worker_spec(self) -> dict[str, Any]:
        """Return name and specification of the next worker job; names are never used twice."""
        return {self._state.registry.new_name(): self.new_spec}

    # Methods that upstream calls

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
        if tasks := self._state.tasks:
            await asyncio.wait(tasks)  # a wait that is given up ends none of them

    def _check_usable(self) -> None:
        """Raise `ClusterError` if the cluster has failed, or if this program has closed it."""
        self.manager.check_usable()

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Run a call in the event loop, and wait for it: only the event loop may change the state."""
        self._check_usable()

        async def acted() -> None:
            act()

        if self.asynchronous:  # this is the event loop
            act()
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

    def _order(self, command: Command) -> None:
        """Send a command of the user to the manager."""
        self._act(lambda: self.manager.order(command))

    # Start and end

    async def _begin(self) -> None:
        """Start the cluster, and submit the planned jobs; wait for the submits, but not for jobs that drain."""
        await self.manager.start()
        self.reconciler.submitter.submit_planned()
        await wait_for_submits(self._state.registry.worker_jobs)

    def __await__(self) -> Generator[Any, Any, Self]:
        async def _() -> Self:
            try:
                await self._begin()
            except asyncio.CancelledError:
                if not self.manager.may_stay:
                    await self._end()
                raise
            return self

        return _().__await__()

    async def __aenter__(self) -> Self:
        if not self.manager.begun:
            await self
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Close the cluster: end its jobs, unless it was attached to with ``shutdown_on_close=False``.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the end.
        """
        ended: Awaitable[None] | None = None
        if self.status != Status.closed:
            with suppress(RuntimeError):  # the event loop has ended with the program
                ended = self.sync(self._end, callback_timeout=timeout)
        if self.asynchronous:
            return NoOpAwaitable() if ended is None else ended
        self._thread.stop()
        return None

    async def _end(self) -> None:
        await self.manager.close()

    async def _detach(self) -> None:
        await self.manager.detach()
