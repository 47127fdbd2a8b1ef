"""Sets of workers that programs hold: each set stays as it is until its program lets it go, or one of them is lost.

A program holds workers for work that is not tasks, and in which each worker waits for the others: a communicator of
NCCL, the training of a model, a query that runs on all workers at once. The program keeps a connection open meanwhile.
So the set is free again when the program ends, however it ends.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from hpcgpu.dask_scheduler import lost_results
from hpcgpu.dask_scheduler.rpc_types import HeldWorkerInfo, HoldSize
from hpcgpu.dask_worker.gpu_metrics import GPUS
from hpcgpu.dask_worker.uploaded_package import UNPACKED, uploaded
from hpcgpu.errors import ClusterError
from hpcgpu.fabric.connection_report import NODE
from hpcgpu.runtime.job_identity import JOB, job_identity

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.scheduler import Scheduler, WorkerState

#: Seconds for which a worker is known to leave: a manager whose connection breaks cannot take it back.
_LEAVES = 120.0
#: Most seconds to wait until workers have unpacked packages: a call may block the event loop of one that has them.
_UNPACKS = 60.0
#: What a program does that wants workers without a GPU.
HOLDS_OTHERS = 'to hold others, give `resources`, such as {"CPU": 1}, to them and to `hold`'


class _Hold:
    """A set of workers that a program has requested.

    Attributes
    ----------
    members : list of WorkerState
        Empty while the program waits for them.
    given : bool
        Whether the program has received its members.
    nested : bool
        Whether the program holds another set meanwhile.
    waits : dict of str to int
        How many workers are free, and how many of these earlier requests wait for.
    lost : WorkerState or None
        The first member that was lost.
    changed : asyncio.Event
        Is set when anything changes that the program must receive.
    """

    def __init__(self, size: HoldSize, *, nested: bool) -> None:
        self.size, self.nested = size, nested
        self.members: list[WorkerState] = []
        self.given = False
        self.waits = {"free": 0, "reserved": 0}
        self.lost: WorkerState | None = None
        self.changed = asyncio.Event()


class Holds:
    """The sets that programs hold or wait for, the earliest request first.

    Parameters
    ----------
    scheduler : distributed.Scheduler

    Attributes
    ----------
    must_leave_until : dict of str to float
        The names of workers whose job must end, and the time until which that is sure: a manager that waits for the
        programs that hold such workers repeats it. Other programs get none of them, unless a program holds workers of
        the same job.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.must_leave_until = dict[str, float]()
        #: The names of the calls that run on a worker. They may be of a program that holds it no more.
        self.calls: Callable[[WorkerState], list[str]] = lambda ws: []
        self._holds: list[_Hold] = []
        self._addresses: frozenset[str] = frozenset()

    def requested(self) -> list[HoldSize]:
        """Return the sizes of the sets that programs wait for: the cluster needs so many workers for them."""
        return [hold.size for hold in self._holds if not hold.members]

    def waiting(self) -> bool:
        """Whether a program waits for workers."""
        return any(not hold.members for hold in self._holds)

    def is_held(self, ws: WorkerState) -> bool:
        """Whether a program holds a worker."""
        return ws.address in self._addresses

    def mark_leaving(self, names: Iterable[str]) -> list[str]:
        """Record workers whose job must end; return the names of those that a program holds."""
        wanted, now = set(names), time.monotonic()
        self.must_leave_until = {name: until for name, until in self.must_leave_until.items() if until > now}
        self.must_leave_until |= dict.fromkeys(wanted, now + _LEAVES)
        return [str(ws.name) for ws in self.scheduler.workers.values() if self.is_held(ws) and str(ws.name) in wanted]

    def unmark_leaving(self, names: Iterable[str]) -> None:
        """Record that the jobs of these workers need not end after all."""
        for name in names:
            self.must_leave_until.pop(name, None)
        self.assign()

    async def workers_of_job(self, job: str) -> int:
        """Return how many workers a job has now."""
        return sum(_job_and_node(ws)[0] == job for ws in self.scheduler.workers.values())

    async def hold(
        self, comm: Comm, n_workers: int, resources: Mapping[str, float] | None = None, nested: bool = False
    ) -> Status:
        """Hold workers for the program at the other end, as long as the connection lasts.

        The program receives how many workers it can have while it waits, then its workers, and the name of the first
        one that is lost.

        Parameters
        ----------
        comm : Comm
        n_workers : int
        resources : mapping, optional
            What each of them must have. Default: a GPU.
        nested : bool, default False
            Whether the program holds other workers until it has let these go.
        """
        amounts = {str(name): float(amount) for name, amount in (resources or {}).items()}
        hold = _Hold(HoldSize(workers=n_workers, resources=amounts), nested=nested)
        self._holds.append(hold)
        ended = asyncio.ensure_future(comm.read())  # the program sends nothing more: this returns when it lets go
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error is the usual end
        try:
            self.assign()
            await self._report(comm, hold, ended)
        except OSError:
            pass  # the program has ended
        finally:
            self._holds.remove(hold)
            self._count()
            ended.cancel()
            comm.abort()
            self.assign()
        return Status.dont_reply

    async def _report(self, comm: Comm, hold: _Hold, ended: asyncio.Future[Any]) -> None:
        """Send what changes to the program, until it closes the connection."""
        while not ended.done():
            hold.changed.clear()
            if hold.lost is not None:
                await comm.write({"lost": str(hold.lost.name), "job": _job_of(hold.lost)})
                await asyncio.wait([ended])
            elif not hold.members:
                await comm.write(hold.waits)
            elif not hold.given and await self._unpacked(hold, ended):
                hold.given = True
                await comm.write({"held": _described(hold.members, self.calls), "scheduler": job_identity()})
            changed = asyncio.ensure_future(hold.changed.wait())
            await asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    async def _unpacked(self, hold: _Hold, ended: asyncio.Future[Any]) -> bool:
        """Wait until the members of a set have unpacked the uploaded packages; return whether it is still the same set.

        A worker that cannot unpack a package ends soon after it has joined; see `require_packages`.
        """
        members = hold.members
        if uploaded(self.scheduler.worker_plugins):
            workers = [ws.address for ws in members]
            answers = self.scheduler.broadcast(msg={"op": UNPACKED}, workers=workers, on_error="ignore")
            answered = asyncio.ensure_future(answers)
            await asyncio.wait([answered, ended], timeout=_UNPACKS, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
        return hold.members is members

    def assign(self) -> None:
        """Give free workers to the programs that wait, in the order of their requests.

        A request of many workers would wait for ever if later ones took the workers that become free. A program that
        holds other workers waits for no earlier request: that one may wait for these. For the same reason such a
        program gets workers whose job must end, if that job waits for a program anyway. Nothing is reserved for a
        request of more workers than there are now, because they may never come. Workers on which calls of earlier
        programs still run come last: their GPUs have other work.
        """
        if not self.waiting():  # this runs each second, also with thousands of workers
            return
        now = time.monotonic()
        staying = {ws for ws in self.scheduler.running if self.must_leave_until.get(str(ws.name), 0.0) < now}
        waited_for = {_job_and_node(ws)[0] for ws in self.scheduler.running if self.is_held(ws)}
        inner = staying | {ws for ws in self.scheduler.running if _job_and_node(ws)[0] in waited_for}
        free, reserved = {ws for ws in self.scheduler.running if not self.is_held(ws)}, set[Any]()
        for hold in sorted(self._holds, key=lambda hold: not hold.nested):
            if hold.members:
                continue
            may_have = free & (inner if hold.nested else staying)
            fitting = [ws for ws in may_have if _fits(ws, hold.size["resources"])]
            left = [ws for ws in fitting if hold.nested or ws not in reserved]
            if len(left) >= hold.size["workers"]:
                order = _in_few_jobs([ws for ws in left if not self.calls(ws)])
                order += _in_few_jobs([ws for ws in left if self.calls(ws)])
                hold.members = order[: hold.size["workers"]]
                hold.changed.set()
                self._count()
                free.difference_update(hold.members)
            else:
                waits = {"free": len(fitting), "reserved": len(fitting) - len(left)}
                if waits != hold.waits:
                    hold.waits = waits
                    hold.changed.set()
                there = sum(_fits(ws, hold.size["resources"]) for ws in staying)
                if there >= hold.size["workers"]:
                    reserved.update(fitting)

    def removed(self, address: str) -> None:
        """Free the other members of a set one of whose workers is lost; let the program and its waiting tasks fail.

        A task that must run on the lost worker would wait for ever. A program that has not received the set yet waits
        for another one.
        """
        for hold in self._holds:
            lost = next((ws for ws in hold.members if ws.address == address), None)
            if lost is not None and not hold.given:
                hold.members = []  # it waits again
                self._count()
                hold.changed.set()
            elif lost is not None:
                hold.lost = hold.lost or lost
                hold.changed.set()
                self._count()
                self._fail_tasks_of(lost, {ws.address for ws in hold.members} - self.scheduler.workers.keys())
        self.assign()

    def _count(self) -> None:
        """Record which workers are held: the scheduler asks for each worker, again and again."""
        self._addresses = frozenset(ws.address for hold in self._holds if hold.lost is None for ws in hold.members)

    def _fail_tasks_of(self, lost: WorkerState, gone: Set[str]) -> None:
        """Let the tasks fail that may run on lost members only."""
        error = ClusterError(f"{lost_words(str(lost.name), _job_of(lost))}, and this task may run there only")
        for ts in list(self.scheduler.unrunnable):
            if ts.worker_restrictions and set(ts.worker_restrictions) <= gone:
                lost_results.fail(self.scheduler, ts, error)


def are_of_kind(requested: Mapping[str, float], resources: Mapping[str, float], gpus: int) -> bool:
    """Whether workers with these resources and GPUs have what a program requests; nothing: a GPU."""
    return all(resources.get(name, 0) >= amount for name, amount in requested.items()) if requested else bool(gpus)


def none_words(requested: Mapping[str, float]) -> str:
    """Return the sentence that a cluster has no workers of the requested kind."""
    if requested:
        return "no worker group has workers of this kind; `add_worker_group` adds one"
    return f"no worker group has workers with a GPU; {HOLDS_OTHERS}"


def lost_words(worker: str, job: Mapping[str, Any] | None) -> str:
    """Return the sentence that a held worker is lost."""
    where = f" of job {job['id']} ({job['name']})" if job else ""
    return f"worker {worker}{where} was lost while a program held it"


def _job_of(ws: WorkerState) -> Mapping[str, Any] | None:
    job: Mapping[str, Any] | None = ws.extra.get(JOB)
    return job


def _node_of(ws: WorkerState) -> str:
    return str(ws.extra.get(NODE) or ws.host)


def _fits(ws: WorkerState, resources: Mapping[str, float]) -> bool:
    """Whether a worker is of the requested kind."""
    return are_of_kind(resources, ws.resources or {}, int(ws.extra.get(GPUS) or 0))


def _job_and_node(ws: WorkerState) -> tuple[str, str]:
    return str((_job_of(ws) or {}).get("name", "")), _node_of(ws)


def _in_order(text: str) -> list[str | int]:
    """Return a key that sorts names by the numbers in them: demo-2 before demo-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def _end_of(ws: WorkerState) -> float:
    """Return the end of the walltime of a worker's job, epoch seconds; infinite if it is not known."""
    end = (_job_of(ws) or {}).get("ends")
    return math.inf if end is None else float(end)


def _in_few_jobs(free: list[WorkerState]) -> list[WorkerState]:
    """Return workers so that the first ones are in as few jobs and nodes as possible, and these end last."""
    places = defaultdict[tuple[str, str], list[Any]](list)
    jobs = defaultdict[str, list[Any]](list)
    for ws in free:
        places[_job_and_node(ws)].append(ws)
        jobs[_job_and_node(ws)[0]].append(ws)
    ends = {job: min(map(_end_of, there)) for job, there in jobs.items()}

    def key(place: tuple[str, str]) -> tuple[Any, ...]:
        job, node = place
        return -len(jobs[job]), -ends[job], _in_order(job), -len(places[place]), _in_order(node)

    return [ws for place in sorted(places, key=key) for ws in sorted(places[place], key=_by_name)]


def _by_name(ws: WorkerState) -> list[str | int]:
    return _in_order(str(ws.name))


def _described(members: list[WorkerState], calls: Callable[[WorkerState], list[str]]) -> list[HeldWorkerInfo]:
    """Return the members in the order of their ranks: those of a node follow each other, whatever their jobs."""
    order = sorted(members, key=lambda ws: (*map(_in_order, (_node_of(ws), _job_and_node(ws)[0])), _by_name(ws)))
    on_node = defaultdict[str, int](int)
    found = []
    for rank, ws in enumerate(order):
        node = _node_of(ws)
        found.append(
            HeldWorkerInfo(
                address=ws.address,
                name=str(ws.name),
                calls=list(calls(ws)),
                job=dict(_job_of(ws) or {}),
                node=node,
                host=ws.host,
                rank=rank,
                local_rank=on_node[node],
                world_size=len(order),
            )
        )
        on_node[node] += 1
    return found
