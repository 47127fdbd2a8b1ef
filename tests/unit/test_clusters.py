"""Clusters as their directories and the queue report them."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from click.testing import CliRunner

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cli import main
from hpcgpu.client import connect
from hpcgpu.client.dashboard_forwarding import endpoint
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import BatchUnavailable, ClusterError, ClusterExists, NoCluster, NotTrusted, Superseded
from hpcgpu.existing_clusters import close_ended, jobs_without_directory, lookup
from hpcgpu.existing_clusters import stop as stop_module
from hpcgpu.existing_clusters.lookup import Found, locate
from hpcgpu.existing_clusters.query_jobs import live_jobs
from hpcgpu.existing_clusters.stop import stop
from hpcgpu.existing_clusters.unsubmitted_jobs import unfinished
from hpcgpu.jobs.job_registry import Registry
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.manager import start_cluster
from hpcgpu.manager.draining import close_finished, move_data
from hpcgpu.scaling.decide_actions import Drain
from hpcgpu.scaling.wanted_state import AddGroup, Wanted, apply
from hpcgpu.scripts.bundle import make
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End
from tests.helpers import Clock


class Queue:
    """Has one job, and leaves it out of the answers that a test chooses."""

    remembers = False

    def __init__(self, forgets: set[int]) -> None:
        self.forgets, self.asked, self.cancelled = forgets, 0, False

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        self.asked += 1
        state = JobState.CANCELLED if self.cancelled else JobState.RUNNING
        known = {} if self.asked in self.forgets else {"7": JobStatus(job_id="7", name="demo-0", state=state)}
        return {job_id: known[job_id] for job_id in job_ids if job_id in known}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}

    def find(self, job_name: str) -> list[str]:
        return []

    def log_name(self, job_name: str, job_id: str) -> str:
        return f"{job_name}-{job_id}.log"

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        self.cancelled = self.cancelled or list(job_ids) == ["7"]


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    directory = create_directory.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "7")
    return directory


@pytest.mark.parametrize("changed", [".", "tls", "tls/key.pem"])
def test_a_client_of_an_address_takes_no_credentials_from_a_directory_that_others_can_change(
    directory: ClusterDirectory, changed: str
) -> None:
    certificates_and_keys.create(directory)
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://a:1", client="tls://a:1"))
    own = {"hpcgpu.cluster-directory": str(directory.path.parent), "distributed.comm.require-encryption": False}
    with dask.config.set(own):
        found = connect.security_for({"address": "tls://a:1"})
        assert found is not None and found.require_encryption, "whatever the configuration says of other clusters"
        directory.path.chmod(0o755)  # others may enter it
        (directory.path / changed).chmod(0o777)
        with pytest.raises(NotTrusted):
            connect.security_for({"address": "tls://a:1"})


def test_a_client_of_an_address_takes_only_the_credentials_of_the_cluster_that_has_it(
    directory: ClusterDirectory,
) -> None:
    certificates_and_keys.create(directory)
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://a:1", client="tls://a:1"))
    with dask.config.set({"hpcgpu.cluster-directory": str(directory.path.parent)}):
        assert connect.security_for({"address": "tls://a:1"}) is not None
        assert connect.security_for({"address": "tls://a:2"}) is None, "another cluster, or none of ours"


def test_the_end_of_a_suspended_job_that_is_stopped_is_recorded(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Any = Queue(forgets=set())
    there = [JobStatus(job_id="7", name="demo-0", state=JobState.RUNNING, suspended=True, start=100.0)]
    queue.poll = lambda ids: {job.job_id: job for job in there}
    queue.cancel = lambda ids: there.clear()  # and the queue forgets it at once
    monkeypatch.setattr(time, "time", lambda: 500.0)
    assert stop(directory, queue, sleep=lambda seconds: None) == []
    assert directory.submits()[0].how == End(state="cancelled", start=100.0, end=500.0)


def test_one_answer_that_leaves_a_job_out_is_not_believed(directory: ClusterDirectory) -> None:
    queue: Any = Queue(forgets={1})
    assert stop(directory, queue, sleep=lambda seconds: None) == []
    assert queue.cancelled and directory.closed


def test_a_stop_removes_the_secrets_before_it_cancels_anything(directory: ClusterDirectory) -> None:
    certificates_and_keys.create(directory)
    assert directory.tls.is_dir() and directory.dashboard_token()
    queue: Any = Queue(forgets=set())

    def cancel(job_ids: Iterable[str]) -> None:
        assert not directory.tls.exists() and not directory.dashboard_token()
        raise BatchUnavailable("scancel does not answer")

    queue.poll = lambda job_ids: {"7": JobStatus(job_id="7", name="demo-0", state=JobState.RUNNING)}
    queue.cancel = cancel
    with pytest.raises(BatchUnavailable, match="scancel does not answer"):
        stop(directory, queue, sleep=lambda seconds: None)
    assert not directory.closed


def test_a_stop_cancels_a_job_once_while_it_ends_and_again_if_it_stays(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, cancels = Clock(), list[float]()
    monkeypatch.setattr(stop_module, "time", clock)
    queue: Any = Queue(forgets=set())
    queue.poll = lambda job_ids: {"7": JobStatus(job_id="7", name="demo-0", state=JobState.RUNNING)}
    queue.cancel = lambda job_ids: cancels.append(clock.now)
    began = clock.now
    assert [job.job_id for job in stop(directory, queue, timeout=25.0, sleep=clock.sleep)] == ["7"]
    assert [at - began for at in cancels] == [0.0, 10.0, 20.0]


def test_a_job_that_nobody_asked_for_is_none_of_the_clusters(directory: ClusterDirectory) -> None:
    queue: Any = Queue(forgets=set())
    queue.poll = lambda job_ids: {i: JobStatus(job_id=i, name="demo-0", state=JobState.RUNNING) for i in ("8", "7", "")}
    assert [job.job_id for job in live_jobs(directory, queue)] == ["7"]


def test_a_stop_does_not_cancel_another_job_that_got_an_old_id(directory: ClusterDirectory) -> None:
    queue: Any = Queue(forgets=set())
    queue.poll = lambda job_ids: {"7": JobStatus(job_id="7", name="train", state=JobState.RUNNING)}
    assert stop(directory, queue, sleep=lambda seconds: None) == []
    assert not queue.cancelled and directory.closed


def test_what_a_contact_and_a_manager_report_is_text(directory: ClusterDirectory) -> None:
    evil = "\x1b[2J\u202e"
    contact = Contact(token=directory.token(), job_id="7", workers=evil, client=evil, fabric=evil * 10**6)
    directory.publish(contact)
    found = directory.contact()
    assert (
        found is not None
        and found.client == r"\x1b[2J\u202e"
        and found.fabric.isprintable()
        and len(found.fabric) <= 2000
    )
    assert str(directory.take_over(f"program {evil}")) and str(directory.manager()) == r"program \x1b[2J\u202e"
    for damaged in ("[]", "7", '"x"', '{"token": 1}'):
        (directory.path / "contact.json").write_text(damaged)
        assert directory.contact() is None


@pytest.mark.parametrize("security", [True, "authenticated"])
def test_a_cluster_whose_credentials_were_removed_is_not_reached_without_them(
    tmp_path: Path, security: bool | str
) -> None:
    directory = create_directory.claim(tmp_path / "safe", lambda earlier: [], system="slurm", security=security)
    certificates_and_keys.create(directory)
    assert certificates_and_keys.security(directory).get_connection_args("client")
    directory.remove_secrets()
    with pytest.raises(FileNotFoundError):
        certificates_and_keys.security(directory)


def test_a_job_that_only_has_its_epilog_left_does_not_keep_a_cluster(directory: ClusterDirectory) -> None:
    queue: Any = Queue(forgets=set())
    queue.poll = lambda job_ids: {"7": JobStatus(job_id="7", name="demo-0", state=JobState.COMPLETING)}
    assert stop(directory, queue, timeout=0.0, sleep=lambda seconds: None) == []
    assert directory.closed


def test_stop_waits_for_a_submit_that_a_killed_client_began_and_cancels_its_job(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.intend("demo-1", "worker")
    left = {"7": "demo-0", "8": "demo-1"}

    class Slow(Queue):
        """Has the job of the second submit only after a while; that job's id is not in the journal."""

        def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
            self.asked += 1
            return {i: JobStatus(job_id=i, name=left[i], state=JobState.RUNNING) for i in job_ids if i in left}

        def find(self, job_name: str) -> list[str]:
            return [i for i, name in left.items() if name == job_name] if self.asked >= 5 else []

        def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
            for job_id in job_ids:
                del left[job_id]

    queue: Any = Slow(forgets=set())
    clock = SimpleNamespace(now=0.0)
    began = directory.submits()[-1].time
    monkeypatch.setattr(time, "time", lambda: began + clock.now)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    assert stop(directory, queue, sleep=sleep) == [] and not left
    assert clock.now >= 10, "its command lives on without the client, and may yet succeed"


