"""A scheduler job that waits in itself for the end of the present one, with a queue and a clock of the test."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcgpu.batch.base import JobState, JobStatus, OwnJob
from hpcgpu.errors import LaunchError
from hpcgpu.runtime import scheduler_connection, standby_scheduler
from hpcgpu.runtime.scheduler_connection import ConnectionResult, check_alone
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End
from tests.unit.simulated import Queue

FIRST, OWN = OwnJob(job_id="1", name="demo-scheduler"), OwnJob(job_id="2", name="demo-scheduler2")


#: Seconds: longer than a job waits for anything but the end of a scheduler.
LONG = 1200


class Node:
    """The node of a job that waits: what it finds at the address of the scheduler, and its clock."""

    def __init__(self) -> None:
        self.found = ConnectionResult.ACCEPTED
        self.clock = 1000.0
        #: Called at each pause, with their number.
        self.at_pause: Callable[[int], None] = lambda number: None
        self.pauses = 0

    def identify(self, contact: Contact, directory: ClusterDirectory) -> ConnectionResult:
        return self.found

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.pauses += 1
        if self.clock > 1000 + LONG:
            raise StillWaitsError
        self.at_pause(self.pauses)


class StillWaitsError(Exception):
    pass


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    monkeypatch.setattr(standby_scheduler, "identify", made.identify)
    monkeypatch.setattr(scheduler_connection, "identify", made.identify)
    monkeypatch.setattr(standby_scheduler.time, "sleep", made.sleep)
    monkeypatch.setattr(standby_scheduler.time, "monotonic", lambda: made.clock)
    return made


@pytest.fixture
def waiting(tmp_path: Path, node: Node) -> ClusterDirectory:
    """A cluster whose second scheduler job waits, and whose first one answers."""
    directory = create_directory.claim(tmp_path / "clusters" / "demo", lambda submits: [])
    directory.tls.mkdir()
    for number in ("", "2"):
        directory.intend(f"demo-scheduler{number}", "scheduler")
        directory.submitted(f"demo-scheduler{number}", number or "1")
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:2"))
    return directory


def has_ended(directory: ClusterDirectory, how: str = "timeout") -> None:
    """What a manager writes when the first scheduler job has ended."""
    directory.ended({"demo-scheduler": "1"}, {"demo-scheduler": End(state=how)})


def reports(state: JobState) -> Queue:
    """A queue that reports this of the first scheduler job."""
    queue = Queue()
    queue.jobs["1"] = JobStatus(job_id="1", state=state, name="demo-scheduler")
    return queue


def test_a_job_that_follows_waits_until_the_journal_names_the_end(
    waiting: ClusterDirectory, node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    def at_pause(number: int) -> None:
        if number == 3:
            has_ended(waiting)
            node.found = ConnectionResult.REFUSED

    node.at_pause = at_pause
    standby_scheduler.wait_until_alone(waiting, Queue(), OWN)
    assert node.pauses == 3
    assert capsys.readouterr().err.count("has a scheduler in job 1. This job waits: it takes over when") == 1


def test_a_job_that_follows_waits_while_the_scheduler_proves_that_it_lives_whatever_the_journal_reports(
    waiting: ClusterDirectory, node: Node
) -> None:
    has_ended(waiting, "unknown")

    def at_pause(number: int) -> None:
        if number == 5:
            node.found = ConnectionResult.REFUSED

    node.at_pause = at_pause
    standby_scheduler.wait_until_alone(waiting, Queue(), OWN)
    assert node.pauses == 5


def test_a_job_that_follows_notices_within_seconds_that_the_scheduler_has_ended_although_no_program_writes_it(
    waiting: ClusterDirectory, node: Node
) -> None:
    def at_pause(number: int) -> None:
        if number == 6:
            node.found = ConnectionResult.REFUSED

    node.at_pause = at_pause
    standby_scheduler.wait_until_alone(waiting, reports(JobState.TIMEOUT), OWN)
    assert node.pauses <= 6 + 5, "the worker jobs keep their GPUs meanwhile"


@pytest.mark.parametrize("how", ["cancelled", "completed"])
def test_a_job_that_follows_ends_if_the_scheduler_has_ended_as_intended(
    waiting: ClusterDirectory, node: Node, how: str
) -> None:
    node.found = ConnectionResult.REFUSED
    has_ended(waiting, how)
    with pytest.raises(LaunchError, match="the scheduler job 1 has ended as intended"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN)


def test_a_job_that_follows_ends_if_nobody_needs_it(waiting: ClusterDirectory) -> None:
    waiting.cancel(["demo-scheduler2"])
    with pytest.raises(LaunchError, match="does not need this scheduler job any more"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN)
    waiting.keep(["demo-scheduler2"])
    waiting.tls.rmdir()  # the present scheduler removes the keys when it ends by `lease` or `idle_timeout`
    with pytest.raises(LaunchError, match="is closed: this job ends"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN)
    waiting.tls.mkdir()
    waiting.begin_close()
    with pytest.raises(LaunchError, match="is closed: this job ends"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN)


def test_of_two_submits_without_an_answer_the_name_shows_which_is_its_own(
    waiting: ClusterDirectory, node: Node
) -> None:
    for number in (3, 4):
        waiting.intend(f"demo-scheduler{number}", "scheduler")
    waiting.cancel(["demo-scheduler3"])
    with pytest.raises(LaunchError, match="does not need this scheduler job any more"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OwnJob(job_id="3", name="demo-scheduler3"))
    with pytest.raises(StillWaitsError):
        standby_scheduler.wait_until_alone(waiting, Queue(), OwnJob(job_id="4", name="demo-scheduler4"))


def test_a_job_that_was_submitted_by_hand_does_not_wait(waiting: ClusterDirectory, node: Node) -> None:
    with pytest.raises(LaunchError, match="already has a scheduler, in job 1"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OwnJob(job_id="99", name="scheduler.sh"))
    node.found = ConnectionResult.REFUSED
    standby_scheduler.wait_until_alone(waiting, Queue(), OwnJob(job_id="99", name="scheduler.sh"))
    assert not node.pauses


def test_the_first_scheduler_job_and_one_that_is_run_again_do_not_wait(waiting: ClusterDirectory, node: Node) -> None:
    standby_scheduler.wait_until_alone(waiting, Queue(), FIRST)
    has_ended(waiting)
    waiting.withdraw()
    standby_scheduler.wait_until_alone(waiting, Queue(), OWN)
    assert not node.pauses


@pytest.mark.parametrize("contact", ["its own", "that of the next one", "none"])
def test_a_scheduler_job_that_was_replaced_and_is_run_again_ends(
    waiting: ClusterDirectory, node: Node, contact: str
) -> None:
    if contact != "that of the next one":
        has_ended(waiting, "node_fail")
    else:
        waiting.publish(Contact(token=waiting.token(), job_id="2", workers="tls://b:1", client="tls://b:2"))
    if contact == "none":
        waiting.withdraw()
    before = waiting.contact()
    with pytest.raises(LaunchError, match=r"another one may have replaced it|job 2 has replaced this one"):
        standby_scheduler.wait_until_alone(waiting, Queue(), FIRST)
    assert waiting.contact() == before and not node.pauses
    if contact != "that of the next one":
        with pytest.raises(LaunchError, match="another one may have replaced it"):
            check_alone(waiting, "1")  # once more, before it publishes its contact


def test_a_job_that_does_not_need_to_wait_is_still_refused_next_to_a_live_scheduler(
    waiting: ClusterDirectory, node: Node
) -> None:
    has_ended(waiting)
    waiting.publish(Contact(token=waiting.token(), job_id="77", workers="tls://b:1", client="tls://b:2"))  # by hand
    with pytest.raises(LaunchError, match="already has a scheduler, in job 77"):
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN)


@pytest.mark.parametrize("how", [JobState.TIMEOUT, JobState.COMPLETED])
def test_a_scheduler_that_removes_its_contact_ends_but_not_yet(
    waiting: ClusterDirectory, node: Node, how: JobState
) -> None:
    queue = reports(JobState.COMPLETING)
    waiting.withdraw()

    def at_pause(number: int) -> None:
        if number == 3:
            has_ended(waiting, how.value)

    node.at_pause = at_pause
    if how is JobState.TIMEOUT:
        standby_scheduler.wait_until_alone(waiting, queue, OWN)
    else:  # `idle_timeout`: the keys are not removed yet
        with pytest.raises(LaunchError, match="has ended as intended"):
            standby_scheduler.wait_until_alone(waiting, queue, OWN)
    assert node.pauses == 3


@pytest.mark.parametrize("answer", ["ended", "runs", "no answer"])
@pytest.mark.parametrize("manager", ["none", "has left", "elsewhere"])
@pytest.mark.parametrize("found", ConnectionResult)
def test_without_a_manager_the_queue_answers_a_job_that_follows(
    waiting: ClusterDirectory, node: Node, manager: str, answer: str, found: ConnectionResult
) -> None:
    if manager != "none":
        record = waiting.take_over("a program on another machine")
        path = waiting.path / f"manager-{record.number:06}.json"
        waiting.write(path.name, path.read_text().replace(socket.gethostname(), "login1"))
    if manager == "has left":
        waiting.leave(1)
    node.found = found
    queue = reports(JobState.NODE_FAIL if answer == "ended" else JobState.RUNNING)
    queue.silent = answer == "no answer"
    proof = answer == "no answer" and found is ConnectionResult.REFUSED and manager != "elsewhere"
    if found is not ConnectionResult.ACCEPTED and (answer == "ended" or proof):
        standby_scheduler.wait_until_alone(waiting, queue, OWN)
        assert node.clock < 1000 + 200
        assert waiting.has_ended("1"), "if the batch system runs it again, it ends"
    else:  # a scheduler that is suspended does not answer either
        with pytest.raises(StillWaitsError):
            standby_scheduler.wait_until_alone(waiting, queue, OWN)


def held_by_the_queue(waiting: ClusterDirectory, *failures: float) -> OwnJob:
    """A third scheduler job, which the queue starts when the first one has ended; the second one does not count.

    `failures` are when earlier scheduler jobs have ended, in seconds before now.
    """
    waiting.want(Wanted(detached=True, manager_in_scheduler_job=True))
    waiting.cancel([OWN.name])
    waiting.ended({OWN.name: OWN.job_id})
    for number, ago in enumerate(failures):
        name, ended = f"demo-scheduler-failed{number}", time.time() - ago
        waiting.intend(name, "scheduler")
        waiting.submitted(name, f"9{number}")
        waiting.ended({name: f"9{number}"}, {name: End(state="failed", end=ended)})
    waiting.intend("demo-scheduler3", "scheduler", after_end="1")
    waiting.submitted("demo-scheduler3", "3")
    return OwnJob(job_id="3", name="demo-scheduler3")


@pytest.mark.parametrize("found", [one for one in ConnectionResult if one is not ConnectionResult.ACCEPTED])
def test_a_job_that_the_queue_held_until_the_end_needs_no_other_proof(
    waiting: ClusterDirectory, node: Node, found: ConnectionResult
) -> None:
    """The queue does not answer on this node, and the manager was in the scheduler job, whose node was switched off."""
    waiting.take_over("hpcgpu in the scheduler job", in_scheduler_job=True)
    own, queue, node.found = held_by_the_queue(waiting), reports(JobState.NODE_FAIL), found
    queue.silent = True
    standby_scheduler.wait_until_alone(waiting, queue, own)
    assert node.pauses == 0 and waiting.has_ended("1") and not waiting.closing


@pytest.mark.parametrize("manager", ["in the scheduler job", "in a program"])
def test_a_job_that_waited_beside_the_present_one_ends_the_cluster_if_nobody_else_does(
    waiting: ClusterDirectory, node: Node, manager: str
) -> None:
    waiting.want(Wanted(detached=True, manager_in_scheduler_job=True))
    waiting.take_over(manager, in_scheduler_job="scheduler" in manager)
    node.found = ConnectionResult.REFUSED
    with pytest.raises(LaunchError, match="no scheduler is started: the scheduler job 1 has ended as intended"):
        standby_scheduler.wait_until_alone(waiting, reports(JobState.CANCELLED), OWN)
    assert waiting.closing == ("scheduler" in manager)


@pytest.mark.parametrize("case", ["cancelled", "too many"])
def test_a_job_that_the_queue_held_ends_the_cluster_if_it_must_not_start(
    waiting: ClusterDirectory, node: Node, case: str
) -> None:
    own = held_by_the_queue(waiting, *[600.0 * (case == "too many")] * 3)
    node.found = ConnectionResult.REFUSED
    state, why = JobState.CANCELLED, "scheduler job 1 has ended as intended"
    if case == "too many":
        state, why = JobState.OUT_OF_MEMORY, "it was restarted 3 times within an hour"
    with pytest.raises(LaunchError, match=f"no scheduler is started: .*{why}"):
        standby_scheduler.wait_until_alone(waiting, reports(state), own)
    assert waiting.closing, "the worker jobs wait for nothing, and end"
    job = f"scheduler job 1 (demo-scheduler) {state.value}. Log: "
    assert job in waiting.why_ended() and waiting.why_ended().endswith(why), "`hpcgpu status` says it"


def test_old_failures_do_not_count(waiting: ClusterDirectory, node: Node) -> None:
    own, node.found = held_by_the_queue(waiting, 600.0, 700.0, 4000.0), ConnectionResult.REFUSED
    standby_scheduler.wait_until_alone(waiting, reports(JobState.OUT_OF_MEMORY), own)
    assert not waiting.closing


def test_a_job_that_the_queue_only_forgot_is_cancelled_before_another_one_takes_over(
    waiting: ClusterDirectory, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, cancelled = reports(JobState.RUNNING), list[str]()
    queue.jobs["1"] = replace(queue.jobs["1"], name="")
    monkeypatch.setattr(queue, "cancel", cancelled.extend)
    node.found = ConnectionResult.SILENT
    standby_scheduler.wait_until_alone(waiting, queue, OWN)
    assert cancelled == ["1"] and waiting.has_ended("1")


@pytest.mark.parametrize("fails", ["submits", "certain_contact", "closing"])
def test_a_filesystem_that_fails_for_a_while_does_not_end_a_job_that_follows(
    waiting: ClusterDirectory, node: Node, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    node.found = ConnectionResult.REFUSED
    has_ended(waiting)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(ClusterDirectory, fails, property(stale) if fails == "closing" else stale)
        node.at_pause = lambda number: broken.undo() if number == 100 else None
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN)
    assert node.pauses == 100
    with monkeypatch.context() as broken:
        broken.setattr(ClusterDirectory, "submits", stale)
        with pytest.raises(LaunchError, match=r"have not been usable for 10 min: .*Stale file handle"):
            standby_scheduler.wait_until_alone(waiting, Queue(), OWN)


def test_a_job_that_follows_waits_for_room_on_the_disk_as_long_as_worker_jobs_wait_for_it(
    waiting: ClusterDirectory, node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(directory: ClusterDirectory, name: str, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory.path))

    node.found = ConnectionResult.REFUSED
    has_ended(waiting)
    with monkeypatch.context() as disk:
        disk.setattr(ClusterDirectory, "write", full)
        why = f"{waiting.path} cannot be written: No space left on device. Make room there"
        with pytest.raises(LaunchError, match=f"have not been usable for 15 min: {why}. This job ends"):
            standby_scheduler.wait_until_alone(waiting, Queue(), OWN, 900.0)
        assert node.clock > 1900
        assert capsys.readouterr().err == f"hpcgpu: {why}. This job tries again, for 15 min at most\n"
        node.clock, node.pauses = 1000.0, 0
        node.at_pause = lambda number: disk.undo() if number == 400 else None
        standby_scheduler.wait_until_alone(waiting, Queue(), OWN, 900.0)
    assert node.pauses == 400 and not (waiting.path / "room").exists()


def test_a_filesystem_that_fails_for_a_moment_does_not_end_a_scheduler_that_starts(
    waiting: ClusterDirectory, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(directory: ClusterDirectory) -> None:
        raise OSError(errno.EIO, "Input/output error")

    node.found = ConnectionResult.REFUSED
    monkeypatch.setattr(ClusterDirectory, "submits", stale)
    check_alone(waiting, "2")  # once more, before it publishes its contact
