"""A cluster, its queue, its nodes, and the programs that manage it: whatever may happen to them."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.batch.base import JobState, JobStatus, OwnJob
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import BatchUnavailable, ClusterError, LaunchError, OptionError, SubmitLimited, SubmitRefused
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.manager import periodic_tasks
from hpcgpu.manager.manager import Manager
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.runtime.standby_scheduler import _Standby, record_failure
from hpcgpu.scaling.wanted_state import AddGroup, Command, DeleteGroup, Detach, Resume
from hpcgpu.state.cluster_phases import Ownership
from hpcgpu.store import create_directory, saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from tests.unit.simulated import HOUR
from tests.unit.simulated_machines import STEP, Killed, Program, Scheduler, acting, with_scheduler
from tests.unit.simulated_queue import SCHEDULER, Faulty

#: Seconds after which a worker job without a scheduler ends, if it does not wait for the next one.
ALONE = 120.0

ENDS = [
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
    JobState.OUT_OF_MEMORY,
]
_REFUSALS: list[Callable[[], Exception]] = [
    lambda: SubmitRefused("sbatch: error: invalid partition"),
    lambda: SubmitLimited("sbatch: error: QOSMaxSubmitJobPerUserLimit"),
    lambda: BatchUnavailable("sbatch: error: Unable to contact slurm controller"),
]


class World:
    """A cluster, its queue, its nodes, and the programs that manage it or have managed it."""

    def __init__(self, path: Path, schedulers: dict[str, Scheduler], *, restart: bool) -> None:
        self.restart, self.queue = restart, Faulty()
        self.latency, self.step = 0.0, STEP
        self.schedulers = schedulers
        self.programs: list[Program] = []
        self.full = self.unwritten = self.starts_all = False
        #: The moment of a submit at which the program that submits is killed; empty if it is not.
        self.dies_then = ""
        #: When submits were refused, and what went wrong when jobs were submitted and cancelled.
        self.tries: list[float] = []
        self.broken: list[str] = []
        #: Since when a worker job runs without a scheduler; jobs that wait before they have a scheduler.
        self._alone: dict[str, float] = {}
        self._standby: dict[str, _Standby] = {}
        self.queue.submits, self.queue.submitted, self.queue.cancels = self._submits, self._submitted, self._cancels
        given: dict[str, Any] = {"name": "demo", "gpus_per_node": 1, "walltime": "48h", "environment_check": "off"}
        given |= {"quiet": True, "on_scheduler_end": "restart" if restart else "end"}
        self.options = resolve("slurm", given | {"cluster_directory": str(path), "jobs": 2})

        def complete(directory: ClusterDirectory) -> None:
            directory.tls.mkdir(mode=0o700)
            saved_options.write(directory, self.options)
            directory.take_over("the first program")

        self.directory = create_directory.claim(path / "demo", lambda _: [], system="slurm", complete=complete)
        self.path = path / "demo"

    # Programs

    def first(self) -> None:
        """Start the cluster."""
        dispatcher = Dispatcher(self.queue, ClusterDirectory.existing(self.path), 1, time.time)
        self._begin(Manager(self.options, dispatcher, Ownership(ends_jobs=True, ends_at_exit=True)))

    def takes_over(self, inside: str = "") -> Program | None:
        """Let another program take the cluster over; None if it sees at once that it cannot."""
        if self.abandoned:
            return None
        directory = ClusterDirectory.existing(self.path)
        latest = directory.manager()
        after = latest.number if inside and latest is not None else None
        try:
            made = Manager.of_existing(
                directory, self.queue, ends_jobs=not inside, in_scheduler_job=bool(inside), after=after, quiet=True
            )
        except ClusterError as error:
            assert directory.closing, error
            return None
        made.state.dispatcher.clock = time.time
        return self._begin(made, inside)

    def _begin(self, made: Manager, inside: str = "") -> Program:
        program = Program(made, inside)
        if self.full:
            _fill(made.state.dispatcher.directory)
        program.start = program.run(made.start())
        program.start.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.programs.append(program)
        return program

    @property
    def abandoned(self) -> bool:
        """Whether the cluster has no directory: its start failed before the queue had a job."""
        return not self.path.exists()

    @property
    def present(self) -> Program | None:
        """The program that manages the cluster now, if one does."""
        return next((one for one in reversed(self.programs) if self._manages(one)), None)

    def _manages(self, program: Program) -> bool:
        state = program.manager.state
        return not program.dead and bool(state.dispatcher.manager) and (state.phase.owned or state.cancelling)

    # The queue, as the managers use it

    def _submits(self, name: str) -> None:
        """Only the latest manager submits; between two schedulers only a scheduler job."""
        if self.queue.refusal is not None:
            self.tries.append(time.time())
        if (program := acting.get()) is None:
            return
        self._dies_at("before a submit", program)
        self._acts(program, f"submits {name}")
        between = program.manager.state.phase.restarting and not with_scheduler.get()
        if between and not name.startswith(SCHEDULER):
            self.broken.append(f"{name} is submitted, and the cluster has no scheduler")

    def _cancels(self, job: JobStatus) -> None:
        """A job that runs is cancelled after its workers have retired, unless the whole cluster ends."""
        if (program := acting.get()) is None:
            return
        self._acts(program, f"cancels {job.name}")
        state, serving = program.manager.state, self.serving
        ends = state.cancelling or state.wanted.closing or state.phase.closing or self.directory.closing
        if serving is None or ends or state.phase.restarting:
            return
        if job.name in {worker["name"] for worker in serving.there.values()} - serving.retired:
            self.broken.append(f"{job.name} is cancelled, and its worker works")

    def _submitted(self) -> None:
        if (program := acting.get()) is not None:
            self._dies_at("after a submit", program)

    def _dies_at(self, moment: str, program: Program) -> None:
        if self.dies_then == moment:
            self.dies_then = ""
            program.kill()
            raise Killed

    def _acts(self, program: Program, what: str) -> None:
        number, latest = program.manager.state.dispatcher.manager, self.directory.manager()
        if latest is not None and latest.number != number:
            self.broken.append(f"manager {number} {what}, and {latest.number} manages the cluster")

    # The nodes

    @property
    def serving(self) -> Scheduler | None:
        """The scheduler of the contact, if it lives."""
        contact = self.directory.contact()
        found = self.schedulers.get(contact.client) if contact is not None else None
        return found if found is not None and found.alive else None

    @property
    def alive(self) -> list[JobStatus]:
        """All jobs that the queue has."""
        return [job for job in self.queue.jobs.values() if not job.state.ended]

    @property
    def live(self) -> list[JobStatus]:
        """The worker jobs that the queue has."""
        return [job for job in self.alive if not job.name.startswith(SCHEDULER)]

    def sets(self, job: JobStatus, state: JobState, **status: Any) -> None:
        """Let the queue have a job in another state."""
        self.queue.jobs[job.job_id] = replace(job, **{"state": state, "reason": "", **status})

    def starts_job(self, job: JobStatus) -> None:
        """Let a job start, unless the queue holds it."""
        held = self.queue.held.get(job.job_id)
        if held is None or self.queue.jobs[held].state.ended:
            now = time.time()
            self.sets(job, JobState.RUNNING, start=now, end=now + 48 * HOUR, node=f"n-{job.name}")

    def ends_job(self, job: JobStatus, state: JobState) -> None:
        """Let a job end."""
        self.sets(job, state, end=time.time())
        self.nodes()

    async def nodes_live(self) -> None:
        """Let the processes on the nodes do their work."""
        while True:
            self.nodes()
            self.queue.accept(self.step, closed=self.directory.closing)
            await asyncio.sleep(self.step)

    def nodes(self) -> None:
        """Let processes end with their job, schedulers start, and workers connect."""
        running = {job.job_id: job for job in self.queue.jobs.values() if job.state is JobState.RUNNING}
        for scheduler in self.schedulers.values():
            if scheduler.alive and scheduler.job_id not in running:
                scheduler.end()
        for program in self.programs:
            if program.inside and program.inside not in running and not program.dead:
                program.kill()
        for job in [job for job in self.alive if self.starts_all and job.state is JobState.PENDING]:
            self.starts_job(job)
        for job in running.values():
            if job.name.startswith(SCHEDULER):
                self._scheduler_job(job)
        serving, names = self.serving, {job.name for job in running.values()}
        workers = [str(worker["name"]) for worker in serving.there.values()] if serving is not None else []
        for worker in set(workers) - names if serving is not None else ():
            serving.loses(worker)
        for job in running.values():
            if not job.name.startswith(SCHEDULER):
                self._worker_job(job, serving)

    def _scheduler_job(self, job: JobStatus) -> None:
        scheduler = next((one for one in self.schedulers.values() if one.job_id == job.job_id), None)
        if scheduler is None:
            self._waits(job)
        elif self.directory.wanted().manager_in_scheduler_job and scheduler.answers:
            if scheduler is self.serving and not self.full and not any(self._alive(one) for one in self.programs):
                self.takes_over(inside=job.job_id)
        elif not (scheduler.released or self.directory.detached) and scheduler.answers:
            lease = self.options.cluster.lease
            assert lease is not None
            if asyncio.get_running_loop().time() - scheduler.heard > lease + 60:  # it ends as intended
                self.directory.remove_secrets()
                self.sets(job, JobState.COMPLETED, end=time.time())
                scheduler.end()

    def _alive(self, program: Program) -> bool:
        """Whether the program manages the cluster, or begins to."""
        starts = program.start is not None and not program.start.done()
        return not program.dead and (starts or self._manages(program))

    def _waits(self, job: JobStatus) -> None:
        """Let a scheduler job start its scheduler when it may."""
        own = OwnJob(job_id=job.job_id, name=job.name)
        standby = self._standby.setdefault(job.job_id, _Standby(self.directory, self.queue, own))
        try:
            if not standby.may_start(now=time.monotonic()) or self.full:
                return
        except LaunchError:
            with suppress(OSError):
                record_failure(self.directory, own)
            self.sets(job, JobState.FAILED, end=time.time())
            return
        except (OSError, ValueError):
            return
        scheduler = Scheduler(job.job_id, asyncio.get_running_loop().time())
        self.schedulers[scheduler.address] = scheduler
        token = self.directory.token()
        self.directory.publish(Contact(token=token, job_id=job.job_id, workers="ucx://s", client=scheduler.address))

    def _worker_job(self, job: JobStatus, serving: Scheduler | None) -> None:
        if serving is None:
            since = self._alone.setdefault(job.job_id, time.time())
            over = self.directory.closing or not self.directory.tls.is_dir()
            if over or time.time() - since > (HOUR if self.restart else ALONE):
                self.sets(job, JobState.FAILED, end=time.time())
            return
        self._alone.pop(job.job_id, None)
        if f"tls://{job.name}" not in serving.there and job.name not in serving.gone and serving.answers:
            serving.joins(job.name)

    def pick(self, index: int, state: JobState) -> JobStatus | None:
        """A worker job in a state."""
        jobs = [job for job in self.live if job.state is state]
        return jobs[index % len(jobs)] if jobs else None

    # What may happen: programs

    async def order(self, command: Command) -> None:
        program = self.present
        if program is None or program.inside:
            return
        state, before = program.manager.state, self.directory.wanted()
        over = not state.managed or self.directory.closing
        latest = self.directory.manager()
        refused = over or (latest is not None and latest.number > state.dispatcher.manager)
        refused = refused or (self.full and isinstance(command, Detach | AddGroup))
        groups = state.registry.groups
        if not isinstance(command, AddGroup | DeleteGroup) and getattr(command, "group", DEFAULT) not in groups:
            return
        try:
            if isinstance(command, AddGroup):
                program.call(program.manager.groups.add, command, self.options.worker)
            elif isinstance(command, DeleteGroup):
                program.call(program.manager.groups.delete, command)
            else:
                program.call(program.manager.order, command)
        except OptionError:
            assert isinstance(command, AddGroup | DeleteGroup)
            assert (command.group in groups) == isinstance(command, AddGroup)
        except ClusterError as error:
            assert refused and str(error), f"{command} was refused: {error}"
            assert self.directory.wanted() == before, "a command that is refused changes nothing"
        else:
            assert not refused, f"{command} was accepted"
            self.unwritten = self.full

    async def another_takes_over(self) -> None:
        """The earlier manager lives, and finds that out."""
        self.takes_over()

    async def dies(self) -> None:
        for program in self.programs:
            if not program.dead and not program.inside:
                program.kill()

    async def dies_at(self, moment: str) -> None:
        """The next program that submits a job is killed."""
        self.dies_then = moment

    async def detaches(self) -> None:
        """The user's program leaves its cluster."""
        program = self.present
        if program is not None and not program.inside and program.manager.state.managed:
            program.run(quietly(program.manager.detach()))

    async def closes(self) -> None:
        if (program := self.present) is not None and not program.inside:
            program.run(quietly(program.manager.close()))

    async def stop_begins(self) -> None:
        """Another program closes the cluster, and is killed before it cancels a job."""
        if not self.full:
            self.directory.begin_close()

    async def passes(self, seconds: int) -> None:
        tried, polls = len(self.tries), self.queue.polls
        await asyncio.sleep(seconds)
        living = sum(not program.dead for program in self.programs)
        assert self.queue.polls - polls <= (living + 1) * (6 + seconds), "the queue is polled too often"
        assert len(set(self.tries[tried:])) <= (living + 1) * (5 + seconds // 20), "a refused submit comes too often"

    # What may happen: jobs and the queue

    async def starts(self, index: int) -> None:
        if job := self.pick(index, JobState.PENDING):
            self.starts_job(job)

    async def scheduler_job_starts(self) -> None:
        for job in self.alive:
            if job.name.startswith(SCHEDULER) and job.state is JobState.PENDING:
                self.starts_job(job)

    async def ends(self, index: int, state: JobState) -> None:
        if job := self.pick(index, JobState.RUNNING):
            self.ends_job(job, state)

    async def cancelled_by_somebody(self, index: int) -> None:
        if job := self.pick(index, JobState.PENDING):
            self.ends_job(job, JobState.CANCELLED)

    async def requeued(self, index: int) -> None:
        if job := self.pick(index, JobState.RUNNING):
            self.sets(job, JobState.PENDING)
            self.nodes()

    async def loses_worker(self, index: int, for_good: bool) -> None:
        serving, job = self.serving, self.pick(index, JobState.RUNNING)
        if serving is not None and job is not None:
            serving.loses(job.name)
            if for_good:
                serving.gone.add(job.name)

    async def hidden(self, index: int | None) -> None:
        """The queue does not show a job any more, though it has it; None: the scheduler job."""
        job = self.pick(index, JobState.RUNNING) if index is not None else None
        serving = self.serving
        if index is None and serving is not None:
            job = self.queue.jobs[serving.job_id]
        if job is not None:
            self.queue.hidden.add(job.job_id)

    async def shown(self) -> None:
        self.queue.hidden.clear()

    async def silent(self, on: bool) -> None:
        self.queue.silent = on

    async def slow(self, seconds: float) -> None:
        self.latency = seconds

    async def refuses_cancels(self, on: bool) -> None:
        self.queue.refuses_cancels = on

    async def refuses_submits(self, which: int) -> None:
        self.queue.refusal = _REFUSALS[which]() if which < len(_REFUSALS) else None

    async def loses_answers(self, on: bool) -> None:
        self.queue.loses_answers = on

    async def accepts_late(self, on: bool) -> None:
        self.queue.accepts_late = on

    async def holds_back(self, on: bool) -> None:
        self.queue.holds_back = on

    async def scheduler_is_silent(self, on: bool) -> None:
        if self.serving is not None:
            self.serving.answers = not on

    async def data_fits_nowhere(self, on: bool) -> None:
        if self.serving is not None:
            self.serving.full = on

    async def scheduler_dies(self) -> None:
        """Its process ends, and the queue does not report that yet."""
        if self.serving is not None:
            self.serving.end()

    async def scheduler_ends(self, state: JobState) -> None:
        """The scheduler job ends; as intended, it removes the keys before."""
        serving = self.serving
        job = self.queue.jobs[serving.job_id] if serving is not None else None
        job = job or next((one for one in self.alive if one.name.startswith(SCHEDULER)), None)
        if job is None:
            return
        if state is JobState.COMPLETED and job.state is JobState.RUNNING:
            self.directory.remove_secrets()
        self.ends_job(job, state)

    async def walltime_of_scheduler_ends_soon(self) -> None:
        if (serving := self.serving) is not None:
            now = time.time()
            job = self.queue.jobs[serving.job_id]
            self.sets(job, JobState.RUNNING, start=now - HOUR, end=now + 60)

    async def disk_is_full(self, on: bool) -> None:
        self.full = on
        for program in self.programs:
            if not program.dead:
                _fill(program.manager.state.dispatcher.directory, on)

    # The end of a history

    async def healed(self) -> None:
        """Nothing goes wrong any more, and the user asks once more for what is wanted."""
        await self.disk_is_full(False)
        await self.shown()
        queue, self.dies_then = self.queue, ""
        queue.silent = queue.refuses_cancels = queue.loses_answers = queue.accepts_late = queue.holds_back = False
        queue.refusal, self.latency, self.starts_all = None, 0.0, True
        self.step = periodic_tasks._DECISION_INTERVAL = 4 * STEP  # what takes long may take less to compute
        for scheduler in self.schedulers.values():
            scheduler.answers, scheduler.full = True, False
        await self.passes(1600)
        for _ in range(2):
            if not any(map(self._alive, self.programs)) and not self.directory.closing:
                self.takes_over()
            await self.passes(800)
        if (program := self.present) is None or not program.manager.state.managed or self.directory.closing:
            return
        for group in program.manager.state.registry.groups:
            program.call(program.manager.order, Resume(group))
        await self.passes(1500)


async def quietly(work: Any) -> None:
    """Let a call of a program end, also with an error that it reports."""
    with suppress(ClusterError):
        await work


def _no_room(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill(directory: ClusterDirectory, on: bool = True) -> None:
    """Let nothing more be written into a directory, or again."""
    for write in ("write", "_append"):
        if on:
            setattr(directory, write, _no_room)
        else:
            directory.__dict__.pop(write, None)
