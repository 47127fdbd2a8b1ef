"""Keeps the jobs of a cluster as they should be: watches queue and scheduler, decides, submits, gives up.

SpecCluster's handling of grouped workers, of dead jobs and of a dead scheduler is broken upstream (distributed #4069, #9102): planning,
retirement and status are overridden here. All state is changed by the event loop's thread alone.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo
from distributed.security import Security

from hpcgpu.batch.base import JobState
from hpcgpu.batch.reasons import explain
from hpcgpu.cluster.adaptive import GPUAdaptive
from hpcgpu.cluster.draining import close_finished, move_data
from hpcgpu.cluster.exit import unguard
from hpcgpu.cluster.groups import WorkerGroup, demands
from hpcgpu.cluster.jobs import Dispatcher, Job, SchedulerJob, WorkerJob
from hpcgpu.display.warn import warn
from hpcgpu.environment.check import EnvironmentCheck, environments
from hpcgpu.errors import AmbiguousSubmit, BatchError, ClusterError, ClusterWarning, NameLost, SubmitLimited, SubmitRefused, Superseded
from hpcgpu.options.common import DEFAULT, Options
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling import units
from hpcgpu.scaling.failures import STABLE, Troubles
from hpcgpu.scaling.policy import Limits
from hpcgpu.store.directory import Submit

__all__ = ["CLOSE_TIMEOUT", "Manager"]

#: Seconds that closing may take.
CLOSE_TIMEOUT = 30.0
#: Seconds between two decisions on the size.
_DECISION_INTERVAL = 1.0
#: Seconds without an answer of the scheduler after which the user is told.
_SILENCE = 60.0
#: Seconds after which it is tried again to retire a job whose data fitted nowhere else.
_RETRY_LEAVING = 3.0
#: The same for jobs of a group that was deleted, of which the user is told each time.
_RETRY_DELETED = 60.0
#: Seconds between two looks at whether workers that leave have finished.
_FINISHING_INTERVAL = 0.5
#: Seconds for which running tasks are waited for when the budget ends.
_BUDGET_END = 20.0
#: Seconds between two signs of life to the scheduler; it also says whether another program manages the cluster.
_HEARTBEAT = 10.0


class Leaving(enum.Enum):
    """Why a job is given up, which says what becomes of data that fits nowhere else."""

    UNWANTED = "it stays"
    ZERO = "the user asked for no jobs at all: it is lost where no other worker is there, else it stays"
    WALLTIME = "it stays as long as it can"
    BUDGET = "it is lost"


class Manager(SpecCluster):  # type: ignore[misc]
    """The part of `hpcgpu.cluster.gpucluster.GPUCluster` that the user does not call.

    Parameters
    ----------
    options : Options
    dispatcher : Dispatcher
    script : str
        File name of the default group's job script.
    asynchronous, loop, security, shutdown_on_close
        See `distributed.deploy.spec.SpecCluster`.
    """

    def __init__(
        self,
        *,
        options: Options,
        dispatcher: Dispatcher,
        script: str,
        asynchronous: bool,
        loop: Any,
        security: Security,
        shutdown_on_close: bool,
    ) -> None:
        settings = options.cluster
        self.options = options
        self._dispatcher = dispatcher
        self._all_jobs: dict[str, Job] = {}
        self._sequence = 0
        group = WorkerGroup(DEFAULT, options.worker, dispatcher.directory.path / script, settings.worker_restarts)
        group.resize(Limits(maximum=settings.jobs, fixed=True))
        self._groups = {DEFAULT: group}
        self._deleted: list[WorkerGroup] = []
        self._begun: list[WorkerJob] = []
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._decide_now = asyncio.Event()
        self._say_now = asyncio.Event()
        self._watching: set[asyncio.Task[None]] = set()
        self._changing: set[asyncio.Task[None]] = set()
        self._watch_worker_status_task: asyncio.Task[None] | None = None
        self._troubles = Troubles()
        self._environment_check = EnvironmentCheck(settings.environment_check)
        self._superseded = ""
        self._closed = ""
        super().__init__(
            worker={"cls": WorkerJob, "options": {}},
            asynchronous=asynchronous,
            loop=loop,
            name=settings.name,
            security=security,
            shutdown_on_close=shutdown_on_close,
        )

    # Deciding

    @property
    def adaptive(self) -> GPUAdaptive | None:
        """Adaptive scaling of the default group, or of the first group that has it."""
        return next((group.adaptive for group in self._groups.values() if group.adaptive is not None), None)

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Do something where all state is changed, and see it done where that does not block the caller's own loop."""
        self._check_usable()

        async def acted() -> None:
            act()

        if self.called_from_running_loop:
            act()
        elif self.asynchronous:
            self.loop.add_callback(act)
        else:
            self.sync(acted)

    def _check_usable(self) -> None:
        """Raise `ClusterError` where nothing more can be asked of the cluster: it has failed, or this program has closed it."""
        if self._troubles.failure:
            raise ClusterError(self._troubles.failure)
        if self.status in (Status.closing, Status.closed):
            raise ClusterError(self._closed or f"cluster {self.options.cluster.name} is closed")

    def _set(self, group: WorkerGroup, limits: Limits, adaptive: GPUAdaptive | None) -> None:
        if self.status in (Status.closing, Status.closed, Status.failed):
            return
        group.failures.start_anew()
        group.adaptive = self._adaptive = adaptive
        group.resize(limits)
        self._dispatcher.resize(group.name, limits.maximum if limits.fixed else None)
        for job in group.jobs:
            job.idle_since = None  # counted from now
        self._decide()
        self._decide_now.set()
        self._say_now.set()

    def _decide(self) -> None:
        """Bring each group to the size that it should have: the one place where jobs are asked for and given up."""
        if self.status not in (Status.starting, Status.running) or self.scheduler is None or self._superseded:
            return
        if isinstance(self.scheduler, SchedulerJob) and self.scheduler.job_id is None:
            return  # worker jobs go right behind it
        now = time.time()
        self._deleted = [group for group in self._deleted if any(job.alive for job in group.jobs)]
        for group in [*self._groups.values(), *self._deleted]:
            jobs = [job for job in self.workers.values() if job.group is group]
            # All are judged before anything is said or done: several that lose workers together are one event.
            lost = [job for job in jobs if self._in_touch and job.alive and group.look_for_absent(job, now=now)]
            for job in lost:
                self._tell_of_absent(job, now=now)
            for job in jobs:
                ends = group.walltime_ends(job)
                if ends is not None and now >= max(ends, job.retry_at) and self.status is Status.running:
                    self._log(f"the walltime of job {job.name} ends soon: its workers retire")
                    self._give_up([job.name], deadline=job.queue_status.end, why=Leaving.WALLTIME)
            decision = group.decide(now=now)
            if group.adaptive is not None:
                group.adaptive.decided(decision, now=now)
            for _ in range(decision.submit):
                self._plan_job(group)
            # What runs is given up when the scheduler is there, which knows who holds data.
            chosen = (*decision.cancel, *decision.retire) if self.status is Status.running else decision.cancel
            names = [name for name in chosen if now >= self.workers[name].retry_at]
            if decision.over:
                self._give_up(names, deadline=now + _BUDGET_END, why=Leaving.BUDGET)
            else:
                zero = group.limits.fixed and not group.limits.maximum and group not in self._deleted
                self._give_up(names, deadline=None, why=Leaving.ZERO if zero else Leaving.UNWANTED)
            for job in group.replaceable(decision.target, now=now) if self.status is Status.running else ():
                self._give_up([job.name], deadline=job.queue_status.end, why=Leaving.WALLTIME)
        self._submit_planned()

    def _tell_of_absent(self, job: WorkerJob, *, now: float) -> None:
        """Tell of a running job that lacks workers for good; it is replaced, unless too many have failed in a row."""
        group, node = job.group, job.queue_status.node
        message = f"worker job {job.job_id} ({job.name}){f' on {node}' if node else ''}: {job.shortage(now=now)}"
        if group.adaptive is not None:
            group.adaptive.note(message, now=now)
        message += f". Log: {job.log}\n{job.log_tail(node=job.absence.node)}"
        if group.failures.paused:
            self._problem(message)
        else:
            self._warn(message)

    def _plan_job(self, group: WorkerGroup) -> None:
        """Add a job to the plan; `_correct_state` submits it."""
        name = next(iter(self.new_worker_spec()))
        job = WorkerJob(self._dispatcher, group.script, name, self._logs, group=group, after=self._dependency)
        self.worker_spec[name] = self.new_spec
        self.workers[name] = self._all_jobs[name] = job
        group.jobs.append(job)

    def new_worker_spec(self) -> dict[str, Any]:
        """Return name and specification of the next worker job; names are never used twice."""
        name = f"{self.options.cluster.name}-{self._sequence}"
        self._sequence += 1
        return {name: self.new_spec}

    def _give_up(self, names: Iterable[str], *, deadline: float | None, why: Leaving) -> None:
        """Take jobs out of the plan, and end them in the background."""
        jobs = [self.workers[name] for name in names if name in self.workers]
        if not jobs:
            return
        try:
            self._dispatcher.will_cancel([job.name for job in jobs])
        except Superseded as error:
            self._step_down(str(error))
            return
        for job in jobs:
            self._forget(job).leaving = True
        self._spawn(self._retire(jobs, deadline, why), self._changing)

    def _stay(self, jobs: Iterable[WorkerJob]) -> None:
        """Take jobs back into the plan that could not be given up."""
        staying = list(jobs)
        if staying:
            self._dispatcher.keep([job.name for job in staying])
        for job in staying:
            job.leaving = False
            job.retired.clear()
            self.workers[job.name] = job
            self.worker_spec[job.name] = self.new_spec

    def _submit_planned(self) -> None:
        for job in self.workers.values():
            if job.opening is None and job.job_id is None:
                job.opening = self._spawn(self._open(job), self._changing)
                self._changed.set()

    def _correct_state(self) -> asyncio.Future[Any]:
        """Submit the jobs that were planned; returns what waits for all that is under way."""
        self._submit_planned()
        return asyncio.gather(*self._changing, return_exceptions=True)

    def _dependency(self) -> str | None:
        """Return the id of the scheduler job while workers must wait for it."""
        waits = isinstance(self.scheduler, SchedulerJob) and self.scheduler.contact is None
        return self.scheduler.job_id if waits else None

    async def _open(self, job: WorkerJob) -> None:
        """Submit a job; what goes wrong is told, and reaches the user at the next call too."""
        group = job.group
        try:
            await job
            group.failures.submitted()
        except Exception as error:
            job.status = Status.failed
            self._forget(job)
            del self._all_jobs[job.name]
            group.jobs.remove(job)
            if isinstance(error, Superseded):
                self._step_down(str(error))
            elif not self._dispatcher.closing:
                self._not_submitted(job, error)

    def _not_submitted(self, job: WorkerJob, error: Exception) -> None:
        group, now = job.group, time.time()
        unknown = isinstance(error, AmbiguousSubmit)
        message = f"{'it is not known whether ' * unknown}worker job {job.name} was {'not ' * (not unknown)}submitted: {error}"
        if isinstance(error, SubmitLimited) and any(other.alive for other in group.jobs):
            group.failures.site_is_full(str(error), now=now)
            self._log(f"{message}. There are as many jobs as the site allows")
            return
        for_good = isinstance(error, SubmitRefused | SubmitLimited) and group.adaptive is None
        group.failures.submit_refused(str(error), for_good=for_good, now=now)
        if group.adaptive is not None:
            group.adaptive.note(message, now=now)
        if group.failures.paused or unknown or not isinstance(error, BatchError):
            self._problem(message if for_good else f"{message}\n{group.failures.paused}".rstrip())
        else:
            self._warn(f"{message}\nIt is tried again in {max(0.0, group.failures.next_try - now):.0f} s.")

    async def _retire(self, jobs: list[WorkerJob], deadline: float | None, why: Leaving) -> None:
        """Give up jobs: those that wait at once, the others when their workers have finished and their data has moved."""
        await asyncio.gather(*(job.opening for job in jobs if job.opening is not None), return_exceptions=True)
        jobs = [job for job in jobs if job.job_id is not None]
        try:
            waiting = [job for job in jobs if job.pending]
            if waiting:
                ids = [job.job_id for job in waiting if job.job_id]
                await self._dispatcher.cancel(ids, only_pending=why is not Leaving.BUDGET)
                await self._dispatcher.poll(ids)
                if self._dispatcher.monitor.trouble:
                    raise BatchError(self._dispatcher.monitor.trouble)
            begun = [job for job in waiting if job.alive and not job.pending]
            self._stay(begun)  # they started just before they would have been cancelled: to be decided on anew
            running = [job for job in jobs if job not in waiting]
            kept = await move_data(self.scheduler_comm, running) if self.scheduler_comm is not None else []
            others = set(self.scheduler_info["workers"]) - {address for job in running for address in job.workers}
            loses = why is Leaving.BUDGET or (why is Leaving.ZERO and not others)
            if loses:
                kept = []
            self._keep(kept, why)
            await self._end([job for job in jobs if job not in begun and job not in running])
            await self._see_off([job for job in running if job not in kept], deadline, why, loses=loses)
        except Superseded as error:
            self._stay(job for job in jobs if job.alive)
            self._step_down(str(error))
        except BatchError as error:
            self._stay(job for job in jobs if job.alive)
            self._problem(f"jobs {', '.join(job.name for job in jobs)} could not be cancelled: {error}")
        except Exception as error:  # whatever it was, the jobs must not be forgotten
            self._stay(job for job in jobs if job.alive)
            for job in jobs:
                job.retry_at = time.time() + _RETRY_LEAVING
            self._warn(f"internal error while jobs {', '.join(job.name for job in jobs)} were given up, it is tried again: {error!r}")
        self._changed.set()

    async def _see_off(self, jobs: list[WorkerJob], deadline: float | None, why: Leaving, *, loses: bool) -> None:
        """End running jobs, each when its workers have finished what they run; those that are ready by one command.

        Parameters
        ----------
        loses : bool
            Whether data that fits nowhere else is given up with them.
        """
        while jobs:
            late = deadline is not None and time.time() > deadline
            gone = isinstance(self.scheduler, SchedulerJob) and self.scheduler.queue_status.state.ended
            closed, stuck = list(jobs), list[WorkerJob]()
            if self.scheduler_comm is not None and not gone:
                closed, stuck = await close_finished(self.scheduler_comm, jobs, at_once=late)
            if late:
                closed, stuck = list(jobs), []
            elif loses:
                closed, stuck = [*closed, *stuck], []
            await self._end(closed)
            self._keep(stuck, why)
            jobs = [job for job in jobs if job not in closed and job not in stuck]
            if jobs:
                await asyncio.sleep(_FINISHING_INTERVAL)

    async def _end(self, jobs: list[WorkerJob]) -> None:
        await self._dispatcher.cancel([job.job_id for job in jobs if job.job_id])
        await asyncio.gather(*(job.close() for job in jobs))
        for job in jobs:
            job.ended_at = job.ended_at or time.time()
        self._poll_now.set()
        self._changed.set()

    def _keep(self, jobs: list[WorkerJob], why: Leaving) -> None:
        """Keep jobs whose data fits nowhere else: perhaps another job is just about to come."""
        if not jobs:
            return
        self._stay(jobs)
        now = time.time()
        for job in jobs if why is not Leaving.WALLTIME else ():
            if job.group.adaptive is not None:  # data that somebody came to want since the decision: the next one knows of it
                job.group.adaptive.note(f"job {job.name} stays: its data fits nowhere else", now=now)
            elif job.group in self._deleted:
                self._warn(f"job {job.name} of the deleted group {job.group.name} stays until its data is released: it fits nowhere else")
            else:
                self._warn(f"job {job.name} stays: its data fits nowhere else. Free some of it, and scale again")
        for job in jobs:
            job.retry_at, job.idle_since = now + (_RETRY_DELETED if job.group in self._deleted else _RETRY_LEAVING), None
            if job.group.limits.fixed and why is not Leaving.WALLTIME and job.group not in self._deleted:
                job.group.resize(replace(job.group.limits, maximum=job.group.limits.maximum + 1))

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Give up the jobs all of whose workers are named. Names of jobs count too.

        Parameters
        ----------
        workers : iterable of str
            Names of workers or of jobs.
        """
        self._check_usable()
        given = {str(w) for w in workers}
        for name, job in list(self.workers.items()):
            if name in given or (given.intersection(units.workers_of(name, job.group.options)) and set(job.workers.values()) <= given):
                if job.group.limits.fixed:
                    job.group.resize(replace(job.group.limits, maximum=job.group.limits.maximum - 1))
                self._give_up([name], deadline=None, why=Leaving.UNWANTED)
        await self._correct_state()

    @property
    def plan(self) -> set[str]:
        """Names of the workers that the cluster is to have."""
        return {worker for name in self.worker_spec for worker in self._workers_of(name)}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs have been submitted."""
        return {worker for name in self.workers if name in self.worker_spec for worker in self._workers_of(name)}

    def _workers_of(self, name: str) -> list[str]:
        return units.workers_of(name, self.workers[name].group.options)

    # What the scheduler says

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op == "add":
            for address, worker in msg["workers"].items():
                self._worker_joined(address, worker["name"])
        elif op == "remove":
            for job in self._all_jobs.values():
                if job.workers.pop(msg, None) is not None and not job.workers:
                    self._poll_now.set()  # the job may have ended
            if msg not in self.scheduler_info["workers"]:
                return
        Cluster._update_worker_status(self, op, msg)
        if op == "add":
            self._compare_environments()
        self._changed.set()

    def _take_workers(self) -> None:
        """Take over the scheduler's full list of workers."""
        workers = self.scheduler_info["workers"]
        for job in self._all_jobs.values():
            for gone in job.workers.keys() - workers.keys():
                del job.workers[gone]
        for address, worker in workers.items():
            self._worker_joined(address, worker["name"])
        self._compare_environments()
        self._changed.set()

    def _compare_environments(self) -> None:
        """Tell where workers do not fit to the others."""
        fatal, doubtful = self._environment_check.check(environments(self.scheduler_info["workers"]))
        if fatal:
            self._problem(fatal)
        if doubtful:
            self._warn(doubtful)

    def _worker_joined(self, address: str, name: object) -> None:
        job = self._all_jobs.get(units.job_of(name, self._all_jobs) or "")
        if isinstance(job, WorkerJob):
            job.joined(address, str(name), now=time.time())

    async def _watch_stream(self) -> None:
        """Notice when the scheduler's stream of news ends, and take it up again if the scheduler is still there."""
        silent_since = 0.0
        while True:
            if silent_since and time.monotonic() - silent_since > _SILENCE:
                silent_since = math.inf
                self._problem(
                    f"the scheduler at {self.scheduler_address} has not answered for {_SILENCE:g} s, though its job runs; it is tried on. "
                    f"Log: {getattr(self.scheduler, 'log', '')}"
                )
            if self._watch_worker_status_task is not None:
                await asyncio.wait([self._watch_worker_status_task])
            self._poll_now.set()
            await asyncio.sleep(1)
            if self.status != Status.running:
                return
            silent_since = silent_since or time.monotonic()
            with suppress(OSError, TimeoutError):
                comm = await asyncio.wait_for(self.scheduler_comm.live_comm(), 10)
                silent_since = 0.0
                comm.name = "Cluster worker status"
                await comm.write({"op": "subscribe_worker_status"})
                self.scheduler_info = SchedulerInfo(await comm.read())
                self._watch_worker_status_comm = comm
                self._watch_worker_status_task = asyncio.ensure_future(self._watch_worker_status(comm))
                self._take_workers()

    # What the queue says

    async def _watch_queue(self) -> None:
        """Poll for all jobs, and take note of those that have started and ended."""
        while True:
            interval = self.options.cluster.poll_interval
            if self._in_touch and not any(job.pending for job in self._all_jobs.values()):
                interval *= 4
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), interval)
                await asyncio.sleep(min(1.0, self.options.cluster.poll_interval))  # let the queue learn of what just happened
            self._poll_now.clear()
            try:
                self._dispatcher.check_manager()
                await self._look_at_queue()
            except Superseded as error:
                self._step_down(str(error))
                return
            except NameLost as error:
                await self._fail(f"{error}: its jobs are cancelled")
            except Exception as error:  # whatever it was, the jobs need somebody to look after them
                self._warn(f"internal error while looking at the queue, it is tried again: {error!r}")
            if self.status == Status.failed:
                return

    async def _look_at_queue(self) -> None:
        await self._dispatcher.poll()
        if self._dispatcher.trouble:
            self._warn(self._dispatcher.trouble)
            self._dispatcher.trouble = ""
        self._troubles.take({name: job.queue_status for name, job in self._all_jobs.items()})
        self._take_note(now=time.time())
        self._changed.set()
        if not self._in_touch:  # starting, or lost: workers that end now may only have lost their scheduler
            scheduler = self.scheduler
            if self.status == Status.running and isinstance(scheduler, SchedulerJob) and scheduler.queue_status.state.ended:
                await self._scheduler_ended(scheduler)
            return
        await self._refresh()
        for job in list(self.workers.values()):
            if job.queue_status.state.ended and job.job_id not in self._dispatcher.cancelled:
                await self._worker_job_ended(job)
        self._decide()

    def _take_note(self, *, now: float) -> None:
        """Learn from what the queue said: waits, ends, what runs well, how long the scheduler job has left."""
        for job in self._all_jobs.values():
            if not isinstance(job, WorkerJob):
                continue
            job.group.learn_wait(job)
            if not job.alive and job.ended_at is None:
                end = job.queue_status.end
                job.ended_at = end if end is not None and end <= now else now
                if job.job_id in self._dispatcher.monitor.ended():  # what the queue merely forgot may still run
                    self._dispatcher.note_end(job.name, job.job_id)
            if job.workers and not job.absence and not job.stable and job.joined_at is not None and now - job.joined_at > STABLE:
                job.stable = True
                job.group.failures.jobs_run_well()
        self._give_up_hopeless()
        started = self.status == Status.running  # before that nobody would be told
        if started and isinstance(self.scheduler, SchedulerJob) and (warning := self.scheduler.end_is_near(now=now)):
            self._warn(warning)

    def _give_up_hopeless(self) -> None:
        """Cancel what adaptive scaling asked for and can never start: nobody may be there to read why."""
        for job in list(self.workers.values()):
            if job.group.adaptive is not None and self._troubles.hopeless([job.name]):
                message = f"worker job {job.job_id} ({job.name}) will never start: {explain(job.queue_status)}"
                job.group.failures.submit_refused(message, for_good=True, now=time.time())
                self._give_up([job.name], deadline=None, why=Leaving.UNWANTED)
                self._problem(f"{message}. Adaptive scaling is paused; `cluster.adaptive.resume()` goes on")

    async def _refresh(self) -> None:
        """Take the scheduler's list of workers, for its stream falls silent when another manager subscribes, and their load."""
        with suppress(OSError, TimeoutError):
            self.scheduler_info = SchedulerInfo(await asyncio.wait_for(self.scheduler_comm.identity(), 10))
            self._take_workers()
        await self._take_load()

    async def _take_load(self) -> None:
        """Ask the scheduler what there is to do. Without an answer the last one counts."""
        with suppress(OSError, TimeoutError):
            load = await asyncio.wait_for(self.scheduler_comm.hpcgpu_load(), 10)
            groups = sorted(self._groups.values(), key=lambda group: group.adaptive is None)
            now = time.time()
            for group in groups:
                group.take_load(load["workers"], now=now)
            for name, demand in demands(load, groups).items():
                self._groups[name].demand = demand

    async def _keep_deciding(self) -> None:
        """Decide once a second: whether a walltime ends, a pause is over, there is work for more jobs or for fewer."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._decide_now.wait(), _DECISION_INTERVAL)
            self._decide_now.clear()
            if self.adaptive is not None:
                await self._take_load()
            self._decide()

    async def _keep_in_contact(self) -> None:
        """Let the scheduler know that this program is alive, until it knows of another manager."""
        interval = min(_HEARTBEAT, (self.options.cluster.lease or math.inf) / 5)
        while not self._superseded:
            with suppress(OSError, TimeoutError):
                say = self.scheduler_comm.hpcgpu_heartbeat(manager=self._dispatcher.manager, about=self._about())
                if await asyncio.wait_for(say, 10) > self._dispatcher.manager:
                    self._poll_now.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._say_now.wait(), interval)
            self._say_now.clear()

    def _about(self) -> str:
        """Return how its scaling is, in a few words: what another program shows of it."""
        parts = []
        for group in self._groups.values():
            what = "" if group.name == DEFAULT else f"group {group.name}: "
            if group.failures.paused:
                parts.append(f"{what}paused: {group.failures.paused}")
            elif group.adaptive is not None:
                limits = group.limits
                parts.append(f"{what}adaptive, {limits.minimum} to {limits.maximum} jobs: {group.adaptive.state.reason}")
        parts += self._shortages(now=time.time())
        return "; ".join(parts)

    def _shortages(self, *, now: float) -> list[str]:
        """Return what running jobs lack, of each that lacks workers."""
        jobs = [job for job in self.workers.values() if job.alive and job.absence]
        return [f"worker job {job.job_id} ({job.name}) {job.shortage(now=now)}" for job in jobs]

    def _step_down(self, why: str) -> None:
        """Leave the cluster to another manager."""
        if self._superseded:
            return
        self._superseded = why
        for group in self._groups.values():
            group.adaptive = None
        unguard(self._dispatcher)
        self.shutdown_on_close = False
        self._problem(why)

    def _adopt(self, submit: Submit, job_id: str) -> None:
        """Take over a worker job that an earlier manager submitted, once the queue was asked about it."""
        group = self._groups.get(submit.group, self._groups[DEFAULT])
        job = WorkerJob(self._dispatcher, group.script, submit.name, self._logs, group=group, after=self._dependency)
        job.job_id, job.status = job_id, Status.running
        state = job.queue_status.state
        job.doubtful = state is JobState.UNKNOWN
        if submit.cancelled and job.doubtful:  # it has ended as it was meant to; if not, `close` cancels it
            return
        self._all_jobs[job.name] = job
        group.jobs.append(job)
        if state.ended or state is JobState.COMPLETING:
            job.leaving = True
            self._dispatcher.cancelled.add(job_id)  # nothing more is to be done about it
            return
        job.leaving = submit.cancelled
        if submit.cancelled:
            self._begun.append(job)
        else:
            self.workers[job.name] = job
            self.worker_spec[job.name] = self.new_spec

    def _restore_sizes(self) -> None:
        """Let each group have the jobs that it has, or fewer, where the user asked for fewer and the last manager did not come so far.

        A job that is being given up counts where there is nothing else in its place: it was to be replaced.
        """
        sizes = self.directory.sizes()
        for group in self._groups.values():
            there = sum(job.group is group for job in self.workers.values())
            begun = sum(job.group is group for job in self._begun)
            wanted = sizes.get(group.name)
            group.resize(replace(group.limits, maximum=there if wanted is None else min(there + begun, wanted)))

    def _go_on_giving_up(self) -> None:
        """End the jobs that the last manager had begun to give up; those that run when the scheduler is there, for their data."""
        jobs = [job for job in self._begun if job.pending or self.status is Status.running]
        self._begun = [job for job in self._begun if job not in jobs]
        sizes = self.directory.sizes()
        for why in (Leaving.ZERO, Leaving.UNWANTED):
            if chosen := [job for job in jobs if (sizes.get(job.group.name) == 0) is (why is Leaving.ZERO)]:
                self._spawn(self._retire(chosen, None, why), self._changing)

    @property
    def _in_touch(self) -> bool:
        """Whether the scheduler's stream of news is open."""
        stream = self._watch_worker_status_task
        return stream is not None and not stream.done()

    async def _scheduler_ended(self, scheduler: SchedulerJob) -> None:
        """Take note that the cluster is lost, and cancel its worker jobs."""
        await self._fail(
            f"the scheduler of cluster {self.options.cluster.name} is gone, its worker jobs are cancelled: {scheduler.obituary()}"
        )

    async def _fail(self, failure: str) -> None:
        self._troubles.fail(failure)
        self._warn(failure)
        self.status = Status.failed  # after its reason: who sees the status can ask for it
        self.worker_spec.clear()
        self.workers.clear()
        try:
            await in_thread(self._dispatcher.cancel_all, CLOSE_TIMEOUT)
        except BatchError as error:
            self._problem(f"the jobs {' '.join(self._dispatcher.left())} could not be cancelled: {error}")
        self._changed.set()

    async def _worker_job_ended(self, job: WorkerJob) -> None:
        """Tell of a job that ended without being asked to; the next decision replaces it, unless too many have failed in a row."""
        self._forget(job)
        job.status = Status.closed
        group, now = job.group, time.time()
        if job.doubtful and job.joined_at is None:  # it had ended before this program came
            if group.limits.fixed:
                there = sum(other.group is group for other in self.workers.values())
                group.resize(replace(group.limits, maximum=min(there, group.limits.maximum)))
            return
        outcome = job.outcome
        group.failures.job_ended(outcome, job.queue_status.node, now=now)
        if outcome.crashed and job.joined_at is not None:
            with suppress(OSError, TimeoutError):
                names = units.workers_of(job.name, group.options)
                await asyncio.wait_for(self.scheduler_comm.hpcgpu_crashed(names=names), 10)
        message = job.obituary()
        if group.adaptive is not None:
            group.adaptive.note(message.splitlines()[0], now=now)
        if group.failures.paused:
            self._problem(f"{group.failures.paused}. The last one: {message}")
            return
        wait = group.failures.next_try - now
        self._warn(f"{message}\nIt is replaced{f' in {wait:.0f} s' if wait > 1 else ''}{' if there is work' if group.adaptive else ''}.")

    def _forget(self, job: WorkerJob) -> WorkerJob:
        self.workers.pop(job.name, None)
        self.worker_spec.pop(job.name, None)
        return job

    # Telling the user

    def _problem(self, message: str) -> None:
        """Warn at once, and again at the next `wait_for_workers`, `repr` or `close`."""
        self._troubles.problems.append(message)
        self._warn(message)
        self._changed.set()

    def _warn(self, message: str) -> None:
        self._log(message)
        if self.status != Status.starting:  # the constructor raises it
            with suppress(ClusterWarning):  # `-W error` must not stop what looks after the jobs
                warn(message)

    def _log(self, log: str) -> None:
        self._cluster_manager_logs.append((time.time(), log))

    @property
    def _logs(self) -> Path:
        return self.options.cluster.log_directory or self.directory.logs

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        """Run something in the background; what it raises is told, not lost."""
        task = asyncio.ensure_future(work)
        tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._problem(f"internal error: {error!r}")

        task.add_done_callback(done)
        return task
