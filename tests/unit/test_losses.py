"""Running jobs that lose workers together, as by a network that fails for a moment: all are replaced, or kept, and none is given up for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.monitor import View
from hpcgpu.cluster.groups import WorkerGroup
from hpcgpu.cluster.jobs import WorkerJob
from hpcgpu.cluster.manager import Manager
from hpcgpu.configuration.resolve import resolve
from hpcgpu.scaling.policy import Limits

JOBS, GPUS = 8, 4


class Site:
    """A manager's decisions, and a queue that starts a job when the test says so."""

    status, scheduler, _superseded, _in_touch = Status.running, object(), "", True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = resolve("slurm", {"name": "demo", "gpus_per_node": GPUS, "walltime": "48h"})
        self.group = WorkerGroup("default", options.worker, Path("/x"), options.cluster.worker_restarts)
        self.group.resize(Limits(maximum=JOBS, fixed=True))
        self._groups, self._deleted = {"default": self.group}, list[WorkerGroup]()
        self.workers = dict[str, WorkerJob]()
        self.given_up, self.told = list[str](), list[str]()
        self.now, self.fewest = 1e9, JOBS * GPUS
        self.views = dict[str, View]()
        monitor = SimpleNamespace(views=self.views, alive=lambda: set(self.views))
        self.dispatcher: Any = SimpleNamespace(monitor=monitor, cancelled=set(), batch=SimpleNamespace(log_name=lambda *_: "log"))
        monkeypatch.setattr("hpcgpu.cluster.manager.time.time", lambda: self.now)
        for _ in range(JOBS):
            self._plan_job(self.group)
        self._submit_planned()
        for name in list(self.workers):
            self.starts(name)

    def _plan_job(self, group: WorkerGroup) -> None:
        name = f"demo-{len(group.jobs)}"
        self.workers[name] = job = WorkerJob(self.dispatcher, Path("/x"), name, Path("/tmp"), group=group, after=lambda: None)
        group.jobs.append(job)

    def _submit_planned(self) -> None:
        for job in self.workers.values():
            if job.job_id is None:
                job.job_id = job.name.removeprefix("demo-") + "0"
                self._says(job, JobState.PENDING)

    def _says(self, job: WorkerJob, state: JobState) -> None:
        assert job.job_id is not None
        times = {"start": self.now, "end": self.now + 48 * 3600} if state is JobState.RUNNING else {}
        status = JobStatus(job_id=job.job_id, state=state, name=job.name, node=f"n-{job.name}" if times else "", **times)
        self.views[job.job_id] = View(status, self.now)

    def _give_up(self, names: Iterable[str], **_: Any) -> None:
        for name in names:
            if name in self.workers:
                job = self.workers.pop(name)
                self.given_up.append(name)
                job.leaving = True
                job.workers.clear()
                self._says(job, JobState.CANCELLED)

    def _tell_of_absent(self, job: WorkerJob, *, now: float) -> None:
        self.told.append(job.shortage(now=now))

    def _log(self, log: str) -> None:
        raise AssertionError(log)

    def starts(self, name: str) -> None:
        self._says(self.workers[name], JobState.RUNNING)
        for i in range(GPUS):
            self.workers[name].joined(f"tcp://{name}:{i}", f"{name}-{i}", now=self.now)

    def loses(self, name: str) -> None:
        self.workers[name].workers.popitem()

    def waiting(self) -> list[str]:
        return [name for name, job in self.workers.items() if job.pending]

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            Manager._decide(self)  # type: ignore[arg-type]
            self.fewest = min(self.fewest, sum(len(job.workers) for job in self.workers.values()))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(monkeypatch)
    made.passes(10)
    return made


def test_jobs_that_lose_workers_together_work_on_until_others_are_there_and_all_are_replaced(site: Site) -> None:
    first = list(site.workers)
    for name in first:
        site.loses(name)
        site.passes(5)  # not all at the same moment
    site.passes(3 * 3600)
    assert site.group.failures.failed == 0, "it is one event"
    assert not site.group.failures.paused
    assert len(site.waiting()) == JOBS, "one is asked for in place of each"
    assert site.given_up == first[:1], "only one makes room; the others work on for the hours that the queue takes"
    assert all(words.endswith("it works on, and another job takes its place") for words in site.told) and len(site.told) == JOBS
    for name in site.waiting():
        site.starts(name)
        site.passes(60)
    assert sorted(site.given_up) == sorted(first)
    assert len(site.workers) == JOBS and not site.waiting()
    assert site.fewest >= (JOBS - 1) * (GPUS - 1)


def test_after_too_many_losses_the_jobs_go_on_without_and_nothing_is_given_up_until_the_user_asks(site: Site) -> None:
    names = list(site.workers)
    site.group.failures.submit_refused("no", for_good=False, now=site.now + 3600)  # no other job can be asked for meanwhile
    for name in names[:4]:
        site.loses(name)
        site.passes(400)  # each is an event of its own
    assert [job.judged for job in site.workers.values()].count(True) == 4
    assert site.group.failures.failed > site.group.failures.restarts
    paused = site.group.failures.paused
    assert paused.startswith("3 worker jobs failed in a row")
    site.passes(4 * 3600)
    assert list(site.workers) == names, "those judged before the pause stay too, and nothing is asked for"
    assert site.given_up == []
    for name in names[:4]:
        assert site.workers[name].shortage(now=site.now).endswith(f"it goes on without, {paused}")
    site.group.failures.start_anew()
    site.passes(2)
    assert len(site.waiting()) == 4, "the user asked again: they are replaced now"
    assert site.given_up == names[:1]


def test_nothing_is_given_up_while_no_other_job_waits(site: Site) -> None:
    site.group.failures.next_try = site.now + 3600
    names = list(site.workers)
    site.loses(names[0])
    site.passes(3000)
    assert site.given_up == []
    site.passes(3600)
    assert site.given_up == names[:1] and site.waiting() == [f"demo-{JOBS}"]


def test_a_job_whose_workers_come_back_is_kept_and_the_one_that_still_waits_goes(site: Site) -> None:
    first, second = list(site.workers)[:2]
    site.loses(first)
    site.loses(second)
    site.passes(400)
    assert site.given_up == [first] and len(site.waiting()) == 2
    site.starts(second)
    site.passes(2)
    assert len(site.waiting()) == 1 and second in site.workers
