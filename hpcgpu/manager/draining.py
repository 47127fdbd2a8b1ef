"""Ends jobs that are no longer wanted.

Pending jobs end at once. The others end when their workers have finished and their data has moved. While a program
holds workers of a job, its drain does not begin: tasks of the program may be able to run on these workers only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable
from contextlib import suppress
from typing import TypeVar

from hpcgpu.batch.base import JobState
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.display.counts_and_durations import counted, duration, listed
from hpcgpu.errors import BatchError, Superseded
from hpcgpu.jobs.job_phases import Draining, Planned
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.manager.submit_planned import wait_for_submits
from hpcgpu.scaling import budget, worker_names
from hpcgpu.scaling.decide_actions import Drain
from hpcgpu.state.cluster_state import ClusterState

#: Seconds until the next attempt to drain a job whose data did not fit elsewhere.
RETRY = 3.0
#: Seconds to wait for calls that run on draining workers: some calls never end.
CALLS_END = 600.0
#: Seconds to wait for a last answer of workers that still run work when their time is over.
_LAST_ANSWER = 10.0
#: Most seconds until a refused cancel is tried again.
_RETRY_LAST = 60.0
#: Seconds between two checks of whether draining workers have finished, or a program still holds workers.
_FINISHING_INTERVAL = 0.5
#: Most seconds between two such checks of workers whose data does not fit elsewhere.
_STUCK_INTERVAL = 5.0
#: How many calls and tasks of a job a message names.
_NAMED = 3

_T = TypeVar("_T")


class Drainer:
    """Drains and cancels the jobs of one cluster.

    Parameters
    ----------
    state : ClusterState
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        #: The queue's message when it last refused a cancel, by job. It was reported to the user.
        self.refused: dict[str, str] = {}
        self._pause = RETRY

    def drain(self, names: Iterable[str], why: Drain, *, deadline: float | None = None) -> None:
        """Remove jobs from the plan, and end them in the background.

        Parameters
        ----------
        names : iterable of str
        why : Drain
        deadline : float, optional
            Epoch seconds after which the drain waits for nothing.
        """
        active = self.state.registry.active
        jobs = [active[name] for name in names if name in active]
        if not jobs:
            return
        try:
            self.state.dispatcher.will_cancel([job.name for job in jobs])
        except Superseded as error:
            self.state.supersede(str(error))
            return
        for job in jobs:
            job.drain(why)
        self.state.spawn(self._drain(jobs, why, deadline))

    def continue_drains(self) -> None:
        """Continue the drains that an earlier manager began.

        Running jobs hold data, so they are drained when the scheduler can be reached.
        """
        state = self.state
        begun = [
            (job, job.phase)
            for job in state.registry.worker_jobs
            if isinstance(job.phase, Draining) and not job.phase.begun
        ]
        ready = [
            (job, phase) for job, phase in begun if job.pending or state.client is not None or state.phase.restarting
        ]
        for why in (Drain.ZERO, Drain.UNWANTED, Drain.DELETED):
            chosen = [job for job, phase in ready if phase.why is why]
            for _, phase in ready:
                phase.begun = True
            if chosen:
                state.spawn(self._drain(chosen, why, None))

    async def _drain(self, jobs: list[WorkerJob], why: Drain, deadline: float | None) -> None:
        state = self.state
        for job in jobs:
            if isinstance(job.phase, Draining) and isinstance(job.phase.before, Planned):
                state.registry.remove(job)
        await wait_for_submits(jobs)
        jobs = [job for job in jobs if job.job_id is not None]
        names = listed((job.name for job in jobs), ", ")
        try:
            if held := await self._held_by_programs(jobs, why):
                state.spawn(self._drain_later(held, why, deadline))
                jobs = [job for job in jobs if job not in held]
            if jobs:
                await self._cancel_or_finish(jobs, why, deadline)
                self._accepted(jobs)
        except Superseded as error:
            self.return_to_plan(jobs)
            state.supersede(str(error))
        except BatchError as error:
            await self._not_accepted(jobs, str(error))
        except Exception as error:  # after any error the jobs must stay in the plan
            await self._end_drain(jobs, retry_at=state.now + RETRY)
            state.messages.warn(f"internal error while draining {names}; hpcgpu tries again: {error!r}")
        state.changed.set()

    async def _held_by_programs(self, jobs: list[WorkerJob], why: Drain) -> list[WorkerJob]:
        """Return the jobs whose drain must wait because a program holds workers of them.

        From now on no other program can hold workers of any of these jobs.
        """
        client, by_worker = self.state.client, dict[str, WorkerJob]()
        for job in jobs:
            if not job.pending and why is not Drain.BUDGET and not self._cannot_wait(job):
                by_worker |= dict.fromkeys(worker_names.workers_of(job.name, job.group.options), job)
        if client is None or not by_worker:
            return []
        try:
            held = {by_worker[name] for name in await client.will_leave(by_worker)}
        except OSError:  # the network, or a busy scheduler: perhaps a program holds them
            held = set(by_worker.values())
        for job in jobs:
            if isinstance(job.phase, Draining):
                job.phase.held_by_program = job in held
        return [job for job in jobs if job in held]

    def _cannot_wait(self, job: WorkerJob) -> bool:
        """Whether a job ends although a program holds its workers: the end of its walltime or of the budget is near."""
        leaves = job.group.walltime_ends(job)
        return job.group.spent or (leaves is not None and self.state.now >= leaves)

    async def _drain_later(self, jobs: list[WorkerJob], why: Drain, deadline: float | None) -> None:
        """Drain jobs as soon as no program holds workers of them."""
        await asyncio.sleep(_FINISHING_INTERVAL)
        jobs = [job for job in jobs if job.draining]  # the others have ended
        if not self.state.managed or not jobs:
            return
        if late := [job for job in jobs if self._cannot_wait(job)]:
            await self._end_drain(late)  # the next decision drains them for that reason
            self.state.decide_now.set()
        await self._drain([job for job in jobs if job not in late], why, deadline)

    async def _not_accepted(self, jobs: list[WorkerJob], words: str) -> None:
        """Return to the plan jobs that the queue did not cancel. Try again; report the same message only once."""
        await self._end_drain(jobs, retry_at=self.state.now + self._pause)
        self._pause = min(2 * self._pause, _RETRY_LAST)
        if any(self.refused.get(job.name) != words for job in jobs):
            names = listed((job.name for job in jobs), ", ")
            self.state.report(f"could not cancel {names}: {words}. hpcgpu tries again")
        self.refused |= {job.name: words for job in jobs}

    def _accepted(self, jobs: list[WorkerJob]) -> None:
        """Forget refused cancels of these jobs, and of jobs that have ended."""
        others = self.state.registry.active.keys() - {job.name for job in jobs}
        self.refused = {name: words for name, words in self.refused.items() if name in others}
        if not self.refused:
            self._pause = RETRY

    async def _cancel_or_finish(self, jobs: list[WorkerJob], why: Drain, deadline: float | None) -> None:
        state = self.state
        waiting = [job for job in jobs if job.pending]
        if waiting:
            ids = [job.job_id for job in waiting if job.job_id]
            await state.dispatcher.cancel(ids, only_pending=why is not Drain.BUDGET)
            await state.poll(ids)
            if state.dispatcher.monitor.error:
                raise BatchError(state.dispatcher.monitor.error)
        # A job that the queue does not list any more has ended, or ends now.
        started = [job for job in waiting if job.queue_status.state in (JobState.RUNNING, JobState.COMPLETING)]
        self.return_to_plan(started)  # they started just before the cancel; the next decision considers them again
        running = [job for job in jobs if job not in waiting]
        loses = why is Drain.BUDGET or (why is Drain.ZERO and not self._other_workers_stay())
        for job in running:
            if isinstance(job.phase, Draining):
                job.phase.loses = loses
        left = None if deadline is None else max(0.0, deadline - state.now)
        kept = (await _within(left, move_data(state.client, running)) or []) if state.client is not None else []
        if loses or why is Drain.DELETED:
            kept = []
        self._keep_data(kept, why)
        await self._cancel([job for job in waiting if job not in started])
        await self._finish([job for job in running if job not in kept], why, deadline)

    def _other_workers_stay(self) -> bool:
        """Whether any worker does not drain. Workers that other programs started count, too."""
        draining = {address for job in self.state.registry.worker_jobs if job.draining for address in job.workers}
        return bool(self.state.known_workers - draining)

    async def _finish(self, jobs: list[WorkerJob], why: Drain, deadline: float | None) -> None:
        """End each running job when its workers have finished. One command cancels all jobs that are ready."""
        state, began, pause = self.state, self.state.now, _FINISHING_INTERVAL
        over, reported = list[WorkerJob](), set[WorkerJob]()
        while jobs:
            late = deadline is not None and state.now >= deadline
            left = None if deadline is None else max(0.0, deadline - state.now)
            closed, stuck = list(jobs), list[WorkerJob]()
            if state.client is not None and not (state.scheduler is not None and state.scheduler.ended):
                if late or state.now - began >= CALLS_END:
                    over += await self._not_waited_for(
                        state.client, [j for j in jobs if j not in over], why, began, late=late
                    )
                close = close_finished(state.client, jobs, at_once=over)
                closed, stuck = await _within(_LAST_ANSWER if late else left, close) or ([], [])
            if late:
                closed, stuck = list(jobs), []
            if why is Drain.BUDGET:
                await self._lose_results(closed)
            await self._cancel(closed)
            jobs = [job for job in jobs if job not in closed]
            if why is Drain.DELETED:
                self._report_kept([job for job in stuck if job not in reported])
                reported.update(stuck)
            keeps = [job for job in stuck if not _refuses(job)]
            self._keep_data(keeps, why)
            jobs = [job for job in jobs if job not in keeps]
            # data that does not fit elsewhere is tried less often
            pause = min(2 * pause, _STUCK_INTERVAL) if len(stuck) > len(keeps) else _FINISHING_INTERVAL
            if jobs:
                await asyncio.sleep(pause if left is None else min(pause, max(left, _FINISHING_INTERVAL)))

    async def _not_waited_for(
        self, client: SchedulerClient, jobs: list[WorkerJob], why: Drain, began: float, *, late: bool
    ) -> list[WorkerJob]:
        """Return the jobs for which the drain waits no longer; warn the user of what still runs on them."""
        try:
            runs = await client.runs(_names(jobs))
        except OSError:  # the network, or a busy scheduler
            return []
        over, messages = [], []
        for job in jobs:
            there = [(name, runs[name]) for name in job.workers.values() if name in runs]
            calls = [(name, call) for name, each in there for call in each["calls"]]
            tasks = [task for _, each in there for task in each["tasks"]]
            held = any(each["held"] for _, each in there)
            if late or (calls and not tasks and not held):  # the program that holds workers ends some time
                over.append(job)
                holds = [name for name, each in there if each["held"]]
                if calls or tasks or holds:
                    messages.append(_what_ends_with(job, calls, tasks, holds, why, self.state.now - began))
        for message in messages[:_NAMED]:
            self.state.messages.warn(message)
        if (others := len(messages) - _NAMED) > 0:
            self.state.messages.warn(f"the same holds for {counted(others, 'more worker job')}")
        return over

    def _report_kept(self, jobs: list[WorkerJob]) -> None:
        """Report that jobs of a deleted group stay because of their data."""
        for job in jobs:
            group = f" of the deleted group {job.group.name}" if job.group in self.state.registry.deleted else ""
            self.state.messages.warn(
                f"job {job.name}{group} continues until its data is released, because it does not fit on other "
                "workers. It takes no new tasks"
            )

    async def _lose_results(self, jobs: list[WorkerJob]) -> None:
        """Report to programs at once which results are lost when the budget ends these jobs."""
        if self.state.client is not None and (names := _names(jobs)):
            with suppress(OSError, TimeoutError):  # the jobs end in any case
                await self.state.client.lose(names, budget.lost(jobs[0].group.whose, jobs[0].group.limits))

    async def _cancel(self, jobs: list[WorkerJob]) -> None:
        state = self.state
        if not jobs:  # the queue need not be polled
            return
        await state.dispatcher.cancel([job.job_id for job in jobs if job.job_id])
        for job in jobs:
            job.workers.clear()  # they are gone, also if the queue still reports the job
        state.poll_now.set()
        state.changed.set()

    def return_to_plan(self, jobs: Iterable[WorkerJob], *, retry_at: float = 0.0) -> None:
        """Return to the plan jobs that could not be drained."""
        staying = [job for job in jobs if job.draining and job.cancelled_at is None]
        if staying:
            self.state.dispatcher.keep([job.name for job in staying])
        for job in staying:
            job.return_to_plan(retry_at=retry_at)

    async def _end_drain(self, jobs: list[WorkerJob], *, retry_at: float = 0.0, seconds: float | None = None) -> None:
        """Return to the plan jobs whose drain failed; their workers take tasks again."""
        for job in jobs:
            if isinstance(job.phase, Draining):
                job.phase.loses = False
        if self.state.client is not None:
            with suppress(Exception):  # after any error the jobs must stay in the plan
                await _within(seconds, _resume(self.state.client, jobs))
        self.return_to_plan(jobs, retry_at=retry_at)

    async def return_unfinished(self, seconds: float) -> list[str]:
        """Return to the plan the jobs whose drain has not ended; return their names. No drain may run any more.

        Parameters
        ----------
        seconds : float
            For the scheduler's answer.
        """
        cancels = self.state.dispatcher.cancels
        jobs = [job for job in self.state.registry.worker_jobs if job.draining and job.job_id not in cancels]
        await self._end_drain(jobs, retry_at=self.state.now + RETRY, seconds=seconds)
        return [job.name for job in jobs]

    def _keep_data(self, jobs: list[WorkerJob], why: Drain) -> None:
        """Keep jobs whose data does not fit on other workers: perhaps another job will start soon."""
        state, now = self.state, self.state.now
        for job in jobs:
            if not job.draining:  # it has ended meanwhile
                continue
            self.return_to_plan([job], retry_at=now + RETRY)
            job.work.idle_since, job.released = None, False
            # jobs of a deleted group are soon drained for good
            if why is Drain.WALLTIME or job.group in state.registry.deleted:
                continue
            # after the decision a client began to need the data of this job; the next decision considers that
            job.group.note(f"job {job.name} continues: its data does not fit on other workers", now=now)
            if job.group.adaptive is None:
                state.messages.warn(
                    f"job {job.name} continues: its data does not fit on other workers. Free some of it, and scale "
                    "again"
                )
            if job.group.limits.fixed:
                job.group.kept += 1


