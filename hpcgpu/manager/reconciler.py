"""Manages the jobs of a cluster: observes the queue and the scheduler, decides, and acts.

A plain class with its collaborators as arguments. It waits only for answers; `hpcgpu.manager.periodic_tasks` calls it
periodically.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from math import inf

from hpcgpu.batch.reasons import explain
from hpcgpu.dask_scheduler.rpc_types import WaitingWork
from hpcgpu.dask_scheduler.scheduler_client import Workers
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.errors import BatchError, ClusterError, NameLost, Superseded
from hpcgpu.jobs.demand import demands
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.jobs.submit_and_cancel import Ending
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.manager.cancel_all import CancelAll
from hpcgpu.manager.draining import Drainer
from hpcgpu.manager.failed_jobs_and_missing_workers import LostJobs
from hpcgpu.manager.restart_scheduler import SchedulerRestarts, not_restarted
from hpcgpu.manager.submit_planned import Submitter
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.posix.full_disk import cannot_be_written
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.decide_actions import Drain, End, EndAll, Fail, ObservedCluster, Submit, SubmitScheduler, decide
from hpcgpu.scaling.policy_data import Decision, Limits
from hpcgpu.scaling.replace_failed_jobs import STABLE
from hpcgpu.scaling.scheduler_restarts import Lose, ObservedScheduler, SchedulerAction
from hpcgpu.scaling.wanted_state import Close, Command, DeleteGroup, Detach, Resume, Scale, Wanted, WantedGroup, apply
from hpcgpu.software.compare_environments import EnvironmentCheck, environments
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store import journal
from hpcgpu.store.removed_directory import directory_exists

#: Seconds without an answer of the scheduler after which the user is warned.
SILENCE = 60.0
#: How many of the jobs that have ended are kept: the last ones.
KEPT_ENDS = 1000


class Reconciler:
    """The manager of one cluster.

    Parameters
    ----------
    state : ClusterState
        The state of the cluster, and the collaborators: dispatcher, scheduler, its client, clock, messages to the user.
    environment : EnvironmentCheck
        Compares the environments of client, scheduler and workers.
    """

    def __init__(self, state: ClusterState, environment: EnvironmentCheck) -> None:
        self.state = state
        self.environment = environment
        self.submitter = Submitter(state, self.order)
        self.drainer = Drainer(state)
        self.lost_jobs = LostJobs(state)
        #: Restarts the scheduler; None if the cluster ends with it.
        self.restarts: SchedulerRestarts | None = None
        #: Why the cluster cannot continue, whatever its jobs do; empty if it can.
        self._failure = ""
        self._silent_since: float | None = None
        self._silence_reported = False
        self.cancel_all = CancelAll(state)

    # Observe: the scheduler

    def worker_joined(self, address: str, name: object) -> None:
        """Record a connected worker."""
        self.state.known_workers.add(address)
        self.state.registry.worker_joined(address, name, now=self.state.now)

    def worker_left(self, address: str) -> None:
        """Record that a worker has left."""
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
        """Report incompatible software of the new workers."""
        fatal, differing = self.environment.check(environments(new), lambda: environments(workers))
        if fatal:
            self.state.report(fatal)
        if differing:
            self.state.messages.warn(differing)

    async def observe_load(self) -> None:
        """Query the scheduler for its load.

        If the scheduler does not answer, its last answer stays valid, but no job is released. An answer does not count
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
        wanted = demands(load, groups, now=state.now)
        for group in groups:
            if group.wanted is before.get(group.name):
                group.record_load(load["workers"], now=state.now)
                group.demand = wanted[group.name]
        self._report_former_groups(load["waiting"])

    def _report_former_groups(self, waiting: Iterable[WaitingWork]) -> None:
        """Report, once for each group, tasks that wait because only a deleted group had the resources for them."""
        registry = self.state.registry
        for kind in waiting:
            needs = kind["resources"]
            if not needs or any(group.can_run(needs) for group in registry.groups.values()):
                continue
            if group := next((group for group in registry.former if group.can_run(needs)), None):
                registry.former.remove(group)  # report it only once
                resources = listed([f"{amount:g} {name}" for name, amount in needs.items()], " and ")
                self.state.messages.warn(
                    f"tasks that need {resources} wait: only the workers of group {group.name} had that, and the group "
                    "was deleted. Add a group with these `resources` by `add_worker_group`, or cancel the tasks"
                )

    def observe_answer(self, answers: bool) -> None:
        """Record whether the scheduler answered a call. Report once that it has not answered for a long time.

        An open connection proves nothing: the kernel keeps it open for a process that is suspended or blocked.
        """
        state, now = self.state, self.state.now
        if not state.managed:  # the scheduler of a lost cluster answers no more
            return
        if answers:
            if self._silence_reported:
                state.messages.log("the scheduler answers again")
            self._silent_since, self._silence_reported = None, False
            return
        self._silent_since = now if self._silent_since is None else self._silent_since
        if (
            now - self._silent_since > SILENCE
            and not self._silence_reported
            and state.scheduler is not None
            and state.client is not None
        ):
            self._silence_reported = True
            logs = "".join(f" Log: {job.log}" for job in state.scheduler.entries)
            who = f"the scheduler at {state.client.address}"
            halted = state.halted_scheduler
            why = f": {explain(halted.queue_status, kind=halted.kind)}" if halted else ", though its job runs"
            state.messages.warn(f"{who} has not answered for {SILENCE:g} s{why}; hpcgpu keeps trying.{logs}")

    # Observe: the queue

    async def observe_queue(self) -> None:
        """Poll for all jobs, record those that have started and ended, and decide."""
        state = self.state
        if state.client is not None and state.scheduler is not None:
            state.scheduler.record_answer(state.client.listening)
        await state.poll()
        if state.dispatcher.problem:
            state.messages.warn(state.dispatcher.problem)
            state.dispatcher.problem = ""
        await self._look_up()
        if state.failures.observe({name: job.queue_status for name, job in state.registry.jobs.items()}):
            state.poll_now.set()
        self._observe_jobs()
        state.changed.set()
        if not state.listening:  # starting, or lost: workers may end now only because they lost their scheduler
            if self.scheduler_gone:
                self.decide()
            if state.cancelling:
                await self.end_all()
            return
        if self.lost_jobs.any_new() and (stopped := self._stopped()):  # the worker jobs may end before the scheduler
            await self.fail(stopped)
            return
        await self.refresh()
        await self.lost_jobs.record_ends()
        self.decide()

    async def _look_up(self) -> None:
        """Look for the jobs whose submit got no answer. Until that is known, no other job takes their place."""
        state = self.state
        if state.dispatcher.monitor.error:
            return
        for name in state.dispatcher.to_look_up():
            try:
                submit = await state.dispatcher.look_up(name)
            except (Superseded, NameLost):
                raise
            except (BatchError, OSError):  # the next poll tries again
                return
            if submit is not None:
                self._looked_up(submit)

    def _looked_up(self, submit: journal.Submit) -> None:
        """Record whether the queue has a job whose submit got no answer."""
        state, registry = self.state, self.state.registry
        if submit.kind == "scheduler":
            self._scheduler_looked_up(submit)
            return
        job = registry.jobs.get(submit.name) or registry.worker_job(submit.name, registry.group(submit.group))
        if not isinstance(job, WorkerJob):
            return
        if submit.job_id is None:
            registry.remove(job)
            state.messages.log(f"the queue does not have worker job {job.name}, whose submit got no answer")
            return
        state.messages.log(f"the queue has worker job {submit.job_id} ({job.name}), whose submit got no answer")
        job.record_id(submit.job_id)
        job.group.failures.submitted()
        if job.draining:
            self.drainer.return_to_plan([job])  # the next decision ends it if it still is one too many
        elif submit.unwanted or submit.group not in registry.groups:  # an earlier manager has decided to end it
            job.drain(Drain.UNWANTED, begun=False)
            self.drainer.continue_drains()
        self.submitter.detach_when_complete()

    def _scheduler_looked_up(self, submit: journal.Submit) -> None:
        """Record whether the queue has a scheduler job whose submit got no answer; cancel it if it comes too late."""
        state, job = self.state, self.state.registry.jobs.get(submit.name)
        if submit.job_id is None:
            if job is not None:
                state.registry.remove(job)
        elif isinstance(job, SchedulerJob) and (job.standby or job is state.scheduler):
            job.record_id(submit.job_id)
        else:
            state.messages.log(f"scheduler job {submit.job_id} ({submit.name}) comes too late, and is cancelled")
            state.spawn(state.dispatcher.cancel([submit.job_id]))

    async def refresh(self) -> None:
        """Query the scheduler for its workers and their load.

        The stream of events reports only which workers come and go, and may have ended.
        """
        if self.state.client is not None:
            with suppress(OSError, TimeoutError):
                self.observe_workers(await self.state.client.workers())
        await self.observe_load()

    def _observe_jobs(self) -> None:
        """Record what the queue reports: waits, ends, stable jobs, and the time left for the scheduler job."""
        state, now = self.state, self.state.now
        ended = state.dispatcher.monitor.ended()  # a job that the queue only forgot may still run
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
        self.lost_jobs.record_unschedulable()
        if state.client is not None and state.scheduler is not None:  # earlier, nobody would receive the warning
            if warning := state.scheduler.end_is_near(now=now):
                state.messages.warn(warning)

    def _forget_old_ends(self) -> None:
        """Forget the oldest jobs that the queue has reported as ended: a cluster may run for months."""
        settled = [
            job
            for job in self.state.registry.worker_jobs
            if isinstance(job.phase, Ended) and job.phase.noted and self.lost_jobs.new_end(job) is None
        ]
        settled.sort(key=_ended_at)
        for job in settled[: max(0, len(settled) - KEPT_ENDS)]:
            job.group.forget(job, now=self.state.now)
            self.state.registry.remove(job)
            self.state.dispatcher.forget(job.name)
            self.state.failures.forget(job.name)

    @property
    def scheduler_gone(self) -> bool:
        """Whether the scheduler has ended that this program has reached or takes over, and none has followed yet.

        If the first scheduler of a cluster is not reached, its start raises an error.
        """
        state = self.state
        was_there = state.client is not None or (state.ownership.attached and self.restarts is not None)
        ended = was_there and not state.listening and state.scheduler is not None and state.scheduler.ended
        return ended or state.phase.restarting

    def _loss(self, why: str) -> str:
        """Record how the scheduler has ended, and return the report that the cluster is lost with it."""
        state, dispatcher = self.state, self.state.dispatcher
        assert state.scheduler is not None
        if self.restarts is not None and state.phase.restarting:
            return self.restarts.loss(why)
        report = state.scheduler.loss_report(state.name)
        dispatcher.note_ends({job.name: job.job_id for job in state.scheduler.entries})  # before others are cancelled
        if directory_exists(dispatcher.directory, dispatcher.token) is False:
            report = f"the directory {dispatcher.directory.path} of the cluster was removed, and {report}"
        return not_restarted(report, why) if why else report

    def _stopped(self) -> str:
        """Return a message if another program has stopped the cluster; empty otherwise."""
        dispatcher = self.state.dispatcher
        if not dispatcher.closing and dispatcher.directory.is_of(dispatcher.token) and dispatcher.directory.closing:
            return f"cluster {self.state.name} was stopped by another program, such as `hpcgpu stop`"
        return ""

    async def fail(self, failure: str) -> None:
        """Record why the cluster cannot continue, decide, and wait until the queue has cancelled its jobs."""
        self._failure = failure
        await self.end_all()

    def _lose(self, failure: str) -> None:
        state = self.state
        self.order(Close())
        state.lose(failure)
        for job in state.registry.active.values():
            job.drain(Drain.UNWANTED)
        state.messages.warn(failure)
        state.notify("ended", failure)
        self.decide()

    async def end_all(self) -> None:
        """Decide, and wait until the queue has cancelled all jobs, or has refused to.

        If it has refused, `CancelAll.problem` has the reason, and `ClusterState.cancelling` stays true.
        """
        self.decide()
        await self.cancel_all.wait()

    async def close_with_scheduler(self) -> None:
        """Decide that no scheduler job follows the present one, and wait until the queue has cancelled such a job."""
        if self.restarts is not None:
            self.restarts.closes = True
            self.decide()
            await asyncio.gather(*self.restarts.drops)

    # Decide

    def order(self, command: Command) -> None:
        """Carry out a command of the user: the only place where the wanted state changes.

        Parameters
        ----------
        command : Command

        Raises
        ------
        OptionError
            The command does not fit the existing worker groups.
        ClusterError
            The cluster was closed, has failed, or another program has taken it over; or a detach cannot be recorded.
        """
        state = self.state
        if isinstance(command, Close):
            if state.phase.owned:  # also a lost cluster. `Dispatcher.cancel_all` records the close after the cancel
                state.wanted, state.dispatcher.ending = apply(state.wanted, command), Ending.REQUESTED
            return
        state.check_manager()
        if isinstance(command, Detach):  # a manager in the scheduler job submits the next scheduler job
            command = Detach(manager_in_scheduler_job=command.manager_in_scheduler_job or self.restarts is not None)
        closing = state.wanted.closing
        with suppress(OSError):  # a filesystem that fails for a while closes no cluster
            closing = closing or state.dispatcher.directory.closing  # by another program
        wanted = apply(replace(state.wanted, closing=closing), command)
        if isinstance(command, Detach):
            self._check_detachable()
            self.record(wanted, needed=True)
            state.stays()
            return
        self.record(wanted)
        group = state.registry.groups[command.group]
        group.failures.start_anew()
        state.failures.requested_anew(group.name)
        match command:
            case Resume():
                group.wanted = wanted.groups[group.name]
                group.note("resumed by the user", now=state.now)
            case DeleteGroup():
                state.registry.delete_group(group)
                self._want(group, WantedGroup(limits=Limits(maximum=0, fixed=True)))
            case _:
                self._want(group, wanted.groups[group.name])
        self.decide()
        state.decide_now.set()
        state.heartbeat_now.set()

    def record(self, wanted: Wanted, *, needed: bool = False) -> None:
        """Set the wanted state, in the memory and in the file: no other function of a manager writes it.

        A full disk is only reported, unless the record is `needed`: without that of a detach, the jobs would end with
        this program. Nothing is written into the directory of a later cluster of this name.
        """
        dispatcher, directory = self.state.dispatcher, self.state.dispatcher.directory
        try:
            if directory.is_of(dispatcher.token):
                directory.want(wanted)
        except OSError as error:
            why = cannot_be_written(directory.path, error)
            if needed:
                raise ClusterError(f"cluster {self.state.name} cannot be detached, because {why}") from error
            dispatcher.problem = why
        self.state.wanted = wanted

    def _check_detachable(self) -> None:
        """Raise `ClusterError` if the cluster cannot outlive this program."""
        state, directory = self.state, self.state.dispatcher.directory
        if state.scheduler is not None and state.scheduler.in_process:
            raise ClusterError(
                "scheduler='local': the scheduler runs in the program that made the cluster, and ends with it"
            )
        if directory_exists(directory, state.dispatcher.token) is False:  # a write into an emptied one would succeed
            raise ClusterError(
                f"cluster {state.name} cannot be detached, because its directory {directory.path} was removed or "
                "emptied, and its jobs end in some minutes. Save your results, and start a new cluster"
            )

    def _want(self, group: WorkerGroup, wanted: WantedGroup) -> None:
        group.want(wanted)
        if group.adaptive is not None and self.state.client is not None:
            group.forget_load()
        for job in group.jobs:
            job.work.idle_since = None

    def restore(self, wanted: Wanted) -> None:
        """Restore the wanted state of a cluster that exists: the last manager may not have reached it.

        A group without a record keeps its jobs.
        """
        registry, groups = self.state.registry, dict[str, WantedGroup]()
        for name, group in registry.groups.items():
            there = sum(job.active for job in group.jobs)
            groups[name] = wanted.groups.get(name) or WantedGroup(limits=Limits(maximum=there, fixed=True))
            self._want(group, groups[name])
        self.state.wanted = replace(wanted, groups=groups)

    def decide(self) -> None:
        """Bring each group to the size that it should have, or end all jobs of a cluster that is over."""
        state, now = self.state, self.state.now
        if not state.cancelling and not state.managed:
            return
        # a new group may have the name of a deleted one; who leaves the cluster decides nothing new for them
        groups = [] if state.leaves_when_done else state.registry.all_groups()
        decided = decide(self._observed(groups), now=now)
        self._act_on_cluster(decided.cluster)
        for group, of_group in zip(groups, decided.groups, strict=bool(decided.groups)):
            self._decided(group, of_group.size)
            self._act(group, of_group.actions)
        if state.managed and decided.groups:
            self.submitter.submit_planned()
        if state.client is None and not state.phase.restarting and any(each.actions for each in decided.groups):
            # no other decision comes before the scheduler answers, and the recorded reason is older than the actions
            self.decide()

    def _act_on_cluster(self, action: SubmitScheduler | EndAll | Fail | SchedulerAction | None) -> None:
        """End all jobs, or carry out what was decided about the scheduler."""
        if isinstance(action, SubmitScheduler):
            self.submitter.submit_scheduler()
        elif isinstance(action, EndAll):
            self.cancel_all.begin()
        elif isinstance(action, Fail):
            self._lose(action.why)
        elif isinstance(action, Lose):
            self._lose(self._stopped() or self._loss(action.why))
        elif action is not None and self.restarts is not None:
            self.restarts.act(action)

    def _observed(self, groups: Iterable[WorkerGroup]) -> ObservedCluster:
        """Return the input of the decision."""
        state, now = self.state, self.state.now
        if state.cancelling:
            return ObservedCluster(over=True, retry_at=0.0 if state.phase.closing else self.cancel_all.retry_at)
        if self._failure or state.scheduler is None or not (state.scheduler.submit_done or state.phase.restarting):
            first = state.scheduler is not None and not state.ownership.attached
            unrequested = first and self.submitter.first_scheduler is None
            return ObservedCluster(submitted=False, unrequested=unrequested, failure=self._failure)
        for group in groups:
            self.lost_jobs.record_absent(group)
        reachable, restarting = state.client is not None, state.phase.restarting
        observed = [
            group.observed(
                now=now,
                # Do not replace a job before it is known whether it failed. At the start only the user requests jobs.
                uncounted=(reachable or restarting) and any(self.lost_jobs.new_end(job) for job in group.jobs),
                never=self.lost_jobs.unschedulable,
                deleted=group in state.registry.deleted,
            )
            for group in groups
        ]
        gone = self.scheduler_gone
        scheduler = ObservedScheduler(gone=gone) if self.restarts is None else self.restarts.observed(gone=gone)
        return ObservedCluster(groups=observed, scheduler=scheduler, reachable=reachable, restarting=restarting)

    def _act(self, group: WorkerGroup, actions: Iterable[Submit | End]) -> None:
        """Carry out the decision on the size: the only place where worker jobs are requested."""
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

    def _decided(self, group: WorkerGroup, decision: Decision) -> None:
        """Record the decided size, and report the stage of the budget to the user."""
        state, now = self.state, self.state.now
        group.decided(decision, now=now)
        if words := group.new_budget_words(now=now):
            state.messages.warn(words)
            state.notify("budget", words)
            group.note(words, now=now)
            state.heartbeat_now.set()

    def scale_down(self, workers: set[str]) -> None:
        """Release the jobs all of whose workers are named. Names of jobs count too."""
        registry, released = self.state.registry, defaultdict[WorkerGroup, list[WorkerJob]](list)
        for name, job in registry.active.items():
            named = workers.intersection(worker_names.workers_of(name, job.group.options))
            if name in workers or (named and set(job.workers.values()) <= workers):
                released[job.group].append(job)
        for group, jobs in released.items():  # an order also decides on other groups, which would replace theirs
            for job in jobs:
                job.released = True
            if group.limits.fixed and group not in registry.deleted:
                self.order(Scale(group.name, max(0, group.limits.maximum - len(jobs))))
        self.decide()

    # For people

    def about(self) -> str:
        """Return the state of the cluster's scaling in a few words; other programs show it."""
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
        return "; ".join([*parts, *self.lost_jobs.shortages()])

    def warnings(self) -> list[str]:
        """Return warnings for the user: failures that no exception has reported, and budgets that end."""
        budgets = (group.budget_words(now=self.state.now) for group in self.state.registry.groups.values())
        return [*self.state.failures.unreported, *filter(None, budgets)]


def _ended_at(job: WorkerJob) -> float:
    return job.phase.at if isinstance(job.phase, Ended) else inf