def without_directory(path: Path, *jobs: JobStatus) -> Found:
    """A cluster whose directory was removed."""
    gone = ClusterDirectory(path / "gone")
    return Found(directory=gone, system="slurm", created=0.0, jobs=list(jobs), problem="", known=True)


def test_a_job_that_got_an_old_id_is_not_cancelled_with_a_cluster_without_a_directory(tmp_path: Path) -> None:
    there = {
        "7": JobStatus(job_id="7", name="train", state=JobState.RUNNING),
        "8": JobStatus(job_id="8", name="gone-1", state=JobState.RUNNING),
    }
    queue: Any = SimpleNamespace(
        poll=lambda ids: {i: there[i] for i in ids if i in there}, cancel=lambda ids: [there.pop(i) for i in ids]
    )
    cluster = without_directory(tmp_path, replace(there["7"], name="gone-0"), there["8"])
    assert jobs_without_directory.end(cluster, queue, sleep=lambda seconds: None) == []
    assert set(there) == {"7"}


def test_one_answer_without_the_jobs_of_a_cluster_without_a_directory_is_not_believed(tmp_path: Path) -> None:
    there = {"7": JobStatus(job_id="7", name="gone-0", state=JobState.RUNNING)}
    answers = iter([{}])
    queue: Any = SimpleNamespace(
        poll=lambda ids: next(answers, dict(there)), cancel=lambda ids: [there.pop(i) for i in ids]
    )
    cluster = without_directory(tmp_path, there["7"])
    assert jobs_without_directory.end(cluster, queue, sleep=lambda seconds: None) == [] and not there