def _what_ends_with(  # what runs on a job, and why it ends
    job: WorkerJob, calls: list[tuple[str, str]], tasks: list[str], holds: list[str], why: Drain, waited: float
) -> str:
    """Return a message: which work still runs on a job that ends, and why the drain does not wait for it."""
    reasons = {Drain.WALLTIME: "its walltime ends", Drain.BUDGET: "the budget of GPU hours is used up"}
    named = [f"a call of `{call}` on worker {name}" if call else f"a call on worker {name}" for name, call in calls]
    held = [f"worker {name} that a program holds" for name in holds]
    parts = [*named[:_NAMED], *[f"task {task}" for task in tasks[:_NAMED]], *held[:_NAMED]]
    others = len(calls) + len(tasks) + len(holds) - len(parts)
    what = ", ".join([*parts, f"{others} more"] if others > 0 else parts)
    after = "" if why in reasons else f" after {duration(waited)}"
    ends = f"worker job {job.job_id} ({job.name}) ends although work runs on it{after}"
    if why in reasons:
        ends += f", as {reasons[why]}"
    follows = [
        *["Calls fail"][: len(calls)],
        *["The program gets an error"][: len(holds)],
        *["Tasks run again on other workers"][: len(tasks)],
    ]
    return f"{ends}: {what}. {'. '.join(follows)}"


