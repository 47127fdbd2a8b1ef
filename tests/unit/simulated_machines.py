"""The machines of a site below the real classes of the manager: time, threads, programs, nodes and the network.

Time passes at once when nothing else is due. So a history of hours takes a second, and is the same each time.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from distributed.security import Security

from hpcgpu.jobs import scheduler_job
from hpcgpu.manager import connect_to_scheduler, manager, periodic_tasks, restart_scheduler
from hpcgpu.manager.manager import Manager
from hpcgpu.posix import json_records, threads
from hpcgpu.runtime import scheduler_connection, standby_scheduler
from hpcgpu.runtime.scheduler_connection import ConnectionResult
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Epoch seconds at which each history begins.
BEGIN = 1e9
#: Seconds until a connection to an address where nobody listens fails, and until a call without an answer does.
_CONNECT, _CALL = 30.0, 10.0
#: How often the state of the nodes and the periodic tasks of a manager are due: seldom, so that histories are short.
STEP = 5.0


class _Time(selectors.DefaultSelector):
    """Waits for nothing: time passes instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        assert ready or timeout is not None, "everything waits, and nothing is due"
        self.now += 0.0 if ready else timeout or 0.0
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop in a time of its own."""

    def __init__(self) -> None:
        self._passed = _Time()
        super().__init__(self._passed)
        self.set_task_factory(_task)

    def time(self) -> float:
        return self._passed.now

    @property
    def epoch(self) -> float:
        """Epoch seconds."""
        return BEGIN + self._passed.now


class Killed(BaseException):
    """The program that runs this was killed."""


class Program:
    """A program that manages the cluster, which may be killed at any moment.

    Parameters
    ----------
    made : Manager
    inside : str, optional
        The scheduler job in which it runs; default: none.
    """

    def __init__(self, made: Manager, inside: str = "") -> None:
        self.manager, self.inside, self.dead = made, inside, False
        self.tasks = set[asyncio.Task[Any]]()
        self.start: asyncio.Task[None] | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in this program."""
        context = contextvars.copy_context()
        context.run(acting.set, self)
        return context.run(function, *arguments)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in this program."""
        task: asyncio.Task[None] = self.call(asyncio.ensure_future, work)
        return task

    def kill(self) -> None:
        """End without any of the things that a program does at its end."""
        self.dead = True
        directory = self.manager.state.dispatcher.directory
        for write in ("write", "_append", "withdraw", "remove_secrets"):
            setattr(directory, write, _killed)
        for task in list(self.tasks):
            task.cancel()

    @property
    def started(self) -> bool:
        """Whether it has started to manage the cluster, without an error."""
        start = self.start
        return start is not None and start.done() and not start.cancelled() and start.exception() is None

    @property
    def messages(self) -> list[str]:
        """All that it has reported to its user."""
        return [text for _, text in self.manager.messages.lines]


#: The program that does what runs now; None in the queue and on the nodes.
acting: contextvars.ContextVar[Program | None] = contextvars.ContextVar("acting", default=None)
#: Whether its program was not between two schedulers when the command that runs now began.
with_scheduler: contextvars.ContextVar[bool] = contextvars.ContextVar("with_scheduler", default=False)


def _killed(*arguments: object) -> None:
    raise Killed


def _task(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
    if (program := acting.get()) is not None:
        program.tasks.add(task)
        task.add_done_callback(_ended(program))
    return task


def _ended(program: Program) -> Callable[[asyncio.Task[Any]], None]:
    def ended(task: asyncio.Task[Any]) -> None:
        program.tasks.discard(task)
        if program.dead and not task.cancelled():
            task.exception()  # nobody else retrieves it

    return ended


class Scheduler:
    """A Dask scheduler that runs in a job.

    Parameters
    ----------
    job_id : str
    """

    def __init__(self, job_id: str, now: float) -> None:
        self.job_id, self.address = job_id, f"tls://scheduler-{job_id}:1"
        self.alive = self.answers = True
        self.full = self.released = False
        self.there: dict[str, dict[str, Any]] = {}
        self.retired, self.gone = set[str](), set[str]()
        self.links = set[Link]()
        self.manager, self.heard = 0, now

    def end(self) -> None:
        """End, however that comes."""
        self.alive = False
        for link in list(self.links):
            link.ends.set()

    def joins(self, name: str) -> None:
        """Let a worker connect."""
        self.there[f"tls://{name}"] = {"name": name}
        for link in self.links:
            link.joined({f"tls://{name}": {"name": name}}, self.there)

    def loses(self, name: str) -> None:
        """Let a worker's connection end."""
        if self.there.pop(f"tls://{name}", None) is not None:
            for link in self.links:
                link.left(f"tls://{name}")