def test_a_cluster_whose_directory_was_renamed_is_not_listed_as_one_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {i: JobStatus(job_id=i, name=f"demo-{i}", state=JobState.RUNNING) for i in ("7", "8")}
    queue: Any = SimpleNamespace(
        marked=lambda wanted: {i: path for i in jobs if wanted(path := tmp_path / f"demo-{i}" / "worker.sbatch")},
        poll=lambda ids: {i: jobs[i] for i in ids},
    )
    system = SimpleNamespace(name="slurm", command="", fallback=True)
    monkeypatch.setattr(jobs_without_directory.system_registry, "systems", lambda: [system])
    monkeypatch.setattr(jobs_without_directory, "batch_system", lambda name: queue)
    [found] = jobs_without_directory.strays([without_directory(tmp_path, jobs["7"])])
    assert found.jobs == [jobs["8"]] and found.directory.path == tmp_path / "demo-8"


def test_a_name_that_two_managers_used_hides_no_job(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")  # of a manager that had been taken over
    directory.refused("demo-0")
    assert [(s.name, s.job_id, s.refused) for s in directory.submits()] == [
        ("demo-0", "7", False),
        ("demo-0", None, True),
    ]
    queue: Any = Queue(forgets=set())
    assert [job.job_id for job in live_jobs(directory, queue)] == ["7"]


def test_a_refusal_does_not_hide_a_job_that_has_an_id(directory: ClusterDirectory) -> None:
    directory.refused("demo-0")
    assert directory.submits()[0].refused is False


def worker_job(directory: ClusterDirectory, gpus: int = 1) -> WorkerJob:
    registry = Registry(
        "demo", Dispatcher(LocalQueue(directory.path / "queue", gpus=1), directory, 1), directory.logs, 2
    )
    group = registry.add_group(
        "default", resolve("slurm", {"gpus_per_node": gpus}).worker, directory.path / "worker.sbatch"
    )
    job = registry.plan(group)
    job.record_id("7")
    return job


async def test_a_network_that_breaks_drains_nothing(directory: ClusterDirectory) -> None:
    async def broken(*arguments: Any, **options: Any) -> None:
        raise OSError("Timed out trying to connect")

    job = worker_job(directory)
    job.joined("tls://a", "demo-0", now=1.0)
    job.drain(Drain.UNWANTED)
    client: Any = SimpleNamespace(unfinished=broken, retire=broken)
    assert await close_finished(client, [job], at_once=[]) == ([], [])


async def test_a_worker_that_joins_a_draining_job_retires_too(directory: ClusterDirectory) -> None:
    job = worker_job(directory, gpus=2)
    job.joined("tls://a", "demo-0-0", now=1.0)
    job.drain(Drain.UNWANTED)
    asked: list[list[str]] = []

    async def retire(names: Iterable[str], *, close: bool) -> list[str]:
        asked.append(list(names))
        there = [address for address, name in job.workers.items() if name in asked[-1]]
        if len(asked) == 1:
            job.joined("tls://b", "demo-0-1", now=2.0)
        return there

    async def unfinished(names: Iterable[str]) -> dict[str, int]:
        return {}

    client: Any = SimpleNamespace(retire=retire, unfinished=unfinished)
    assert await move_data(client, [job]) == []
    assert asked == [["demo-0-0"], ["demo-0-1"]]
    job.workers = {"tls://a": "demo-0-0", "tls://c": "demo-0-1"}  # its nanny restarted it
    assert await close_finished(client, [job], at_once=[]) == ([job], [])
    assert asked[2:] == [["demo-0-1"], ["demo-0-0", "demo-0-1"]]


async def test_workers_whose_data_fits_nowhere_else_go_on_with_their_tasks_also_if_there_is_room_just_then(
    directory: ClusterDirectory,
) -> None:
    job, closed, resumed = worker_job(directory), list[str](), list[str]()
    job.joined("tls://a", "demo-0", now=1.0)
    job.drain(Drain.UNWANTED)

    async def retire(names: Iterable[str], *, close: bool) -> list[str]:
        closed.extend(names if close else ())
        return ["tls://a"] if close else []

    async def resume(names: Iterable[str]) -> None:
        resumed.extend(names)

    async def unfinished(names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, 1)

    client: Any = SimpleNamespace(retire=retire, unfinished=unfinished, resume=resume)
    assert await close_finished(client, [job], at_once=[]) == ([], [job])
    assert closed == [] and resumed == ["demo-0"]


def test_a_directory_names_its_owner(directory: ClusterDirectory, tmp_path: Path) -> None:
    token = directory.token()
    assert directory.is_of(token) and not directory.is_of("another")
    assert ClusterDirectory(tmp_path / "nowhere").is_of(token), "what cannot be read is no proof"


def test_a_job_that_lost_a_worker_for_good_can_still_be_idle(directory: ClusterDirectory) -> None:
    job = worker_job(directory, gpus=2)
    job.joined("a", "demo-0-0", now=1.0)
    nothing = dict.fromkeys(
        ("processing", "calls", "computes", "nbytes", "wanted", "actors", "paused", "memory_limit"), 0
    )
    load = {"demo-0-0": nothing, "demo-0-1": nothing}
    job.group.record_load(load, now=1.0)
    assert job.work.idle_since is None, "its other worker is still to come"
    job.joined("b", "demo-0-1", now=2.0)
    job.group.record_load(load, now=2.0)
    assert job.work.idle_since == 2.0
    del job.workers["b"]
    job.group.record_load(load, now=3.0)
    assert job.work.idle_since == 2.0


def test_a_scheduler_job_that_the_queue_forgot_is_gone(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.intend("demo-scheduler", "scheduler")
    directory.submitted("demo-scheduler", "9")
    monkeypatch.setattr(connect, "time", Clock())
    queue: Any = Queue(forgets=set())
    queue.ended = lambda job_ids: {}
    monkeypatch.setattr(connect, "batch_of", lambda directory: queue)
    with pytest.raises(
        ClusterError,
        match=r"the scheduler of cluster demo is gone: scheduler job 9 .*the queue has not known it for \d\d s.*Log: ",
    ):
        connect.wait_for_contact(directory, quiet=True)


def test_a_client_does_not_wait_for_a_cluster_that_is_closed_while_its_jobs_still_end(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.begin_close()
    monkeypatch.setattr(connect, "time", Clock())
    monkeypatch.setattr(connect, "batch_of", lambda directory: Queue(forgets=set()))
    with pytest.raises(ClusterError, match=f"cluster demo was closed; its logs are in {directory.logs}"):
        connect.wait_for_contact(directory, timeout=5, quiet=True)


def test_the_journal_records_which_jobs_are_not_wanted_any_more(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="slurm")
    for number in range(3):
        directory.intend(f"demo-{number}", "worker")
        directory.submitted(f"demo-{number}", str(number))
    directory.cancel(["demo-1", "demo-2"])
    directory.keep(["demo-2"])  # it had started already
    directory.intend("demo-1", "worker")  # another job of that name
    assert [(s.job_id, s.unwanted) for s in directory.submits()] == [
        ("1", True),
        ("0", False),
        ("2", False),
        (None, False),
    ]


def test_what_is_given_up_is_written_by_the_manager_alone_and_a_full_disk_does_not_keep_a_job(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")
    directory.intend("demo-0", "worker")
    first = Dispatcher(LocalQueue(tmp_path / "queue", gpus=1), directory, directory.take_over("first").number)
    first.will_cancel(["demo-0"])
    second = Dispatcher(LocalQueue(tmp_path / "queue", gpus=1), directory, directory.take_over("second").number)
    first.keep(["demo-0"])  # it is not asked any more
    assert directory.submits()[0].unwanted
    second.keep(["demo-0"])
    with pytest.raises(Superseded, match="was taken over by second"):
        first.will_cancel(["demo-0"])
    assert not directory.submits()[0].unwanted
    (directory.path / "journal.jsonl").unlink()
    (directory.path / "journal.jsonl").mkdir()  # nothing can be written there
    second.will_cancel(["demo-0"])
    assert "cannot be written" in second.problem


class Tells:
    """A queue that lists no live job, and of those that have ended what it is given."""

    remembers = False

    def __init__(self, **ended: str) -> None:
        statuses = [JobStatus(job_id="5", name=name, state=JobState(state)) for name, state in ended.items()]
        self.known = {status.job_id: status for status in statuses}

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {job_id: self.known[job_id] for job_id in job_ids if job_id in self.known}

    def find(self, job_name: str) -> list[str]:
        return []


@pytest.fixture
def lone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterDirectory:
    """A cluster of a program that has ended, and of a job that has ended by the accounting."""
    directory = create_directory.claim(
        tmp_path / "lone", lambda earlier: [], system="slurm", complete=lambda draft: draft.tls.mkdir()
    )
    directory.intend("lone", "scheduler")
    directory.submitted("lone", "5")
    record = directory.take_over("a program")
    record = replace(record, process=[record.process[0], 1])
    (directory.path / "manager-000001.json").write_text(json.dumps(asdict(record)))
    tells(monkeypatch, Tells(lone="completed"))
    return directory


def tells(monkeypatch: pytest.MonkeyPatch, queue: Any) -> None:
    for module in (lookup, close_ended):
        monkeypatch.setattr(module, "batch_system", lambda name: queue)


def elsewhere(directory: ClusterDirectory) -> None:
    """Its program is on another machine."""
    (directory.path / "manager-000001.json").write_text(
        json.dumps({"program": "p", "host": "login2", "process": [1, 1]})
    )


def listed(directory: ClusterDirectory, now: float = 0.0) -> list[lookup.Found]:
    return close_ended.close_ended(lookup.find([directory.path.parent]), now=lambda: time.time() + now)


def test_what_has_ended_is_closed_when_it_is_listed(lone: ClusterDirectory) -> None:
    assert listed(lone) == []
    assert lone.closed and not lone.tls.exists()


def test_rendered_scripts_that_were_launched_keep_their_credentials(lone: ClusterDirectory) -> None:
    (lone.path / "launch.sh").touch()
    assert listed(lone) == []
    assert lone.closed and lone.tls.exists()


def test_scripts_that_were_never_launched_are_no_cluster_unless_something_is_wrong_or_ran(
    lone: ClusterDirectory,
) -> None:
    (lone.path / "launch.sh").touch()
    (lone.path / "journal.jsonl").unlink()
    assert listed(lone) == [] and lone.tls.exists(), "nothing ran, and the scripts are as they were"
    lone.logs.mkdir(exist_ok=True)
    (lone.logs / "by-hand.log").touch()
    assert len(listed(lone)) == 1, "somebody submitted a script by hand"
    (lone.logs / "by-hand.log").unlink()
    (lone.path / "journal.jsonl").write_text("half a line")
    assert "journal.jsonl" in listed(lone)[0].problem


def test_a_cluster_whose_program_lives_is_not_closed(lone: ClusterDirectory) -> None:
    lone.take_over("this program")
    assert len(listed(lone, now=3600.0)) == 1 and not lone.closed


def test_a_cluster_of_a_program_elsewhere_is_closed_when_nothing_changes(lone: ClusterDirectory) -> None:
    elsewhere(lone)
    assert len(listed(lone)) == 1
    assert listed(lone, now=3600.0) == [] and lone.closed


def test_one_answer_without_the_job_closes_nothing(lone: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lookup.find([lone.path.parent])
    queue: Any = Queue(forgets=set())
    queue.poll = lambda job_ids: {"5": JobStatus(job_id="5", name="lone", state=JobState.RUNNING)}
    tells(monkeypatch, queue)
    assert close_ended.close_ended(found) == found and not lone.closed


def test_a_scheduler_that_answers_proves_that_its_cluster_lives(lone: ClusterDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        lone.publish(Contact(token=lone.token(), job_id="5", workers=address, client=address))
        assert len(listed(lone)) == 1 and not lone.closed


@pytest.mark.parametrize(
    "ended", [{}, {"another": "completed"}, {"lone": "unknown"}], ids=["nothing", "of another name", "no state"]
)
@pytest.mark.parametrize("program", ["elsewhere", "ended here"])
def test_a_job_that_nothing_shows_keeps_its_cluster_and_its_name(
    lone: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, ended: dict[str, str], program: str
) -> None:
    tells(monkeypatch, Tells(**ended))
    if program == "elsewhere":
        elsewhere(lone)
    (one,) = listed(lone, now=30 * 86400.0)
    assert not lone.closed and lone.tls.is_dir()
    if "lone" not in ended:
        assert "does not know its jobs 5" in one.problem and f"run: hpcgpu stop {lone.in_shell}" in one.problem
    with pytest.raises(
        ClusterExists, match=r"a cluster named 'lone' .*( run: hpcgpu stop [^ ]*lone|its jobs 5 are in the queue)"
    ):
        create_directory.claim(lone.path, start_cluster.alive)
    assert lone.token() and lone.tls.is_dir()
    queue: Any = Tells()
    assert stop(lone, queue, sleep=lambda seconds: None) == [] and lone.closed, "the user may say so"
    create_directory.claim(lone.path, start_cluster.alive)


@pytest.mark.parametrize("name", ["lone-0", "lone"], ids=["of its own name", "of the name of an earlier job"])
def test_a_submit_without_an_answer_that_nothing_shows_keeps_its_cluster(lone: ClusterDirectory, name: str) -> None:
    lone.intend(name, "worker")
    assert f"does not know its jobs {name}." in listed(lone, now=3600.0)[0].problem and not lone.closed
    lone.refused(name)
    assert listed(lone, now=3600.0) == []


@pytest.mark.parametrize("by", ["the accounting", "the journal", "its scheduler"])
def test_the_name_of_what_has_ended_is_free(lone: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    elsewhere(lone)
    if by != "the accounting":
        tells(monkeypatch, Tells())
    if by == "the journal":
        lone.ended({"lone": None})
    if by == "its scheduler":  # the last that it does is to remove the keys
        lone.remove_secrets()
    assert create_directory.claim(lone.path, start_cluster.alive).submits() == []


def test_the_name_of_a_cluster_whose_jobs_still_end_after_a_stop_is_not_free(lone: ClusterDirectory) -> None:
    lone.begin_close()
    with pytest.raises(ClusterExists, match="its jobs 5 are in the queue"):
        create_directory.claim(lone.path, lambda earlier: ["5"])
    assert lone.closing and not lone.closed


def test_only_a_start_that_has_been_quiet_for_long_counts_as_killed_on_another_machine(lone: ClusterDirectory) -> None:
    elsewhere(lone)
    lone.want(apply(Wanted(), AddGroup("default", 2)))
    now = time.time()
    assert unfinished(lone, now=now) == "", "it may still submit"
    assert "2 worker jobs were asked for, and none submitted" in unfinished(lone, now=now + 3600)


def test_a_job_that_was_drained_is_none_of_those_that_were_requested_later(lone: ClusterDirectory) -> None:
    elsewhere(lone)
    lone.want(apply(Wanted(), AddGroup("default", 2)))
    for name in ("lone-0", "lone-1"):
        lone.intend(name, "worker")
        lone.submitted(name, name[-1])
    lone.cancel(["lone-0"])
    assert "2 worker jobs were asked for, and only 1 submitted" in unfinished(lone, now=time.time() + 3600)


def test_a_cluster_that_has_ended_without_a_close_is_not_connected_to(lone: ClusterDirectory) -> None:
    settings: Any = SimpleNamespace(cluster_directory=lone.path.parent, name="lone", if_exists="connect")
    queue: Any = Tells(lone="completed")
    assert start_cluster.existing(SimpleNamespace(cluster=settings), queue) is None  # type: ignore[arg-type]
    queue.poll = lambda job_ids: {"5": JobStatus(job_id="5", name="lone", state=JobState.RUNNING)}
    found = start_cluster.existing(SimpleNamespace(cluster=settings), queue)  # type: ignore[arg-type]
    assert found is not None and found.path == lone.path


def test_a_cluster_that_was_stopped_half_way_is_kept_while_its_jobs_are_not_in_the_queue(
    lone: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells(monkeypatch, Tells())
    lone.remove_secrets()
    lone.begin_close()
    assert len(listed(lone, now=3600.0)) == 1 and not lone.closed


def test_the_embedded_queue_is_believed_on_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lone: ClusterDirectory
) -> None:
    queue = Tells()
    queue.remembers = True
    tells(monkeypatch, queue)
    about = json.loads((lone.path / "cluster.json").read_text())
    lone.write("cluster.json", json.dumps(about | {"system": "local"}))
    here = (lone.path / "manager-000001.json").read_text()
    elsewhere(lone)
    assert len(listed(lone, now=3600.0)) == 1, "another machine has a queue of its own"
    lone.write("manager-000001.json", here)
    assert listed(lone) == [] and lone.closed


def test_a_cluster_that_was_renamed_is_listed_while_it_has_jobs(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Any = Queue(forgets=set())
    for module in (lookup, close_ended):
        monkeypatch.setattr(module, "batch_system", lambda name: queue)
    (directory.path / "worker.sbatch").touch()
    later = create_directory.claim(directory.path, None, system="slurm")
    (aside,) = (found for found in lookup.find([later.path.parent]) if found.jobs)
    assert re.fullmatch(r"demo~[0-9]{8}-[0-9]{6}-[0-9a-f]{8}", aside.directory.path.name)
    assert stop(aside.directory, queue, sleep=lambda seconds: None) == [] and queue.cancelled
    assert [found.directory.path.name for found in lookup.find([later.path.parent])] == ["demo"]


def test_scripts_that_were_not_launched_are_no_cluster_and_report_how_they_become_one(tmp_path: Path) -> None:
    create_directory.claim(tmp_path / "open", lambda submits: [])
    path = make("slurm", {"walltime": "1h"}, tmp_path / "written").path
    with dask.config.set({"hpcgpu": {"cluster-directory": str(tmp_path)}}):
        with pytest.raises(NoCluster, match=r"(?m)Existing clusters: open. Scripts that were not launched: written$"):
            locate("other")
        said = CliRunner().invoke(main, ["status", "written"])
        listed = CliRunner().invoke(main, ["status", "written", "--json"])
    launch = f"cluster    written on slurm: not launched yet. To launch it, run: {path}/launch.sh JOBS\n"
    assert (said.exit_code, said.output) == (0, launch)
    assert json.loads(listed.output)["state"] == "not launched"


def test_of_two_clusters_of_one_name_the_one_that_is_not_closed_is_meant(tmp_path: Path) -> None:
    closed, live = (create_directory.claim(tmp_path / root / "demo", lambda submits: []) for root in ("a", "b"))
    closed.close()
    roots = {"slurm": {"cluster-directory": str(tmp_path / "a")}, "pbs": {"cluster-directory": str(tmp_path / "b")}}
    with dask.config.set({"hpcgpu": roots}):
        assert locate("demo").path == live.path
        live.close()
        with pytest.raises(NoCluster, match="several clusters are named demo"):
            locate("demo")


def test_a_closed_cluster_is_not_among_those_that_there_are(tmp_path: Path) -> None:
    for name in ("open", "shut"):
        create_directory.claim(tmp_path / name, lambda submits: [])
    ClusterDirectory(tmp_path / "shut").close()
    with (
        dask.config.set({"hpcgpu": {"cluster-directory": str(tmp_path)}}),
        pytest.raises(NoCluster, match=r"(?m)Existing clusters: open$"),
    ):
        locate("other")


def test_commands_in_messages_name_a_cluster_as_they_find_it(tmp_path: Path) -> None:
    here, there = (ClusterDirectory(tmp_path / place / "demo") for place in ("here", "an other"))
    for directory in (here, there):
        directory.path.mkdir(parents=True)
    with dask.config.set({"hpcgpu.cluster-directory": str(here.path.parent)}):
        assert (here.found_as, here.in_shell) == ("demo", "demo")
        assert (there.found_as, there.in_shell) == (str(there.path), f"'{there.path}'"), "by its path alone"
        with dask.config.set({"hpcgpu.slurm.cluster-directory": str(there.path.parent)}):
            assert here.found_as == str(here.path), "two clusters have that name"
        with dask.config.set({"hpcgpu.cluster-directory": 7}):
            assert here.found_as == str(here.path), "the configuration is wrong"
    with dask.config.set({"hpcgpu.cluster-directory": str(here.path.parent)}), pytest.raises(ClusterError) as raised:
        endpoint(there)
    assert str(raised.value).endswith(f"run: hpcgpu status '{there.path}'")


def test_stop_cancels_a_job_whose_drain_its_killed_program_had_only_begun(directory: ClusterDirectory) -> None:
    directory.cancel(["demo-0"])
    queue: Any = Queue(forgets=set())
    assert stop(directory, queue, sleep=lambda seconds: None) == []
    assert queue.cancelled