async def _within(seconds: float | None, work: Awaitable[_T]) -> _T | None:
    """Return the result of work; None if it takes longer.

    A worker cannot send its data while a call blocks its event loop.
    """
    with suppress(TimeoutError):
        return await asyncio.wait_for(work, seconds)
    return None


async def move_data(client: SchedulerClient, jobs: Collection[WorkerJob]) -> list[WorkerJob]:
    """Retire all workers of these jobs together: they get no new tasks, their data moves, running tasks continue.

    Parameters
    ----------
    client : SchedulerClient
    jobs : collection of WorkerJob

    Returns
    -------
    list of WorkerJob
        Jobs whose data does not fit elsewhere. They continue as before, but some take no new tasks: see
        `Draining.refuses`.
    """
    requested, moved = set[str](), set[str]()
    try:
        while coming := _remaining(jobs):  # more than once if workers join meanwhile
            requested |= coming.keys()
            if refusing := [name for job in jobs if _refuses(job) for name in job.workers.values()]:
                await client.refuse_tasks(refusing)
            moved |= set(await client.retire(coming.values(), close=False))
            for job in jobs:
                _retired(job).update(requested & job.workers.keys())
    except OSError:  # the network, or a busy scheduler: `close_finished` tries again before any worker is closed
        return []
    stuck = [job for job in jobs if any(address in requested and address not in moved for address in job.workers)]
    await _resume(client, stuck)
    return stuck


