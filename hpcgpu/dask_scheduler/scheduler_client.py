"""What the reconciler requests from the Dask scheduler, and how it does so over distributed's RPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from distributed.core import rpc
from distributed.objects import SchedulerInfo
from distributed.security import Security
from distributed.utils import log_errors

from hpcgpu.batch import system_registry
from hpcgpu.dask_scheduler.answer_changes import Received
from hpcgpu.dask_scheduler.manager_requests import REQUEST_WAIT
from hpcgpu.dask_scheduler.rpc_types import (
    GPUState,
    GroupState,
    Load,
    LoadChanges,
    ScalingRequest,
    WorkerChanges,
    WorkerRuns,
)
from hpcgpu.display.counts_and_durations import MANY

#: Seconds that the scheduler may take to answer.
_TIMEOUT = 10.0

#: What the scheduler reports of its workers, by address.
Workers = Mapping[str, Mapping[str, Any]]


class _Info(SchedulerInfo):  # type: ignore[misc]
    """What a notebook shows of the scheduler, twice a second; with thousands of workers only the first ones."""

    def _repr_html_(self) -> str:
        workers = self["workers"]
        shown = dict(itertools.islice(workers.items(), MANY))
        return str(SchedulerInfo(self | {"n_workers": len(workers), "workers": shown})._repr_html_())


class SchedulerClient:
    """The scheduler, over distributed's RPC and its stream of events about workers. It is made in an event loop.

    Each call raises `OSError` or `TimeoutError` if the scheduler does not answer.

    Parameters
    ----------
    address : str
    security : Security
    joined : callable
        Is called with the workers that have joined, and with all workers.
    left : callable
        Is called with the address of a worker that has left.

    Attributes
    ----------
    rpc : distributed.core.rpc
    info : SchedulerInfo
        What the scheduler reports of itself and of all workers.
    """

    def __init__(
        self,
        address: str,
        security: Security,
        joined: Callable[[Workers, Workers], None],
        left: Callable[[str], None],
    ) -> None:
        self.rpc = rpc(address, connection_args=security.get_connection_args("client"))
        self.info: dict[str, Any] = _Info({"workers": {}})
        self._joined, self._left = joined, left
        self._loop = asyncio.get_running_loop()
        self._comm: Any = None
        self._stream: asyncio.Task[None] | None = None
        self._workers, self._loads = Received(), Received()
        #: How many calls for the workers are under way, and what the stream has reported since the oldest one began.
        self._calls, self._meanwhile = 0, dict[str, Mapping[str, Any] | None]()
        self._load = Load(workers={}, waiting=[], holds=[])

    @property
    def address(self) -> str:
        """The address of the scheduler."""
        return str(self.rpc.address)

    def move(self, address: str) -> None:
        """Query another scheduler of the cluster from now on; another thread may call it.

        The stream is not opened again.
        """
        asyncio.run_coroutine_threadsafe(self.rpc.close_rpc(), self._loop)
        self.rpc = rpc(address, connection_args=self.rpc.connection_args)
        self._workers, self._loads = Received(), Received()

    @property
    def listening(self) -> bool:
        """Whether the stream is open."""
        return self._stream is not None and not self._stream.done()

    async def stream_ended(self) -> None:
        """Wait until the stream ends."""
        if self._stream is not None:
            await asyncio.wait([self._stream])

    async def listen(self, timeout: float | None = _TIMEOUT) -> Workers:
        """Open the stream, also again after it has ended; return all workers.

        Parameters
        ----------
        timeout : float, optional
            Seconds. None: no limit other than Dask's own for connecting.
        """
        comm = await asyncio.wait_for(self.rpc.live_comm(), timeout)
        comm.name = "Cluster worker status"
        await comm.write({"op": "hpcgpu_listen"})
        self.info, self._comm = _Info(await comm.read()), comm
        self._stream = asyncio.ensure_future(self._read(comm))
        return self.known

    async def _read(self, comm: Any) -> None:
        while True:
            try:
                messages = await comm.read()
            except OSError:
                break
            with log_errors():
                for op, message in messages:
                    self._record(op, message)
        await comm.close()

    def _record(self, op: str, message: Any) -> None:
        workers = self.info["workers"]
        if op == "add":
            joined = message.pop("workers")
            self._meanwhile |= joined
            workers.update(joined)
            self.info.update(message)
            self._joined(joined, workers)
        elif op == "remove":
            self._meanwhile[message] = None
            workers.pop(message, None)
            self._left(message)

    async def close(self) -> None:
        """Disconnect."""
        if self._comm is not None:
            await self._comm.close()
        await self.stream_ended()
        await self.rpc.close_rpc()

    @property
    def known(self) -> Workers:
        """All workers, as the scheduler last reported them."""
        workers: Workers = self.info["workers"]
        return workers

    async def workers(self) -> Workers:
        """Return all present workers. The stream reports only which workers come and go, and may have ended.

        The answer may be older than what the stream has reported since the call began: this counts.
        """
        if not self._calls:
            self._meanwhile.clear()
        self._calls += 1
        try:
            call = self.rpc.hpcgpu_workers(version=self._workers.version)
            answer: WorkerChanges = await asyncio.wait_for(call, _TIMEOUT)
        finally:
            self._calls -= 1
        self._workers.update(answer["workers"])
        workers = {**self._workers.values, **self._meanwhile}
        present = {address: worker for address, worker in workers.items() if worker is not None}
        self.info = _Info(answer["scheduler"] | {"workers": present})
        return self.known

    async def running(self) -> int:
        """Return how many workers are ready. A worker that has just connected is not ready yet."""
        return int(await asyncio.wait_for(self.rpc.hpcgpu_running(), _TIMEOUT / 2))

    async def load(self) -> Load:
        """Return the load."""
        answer: LoadChanges = await asyncio.wait_for(self.rpc.hpcgpu_load(version=self._loads.version), _TIMEOUT)
        waiting, holds = answer["waiting"], answer["holds"]
        if self._loads.update(answer["workers"]) or (waiting, holds) != (self._load["waiting"], self._load["holds"]):
            self._load = Load(workers=self._loads.values, waiting=waiting, holds=holds)
        return self._load

    async def environment(self, timeout: float) -> Mapping[str, str]:
        """Return the software that the scheduler has."""
        answer: Mapping[str, str] = await asyncio.wait_for(self.rpc.hpcgpu_environment(), timeout)
        return answer

    async def heartbeat(self, manager: int, about: str, groups: list[GroupState], warnings: list[str]) -> int:
        """Report that this manager is alive, and how it scales."""
        beat = self.rpc.hpcgpu_heartbeat(manager=manager, about=about, groups=groups, warnings=warnings)
        return int(await asyncio.wait_for(beat, _TIMEOUT))

    async def next_request(self, manager: int) -> ScalingRequest | None:
        """Wait for a request of another program; return None if there was none for a while."""
        request: ScalingRequest | None = await asyncio.wait_for(
            self.rpc.hpcgpu_next_request(manager=manager), _TIMEOUT + REQUEST_WAIT
        )
        return request

    async def answer_request(self, number: int, error: str) -> None:
        """Answer a request with an error message, or with an empty string."""
        await asyncio.wait_for(self.rpc.hpcgpu_answer_request(number=number, error=error), _TIMEOUT)

    async def gpus(self) -> list[GPUState]:
        """Return the GPUs of all connected workers."""
        gpus: list[GPUState] = await asyncio.wait_for(self.rpc.hpcgpu_gpus(), _TIMEOUT)
        return gpus

    async def ended(self, names: Iterable[str], crashed: Iterable[str]) -> None:
        """Report the workers whose job has ended, and which of them were lost because the job failed."""
        await asyncio.wait_for(self.rpc.hpcgpu_ended(names=list(names), crashed=list(crashed)), _TIMEOUT)

    async def end(self, manager: int) -> None:
        """End the scheduler and its workers."""
        await asyncio.wait_for(self.rpc.hpcgpu_end(manager=manager), _TIMEOUT)

    async def will_leave(self, names: Iterable[str]) -> Collection[str]:
        """Let no other program hold workers whose job must end; return the names of those that a program holds."""
        held: Collection[str] = await asyncio.wait_for(self.rpc.hpcgpu_will_leave(names=list(names)), _TIMEOUT)
        return held

    async def retire(self, names: Iterable[str], *, close: bool) -> Collection[str]:
        """Move the data, and close the workers or keep them. There is no time limit."""
        gone: Mapping[str, Any] = await self.rpc.retire_workers(names=list(names), close_workers=close, remove=close)
        return gone.keys()

    async def unfinished(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return how many tasks retiring workers still execute."""
        counts: Mapping[str, int] = await self.rpc.hpcgpu_unfinished(names=list(names))
        return counts

    async def resume(self, names: Iterable[str]) -> None:
        """Let workers take tasks again."""
        await asyncio.wait_for(self.rpc.hpcgpu_resume(names=list(names)), _TIMEOUT)

    async def lose(self, names: Iterable[str], why: str) -> None:
        """Remove workers, and report to clients why the results that only these had are lost."""
        await asyncio.wait_for(self.rpc.hpcgpu_lose(names=list(names), why=why), _TIMEOUT)

    async def refuse_tasks(self, names: Iterable[str]) -> None:
        """Let workers take no new tasks."""
        await asyncio.wait_for(self.rpc.hpcgpu_refuse_tasks(names=list(names)), _TIMEOUT)

    async def runs(self, names: Iterable[str]) -> Mapping[str, WorkerRuns]:
        """Return what runs on workers, by name."""
        runs: Mapping[str, WorkerRuns] = await asyncio.wait_for(self.rpc.hpcgpu_runs(names=list(names)), _TIMEOUT)
        return runs

    async def describe(self, name: str, system: str) -> None:
        """Write the cluster's name into the scheduler's metadata, where dask-ctl finds it."""
        module, _, cls = system_registry.system(system).cluster_class.partition(":")
        about = {"name": name, "type": f"{module}.{cls}"}
        await asyncio.wait_for(self.rpc.set_metadata(keys=["cluster-manager-info"], value=about), _TIMEOUT)

    async def release(self) -> None:
        """Let the scheduler continue without a manager."""
        await asyncio.wait_for(self.rpc.hpcgpu_release(), _TIMEOUT)

    async def goodbye(self, manager: int) -> None:
        """Report that this manager leaves."""
        await asyncio.wait_for(self.rpc.hpcgpu_goodbye(manager=manager), _TIMEOUT / 2)
