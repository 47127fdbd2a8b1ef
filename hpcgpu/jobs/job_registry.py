"""All jobs of one cluster, and the groups of its worker jobs.

SpecCluster's ``workers`` and ``worker_spec`` are views of it.
"""

from __future__ import annotations

from pathlib import Path

from hpcgpu.errors import OptionError
from hpcgpu.jobs.job import Job
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.options.shared_options_and_defaults import DEFAULT, WorkerOptions
from hpcgpu.scaling import worker_names


class Registry:
    """The jobs of a cluster by name, in all phases; names are never used twice.

    Parameters
    ----------
    cluster : str
        Its name.
    dispatcher : Dispatcher
    logs : Path
        Directory of the jobs' logs.
    restarts : int
        Jobs of a group that may fail in a row and be replaced.

    Attributes
    ----------
    jobs : dict of str to Job
    groups : dict of str to WorkerGroup
    sequence : int
        Number of the next worker job.
    """

    def __init__(self, cluster: str, dispatcher: Dispatcher, logs: Path, restarts: int) -> None:
        self.cluster = cluster
        self.dispatcher = dispatcher
        self.logs = logs
        self.restarts = restarts
        self.jobs: dict[str, Job] = {}
        self.groups: dict[str, WorkerGroup] = {}
        #: Groups that were deleted while this program manages the cluster, also those without jobs.
        self.former: list[WorkerGroup] = []
        self.sequence = 0
        self._home: dict[str, WorkerJob] = {}

    # Groups

    def add_group(self, name: str, options: WorkerOptions, script: Path) -> WorkerGroup:
        """Add a group without jobs."""
        group = WorkerGroup(name, options, script, self.restarts, cluster=self.cluster, jobs_of=self.jobs_of)
        self.groups = {**self.groups, name: group}  # never changed in place: other threads read it
        return group

    def group_named(self, name: str) -> WorkerGroup:
        """Return the group of that name.

        Raises
        ------
        OptionError
            There is none.
        """
        if not isinstance(name, str) or name not in self.groups:
            raise OptionError(
                f"no worker group named {name!r}: the groups are {', '.join(self.groups)}; add_worker_group adds one"
            )
        return self.groups[name]

    def delete_group(self, group: WorkerGroup) -> None:
        """Forget a group as soon as its last job has ended."""
        self.remove_group(group)
        self.former.append(group)

    def remove_group(self, group: WorkerGroup) -> None:
        """Remove a group from those that may get jobs."""
        self.groups = {name: kept for name, kept in self.groups.items() if kept is not group}

    @property
    def deleted(self) -> list[WorkerGroup]:
        """Groups that were deleted and still have jobs."""
        kept = self.groups.values()
        return list(dict.fromkeys(job.group for job in self.worker_jobs if job.alive and job.group not in kept))

    def group(self, name: str) -> WorkerGroup:
        """Return the group of that name, or the default group if there is none."""
        return self.groups.get(name, self.groups[DEFAULT])

    def all_groups(self) -> list[WorkerGroup]:
        """Return all groups that have jobs or may get jobs."""
        return [*self.groups.values(), *self.deleted]

    @property
    def wanted_workers(self) -> int:
        """How many workers there should be.

        A fixed size counts all workers. Adaptive scaling counts its minimum, or the workers of the existing jobs.
        """
        return sum(
            group.options.workers_per_job
            * (
                group.limits.maximum
                if group.limits.fixed
                else max(group.limits.minimum, sum(job.active for job in group.jobs))
            )
            for group in self.groups.values()
        )

    # Jobs

    def add(self, job: Job) -> None:
        """Add a job."""
        self.jobs[job.name] = job

    def remove(self, job: Job) -> None:
        """Forget a job that never was in the queue."""
        self.jobs.pop(job.name, None)

    def new_name(self) -> str:
        """Return a name for the next worker job."""
        name = f"{self.cluster}-{self.sequence}"
        self.sequence += 1
        return name

    def plan(self, group: WorkerGroup) -> WorkerJob:
        """Add a worker job that will be submitted."""
        return self.worker_job(self.new_name(), group)

    def worker_job(self, name: str, group: WorkerGroup) -> WorkerJob:
        """Add a worker job."""
        job = WorkerJob(self.dispatcher, group.script, name, self.logs, group=group)
        self.add(job)
        return job

    @property
    def worker_jobs(self) -> list[WorkerJob]:
        """All worker jobs, also those that have ended."""
        return [job for job in list(self.jobs.values()) if isinstance(job, WorkerJob)]

    def jobs_of(self, group: WorkerGroup) -> list[WorkerJob]:
        """Return all jobs of a group, also those that have ended."""
        return [job for job in self.worker_jobs if job.group is group]

    @property
    def active(self) -> dict[str, WorkerJob]:
        """The worker jobs that are neither draining nor ended."""
        return {job.name: job for job in self.worker_jobs if job.active}

    @property
    def draining(self) -> list[WorkerJob]:
        """The worker jobs that drain."""
        return [job for job in self.worker_jobs if job.draining]

    # What is observed

    def observe(self, *, now: float) -> None:
        """Move every job to the phase that the queue and the scheduler prove."""
        for job in list(self.jobs.values()):
            job.observe(now=now)

    def job_of(self, worker: object) -> WorkerJob | None:
        """Return the job that a worker belongs to."""
        job = self.jobs.get(worker_names.job_of(worker, self.jobs) or "")
        return job if isinstance(job, WorkerJob) else None

    def worker_joined(self, address: str, name: object, *, now: float) -> None:
        """Record a connected worker."""
        if job := self.job_of(name):
            self._home[address] = job
            job.joined(address, str(name), now=now)

    def scheduler_lost(self) -> None:
        """Record that all workers have ended with their scheduler, as expected: none counts as missing."""
        self._home.clear()
        for job in self.worker_jobs:
            job.scheduler_lost()

    def worker_left(self, address: str, *, now: float) -> bool:
        """Record that a worker has left. Return whether its job has no worker left, and so may have ended."""
        job = self._home.pop(address, None)
        if job is None or job.workers.pop(address, None) is None:
            return False
        job.observe(now=now)
        return not job.workers