async def close_finished(
    client: SchedulerClient, jobs: Collection[WorkerJob], *, at_once: Collection[WorkerJob]
) -> tuple[list[WorkerJob], list[WorkerJob]]:
    """Close the workers of each job that has finished its work and whose results have moved.

    Parameters
    ----------
    client : SchedulerClient
    jobs : collection of WorkerJob
        Jobs whose data `move_data` has moved.
    at_once : collection of WorkerJob
        Jobs that are closed without a wait for their tasks and calls; Dask runs the tasks again elsewhere.

    Returns
    -------
    closed, stuck : list of WorkerJob
        A job is stuck if its results do not fit elsewhere. It takes tasks again unless `Draining.refuses`. A job that
        may lose its results (`Draining.loses`) is closed.
    """
    kept = await move_data(client, jobs) if _remaining(jobs) else []  # a nanny may have restarted a worker
    waits = [job for job in jobs if job not in at_once and (job not in kept or _refuses(job))]
    try:
        # this also moves tasks away that have not begun on workers that refuse new tasks
        unfinished = await client.unfinished(_names(waits)) if waits else {}
        finished = [job for job in jobs if not any(map(unfinished.get, job.workers.values()))]
        done = [job for job in finished if job not in kept or _loses(job)]
        names = _names(done)
        closed = await client.retire(names, close=True) if names else ()
    except OSError:  # the network or a busy scheduler may recover: try again, because of the data
        return [], kept
    stuck = [job for job in done if any(address in _retired(job) and address not in closed for address in job.workers)]
    await _resume(client, stuck)
    ended = [job for job in done if _loses(job) or (job not in stuck and not _remaining([job]))]
    return ended, [job for job in (*kept, *stuck) if job not in ended]


