"""Requests of other programs to the manager, as the scheduler passes them on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler
from distributed.core import Status

from hpcgpu.batch import batch_system
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler import end_without_manager, manager_requests
from hpcgpu.dask_scheduler.end_without_manager import ManagerLease
from hpcgpu.dask_scheduler.manager_requests import Requests
from hpcgpu.dask_scheduler.rpc_types import RequestAnswer
from hpcgpu.dask_scheduler.scheduler_extension import Extension, install
from hpcgpu.errors import ClusterError, ClusterWarning, Superseded
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.manager.manager import Manager
from hpcgpu.orders import change_size, manager_in_scheduler_job, manager_on_login_node, send_to_manager
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Detach, Scale, Wanted, apply
from hpcgpu.store import certificates_and_keys, create_directory, saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory


async def test_a_request_is_answered_by_the_manager_that_takes_it() -> None:
    passed = Requests()
    answer = asyncio.ensure_future(passed.request({"command": "scale"}))
    received = await passed.next_request(1)
    assert received is not None and received["command"] == {"command": "scale"}
    assert passed.accepted_by(1) and not passed.accepted_by(2)
    await passed.answer_request(received["number"], "no")
    assert await answer == "no"


async def test_an_earlier_manager_that_is_gone_takes_no_request() -> None:
    passed = Requests()
    gone = asyncio.ensure_future(passed.next_request(1))  # its program was killed: nobody reads what it gets
    await asyncio.sleep(0)
    lives = asyncio.ensure_future(passed.next_request(2))
    await asyncio.sleep(0)
    answer = asyncio.ensure_future(passed.request({"command": "scale"}))
    assert await gone is None
    received = await lives
    assert received is not None
    await passed.answer_request(received["number"], "")
    assert await answer == ""


async def test_only_the_last_manager_counts_as_present_and_may_end_the_scheduler() -> None:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        extension = Extension(scheduler, None)
        assert await extension.lease.heartbeat(2, "the second") == 2
        assert await extension.lease.heartbeat(1, "the first") == 2, "the first manager learns of the second one"
        await extension.lease.end(1)
        await extension.lease.goodbye(1)
        told = (await extension.state())["manager"]
        assert (told["number"], told["about"], told["present"]) == (2, "the second", True)
        await asyncio.sleep(0)
        assert scheduler.status is Status.running
        await extension.lease.goodbye(2)
        await extension.lease.heartbeat(2, "late")  # this heartbeat was under way
        assert not (await extension.state())["manager"]["present"]
        await extension.lease.end(2)
        await asyncio.wait_for(scheduler.finished(), 60)


@pytest.mark.parametrize("error", ["", "there is no such group"])
def test_what_the_manager_refuses_is_an_error_in_the_program_that_requested_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None)
    directory.take_over("the manager")
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:1"))

    async def answered(*_: object) -> RequestAnswer:
        return RequestAnswer(accepted=True, error=error)

    monkeypatch.setattr(send_to_manager, "answer_of", answered)
    with pytest.raises(ClusterError, match=error) if error else contextlib.nullcontext():
        assert send_to_manager.done_by_manager(directory, Scale("default", 2))


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_a_manager_that_lives_keeps_its_cluster_though_it_takes_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None)
    if host == "elsewhere":
        monkeypatch.setattr(socket, "gethostname", lambda: "login2")
    directory.take_over("the manager")
    monkeypatch.undo()
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:1"))

    async def no_manager(*_: object) -> RequestAnswer:
        return RequestAnswer(accepted=False, error="")

    monkeypatch.setattr(send_to_manager, "answer_of", no_manager)
    monkeypatch.setattr(send_to_manager, "BEGINS", -1.0)
    if host == "here":
        with pytest.raises(ClusterError, match="the manager manages cluster demo, and takes no requests now"):
            send_to_manager.done_by_manager(directory, Scale("default", 2))
    else:
        with pytest.warns(ClusterWarning, match="takes over cluster demo .* cannot find out whether it still runs"):
            assert not send_to_manager.done_by_manager(directory, Scale("default", 2))


def test_a_manager_on_another_machine_that_takes_requests_a_moment_later_keeps_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, accepts = create_directory.claim(tmp_path / "demo", None), iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "login2")
        directory.take_over("the manager")
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:1"))

    async def connects(*_: object) -> RequestAnswer:
        return RequestAnswer(accepted=next(accepts), error="")

    monkeypatch.setattr(send_to_manager, "answer_of", connects)
    assert send_to_manager.done_by_manager(directory, Scale("default", 2))


def test_a_manager_on_another_machine_keeps_its_cluster_while_the_scheduler_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="slurm")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "login2")
        directory.take_over("the manager")
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://h:1", client="tls://h:1"))

    async def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(manager_on_login_node, "answer_of", silent)
    with pytest.raises(ClusterError, match="the manager manages cluster demo already"):
        manager_on_login_node.manage_here(directory)


def test_a_manager_that_the_scheduler_job_is_about_to_start_gets_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the cluster back at once from a program that had taken it over meanwhile."""
    directory = create_directory.claim(tmp_path / "demo", None)
    directory.leave(directory.take_over("the first").number)
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:1"))
    directory.want(apply(apply(Wanted(), AddGroup("default", 1)), Detach(manager_in_scheduler_job=True)))

    async def answered(*_: object) -> RequestAnswer:
        return RequestAnswer(accepted=True, error="")

    monkeypatch.setattr(send_to_manager, "answer_of", answered)
    comes = threading.Timer(0.2, directory.take_over, ["the next"], {"in_scheduler_job": True})
    comes.start()
    assert send_to_manager.done_by_manager(directory, Scale("default", 2))
    comes.join()
    directory.leave(2)
    monkeypatch.setattr(send_to_manager, "BEGINS", 0.1)
    assert not send_to_manager.done_by_manager(directory, Scale("default", 2)), "none comes"