class Link:
    """`hpcgpu.dask_scheduler.scheduler_client.SchedulerClient`, with its network and the scheduler behind it."""

    #: All schedulers of the site, by address.
    schedulers: Mapping[str, Scheduler]

    def __init__(self, address: str, security: Security, joined: Any, left: Any) -> None:
        self.address, self._joined, self._left, self._program = address, joined, left, acting.get()
        self.ends = asyncio.Event()
        self.ends.set()

    @property
    def known(self) -> Mapping[str, Mapping[str, Any]]:
        return dict(self.schedulers[self.address].there)

    @property
    def listening(self) -> bool:
        return not self.ends.is_set()

    def move(self, address: str) -> None:
        self.address = address

    def joined(self, workers: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Report a worker to the program."""
        if self._program is not None and not self._program.dead:
            self._program.call(self._joined, workers, known)

    def left(self, address: str) -> None:
        """Report to the program that a worker has left."""
        if self._program is not None and not self._program.dead:
            self._program.call(self._left, address)

    async def _scheduler(self, seconds: float = _CALL) -> Scheduler:
        """The scheduler, if it answers."""
        program = acting.get()
        if program is not None and program.dead:
            raise Killed
        scheduler = self.schedulers[self.address]
        if scheduler.alive and not scheduler.answers:
            await asyncio.sleep(seconds)
            raise TimeoutError
        if not scheduler.alive:
            raise ConnectionRefusedError(f"nobody listens at {self.address}")
        return scheduler

    async def listen(self, timeout: float | None = _CALL) -> Mapping[str, Mapping[str, Any]]:
        while timeout is None and self.schedulers[self.address].alive and not self.schedulers[self.address].answers:
            await asyncio.sleep(STEP)
        if not self.schedulers[self.address].alive:
            await asyncio.sleep(_CONNECT)
        scheduler = await self._scheduler()
        self.ends.clear()
        scheduler.links.add(self)
        return self.known

    async def stream_ended(self) -> None:
        await self.ends.wait()

    async def close(self) -> None:
        self.ends.set()
        self.schedulers[self.address].links.discard(self)

    async def workers(self) -> Mapping[str, Mapping[str, Any]]:
        return dict((await self._scheduler()).there)

    async def running(self) -> int:
        return len((await self._scheduler()).there)

    async def load(self) -> Mapping[str, Any]:
        numbers = ("processing", "calls", "nbytes", "wanted", "actors", "memory_limit")
        load = dict.fromkeys(numbers, 0) | dict.fromkeys(("computes", "held", "paused"), False)
        load |= {"occupancy": 0.0, "at_once": 1, "nthreads": 1}
        there = (await self._scheduler()).there.values()
        return {"workers": {worker["name"]: load for worker in there}, "waiting": [], "holds": []}

    async def heartbeat(self, number: int, about: str, groups: object, warnings: object) -> int:
        scheduler = await self._scheduler()
        if number >= scheduler.manager:
            scheduler.manager, scheduler.heard = number, asyncio.get_running_loop().time()
        return scheduler.manager

    async def describe(self, name: str, system: str) -> None:
        await self._scheduler()

    async def next_request(self, number: int) -> None:
        await self._scheduler()
        await self.ends.wait()

    async def ended(self, names: Iterable[str], crashed: Iterable[str]) -> None:
        await self._scheduler()

    async def retire(self, names: Iterable[str], *, close: bool) -> Collection[str]:
        listed, scheduler = set(names), await self._scheduler()
        scheduler.retired |= listed
        there = [address for address, worker in scheduler.there.items() if worker["name"] in listed]
        addresses = [] if scheduler.full else there
        for address in addresses if close else ():
            scheduler.gone.add(scheduler.there[address]["name"])
            del scheduler.there[address]
        return addresses

    async def unfinished(self, names: Iterable[str]) -> Mapping[str, int]:
        await self._scheduler()
        return {}

    async def resume(self, names: Iterable[str]) -> None:
        (await self._scheduler()).retired -= set(names)

    async def will_leave(self, names: Iterable[str]) -> Collection[str]:
        await self._scheduler()
        return []

    async def lose(self, names: Iterable[str], why: str) -> None:
        await self._scheduler()

    async def refuse_tasks(self, names: Iterable[str]) -> None:
        await self._scheduler()

    async def runs(self, names: Iterable[str]) -> Mapping[str, Any]:
        await self._scheduler()
        return {}

    async def end(self, number: int) -> None:
        await self._scheduler()

    async def release(self) -> None:
        (await self._scheduler()).released = True

    async def goodbye(self, number: int) -> None:
        await self._scheduler()


def identify(contact: Contact, directory: ClusterDirectory) -> ConnectionResult:
    """What happens to a connection to the address of a contact."""
    scheduler = Link.schedulers[contact.client]
    if scheduler.alive:
        return ConnectionResult.ACCEPTED if scheduler.answers else ConnectionResult.BUSY
    return ConnectionResult.REFUSED


@contextmanager
def machines(schedulers: Mapping[str, Scheduler], latency: Callable[[], float]) -> Iterator[asyncio.Runner]:
    """Put these machines below the manager's classes; commands of the queue and files take the seconds of `latency`."""

    class AtOnce(threading.Thread):
        """A thread that runs in the event loop."""

        def start(self) -> None:
            program, run = acting.get(), self.run
            begun = program is not None and not program.manager.state.phase.restarting

            def work() -> None:
                if program is None or not program.dead:
                    with_scheduler.set(begun)
                    run()

            asyncio.get_running_loop().call_later(latency(), work)

    Link.schedulers = schedulers
    with ExitStack() as stack, asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        for module in (connect_to_scheduler, manager):
            stack.enter_context(mock.patch.object(module, "SchedulerClient", Link))
        for module in (scheduler_connection, standby_scheduler):
            stack.enter_context(mock.patch.object(module, "identify", identify))
        stack.enter_context(mock.patch.object(manager, "answer_clients", lambda *arguments, **more: None))
        stack.enter_context(mock.patch.object(manager, "cancel_at_exit", lambda dispatcher: None))
        stack.enter_context(mock.patch.object(certificates_and_keys, "security", lambda directory: Security()))
        stack.enter_context(mock.patch.object(threads, "threading", SimpleNamespace(Thread=AtOnce)))
        stack.enter_context(mock.patch.multiple(scheduler_job, _PAUSE=STEP, _LAST_PAUSE=STEP))
        stack.enter_context(mock.patch.object(restart_scheduler, "_INTERVAL", STEP))
        stack.enter_context(mock.patch.object(periodic_tasks, "_DECISION_INTERVAL", STEP))
        stack.enter_context(mock.patch.object(json_records, "parse", lru_cache(1000)(json_records.parse)))
        stack.enter_context(mock.patch("time.time", lambda: loop.epoch))
        stack.enter_context(mock.patch("time.monotonic", loop.time))
        yield runner