async def _resume(client: SchedulerClient, jobs: Collection[WorkerJob]) -> None:
    for job in jobs:
        _retired(job).clear()
    staying = [job for job in jobs if not _refuses(job)]
    # also the workers that are away: a nanny may be starting one again
    names = [name for job in staying for name in worker_names.workers_of(job.name, job.group.options)]
    if names:
        await client.resume(names)


def _refuses(job: WorkerJob) -> bool:
    """Whether its workers must take no more tasks, also if its data stays."""
    return isinstance(job.phase, Draining) and job.phase.refuses


def _loses(job: WorkerJob) -> bool:
    """Whether the job ends, and loses its data, if the data does not fit elsewhere."""
    return isinstance(job.phase, Draining) and job.phase.loses


def _retired(job: WorkerJob) -> set[str]:
    """Return the addresses of its workers that were requested to retire."""
    return job.phase.retired if isinstance(job.phase, Draining) else set()


def _remaining(jobs: Collection[WorkerJob]) -> dict[str, str]:
    """Return the workers that were not requested to retire: names by address."""
    return {
        address: name
        for job in jobs
        if job.draining
        for address, name in job.workers.items()
        if address not in _retired(job)
    }


def _names(jobs: Collection[WorkerJob]) -> list[str]:
    return [name for job in jobs for name in job.workers.values()]