async def test_a_request_that_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_requests, "_ANSWER", 0.05)
    passed = Requests()
    with pytest.raises(TimeoutError):
        await passed.request({"command": "scale"})
    monkeypatch.setattr(manager_requests, "REQUEST_WAIT", 0.05)
    assert await passed.next_request(1) is None, "its program does not wait any more"


async def test_a_manager_that_is_silent_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program may be suspended: another program takes the cluster over instead of waiting for an answer."""
    monkeypatch.setattr(manager_requests, "_ANSWER", 0.05)
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        extension = Extension(scheduler, None)
        await extension.lease.heartbeat(1, "the first")
        waits = asyncio.ensure_future(extension.requests.next_request(1))
        await asyncio.sleep(0)
        assert (await extension.request({"command": "scale"}))["accepted"]
        await extension.lease.step(61)
        assert not (await extension.request({"command": "scale"}))["accepted"]
        waits.cancel()


async def test_a_manager_that_lives_takes_requests_as_soon_as_its_scheduler_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A suspended scheduler received nothing. If the manager counted as gone, another program would take over."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        extension = install(scheduler, 60.0)
        await extension.lease.heartbeat(1)
        waits = asyncio.ensure_future(extension.requests.next_request(1))
        await asyncio.sleep(0)
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 600)  # it was suspended for ten minutes
        assert await waits is None, "all timers are due"
        assert scheduler.status is Status.running and (await extension.state())["manager"]["present"]
        request = asyncio.ensure_future(extension.request({"command": "scale"}))
        received = await extension.requests.next_request(1)
        assert received is not None and not request.done()
        await extension.requests.answer_request(received["number"], "")
        assert await request == RequestAnswer(accepted=True, error="")


async def test_a_manager_that_has_not_asked_for_a_request_for_long_gets_none() -> None:
    passed = Requests()
    waits = asyncio.ensure_future(passed.next_request(1))
    await asyncio.sleep(0)
    passed.step(manager_requests.REQUEST_WAIT)
    assert passed.accepted_by(1)
    passed.step(2 * manager_requests.REQUEST_WAIT)
    assert not passed.accepted_by(1)
    waits.cancel()


async def test_an_answer_that_comes_too_late_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_requests, "_ANSWER", 0.05)
    passed = Requests()
    request = asyncio.ensure_future(passed.request({"command": "scale"}))
    received = await passed.next_request(1)
    assert received is not None
    with pytest.raises(TimeoutError):
        await request
    await passed.answer_request(received["number"], "")


class Closed:
    """A scheduler that remembers why it was closed."""

    reason = ""

    async def close(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize("released", [False, True])
async def test_the_lease_ends_a_scheduler_unless_its_cluster_was_detached(released: bool) -> None:
    scheduler = Closed()
    lease = ManagerLease(scheduler, 10.0, lambda: False)  # type: ignore[arg-type]
    if released:
        await lease.release()
    await lease.step(end_without_manager._FIRST_HEARTBEAT)
    assert not scheduler.reason, "a manager has time for its first heartbeat"
    await lease.step(10)
    assert scheduler.reason == ("" if released else "hpcgpu-lease")


async def test_a_manager_that_sends_heartbeats_again_while_the_filesystem_hangs_keeps_its_scheduler() -> None:
    asked, answers, scheduler = threading.Event(), threading.Event(), Closed()

    def released() -> bool:
        asked.set()
        answers.wait(60)
        return False

    lease = ManagerLease(scheduler, 10.0, released)  # type: ignore[arg-type]
    step = asyncio.ensure_future(lease.step(100))
    await asyncio.to_thread(asked.wait, 60)
    await lease.heartbeat(1)
    answers.set()
    await step
    assert not scheduler.reason and lease.present


def test_a_scheduler_ends_although_the_filesystem_hangs_that_its_lease_asks() -> None:
    asked, answers = threading.Event(), threading.Event()
    late: list[bool] = []

    def released() -> bool:
        asked.set()
        late.append(answers.wait(60))
        return False

    async def ends_meanwhile() -> None:
        lease = ManagerLease(None, 10.0, released)  # type: ignore[arg-type]
        step = asyncio.ensure_future(lease.step(100))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        step.cancel()

    asyncio.run(ends_meanwhile())
    assert not late, "it has not waited for the answer"
    answers.set()


def test_a_request_that_the_scheduler_job_cannot_carry_out_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(contact: Contact, directory: ClusterDirectory) -> str:
        assert directory.wanted().detached, "a scheduler that starts now would follow the request"
        return "compute nodes of this site cannot submit jobs"

    def refused(directory: ClusterDirectory) -> str:
        raise ClusterError("no process can manage cluster demo")

    monkeypatch.setattr(manager_in_scheduler_job, "_start", fails)
    monkeypatch.setattr(manager_in_scheduler_job, "on_login_node", refused)
    directory = create_directory.claim(tmp_path / "demo", None, system="slurm")
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    earlier = apply(Wanted(), AddGroup("default", 2))
    directory.want(earlier)
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://h:1", client="tls://h:1"))
    with pytest.raises(ClusterError, match="demo cannot scale it: compute nodes of this site cannot submit jobs"):
        manager_in_scheduler_job.in_scheduler_job(directory, Adapt("default", Limits(maximum=4), 5.0))
    assert directory.wanted() == earlier and not directory.detached


def test_a_request_that_is_refused_takes_the_cluster_from_nobody(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="slurm")
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    manager = directory.take_over("the program that closes it")
    directory.begin_close()
    with pytest.raises(ClusterError, match="closed"):
        manager_in_scheduler_job.in_scheduler_job(directory, Adapt("default", Limits(maximum=4), 5.0))
    assert directory.manager() == manager


def test_a_scheduler_that_starts_while_the_request_is_recorded_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, asked = create_directory.claim(tmp_path / "demo", None, system="slurm"), list[Contact]()
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    directory.want(apply(Wanted(), AddGroup("default", 2)))
    take_over = ClusterDirectory.take_over

    def starts(self: ClusterDirectory, *arguments: Any, **named: Any) -> Any:  # it has read the state before
        directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://h:1", client="tls://h:1"))
        return take_over(self, *arguments, **named)

    async def manages(contact: Contact, directory: ClusterDirectory) -> str:
        asked.append(contact)
        return ""

    monkeypatch.setattr(ClusterDirectory, "take_over", starts)
    monkeypatch.setattr(manager_in_scheduler_job, "_start", manages)
    text = manager_in_scheduler_job.in_scheduler_job(directory, Adapt("default", Limits(maximum=4), 5.0))
    assert [contact.job_id for contact in asked] == ["7"] and "its scheduler job scales it from now on" in text


def test_a_process_that_does_not_manage_the_cluster_in_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later it would take the cluster from the program that manages it by then."""
    directory, begun = create_directory.claim(tmp_path / "demo", None, system="slurm"), list[subprocess.Popen[bytes]]()

    class Hangs(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import signal; signal.pause()"], **options)
            begun.append(self)

    monkeypatch.setattr(manager_on_login_node.subprocess, "Popen", Hangs)
    monkeypatch.setattr(manager_on_login_node, "_TIMEOUT", 0.0)
    try:
        with pytest.raises(ClusterError, match="has not done so within 0 s"):
            manager_on_login_node.on_login_node(directory)
        assert [process.poll() is not None for process in begun] == [True]
    finally:
        for process in begun:
            process.kill()
            process.wait()


@pytest.mark.parametrize("begins", ["a manager that changes the size", "a manager", "a program on this machine", ""])
def test_what_a_manager_has_recorded_meanwhile_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="slurm")
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    earlier = apply(Wanted(), AddGroup("default", 2))
    directory.want(earlier)
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://h:1", client="tls://h:1"))

    async def too_late(contact: Contact, directory: ClusterDirectory) -> str:
        if begins:
            number = directory.take_over("a manager", in_scheduler_job=True).number
            if begins == "a manager that changes the size":
                directory.want(apply(directory.wanted(), Scale("default", 3)))
            elif begins == "a program on this machine":  # it has ended again
                directory.leave(number)
        raise TimeoutError("the answer is lost")

    monkeypatch.setattr(manager_in_scheduler_job, "_start", too_late)
    with pytest.raises(ClusterError, match="demo cannot be changed now"):
        manager_in_scheduler_job.in_scheduler_job(directory, Adapt("default", Limits(maximum=4), 5.0))
    kept = directory.wanted()
    if begins == "a manager that changes the size":
        assert kept.sizes == {"default": 3}, "its order is lost"
    elif begins == "a manager":  # it scales the cluster as was requested: the record has what it does
        assert kept.groups["default"].limits.maximum == 4 and kept.manager_in_scheduler_job
    else:
        assert kept == earlier


