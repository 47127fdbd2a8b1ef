"""Manages the jobs of a cluster: observes the queue and the scheduler, decides, and acts.

A plain class with its collaborators as arguments. It waits only for answers; `hpcgpu.cluster.periodic` calls it
again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from math import inf

from hpcgpu.batch.reasons import explain
from hpcgpu.cluster.adaptive import GPUAdaptive
from hpcgpu.cluster.draining import Drainer
from hpcgpu.cluster.groups import WorkerGroup, demands
from hpcgpu.cluster.job import Job
from hpcgpu.cluster.phases import Ended
from hpcgpu.cluster.scheduler_client import Workers
from hpcgpu.cluster.state import ClusterState
from hpcgpu.cluster.submitting import Submitter
from hpcgpu.cluster.worker_job import WorkerJob
from hpcgpu.display.summary import summary
from hpcgpu.display.words import MANY, counted, listed
from hpcgpu.errors import BatchError, ClusterError, Superseded
from hpcgpu.options.common import DEFAULT
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.wire import WaitingWork
from hpcgpu.scaling import units
from hpcgpu.scaling.deciding import Drain, End, Submit, decide
from hpcgpu.scaling.model import Decision, Limits
from hpcgpu.scaling.replacement import STABLE, Outcome
from hpcgpu.scaling.wanted import Command, DeleteGroup, Resume, Scale, Wanted, WantedGroup, apply
from hpcgpu.software.check import EnvironmentCheck, environments
from hpcgpu.store.gone import is_there

__all__ = ["CLOSE_TIMEOUT", "Reconciler"]

#: Seconds that closing may take.
CLOSE_TIMEOUT = 30.0
#: Seconds without an answer of the scheduler after which the user is warned.
SILENCE = 60.0
#: Jobs that have ended that are kept, the last ones.
KEPT_ENDS = 1000
#: Jobs, of many that fail together, of which a message each tells.
_TOLD = 3


class Reconciler:
    """The manager of one cluster.

    Parameters
    ----------
    state : ClusterState
        What is known, and the collaborators: dispatcher, scheduler, its client, clock, and the messages to the user.
    environment : EnvironmentCheck
        Compares the environments of client, scheduler and workers.
    """

    def __init__(self, state: ClusterState, environment: EnvironmentCheck) -> None:
        self.state = state
        self.environment = environment
        self.submitter = Submitter(state)
        self.drainer = Drainer(state)
        #: Passes a command of the user on to `order`, from any thread.
        self.send: Callable[[Command], None] = self.order
        self._silent_since: float | None = None
        self._silence_told = False
        self._gone: list[str] = []  # workers of jobs that ended, of which the scheduler does not know yet
        self._crashed: list[str] = []
        self._refusal_told = False
        self._never = set[str]()  # jobs of adaptive scaling that can never start, which was reported

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """The groups of worker jobs by name."""
        return self.state.registry.groups

    @property
    def jobs(self) -> dict[str, Job]:
        """All jobs by name, also those that have ended."""
        return self.state.registry.jobs

    # Observe: the scheduler

    def worker_joined(self, address: str, name: object) -> None:
        """Record a connected worker."""
        self.state.known_workers.add(address)
        self.state.registry.worker_joined(address, name, now=self.state.now)

    def worker_left(self, address: str) -> None:
        """Record a worker that is gone."""
        self.state.known_workers.discard(address)
        if self.state.registry.worker_left(address, now=self.state.now):
            self.state.poll_now.set()  # its job may have ended
        self.state.changed.set()

    def observe_workers(self, workers: Workers) -> None:
        """Record the scheduler's full list of workers."""
        state = self.state
        known = {address for job in state.registry.worker_jobs for address in job.workers}
        for gone in known - workers.keys():
            state.registry.worker_left(gone, now=state.now)
        for address in workers.keys() - known:
            state.registry.worker_joined(address, workers[address]["name"], now=state.now)
        new = {address: workers[address] for address in workers.keys() - state.known_workers}
        state.known_workers = set(workers)
        self.compare_environments(new, workers)
        state.changed.set()

    def compare_environments(self, new: Workers, workers: Workers) -> None:
        """Report incompatible software of the workers, of which some are new."""
        fatal, differing = self.environment.check(environments(new), lambda: environments(workers))
        if fatal:
            self.state.report(fatal)
        if differing:
            self.state.messages.warn(differing)

    async def observe_load(self) -> None:
        """Query the scheduler for its load.

        If it does not answer, the last answer counts, but no job is released because of it. An answer does not count
        for a group that was resized meanwhile.
        """
        state = self.state
        if state.client is None:
            return
        before = {name: group.wanted for name, group in state.registry.groups.items()}
        try:
            load = await state.client.load()
        except (OSError, TimeoutError):
            for group in state.registry.groups.values():
                group.load_unknown()
            return
        groups = sorted(state.registry.groups.values(), key=lambda group: group.adaptive is None)
        wanted = demands(load, groups)
        for group in groups:
            if group.wanted is before.get(group.name):
                group.take_load(load["workers"], now=state.now)
                group.demand = wanted[group.name]
        self._tell_of_former_groups(load["waiting"])

    def _tell_of_former_groups(self, waiting: Iterable[WaitingWork]) -> None:
        """Report, once for each group, tasks that wait because only a deleted group had the resources for them."""
        registry = self.state.registry
        for kind in waiting:
            needs = kind["resources"]
            if not needs or any(group.can_run(needs) for group in registry.groups.values()):
                continue
            if group := next((group for group in registry.former if group.can_run(needs)), None):
                registry.former.remove(group)  # it is told
                resources = listed([f"{amount:g} {name}" for name, amount in needs.items()], " and ")
                self.state.messages.warn(
                    f"tasks that need {resources} wait: only the workers of group {group.name} had that, and the group "
                    "was deleted. Add a group with these `resources` by `add_worker_group`, or cancel the tasks"
                )

    def observe_silence(self) -> None:
        """Report once that the scheduler has not answered for long although its job runs."""
        state, now = self.state, self.state.now
        if state.listening:
            self._silent_since, self._silence_told = None, False
            return
        self._silent_since = now if self._silent_since is None else self._silent_since
        if (
            now - self._silent_since > SILENCE
            and not self._silence_told
            and state.scheduler is not None
            and state.client is not None
        ):
            self._silence_told = True
            logs = "".join(f" Log: {job.log}" for job in state.scheduler.entries)
            who = f"the scheduler at {state.client.address}"
            suspended = [job.queue_status for job in state.scheduler.entries if job.queue_status.suspended]
            why = f": {explain(suspended[0])}" if suspended else ", though its job runs"
            state.report(f"{who} has not answered for {SILENCE:g} s{why}; hpcgpu keeps trying.{logs}")

    # Observe: the queue

    async def observe_queue(self) -> None:
        """Poll for all jobs, record those that have started and ended, and decide."""
        state = self.state
        if state.client is not None and state.scheduler is not None:
            state.scheduler.heard(state.client.listening)
        await state.poll()
        if state.dispatcher.problem:
            state.messages.warn(state.dispatcher.problem)
            state.dispatcher.problem = ""
        if state.failures.observe({name: job.queue_status for name, job in state.registry.jobs.items()}):
            state.poll_now.set()
        self._observe_jobs()
        state.changed.set()
        if not state.listening:  # starting, or lost: workers that end now may only have lost their scheduler
            if state.client is not None and state.scheduler is not None and state.scheduler.ended:
                await self._scheduler_ended()
            return
        await self.refresh()
        ended = [(job, phase) for job in state.registry.worker_jobs if (phase := self._new_end(job)) is not None]
        await self._worker_jobs_ended(ended)
        self.decide()

    def _new_end(self, job: WorkerJob) -> Ended | None:
        """Return how a job ended that nobody drained, until that is counted among the failures of its group."""
        phase = job.phase
        new = (
            isinstance(phase, Ended)
            and not phase.drained
            and not phase.handled
            and job.job_id not in self.state.dispatcher.cancelled
        )
        return phase if isinstance(phase, Ended) and new else None

    async def refresh(self) -> None:
        """Query the scheduler for its workers and their load.

        The stream of events stops when another manager subscribes.
        """
        if self.state.client is not None:
            with suppress(OSError, TimeoutError):
                self.observe_workers(await self.state.client.workers())
        await self.observe_load()

    def _observe_jobs(self) -> None:
        """Record what the queue reports: waits, ends, stable jobs, and the time left for the scheduler job."""
        state, now = self.state, self.state.now
        ended = state.dispatcher.monitor.ended()  # what the queue merely forgot may still run
        seen_to_end: dict[str, str | None] = {}
        for job in state.registry.worker_jobs:
            job.group.learn_wait(job)
            work = job.work
            if isinstance(job.phase, Ended):
                if job.job_id in ended and not job.phase.noted:
                    job.phase.noted = True
                    seen_to_end[job.name] = job.job_id
            elif (
                job.workers
                and not work.absence
                and not work.stable
                and work.joined_at is not None
                and now - work.joined_at > STABLE
            ):
                work.stable = True
                job.group.failures.jobs_run_well()
        if seen_to_end:
            state.dispatcher.note_ends(seen_to_end)
        self._forget_old_ends()
        self._observe_unschedulable()
        if state.client is not None and state.scheduler is not None:  # before that nobody would receive it
            if warning := state.scheduler.end_is_near(now=now):
                state.messages.warn(warning)

    def _forget_old_ends(self) -> None:
        """Forget the oldest jobs that the queue has reported as ended: a cluster may run for months."""
        settled = [
            job
            for job in self.state.registry.worker_jobs
            if isinstance(job.phase, Ended) and job.phase.noted and self._new_end(job) is None
        ]
        settled.sort(key=_ended_at)
        for job in settled[: max(0, len(settled) - KEPT_ENDS)]:
            job.group.forget(job, now=self.state.now)
            self.state.registry.remove(job)
            self.state.dispatcher.forget(job.name)
            self.state.failures.forget(job.name)

    def _observe_unschedulable(self) -> None:
        """Record and report jobs of adaptive scaling that can never start; the next decision ends them."""
        state = self.state
        never = {
            name: job
            for name, job in state.registry.active.items()
            if job.group.adaptive is not None and state.failures.unschedulable([name])
        }
        new = [job for name, job in never.items() if name not in self._never]
        self._never = {
            name for name in self._never if (job := state.registry.jobs.get(name)) and job.alive
        } | never.keys()
        messages = {
            job: f"worker job {job.job_id} ({job.name}) will never start: {explain(job.queue_status)}" for job in new
        }
        for job, message in messages.items():
            job.group.failures.submit_refused(message, for_good=True, now=state.now)
        for job in _few(new):
            message = f"{messages[job]}. Adaptive scaling is paused; `cluster.adaptive.resume()` resumes it"
            state.report(message, job.group.name)
        self._tell_of_others(new, "will never start either")

    async def _scheduler_ended(self) -> None:
        """Record that the cluster is lost, and cancel its worker jobs."""
        scheduler = self.state.scheduler
        assert scheduler is not None
        report, dispatcher = scheduler.loss_report(self.state.name), self.state.dispatcher
        if is_there(dispatcher.directory, dispatcher.token) is False:
            report = f"the directory {dispatcher.directory.path} of the cluster was removed, and {report}"
        elif dispatcher.directory.is_of(dispatcher.token) and dispatcher.directory.closing:  # not by this program
            report = f"cluster {self.state.name} was stopped by another program, such as `hpcgpu stop`"
        await self.fail(report)

    async def fail(self, failure: str) -> None:
        """Record that the cluster is lost, report it, and cancel its jobs."""
        state = self.state
        state.lose(failure, cancelling=True)
        state.messages.warn(failure)
        state.tell("ended", failure)
        await self.cancel_lost()

    async def cancel_lost(self) -> None:
        """Cancel the jobs of a lost cluster; `Phase.cancelling` is true until the queue has done it."""
        state = self.state
        for job in state.registry.active.values():
            job.drain(Drain.UNWANTED)
        try:
            await in_thread(state.dispatcher.cancel_all, CLOSE_TIMEOUT)
        except Exception as error:  # whatever it was, the jobs must not be forgotten
            state.dispatcher.monitor.cadence.failed(now=state.now)
            if not self._refusal_told:
                self._refusal_told = True
                words = str(error) if isinstance(error, BatchError) else repr(error)
                state.report(
                    f"could not cancel {listed(state.dispatcher.left())}: {words}. hpcgpu tries again until the "
                    f"queue has cancelled them. {state.dispatcher.advice()}"
                )
        else:
            state.cancelled_lost()
            for job in state.registry.draining:
                job.cancelled(now=state.now)
        state.changed.set()

    async def _worker_jobs_ended(self, ended: list[tuple[WorkerJob, Ended]]) -> None:
        """Report jobs that ended without being drained, of many the first ones.

        The next decision replaces them, unless too many have failed in a row.
        """
        told = _few([job for job, phase in ended if not phase.presumed])
        messages = dict[WorkerJob, str]()
        for job, phase in ended:
            phase.handled = True
            if job in told:
                messages[job] = job.failure_report()  # state and message must be from the same moment
            outcome = self._worker_job_ended(job, phase)
            if phase.work.joined_at is None or phase.presumed:
                continue
            workers = units.workers_of(job.name, job.group.options)
            self._gone += workers
            if outcome.crashed:
                self._crashed += workers
        self._tell_of_ends([job for job, phase in ended if not phase.presumed], messages)
        if self._gone and self.state.client is not None:
            with suppress(OSError, TimeoutError):  # it is told with the next look
                await self.state.client.ended(self._gone, self._crashed)
                self._gone, self._crashed = [], []

    def _tell_of_others(self, jobs: list[WorkerJob], what: str) -> None:
        """Warn once of those of many jobs of which no message tells."""
        if others := jobs[len(_few(jobs)) :]:
            infos = [job.info(now=self.state.now) for job in others]
            message = f"{counted(len(others), 'more worker job')} {what}: {summary(infos)}"
            self.state.messages.warn(message)
            self.state.tell("job_lost", message)

    def _worker_job_ended(self, job: WorkerJob, phase: Ended) -> Outcome:
        """Record the end of a job that was not drained; return how it ended."""
        state, group = self.state, job.group
        if phase.presumed:
            there = sum(other.group is group for other in state.registry.active.values())
            if group.limits.fixed and there < group.limits.maximum:  # its place goes with it, and no other's
                group.unknown += 1
            return Outcome.EXPECTED
        outcome = job.outcome
        group.failures.job_ended(outcome, job.queue_status.node, now=state.now)
        return outcome

    def _tell_of_ends(self, jobs: list[WorkerJob], messages: dict[WorkerJob, str]) -> None:
        """Report jobs that ended too early, and for each group whether they are replaced."""
        last = {job.group: job for job in jobs if job in messages}
        for group, job in {job.group: job for job in jobs}.items():
            if group.failures.paused and group not in last:
                last[group], messages[job] = job, job.failure_report()
        for job in jobs:
            message, group = messages.get(job, ""), job.group
            if message:
                self.state.tell("job_lost", message)
            if message and group.adaptive is not None:
                group.adaptive.note(message.splitlines()[0], now=self.state.now)
            if message and group.failures.paused and job is last[group]:
                self.state.report(f"{group.failures.paused}. The last one: {message}", group.name)
            elif message:
                self.state.messages.warn(f"{message}{self._replaces(group)}")
            else:
                self.state.messages.log(f"worker job {job.job_id} ({job.name}) {job.queue_status.state.value}")
        self._tell_of_others(jobs, "ended")

    def _replaces(self, group: WorkerGroup) -> str:
        """Return when a job that ended is replaced."""
        if group.failures.paused:
            return ""
        wait = group.failures.next_try - self.state.now
        when = f"{f' in {wait:.0f} s' if wait > 1 else ''}{' if there is work' if group.adaptive else ''}"
        return f"\nhpcgpu replaces it{when}."

    # Decide

    def order(self, command: Command, adaptive: GPUAdaptive | None = None) -> None:
        """Do what the user orders: the one place where the wanted state changes.

        Parameters
        ----------
        command : Command
        adaptive : GPUAdaptive, optional
            What the user gets of `Adapt`. Default: a new one.

        Raises
        ------
        OptionError
            The command does not fit the worker groups that there are.
        ClusterError
            Another program has taken the cluster over.
        """
        state = self.state
        if not state.managed:
            return
        try:
            state.dispatcher.check_manager()
        except Superseded as error:
            state.supersede(str(error))
            raise ClusterError(str(error)) from error
        wanted = apply(state.wanted, command)
        group = state.registry.groups[command.group]
        state.wanted = wanted
        state.dispatcher.want(wanted)
        group.failures.start_anew()
        state.failures.requested_anew(group.name)
        match command:
            case Resume():
                group.wanted = wanted.groups[group.name]
                if group.adaptive is not None:
                    group.adaptive.note("resumed by the user", now=state.now)
            case DeleteGroup():
                state.registry.delete_group(group)
                self._want(group, WantedGroup(limits=Limits(maximum=0, fixed=True)))
            case _:
                self._want(group, wanted.groups[group.name], adaptive)
        self.decide()
        state.decide_now.set()
        state.heartbeat_now.set()

    def _want(self, group: WorkerGroup, wanted: WantedGroup, adaptive: GPUAdaptive | None = None) -> None:
        if adaptive is None and wanted.target_duration is not None:
            adaptive = GPUAdaptive(group, wanted.limits, wanted.target_duration, self.send)
        group.adaptive, group.failures.adaptive = adaptive, adaptive is not None
        group.want(wanted)
        if adaptive is not None and self.state.client is not None:
            group.forget_load()
        for job in group.jobs:
            job.forget_idleness()

    def restore(self, wanted: Wanted) -> None:
        """Take over what the user wants of a cluster that exists: the last manager may not have reached it.

        A group of which nothing is recorded keeps the jobs that it has.
        """
        registry, groups = self.state.registry, dict[str, WantedGroup]()
        for name, group in registry.groups.items():
            there = sum(job.active for job in group.jobs)
            groups[name] = wanted.groups.get(name) or WantedGroup(limits=Limits(maximum=there, fixed=True))
            self._want(group, groups[name])
        self.state.wanted = replace(wanted, groups=groups)

    def decide(self) -> None:
        """Bring each group to the size that it should have."""
        state, now = self.state, self.state.now
        if not state.managed or state.scheduler is None or not state.scheduler.submit_done:
            return  # worker jobs go right behind the scheduler
        groups = state.registry.all_groups()  # a new group may have the name of a deleted one
        for group in groups:
            self._record_absent(group)
        reachable = state.client is not None
        never = {name for name in self._never if state.failures.unschedulable([name])}
        observed = [
            group.observed(
                now=now,
                # A job is not replaced before it is known whether it failed. At the start only the user requests jobs.
                uncounted=reachable and any(self._new_end(job) for job in group.jobs),
                never=never,
                deleted=group in state.registry.deleted,
            )
            for group in groups
        ]
        for group, decided in zip(groups, decide(observed, reachable=reachable, now=now), strict=True):
            self._decided(group, decided.size)
            self._act(group, decided.actions)
        if state.managed:
            self.submitter.submit_planned()

    def _act(self, group: WorkerGroup, actions: Iterable[Submit | End]) -> None:
        """Carry out what was decided: the one place where jobs are requested and released."""
        state = self.state
        for action in actions:
            if not state.managed:  # another program has taken the cluster over meanwhile
                return
            if isinstance(action, Submit):
                for _ in range(action.jobs):
                    state.registry.plan(group)
                continue
            if action.log:
                state.messages.log(action.log)
            for name in action.jobs if action.why is Drain.WALLTIME else ():
                state.registry.active[name].retires(now=state.now)
            self.drainer.drain(action.jobs, action.why, deadline=action.deadline)

    def _record_absent(self, group: WorkerGroup) -> None:
        """Record and report the running jobs of a group that lack workers."""
        state, now = self.state, self.state.now
        jobs = [job for job in state.registry.active.values() if job.group is group]
        # All are examined before anything is reported or done: several that lose workers together are one event.
        lost = [job for job in jobs if state.listening and group.record_absent(job, now=now)]
        for job in _few(lost):
            self._tell_of_absent(job)
        self._tell_of_others(lost, "lack workers")

    def _decided(self, group: WorkerGroup, decision: Decision) -> None:
        """Record the size that was decided on, and report what the user must know of the budget."""
        state, now = self.state, self.state.now
        group.decided(decision, now=now)
        if told := group.new_budget_words(now=now):
            state.messages.warn(told)
            state.tell("budget", told)
            if group.adaptive is not None:
                group.adaptive.note(told, now=now)
            state.heartbeat_now.set()

    def _tell_of_absent(self, job: WorkerJob) -> None:
        """Report a running job that lacks workers for good; it is replaced, unless too many have failed in a row."""
        state, group, node, now = self.state, job.group, job.queue_status.node, self.state.now
        message = f"worker job {job.job_id} ({job.name}){f' on {node}' if node else ''}: {job.shortage(now=now)}"
        if group.adaptive is not None:
            group.adaptive.note(message, now=now)
        message += f". Log: {job.log}\n{job.log_tail(node=job.work.absence.node)}"
        state.tell("job_lost", message)
        if group.failures.paused:
            state.report(message, group.name)
        else:
            state.messages.warn(message)

    def scale_down(self, workers: set[str]) -> None:
        """Drain the jobs all of whose workers are named. Names of jobs count too."""
        for name, job in self.state.registry.active.items():
            named = workers.intersection(units.workers_of(name, job.group.options))
            if name in workers or (named and set(job.workers.values()) <= workers):
                self.drainer.drain([name], Drain.UNWANTED)
                if job.group.limits.fixed and job.group not in self.state.registry.deleted:
                    self.order(Scale(job.group.name, max(0, job.group.limits.maximum - 1)))

    # For people

    def about(self) -> str:
        """Return the state of its scaling in a few words, for other programs to show."""
        parts = []
        for group in self.state.registry.groups.values():
            what = "" if group.name == DEFAULT else f"group {group.name}: "
            if group.failures.paused:
                parts.append(f"{what}paused: {group.failures.paused}")
            elif group.adaptive is not None:
                limits = group.limits
                parts.append(
                    f"{what}adaptive, {limits.minimum} to {limits.maximum} jobs: {group.adaptive.decision.reason}"
                )
        return "; ".join([*parts, *self.shortages()])

    def warnings(self) -> list[str]:
        """Return what the user must know: failures that no exception has reported, and budgets that end."""
        budgets = (group.budget_words(now=self.state.now) for group in self.state.registry.groups.values())
        return [*self.state.failures.unreported, *filter(None, budgets)]

    def shortages(self) -> list[str]:
        """Return which workers are missing, for each running job that lacks some; the first few of many."""
        jobs = [job for job in self.state.registry.active.values() if job.work.absence]
        told = [f"worker job {job.job_id} ({job.name}) {job.shortage(now=self.state.now)}" for job in _few(jobs)]
        others = len(jobs) - len(told)
        return [*told, f"{others} more worker jobs lack workers"] if others else told


def _ended_at(job: WorkerJob) -> float:
    return job.phase.at if isinstance(job.phase, Ended) else inf


def _few(jobs: list[WorkerJob]) -> list[WorkerJob]:
    """Return the jobs of which a message each tells: of more than twenty the first ones."""
    return jobs if len(jobs) <= MANY else jobs[:_TOLD]