def test_the_manager_that_had_the_cluster_before_writes_no_more_when_the_scheduler_job_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="slurm")
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://h:1", client="tls://h:1"))
    directory.want(apply(Wanted(), AddGroup("default", 2)))
    first = Dispatcher(LocalQueue(tmp_path / "queue", gpus=1), directory, directory.take_over("the first").number)

    async def asked(contact: Contact, directory: ClusterDirectory) -> str:
        with pytest.raises(Superseded):
            first.check_manager()
        return ""

    monkeypatch.setattr(manager_in_scheduler_job, "_start", asked)
    manager_in_scheduler_job.in_scheduler_job(directory, Adapt("default", Limits(maximum=4), 5.0))
    assert directory.wanted().groups["default"].limits.maximum == 4


def test_a_manager_that_begins_while_the_scheduler_job_is_asked_gets_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="slurm")
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    sent = list[Adapt]()

    def begins(directory: ClusterDirectory, command: Adapt) -> str:
        directory.take_over("hpcgpu manage")
        raise ClusterError("hpcgpu manage manages cluster demo already")

    def taken(directory: ClusterDirectory, command: Adapt) -> bool:
        sent.append(command)
        return directory.manager() is not None

    monkeypatch.setattr(change_size, "in_scheduler_job", begins)
    monkeypatch.setattr(change_size, "done_by_manager", taken)
    assert change_size.adapt(directory, maximum_jobs=2) == "demo: hpcgpu manage scales it by its work from now on"
    assert len(sent) == 2


async def test_a_manager_of_a_cluster_whose_keys_are_being_removed_reports_that_it_has_ended(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="local")
    saved_options.write(directory, resolve("local", {"name": "demo", "gpus_per_node": 1}))
    certificates_and_keys.create(directory)
    (directory.tls / "ucx.key").unlink()  # by `hpcgpu stop`, after the manager has seen a cluster that lives
    manager = Manager.of_existing(directory, batch_system("local"), ends_jobs=False)
    directory.begin_close()
    with pytest.raises(ClusterError, match="demo"):
        await manager.start()
