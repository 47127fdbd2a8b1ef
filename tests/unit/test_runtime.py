"""What a job checks before it becomes the Dask command, and what the monitor makes of the queue's answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dask
import psutil
import pytest
from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler
from hypothesis import given
from hypothesis import strategies as st

import hpcgpu
from hpcgpu.batch.base import JobState, JobStatus, OwnJob
from hpcgpu.batch.pbs import reasons as pbs
from hpcgpu.batch.reasons import advice, explain, outlook
from hpcgpu.batch.slurm import reasons as slurm
from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler import end_without_manager, scheduler_preload
from hpcgpu.dask_scheduler.running_calls import _function_name
from hpcgpu.dask_scheduler.scheduler_extension import Extension, _wanted
from hpcgpu.dask_worker import start_again
from hpcgpu.errors import BatchUnavailable, ClusterExists, LaunchError
from hpcgpu.fabric.protocol_and_interface import Node
from hpcgpu.options.shared_options_and_defaults import WorkerOptions
from hpcgpu.polling.queue_monitor import Answer, Monitor, presumed_ended
from hpcgpu.posix import checked_files
from hpcgpu.posix.printable import printable
from hpcgpu.runtime import (
    complete_dask_commands,
    cpu_affinity,
    credentials_of_job,
    dask_signals,
    forkserver,
    launch,
    next_scheduler,
    preemption,
    scheduler_connection,
    single_job,
)
from hpcgpu.runtime.before_walltime import Retirement
from hpcgpu.runtime.gpus_of_job import visible_gpus
from hpcgpu.runtime.scheduler_connection import ConnectionResult, wait_for_scheduler
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from tests.helpers import Clock

UUIDS = "GPU-1b9e,MIG-77aa"


@pytest.mark.parametrize(
    ("wanted", "environ", "on_node", "expected"),
    [
        (0, {}, None, None),
        (2, {"CUDA_VISIBLE_DEVICES": "2,3"}, None, "2,3"),
        (2, {"CUDA_VISIBLE_DEVICES": UUIDS}, None, UUIDS),
        (1, {"CUDA_VISIBLE_DEVICES": "2,3"}, None, "2"),
        (4, {}, 4, "0,1,2,3"),
    ],
)
def test_the_gpus_of_a_job(wanted: int, environ: dict[str, str], on_node: int | None, expected: str | None) -> None:
    assert visible_gpus(wanted, environ, on_node) == expected


def test_a_job_that_has_whole_nodes_takes_as_many_of_their_gpus_as_it_wants() -> None:
    assert visible_gpus(1, {}, 4, whole_nodes=True) == "0"
    with pytest.raises(LaunchError, match="the node has 2"):
        visible_gpus(4, {}, 2, whole_nodes=True)


@pytest.mark.parametrize(
    ("wanted", "environ", "on_node", "message"),
    [
        (4, {"CUDA_VISIBLE_DEVICES": "0,1"}, None, "requested 4 GPUs and sees 2"),
        (1, {"CUDA_VISIBLE_DEVICES": ""}, None, "requested 1 GPU and sees 0"),
        (1, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, "requested 1 GPU and sees 0"),
        (1, {}, None, "no CUDA_VISIBLE_DEVICES, no driver"),
        (2, {}, 8, "If jobs get whole nodes, set gpus_per_node=8"),
    ],
)
def test_a_job_without_its_gpus_reports_why(
    wanted: int, environ: dict[str, str], on_node: int | None, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        visible_gpus(wanted, environ, on_node)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("qsub: Job violates queue and/or server resource limits", "`walltime`"),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some "
            "limit)",
            "`walltime`",
        ),
        ("sbatch: error: invalid partition specified: nosuch", "`queue`"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "`account`"),
        ("Batch job submission failed: Invalid qos specification", "`qos`"),
        ("Batch job submission failed: Requested node configuration is not available", "`gpu_type`"),
        ("qsub: Unknown queue", "`queue`"),
    ],
)
def test_a_refused_submit_names_which_option_to_check(words: str, option: str) -> None:
    assert option in advice(words, (pbs if words.startswith("qsub") else slurm).REASONS)


def test_a_refusal_in_words_never_seen_before_has_no_advice() -> None:
    assert advice("the site's own filter says no", slurm.REASONS) == ""


def test_a_job_whose_earliest_start_has_not_come_is_not_being_prepared() -> None:
    said = explain(JobStatus(job_id="1", state=JobState.PENDING, name="x", reason="BeginTime", words=slurm.REASONS))
    assert "its earliest start time is in the future" in said and "prepared" not in said


def test_the_scheduler_job_is_not_advised_to_request_all_gpus_of_a_node() -> None:
    with pytest.raises(LaunchError, match=r"If jobs get whole nodes, set scheduler=\{'gpu_request': 'none'\}"):
        visible_gpus(1, {}, 4, kind="scheduler")
    assert resolve("slurm", {"scheduler": {"gpu_request": "none"}}).scheduler is not None


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    return create_directory.claim(tmp_path / "clusters" / "demo", lambda submits: [])


class Gone(Slurm):
    """A queue that lists no job any more."""

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}


@pytest.mark.parametrize("security", [True, False])
def test_a_job_of_a_closed_cluster_ends_before_it_starts_anything(tmp_path: Path, security: bool) -> None:
    made = create_directory.claim(tmp_path / "demo", None, security=security)
    if security:
        certificates_and_keys.create(made)
    assert launch.open_directory(made.path).path == made.path
    made.begin_close()
    with pytest.raises(LaunchError, match=f"the cluster in {made.path} is closed: this job ends"):
        launch.open_directory(made.path)


def test_a_job_whose_credentials_are_gone_ends_instead_of_running_without(tmp_path: Path) -> None:
    """The scheduler job has removed them at its end, and nobody has closed the cluster."""
    made = create_directory.claim(tmp_path / "demo", None)
    certificates_and_keys.create(made)
    made.remove_secrets()
    with pytest.raises(LaunchError, match=f"the cluster in {made.path} is closed: this job ends"):
        launch.open_directory(made.path)


def test_a_script_that_was_run_outside_of_a_job_or_on_a_node_without_the_directory_ends(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is not a cluster directory, or this node does not see it"):
        launch.open_directory(tmp_path)

    class Nowhere(Slurm):
        def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
            return None

    with pytest.raises(LaunchError, match="not a job of the batch system 'slurm': submit the script, do not run it"):
        launch.own_job(Nowhere())


def test_a_program_whose_cluster_has_removed_its_credentials_reads_which_file_is_missing(
    directory: ClusterDirectory,
) -> None:
    certificates_and_keys.create(directory)
    security = certificates_and_keys.security(directory)
    assert security.get_connection_args("client")["ssl_context"] is not None
    (directory.tls / "cert.pem").unlink()
    for arguments in (security.get_connection_args, security.get_listen_args):
        with pytest.raises(FileNotFoundError, match=r"the credentials of the cluster were removed.*cert\.pem"):
            arguments("client")


def test_a_job_whose_certificate_has_expired_ends(directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates_and_keys.create(directory, 3600.0)
    clock = Clock()
    clock.now = time.time() + 91 * 86400  # it waited longer in the queue than any certificate is valid
    monkeypatch.setattr(launch, "time", clock)
    with pytest.raises(LaunchError, match="the certificate of cluster demo expired on"):
        launch.open_directory(directory.path)


def test_a_job_that_was_given_its_gpus_by_number_only_takes_as_many_as_it_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments: Any = SimpleNamespace(gpus=2, whole_nodes=False, kind="worker")
    monkeypatch.setattr(launch, "gpus_on_node", lambda: 2)
    for of_queue, expected in (("4,5,6", "4,5"), (None, "0,1")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if of_queue is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", of_queue)
        launch.choose_gpus(arguments)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("contact", "words"),
    [
        (None, "it did not write .*contact.json. See its log in .*raise death_timeout"),
        ("tcp://127.0.0.1:9", "tcp://127.0.0.1:9 does not answer .*: set client_interface to a network"),
    ],
)
def test_a_worker_whose_scheduler_does_not_answer_in_time_names_what_to_check(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, contact: str | None, words: str
) -> None:
    if contact is not None:
        directory.publish(Contact(token=directory.token(), job_id="17", workers=contact, client=contact))
    monkeypatch.setattr(scheduler_connection, "answers", lambda contact, directory: False)
    clock = Clock()
    began = clock.now
    monkeypatch.setattr(scheduler_connection, "time", clock)
    with pytest.raises(LaunchError, match=rf"no scheduler answered within 30 s \(death_timeout\): {words}"):
        wait_for_scheduler(directory, Gone(), timeout=30)
    assert 30 < clock.now - began < 33


def test_a_worker_whose_scheduler_job_is_gone_gives_up(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    began = clock.now
    monkeypatch.setattr(scheduler_connection, "time", clock)
    directory.intend("demo-scheduler", "scheduler")
    directory.submitted("demo-scheduler", "17")
    with pytest.raises(LaunchError, match=r"the scheduler job 17 has ended .*this worker job ends too"):
        wait_for_scheduler(directory, Gone(), timeout=300)
    assert 60 <= clock.now - began < 250, "after the grace period, not after the timeout"


class Ended(Gone):
    """A queue that reports how a scheduler job has ended."""

    def __init__(self, state: JobState) -> None:
        self.state = state

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {id_: JobStatus(job_id=id_, state=self.state, name="demo-scheduler", reason="") for id_ in job_ids}


@pytest.mark.parametrize(
    ("state", "words", "longest"),
    [
        (JobState.TIMEOUT, r"no scheduler answered within 900 s \(restart_wait\)", 915),
        (JobState.NODE_FAIL, r"no scheduler answered within 900 s \(restart_wait\)", 915),
        (JobState.CANCELLED, "the scheduler job 17 has ended", 700),
        (JobState.COMPLETED, "the scheduler job 17 has ended", 700),
    ],
)
def test_a_worker_waits_for_a_scheduler_that_is_restarted_and_no_longer_than_it_may(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, state: JobState, words: str, longest: float
) -> None:
    clock = Clock()
    began = clock.now
    monkeypatch.setattr(scheduler_connection, "time", clock)
    directory.intend("demo-scheduler", "scheduler")
    directory.submitted("demo-scheduler", "17")
    with pytest.raises(LaunchError, match=words):
        wait_for_scheduler(directory, Ended(state), timeout=600, restart_wait=900)
    assert clock.now - began < longest


def test_a_worker_waits_for_the_last_scheduler_job(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled: list[str] = []

    class Queue(Ended):
        def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
            polled.extend(job_ids)
            return super().poll(job_ids)

    clock = Clock()
    monkeypatch.setattr(scheduler_connection, "time", clock)
    for name, job_id in (("demo-scheduler", "17"), ("demo-scheduler2", "18")):
        directory.intend(name, "scheduler")
        directory.submitted(name, job_id)
    directory.ended({"demo-scheduler": "17"})  # the manager writes it before it submits the next one
    with pytest.raises(LaunchError):
        wait_for_scheduler(directory, Queue(JobState.TIMEOUT), timeout=300, restart_wait=300)
    assert set(polled) == {"18"}


def test_a_worker_that_waits_for_a_scheduler_ends_with_its_cluster(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.begin_close()
    with pytest.raises(LaunchError, match="is closed: this job ends"):
        wait_for_scheduler(directory, Gone(), timeout=300, restart_wait=300)


def test_a_worker_job_waits_for_the_next_scheduler_until_that_could_have_waited_as_long_as_the_job_and_started(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "2")
    [submit] = directory.submits()

    class Process:
        def create_time(self) -> float:
            return submit.time + 7000

    monkeypatch.setattr(next_scheduler.psutil, "Process", Process)
    arguments = argparse.Namespace(restart_wait=0, timeout=300)
    wait = next_scheduler.restart_wait(arguments, directory, OwnJob(job_id="2", name="demo-0"))
    assert wait == pytest.approx(7300), "the end is noticed later, and the scheduler takes its time to start"


def test_workers_end_when_their_cluster_has_another_scheduler(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    signals: list[tuple[int, int]] = []
    contacts = ["tcp://a:1", "", "tcp://b:1", "tcp://a:1", "tcp://b:1", "tcp://b:1", "tcp://b:1", "tcp://b:1"]

    def sleep(seconds: float) -> None:
        looks.append(contacts[len(looks)])
        address = looks[-1]
        contact = Contact(token=directory.token(), job_id="2", workers=address, client=address)
        directory.publish(contact) if address else directory.withdraw()

    monkeypatch.setattr(next_scheduler.time, "sleep", sleep)
    monkeypatch.setattr(next_scheduler.os, "kill", lambda *sent: signals.append(sent))
    served = Contact(token=directory.token(), job_id="2", workers="tcp://a:1", client="tcp://a:1")
    next_scheduler._watch(directory, served)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert looks == contacts[:7], "after three looks in a row that show the other one"


def test_workers_end_with_their_cluster_though_they_have_never_reached_its_scheduler(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(next_scheduler.time, "sleep", lambda seconds: directory.closing or directory.begin_close())
    monkeypatch.setattr(next_scheduler.os, "kill", lambda *sent: signals.append(sent))
    served = Contact(token=directory.token(), job_id="2", workers="tcp://a:1", client="tcp://a:1")
    directory.publish(served)
    next_scheduler._watch(directory, served)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert "the cluster is closed: the workers of this job end" in capsys.readouterr().err


def test_the_state_of_a_scheduler_job_is_not_known_while_the_queue_does_not_answer(
    directory: ClusterDirectory,
) -> None:
    class Queue(Slurm):
        silent = False

        def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
            if self.silent:
                raise BatchUnavailable("squeue does not answer")
            return {"17": JobStatus(job_id="17", state=JobState.PENDING, name="demo-scheduler")}

    directory.intend("demo-scheduler", "scheduler")
    directory.submitted("demo-scheduler", "17")
    queue = Queue()
    watch = scheduler_connection.SchedulerWatch(directory, queue)
    status = watch.poll(now=0.0)
    assert status is not None and status.state is JobState.PENDING
    queue.silent = True
    assert watch.poll(now=1000.0) is None and watch.error == "squeue does not answer"
    queue.silent = False
    assert watch.poll(now=2000.0) is not None and not watch.error


def test_a_contact_of_another_cluster_is_not_believed(directory: ClusterDirectory) -> None:
    contact = Contact(token="somebody else's", job_id="1", workers="tls://a:1", client="tls://a:2")
    directory.publish(contact)
    assert directory.contact() is None
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:2"))
    assert directory.contact() is not None
    directory.remove_secrets()
    assert directory.contact() is None


def test_only_the_job_of_the_contact_removes_the_keys(directory: ClusterDirectory) -> None:
    directory.tls.mkdir()
    directory.intend("demo-scheduler", "scheduler")
    directory.submitted("demo-scheduler", "1")
    credentials_of_job.remove_secrets(directory, directory.token(), "2")
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:2"))
    credentials_of_job.remove_secrets(directory, directory.token(), "2")
    assert directory.tls.is_dir() and directory.contact() is not None
    directory.withdraw()  # the scheduler itself does so when it ends
    credentials_of_job.remove_secrets(directory, directory.token(), "1")
    assert not directory.tls.is_dir()


@pytest.mark.parametrize(("closed_by", "stay"), [(signal.SIGTERM, True), (None, True), (0, False)])
def test_the_keys_stay_for_the_next_scheduler_until_one_ends_as_intended(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, closed_by: int | None, stay: bool
) -> None:
    directory.tls.mkdir()
    monkeypatch.setattr(credentials_of_job, "_closed_by", closed_by)
    credentials_of_job.remove_secrets(directory, directory.token(), "1", restarts=True)
    assert (directory.tls.is_dir(), bool(directory.dashboard_token())) == (stay, stay)


def test_a_scheduler_job_that_was_submitted_by_hand_removes_the_keys(directory: ClusterDirectory) -> None:
    """Neither a journal nor a contact has its id: the job was submitted by hand, and its scheduler did not start."""
    directory.tls.mkdir()
    credentials_of_job.remove_secrets(directory, "the token of an earlier cluster", "1")
    assert directory.tls.is_dir()
    credentials_of_job.remove_secrets(directory, directory.token(), "1")
    assert not directory.tls.is_dir()


def test_the_scripts_of_a_bundle_keep_their_keys_for_the_next_launch(directory: ClusterDirectory) -> None:
    directory.tls.mkdir()
    (directory.path / "launch.sh").touch()
    credentials_of_job.remove_secrets(directory, directory.token(), "1")
    assert directory.tls.is_dir()


@pytest.mark.parametrize("end_from", ["the environment", "the queue", "nowhere"])
def test_the_credentials_of_a_cluster_in_one_job_are_valid_as_long_as_the_job(
    directory: ClusterDirectory, end_from: str
) -> None:
    now, day = time.time(), 86400.0
    end = now + 3600

    class Queue(Slurm):
        def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
            return {"1": status(JobState.RUNNING, end=end)} if end_from == "the queue" else {}

    own = OwnJob(job_id="1", name="demo", end=end if end_from == "the environment" else None)
    credentials_of_job.make_credentials(directory, own, Queue())
    valid = 3650 * day if end_from == "nowhere" else 3600 + day  # a day, because clocks differ
    assert not certificates_and_keys.problem(directory, now=now + valid - 60)
    assert "expired on" in certificates_and_keys.problem(directory, now=now + valid + 60)


async def test_a_wanted_state_that_cannot_be_read_at_the_start_does_not_end_the_lease(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    monkeypatch.setenv("HPCGPU_SCHEDULER_JOB", "1")
    monkeypatch.setenv("HPCGPU_FABRIC", '{"fabric": "TCP"}')
    monkeypatch.setenv("HPCGPU_LEASE", "0.2")
    monkeypatch.setattr(end_without_manager, "_FIRST_HEARTBEAT", 0.0)
    directory.write("wanted.json", "{")
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        await scheduler_preload.dask_setup(scheduler)
        directory.want(Wanted())
        await asyncio.wait_for(scheduler.finished(), 30)


async def test_a_scheduler_publishes_a_dashboard_that_others_reach_and_removes_its_own_contact_only(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    arguments = {"dashboard": False, "dashboard_address": ":0"}  # it listens on all interfaces
    async with Scheduler(host="127.0.0.1", port=0, **arguments) as scheduler:
        contact = scheduler_preload.publish_contact(scheduler, directory, job_id="1", fabric="TCP")
        assert contact.dashboard.startswith("127.0.0.1:") and directory.contact() == contact
        file = directory.path / "scheduler.json"
        assert json.loads(file.read_text())["address"] == contact.client
        monkeypatch.setenv("HPCGPU_SCHEDULER_JOB", "2")
        await scheduler_preload.dask_teardown(scheduler)
        assert directory.contact() == contact and file.exists()
        monkeypatch.setenv("HPCGPU_SCHEDULER_JOB", "1")
        await scheduler_preload.dask_teardown(scheduler)
        assert directory.contact() is None and not file.exists()


async def test_workers_and_clients_get_the_address_of_their_own_listener(directory: ClusterDirectory) -> None:
    async with Scheduler(host=["127.0.0.1", "127.0.0.2"], port=[0, 0], dashboard=False) as scheduler:
        contact = scheduler_preload.publish_contact(scheduler, directory, job_id="1", fabric="TCP")
    assert contact.workers.startswith("tcp://127.0.0.1:"), "in their fast network"
    assert contact.client.startswith("tcp://127.0.0.2:"), "in the network that login nodes reach"


async def test_a_second_scheduler_that_started_at_the_same_time_ends_without_a_word_to_workers(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: signals.append(number))
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    monkeypatch.setenv("HPCGPU_SCHEDULER_JOB", "2")
    with socket.create_server(("127.0.0.1", 0)) as first:
        address = f"tcp://127.0.0.1:{first.getsockname()[1]}"
        contact = Contact(token=directory.token(), job_id="1", workers=address, client=address)
        directory.publish(contact)
        await scheduler_preload.dask_setup(cast(Scheduler, None))
    assert signals == [signal.SIGTERM] and directory.contact() == contact
    assert "cluster demo already has a scheduler, in job 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written: No space left on device. Make room"),
        (KeyError("of a new release"), "KeyError: 'of a new release'"),
    ],
)
async def test_a_scheduler_that_cannot_publish_its_contact_ends_its_job_and_reports_why(
    directory: ClusterDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    words: str,
) -> None:
    def fails(directory: ClusterDirectory, contact: Contact) -> None:
        raise error

    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: signals.append(number))
    monkeypatch.setattr(ClusterDirectory, "publish", fails)
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    monkeypatch.setenv("HPCGPU_SCHEDULER_JOB", "1")
    monkeypatch.setenv("HPCGPU_FABRIC", '{"fabric": "TCP"}')
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        await scheduler_preload.dask_setup(scheduler)
    printed = capsys.readouterr().err
    assert signals == [signal.SIGTERM] and words in printed and "hpcgpu: the scheduler of cluster demo " in printed


def test_a_journal_that_a_crash_cut_short_is_read_to_there(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "5")
    with (directory.path / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "intent", "na')
    assert [(s.name, s.job_id) for s in directory.submits()] == [("demo-0", "5")]
    assert not directory.closed


def test_a_name_whose_jobs_are_alive_is_refused_and_one_whose_jobs_are_not_is_kept_aside(
    directory: ClusterDirectory,
) -> None:
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "5")
    with pytest.raises(ClusterExists, match="its jobs 5 are in the queue"):
        create_directory.claim(directory.path, lambda submits: ["5"])
    again = create_directory.claim(directory.path, lambda submits: [])
    assert again.submits() == [] and len(list(directory.path.parent.iterdir())) == 2


def test_credentials_are_never_readable_by_others(directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    real = os.open

    def watched(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_CREAT:  # what is only read has no mode
            modes.append(mode)
        return real(path, flags, mode, **rest)

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", watched)
        certificates_and_keys.create(directory)
    finally:
        os.umask(before)
    assert modes and set(modes) == {0o600}
    assert directory.tls.stat().st_mode & 0o777 == 0o700


def status(state: JobState, **rest: Any) -> JobStatus:
    return JobStatus(job_id="1", state=state, words=slurm.REASONS, **rest)


def monitor() -> Monitor:
    watched = Monitor(Slurm(), grace=60)
    watched.watch("1", "demo-0", now=0)
    return watched


def test_a_failed_poll_keeps_the_last_state() -> None:
    watched = monitor()
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.RUNNING)}), now=1)
    watched.record(Answer(frozenset({"1"}), error="down"), now=1e6)
    assert watched.views["1"].status.state is JobState.RUNNING and watched.error == "down"


def test_a_job_that_vanished_is_given_up_only_after_the_grace_period() -> None:
    watched = monitor()
    watched.record(Answer(frozenset({"1"})), now=10)
    watched.record(Answer(frozenset({"1"})), now=69)
    assert watched.views["1"].status.state is JobState.UNKNOWN
    watched.record(Answer(frozenset({"1"})), now=70)
    assert watched.views["1"].status.state is JobState.FAILED


def test_a_single_answer_that_leaves_a_job_out_is_never_believed() -> None:
    assert not presumed_ended(missing=3600, answers=1)
    assert not presumed_ended(missing=3600, answers=1, cancelled=True)
    assert presumed_ended(missing=1, answers=2, cancelled=True)
    assert not presumed_ended(missing=1, answers=2)
    watched = monitor()
    watched.record(Answer(frozenset({"1"})), now=10)
    watched.record(Answer(frozenset({"1"}), error="down"), now=500)
    assert watched.views["1"].status.state is JobState.UNKNOWN, "a poll that failed says nothing"


@pytest.mark.parametrize(
    ("submitted", "shown", "words"),
    [
        (0.0, False, "the queue has not known it for 60 s, nor ever since its submit: it ended at once, or "),
        (-600.0, False, "the queue has not known it for 60 s]"),  # another program submitted it long ago
        (0.0, True, "the queue has not known it for 60 s]"),
    ],
)
def test_only_a_job_that_the_queue_never_showed_is_reported_as_dropped(
    submitted: float, shown: bool, words: str
) -> None:
    watched = Monitor(Slurm(), grace=60)
    watched.watch("1", "demo-0", now=submitted)
    if shown:
        watched.record(Answer(frozenset({"1"}), {"1": status(JobState.RUNNING)}), now=5)
    for now in (10, 70):
        watched.record(Answer(frozenset({"1"})), now=now)
    assert f"the queue has forgotten how it ended [{words}" in explain(watched.views["1"].status)


def test_a_job_whose_worker_connects_is_alive_although_the_queue_has_forgotten_it_and_not_after_its_end() -> None:
    watched = monitor()
    for now in (10, 70):
        watched.record(Answer(frozenset({"1"})), now=now)
    assert not watched.alive() and not watched.ended(), "the queue itself did not report its end"
    watched.proven("1")
    assert watched.alive() == {"1"}
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.COMPLETED)}), now=80)
    watched.proven("1")
    assert not watched.alive() and watched.ended() == {"1"}


def test_a_state_that_hpcgpu_does_not_have_leaves_the_last_state_with_its_node_and_is_the_reason() -> None:
    watched = monitor()
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.RUNNING, node="n1")}), now=10)
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.UNKNOWN, reason="HIBERNATING")}), now=20)
    found = watched.views["1"].status
    assert (found.state, found.node, found.reason) == (JobState.RUNNING, "n1", "HIBERNATING")


def test_a_queue_that_does_not_answer_ends_no_job_and_its_words_are_kept() -> None:
    class Away(Slurm):
        def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
            raise BatchUnavailable("`squeue` failed: no route to host")

    watched = monitor()
    watched.batch = Away()
    for now in (0.0, 1e4, 2e4, 3e4):
        assert watched.poll_if_due(now=now)
    assert watched.alive() == {"1"} and watched.error == "`squeue` failed: no route to host"


def test_a_command_that_cannot_be_started_for_now_is_tried_again_as_if_the_queue_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*arguments: Any, **named: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    pauses: list[float] = []
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(BatchUnavailable, match="`squeue` cannot be started: Resource temporarily unavailable"):
        Slurm(attempts=3, sleep=pauses.append).poll(["1"])
    assert len(pauses) == 2


def test_an_answer_on_some_jobs_is_not_the_time_of_the_last_answer_on_all() -> None:
    watched = monitor()
    watched.watch("2", "demo-1", now=0)
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.RUNNING)}), now=10)
    assert watched.answered_at is None
    watched.record(Answer(frozenset({"1", "2"}), {"1": status(JobState.RUNNING)}), now=20)
    assert watched.answered_at == 20


def test_the_monitor_polls_when_the_cadence_allows_it() -> None:
    watched = monitor()
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.RUNNING)}), now=100.0)
    assert not watched.poll_if_due(now=135.0), "nothing is waited for"
    watched.record(Answer(frozenset({"1"})), now=140.0)
    assert watched.cadence.next_poll <= 151.0, "the queue does not know a job: that is settled soon"


def test_the_accounting_is_believed_of_a_job_that_the_queue_forgot() -> None:
    watched = monitor()
    watched.record(Answer(frozenset({"1"}), {}, {"1": status(JobState.OUT_OF_MEMORY)}), now=10)
    assert watched.views["1"].status.state is JobState.OUT_OF_MEMORY
    watched.record(Answer(frozenset({"1"}), {"1": status(JobState.RUNNING)}), now=11)
    assert watched.views["1"].status.state is JobState.OUT_OF_MEMORY, "what ended stays ended"


@given(st.sampled_from(JobState), st.text())
def test_any_reason_is_put_into_words(state: JobState, reason: str) -> None:
    text = explain(status(state, reason=reason))
    assert printable(reason) in text and text.isprintable()
    outlook(status(state, reason=reason))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("4,5,6,7", [4, 5, 6, 7]),
        ("3", [3]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        ("0,0", [0, 0]),
    ],
)
def test_each_worker_has_the_affinity_and_the_memory_of_its_own_gpu(
    visible: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dask_cuda import cuda_worker

    monkeypatch.setattr(cuda_worker, "nvml_device_index", cuda_worker.nvml_device_index)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cpu_affinity.correct_device_index()
    cpu_affinity.correct_device_index()
    asked = [cuda_worker.nvml_device_index(i, cuda_worker.cuda_visible_devices(i)) for i in range(len(expected))]
    assert asked == expected
    assert cuda_worker.nvml_device_index(1, "7,8,9") == 8, "what is not rotated is looked up as before"


def test_the_load_reports_the_bytes_that_somebody_wants_each_once() -> None:
    def result(*, wants: int = 0, waits: int = 0, copies: int = 1, nbytes: int = 100) -> Any:
        return SimpleNamespace(
            who_wants=["client"] * wants, waiters=["task"] * waits, who_has=range(copies), get_nbytes=lambda: nbytes
        )

    held = [result(wants=1), result(waits=1), result(wants=2, copies=2), result()]
    worker: Any = SimpleNamespace(has_what=[])
    assert _wanted(worker, 1000) == 0
    worker.has_what = held
    assert _wanted(worker, 1000) == 250, "the half of what another worker holds too"
    worker.has_what, worker.nbytes = held * 1000, 400_000
    assert _wanted(worker, 400) == 250_000, "a sample stands for all"
    worker.has_what, worker.nbytes = [*[result(wants=1, nbytes=10**8)] * 200, *[result(wants=1)] * 2000], 2 * 10**10
    assert _wanted(worker, 200) == 2 * 10**10, "not more than it holds"


def test_the_name_of_a_function_is_read_without_its_modules() -> None:
    def train(x: int) -> int:
        return x + len(UUIDS)

    by_name = [time.sleep, os.path.join, Clock, len]
    assert [_function_name(dumps(function)) for function in by_name] == ["sleep", "join", "Clock", "len"]
    assert _function_name(dumps(train)) == "train", "it is pickled by value"
    by_rank = [dumps((function, (b"x" * 10**6,), {}, {}))[: 10**5] for function in (train, time.sleep)]
    assert [_function_name(given) for given in by_rank] == ["train", "sleep"], "the arguments of `run_ranked`"
    assert _function_name("increment") == "increment", "of an actor"
    assert _function_name(dumps(Clock().time)) == _function_name(b"\x80") == _function_name(None) == ""


async def test_a_task_is_taken_from_a_leaving_worker_only_by_a_heartbeat_that_is_late_enough() -> None:
    moved: list[str] = []
    task = namedtuple("Task", "key")("task")
    worker = SimpleNamespace(name="demo-0", address="tls://a", executing={}, processing={task}, last_seen=time.time())
    scheduler = SimpleNamespace(
        workers={"tls://a": worker}, transitions=lambda recommended, stimulus: moved.extend(recommended)
    )
    extension: Any = SimpleNamespace(
        scheduler=scheduler, _leaving_since={}, calls=SimpleNamespace(running=lambda ws: 0)
    )
    for after, expected in (
        (0.0, []),
        (1.0, []),
        (3.0, ["task"]),
    ):  # it may have begun the task before it received that it leaves
        worker.last_seen += after
        assert await Extension.unfinished(extension, ["demo-0"]) == {"demo-0": 1}
        assert moved == expected


def test_a_certificate_that_is_over_is_reported(directory: ClusterDirectory) -> None:
    certificates_and_keys.create(directory, 3600, waits=False)
    name, day = directory.path.name, 86400
    assert certificates_and_keys.problem(directory, now=time.time() + day) == ""
    assert f"the certificate of cluster {name} expired on 20" in certificates_and_keys.problem(
        directory, now=time.time() + day + 7200
    )
    early = certificates_and_keys.problem(directory, now=time.time() - day - 60)
    assert f"the certificate of cluster {name} is not valid before 20" in early
    assert f"check the clock of {socket.gethostname()}" in early


@pytest.mark.parametrize(
    ("transports", "why"),
    [
        (("rc_mlx5", "cuda_copy", "tcp"), "UCX over ib0: set by the option `protocol`"),
        (
            ("tcp",),
            "UCX over ib0: set by the option `protocol`; the InfiniBand of this node is not used: this UCX was "
            "built without InfiniBand",
        ),
    ],
)
def test_ucx_that_was_asked_for_and_leaves_infiniband_out_is_reported(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...], why: str
) -> None:
    addresses = {"lo": "127.0.0.1", "ib0": "10.1.0.3"}
    node = Node(has_ucxx=True, ports=("mlx5_0/1",), transports=transports, infiniband=("ib0",), addresses=addresses)
    monkeypatch.setattr(
        complete_dask_commands.protocol_and_interface,
        "this_node",
        lambda *, ucx: node if ucx else replace(node, transports=()),
    )
    monkeypatch.setattr(complete_dask_commands.ucx_authentication, "install", lambda: None)
    monkeypatch.setattr(complete_dask_commands.os, "environ", dict(os.environ))
    arguments = SimpleNamespace(
        gpus=1,
        protocol="ucx",
        interface=None,
        client_interface=None,
        rmm_pool=False,
        cudf_spill=True,
        lease=600.0,
        command=["python", "-m", "x", "--idle-timeout", "3600"],
    )
    command = complete_dask_commands.scheduler_command(arguments, directory, OwnJob(job_id="17", name="demo-scheduler"))  # type: ignore[arg-type]
    assert "ucx,tls" in command or "ucx,tcp" in command
    assert json.loads(complete_dask_commands.os.environ["HPCGPU_FABRIC"])["fabric"].startswith(why)
    assert complete_dask_commands.os.environ["NCCL_SOCKET_IFNAME"] == "=ib0", "that of the workers"
    assert complete_dask_commands.os.environ["HPCGPU_LEASE"] == "600", "then it ends without a manager"
    assert complete_dask_commands.os.environ["HPCGPU_ALLOWED_FAILURES"] == "3", "Dask's default"
    assert int(complete_dask_commands.os.environ["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"]) > 1e6
    assert complete_dask_commands.os.environ["HPCGPU_WORKER_TTL"] == "5 minutes", "Dask's default"
    assert complete_dask_commands.os.environ["HPCGPU_IDLE_TIMEOUT"] == "3600" and command[-2:] == [
        "--idle-timeout",
        "0",
    ]
    assert complete_dask_commands.os.environ["CUDF_SPILL"] == "on", (
        "it can rebuild what workers with cuDF's spilling send"
    )
    arguments.cudf_spill = False
    complete_dask_commands.scheduler_command(arguments, directory, OwnJob(job_id="17", name="demo-scheduler"))  # type: ignore[arg-type]
    assert complete_dask_commands.os.environ["CUDF_SPILL"] == "off", "whatever the user's environment is"


class Listening:
    """What `worker_command` began in the process of a job, which is no process of a job here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, contact: Contact) -> None:
        self.retirements: list[Retirement] = []
        self.after_a_warning: list[Retirement | None] = []
        self.authenticated_ucx = 0
        commands: Any = complete_dask_commands
        monkeypatch.setattr(commands.os, "environ", dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "0,1"})
        monkeypatch.setattr(commands, "wait_for_scheduler", lambda *arguments: contact)
        monkeypatch.setattr(commands.cpu_affinity, "correct_device_index", lambda: None)
        monkeypatch.setattr(commands.protocol_and_interface, "this_node", lambda *, ucx: Node(has_ucxx=True))
        retirements = self.retirements

        def begin(retirement: Retirement) -> None:
            retirements.append(retirement)

        monkeypatch.setattr(commands.Retirement, "begin", begin)
        monkeypatch.setattr(commands.preemption, "listen", self.after_a_warning.append)
        monkeypatch.setattr(commands.ucx_authentication, "install", self.install)

    def install(self) -> None:
        self.authenticated_ucx += 1


def worker(own: OwnJob, directory: ClusterDirectory, *, nodes: int = 1, gpus: int = 2) -> list[str]:
    arguments: Any = SimpleNamespace(
        gpus=gpus,
        nodes=nodes,
        protocol="tcp",
        interface=None,
        timeout=1.0,
        restart_wait=None,
        walltime=3600.0,
        walltime_margin=60.0,
        command=["dask"],
    )
    return complete_dask_commands.worker_command(arguments, directory, Slurm(), own)


@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [
        ("demo-3", 1, "demo-3"),
        ("demo-3", 2, "demo-3-1"),
        ("demo", 1, "demo-by-hand-17"),  # two such jobs must not have one name
        ("demo", 2, "demo-by-hand-17-1"),
    ],
)
def test_workers_have_a_name_of_their_own_by_which_they_retire_before_the_walltime_ends(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, name: str, nodes: int, expected: str
) -> None:
    contact = Contact(token="", job_id="1", workers="tcp://10.0.0.1:1", client="tcp://10.0.0.1:1")
    begun = Listening(monkeypatch, contact)
    command = worker(OwnJob(job_id="17", name=name, node=1, warned=True), directory, nodes=nodes)
    assert command[command.index("--name") + 1] == expected and command[-1] == "tcp://10.0.0.1:1"
    (retirement,) = begun.retirements
    assert retirement.names == [expected, f"{expected}-0", f"{expected}-1"], "dask-cuda adds the number of the GPU"
    assert (retirement.walltime, retirement.margin) == (3600.0, 60.0)
    assert begun.after_a_warning == [retirement]


def test_workers_that_end_with_the_job_of_their_scheduler_do_not_retire(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    contact = Contact(token="", job_id="17", workers="tcp://10.0.0.1:1", client="tcp://10.0.0.1:1")
    begun = Listening(monkeypatch, contact)
    worker(OwnJob(job_id="17", name="demo-3", warned=True), directory)
    worker(OwnJob(job_id="17", name="demo-3"), directory)  # a script that Slurm does not warn
    assert begun.after_a_warning == [None] and begun.retirements == []


def test_collectives_of_workers_use_the_network_of_the_scheduler(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Listening(monkeypatch, Contact(token="", job_id="1", workers="tcp://10.0.0.1:1", client="tcp://10.0.0.1:1"))
    monkeypatch.setattr(complete_dask_commands.collectives_interface.interface_addresses, "towards", lambda _: "ib0")
    complete_dask_commands.os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
    worker(OwnJob(job_id="17", name="demo-3"), directory)
    assert complete_dask_commands.os.environ["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert complete_dask_commands.os.environ["GLOO_SOCKET_IFNAME"] == "chosen"


def test_the_nannies_of_workers_authenticate_themselves_as_the_workers_do(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Listening(monkeypatch, Contact(token="", job_id="1", workers="ucx://127.0.0.1:1", client="tls://a:1"))
    assert worker(OwnJob(job_id="17", name="demo-3"), directory)[-1] == "ucx://127.0.0.1:1"
    assert begun.authenticated_ucx == 1
    Listening(monkeypatch, Contact(token="", job_id="1", workers="authenticated://127.0.0.1:1", client="tls://a:1"))
    worker(OwnJob(job_id="17", name="demo-3"), directory, gpus=0)
    assert complete_dask_commands.os.environ["HPCGPU_OWN_HOST"] == "127.0.0.1", "not every address of the node"


def test_an_interface_that_the_node_does_not_have_is_refused_by_the_option_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(complete_dask_commands.interface_addresses, "addresses", lambda: {"ib0": "10.1.0.3"})
    complete_dask_commands.check_interface(None)
    complete_dask_commands.check_interface("ib0")
    words = "'eth7' does not exist on .*: ib0 \\(10.1.0.3\\). Set `client_interface` to one of them"
    with pytest.raises(LaunchError, match=words):
        complete_dask_commands.check_interface("eth7", "client_interface")


def test_a_worker_whose_node_cannot_use_the_transport_of_the_scheduler_reports_why(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Listening(monkeypatch, Contact(token="", job_id="1", workers="ucx://10.0.0.1:1", client="tls://a:1"))
    monkeypatch.setattr(complete_dask_commands.protocol_and_interface, "this_node", lambda *, ucx: Node(has_ucxx=False))
    with pytest.raises(LaunchError, match="the scheduler uses UCX, but distributed-ucxx is not installed"):
        worker(OwnJob(job_id="17", name="demo-3"), directory)


@pytest.mark.parametrize(
    ("command", "configured", "why"),
    [
        (["python", "-m", "dask", "cuda", "worker"], None, ""),
        (["--multiprocessing-method", "spawn"], None, "worker_extra_args sets --multiprocessing-method"),
        (["--multiprocessing-method=fork"], None, "worker_extra_args sets --multiprocessing-method"),
        ([], "spawn", "your Dask configuration sets distributed.worker.multiprocessing-method: spawn"),
    ],
)
def test_workers_start_as_the_user_requests(command: list[str], configured: str | None, why: str) -> None:
    assert forkserver.why_not(command, configured) == why


def test_workers_are_forks_by_default_and_the_log_need_not_report_why_they_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert WorkerOptions().worker_start == "forkserver"
    assert not forkserver.prepare(argparse.Namespace(worker_start="spawn", command=[], gpus=0))
    assert not capsys.readouterr().err


PROGRAM = """
import argparse, os, sys
from hpcgpu.runtime import forkserver

print("starts", flush=True)
assert forkserver.prepare(argparse.Namespace(worker_start="forkserver", command=[], gpus=0))
print(hash("x"), {name: os.environ.get(name) for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "HPCGPU_PRESET")})
"""
CONFIGURED = "DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON"
FOUR = "{'OMP_NUM_THREADS': 4}"


@pytest.mark.parametrize(
    ("environ", "starts", "threads"),
    [
        ({}, 2, "1"),
        ({"OMP_NUM_THREADS": "8"}, 2, "8"),
        ({CONFIGURED: FOUR}, 2, "4"),
        ("script", 1, "1"),
        ("script, OMP_NUM_THREADS=8", 1, "8"),
        (f"script, {CONFIGURED}={FOUR}", 2, "4"),
        (f"script, {CONFIGURED}={{'OMP_NUM_THREADS': None}}", 2, None),
        (f"script, {CONFIGURED}={FOUR}, OMP_NUM_THREADS=8", 1, "8"),
    ],
)
def test_the_first_process_of_a_job_starts_again_only_if_it_lacks_what_dask_sets_before_a_worker_starts(
    environ: dict[str, str] | str, starts: int, threads: str | None, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM]
    if isinstance(environ, str):  # the lines of the script
        script = (Path(__file__).parent / "golden" / "slurm-cpu.sbatch").read_text()
        (tmp_path / "script").write_text(
            "set -u\n" + script[script.index("export HPCGPU_PRESET") : script.index("done\n")] + 'done\nexec "$@"'
        )
        command = ["bash", str(tmp_path / "script"), *command]
        environ = dict(setting.split("=") for setting in environ.split(", ")[1:])
    names = forkserver.pre_spawn_environment(forkserver.configured_environment(), {})
    plain = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(command, env=plain | environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seed = "import os; print(hash('x'))"
    expected = subprocess.run(
        [sys.executable, "-c", seed], env=plain | {"PYTHONHASHSEED": "6640"}, capture_output=True, text=True
    ).stdout.strip()
    settings = {"PYTHONHASHSEED": "6640", "OMP_NUM_THREADS": threads, "HPCGPU_PRESET": None}
    assert done.stdout.splitlines() == [*["starts"] * starts, f"{expected} {settings}"]


def test_a_library_that_is_there_at_each_start_does_not_let_the_first_process_start_for_ever(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"x" * 4096)  # as a profiler's LD_PRELOAD would load it
    (tmp_path / "sitecustomize.py").write_text(
        f"import mmap\nwith open({str(tmp_path / 'libcuda.so.1')!r}) as file:\n"
        "    there = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == ["starts"] * 2


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ({"OMP_NUM_THREADS": 1}, {}, {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "6640"}),
        ({"OMP_NUM_THREADS": 1}, {"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "8", "PYTHONHASHSEED": "6640"}),
        ({"OMP_NUM_THREADS": None, "PYTHONHASHSEED": "7"}, {}, {"PYTHONHASHSEED": "7"}),
        ({"PYTHONHASHSEED": 0}, {}, {"PYTHONHASHSEED": "6640"}),
    ],
)
def test_the_fork_server_starts_with_what_nannies_set(
    configured: dict[str, object], environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert forkserver.pre_spawn_environment(configured, environ) == expected


@pytest.mark.parametrize("mode", [None, 0o777], ids=["missing", "writable by others"])
def test_workers_are_spawned_if_the_fork_server_has_no_safe_place_for_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: int | None
) -> None:
    place = tmp_path / "place"
    if mode is not None:
        place.mkdir()
        place.chmod(mode)
    monkeypatch.setattr(forkserver, "_SOCKET_PARENT", place)
    with contextlib.ExitStack() as at_end:
        assert forkserver.begin(gpus=False, at_end=at_end) is None
    said = capsys.readouterr().err
    assert "workers are spawned, and each imports its modules itself: " in said and str(place) in said


def program(text: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, which finds modules in a directory."""
    (place / "program.py").write_text(text)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(place), str(Path(hpcgpu.__file__).parents[1])]),
    }
    command = [sys.executable, str(place / "program.py")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_a_fork_server_that_hangs_in_its_imports_is_ended_and_workers_are_spawned(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("""
import contextlib, os, pathlib, select, signal, socket

for file in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # it is no socket
        each = socket.socket(fileno=os.dup(int(file)))
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            select.select([each], [], [])  # until the first process of the job has connected
pathlib.Path(__file__).with_name("begun").touch()
signal.pause()
""")
    done = program(
        """
import contextlib, os, pathlib, psutil, time
from hpcgpu.runtime import forkserver

forkserver._TIMEOUT, forkserver._MODULES = 0.0, ("hangs",)
if __name__ == "__main__":
    with contextlib.ExitStack() as at_end:
        fork_server = forkserver.begin(gpus=False, at_end=at_end)
        servers = [child for child in psutil.Process().children() if "resource_tracker" not in str(child.cmdline())]
        assert fork_server is not None and len(servers) == 1
        # an earlier end would let multiprocessing start a fork server of its own
        while not pathlib.Path(__file__).with_name("begun").exists():
            time.sleep(0.05)
        assert forkserver.finish(fork_server, ["worker"], gpus=False) == ["worker"]
        servers[0].wait(60)
    os._exit(0)
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "the fork server did not import its modules within 0 s" in done.stderr


def test_the_fork_server_has_nothing_of_the_process_that_it_is_a_fork_of(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text("""
import os, signal, sys
from multiprocessing import forkserver

found = [signal.getsignal(signal.SIGTERM), sys.argv, vars(sys.modules["__main__"]).get("MINE")]
if found[1][0].endswith("program.py"):  # Python itself gives the fork server these (python/cpython#144503)
    found[1] = ["-c"]
print(*found, len(os.listdir("/proc/self/fd")), forkserver._forkserver._lock.locked(), flush=True)
""")
    done = program(
        """
import contextlib, os, signal, sys
from hpcgpu.runtime import forkserver

forkserver._MODULES, MINE = ("looks",), "mine"
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: print("not mine"))
    kept = open(__file__)
    print("twice, if it is written by the fork too", end=" ")
    with contextlib.ExitStack() as at_end:
        fork_server = forkserver.begin(gpus=False, at_end=at_end)
        fork_server._thread.join(60)
        fork_server.stop()
    os._exit(0)
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    # the standard streams, the socket, the pipe that reports its end, and the directory that lists them
    told = "twice, if it is written by the fork too Handlers.SIG_DFL ['-c'] None 6 False"
    assert done.stdout.strip() in (told, told.replace("Handlers.SIG_DFL", "0"))


def test_workers_are_spawned_if_the_first_process_of_the_job_has_threads(tmp_path: Path) -> None:
    done = program(
        """
import contextlib, os, threading, time
from hpcgpu.runtime import forkserver

if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    with contextlib.ExitStack() as at_end:
        assert forkserver.begin(gpus=False, at_end=at_end) is None
    os._exit(0)
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "the first process of the job has 2 threads, but may have only one before a fork" in done.stderr


def test_workers_are_spawned_if_every_user_could_reach_the_socket_of_the_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forkserver, "_SOCKET_PARENT", tmp_path)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(multiprocessing.connection, "arbitrary_address", lambda family: "\0listener-1-0")  # 3.11.0
    with contextlib.ExitStack() as at_end:
        assert forkserver.begin(gpus=False, at_end=at_end) is None
    said = capsys.readouterr().err
    assert "workers are spawned, and each imports its modules itself: " in said and "CVE-2022-42919" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("warned", [True, False])
def test_workers_that_stay_at_a_warning_end_with_the_first_process_of_the_job(
    monkeypatch: pytest.MonkeyPatch, warned: bool
) -> None:
    begun, signals = list[float](), list[signal.Signals]()
    worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)

    async def wait_for_signals() -> int:
        while signals and not begun:  # the second signal comes when the workers retire
            await asyncio.sleep(0)
        assert worker.is_alive()
        signals.append(signal.SIGTERM)
        return signals[-1]

    monkeypatch.setattr(dask_signals, "_waits", [wait_for_signals])
    retirement: Any = SimpleNamespace(warned=lambda: 100.0 if warned else None, begin_at_once=begun.append)
    worker.start()
    try:
        preemption.listen(retirement)
        assert asyncio.run(dask_signals._waits[-1]()) == signal.SIGTERM  # type: ignore[arg-type]
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL and begun == [100.0] * warned
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("number", "retires"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["SIGINT", "scheduler job"]
)
def test_workers_end_at_once_after_another_signal_or_if_their_job_has_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, retires: bool
) -> None:
    calls = list[str]()

    async def wait_for_signals() -> int:
        calls.append("wait")
        return number

    monkeypatch.setattr(dask_signals, "_waits", [wait_for_signals])
    retirement: Any = SimpleNamespace(warned=lambda: calls.append("query the queue")) if retires else None
    preemption.listen(retirement)
    assert asyncio.run(dask_signals._waits[-1]()) == number  # type: ignore[arg-type]
    assert calls == ["wait"]


def test_a_process_that_expects_a_warning_stays_and_its_children_do_not() -> None:
    program = """
import ctypes, os, signal
from hpcgpu.runtime import preemption

preemption.ignore_warning()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
preemption.expect(warned=True)
preemption.ignore_warning()
os.kill(os.getpid(), signal.SIGTERM)
action = ctypes.create_string_buffer(256)  # of C: the handler, 128 bytes of signals, the flags
assert ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action) == 0
flags = int.from_bytes(action.raw[ctypes.sizeof(ctypes.c_void_p) + 128 :][:4], "little")
assert flags & 0x10000000, "without SA_RESTART calls of libraries fail with EINTR"
if not (child := os.fork()):
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""
    environ = {name: value for name, value in os.environ.items() if name != "HPCGPU_WARNED"}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)


def test_a_release_of_dask_cuda_that_waits_for_signals_in_another_way_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCGPU_WARNED", "1")  # of a worker that started this job
    for release, obeys in (("26.6.0", False), ("26.10.00", True), ("26.8.0a12", True)):
        monkeypatch.setitem(sys.modules, "dask_cuda", SimpleNamespace(__version__=release))  # type: ignore[arg-type]
        assert dask_signals.obeyed(gpus=True) is obeys and dask_signals.obeyed(gpus=False)
    preemption.expect(warned=False)
    assert "HPCGPU_WARNED" not in os.environ


def test_forks_of_the_fork_server_draw_different_random_numbers_even_if_it_has_imported_numpy() -> None:
    program = """
import os, numpy.random
import hpcgpu.runtime.forkserver_imports
for _ in range(2):
    if not (child := os.fork()):
        print(numpy.random.random(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 2


async def test_what_a_program_of_a_single_job_has_started_ends_with_it() -> None:
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", "sleep 600 & echo $!; wait", stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(await process.stdout.readline()))
    await single_job._end(process, 5.0)
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone and process.returncode is not None


FOREVER = ["sleep", "600"]


@pytest.fixture
def single(directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[single_job.Single]:
    """A job whose scheduler has a contact at once, and whose workers connect at once. It leaves no process behind."""

    async def connected(*_: object) -> None:
        pass

    monkeypatch.setattr(single_job, "_workers_connected", connected)
    address = "tcp://127.0.0.1:9"
    directory.publish(Contact(token=directory.token(), job_id="17", workers=address, client=address))
    yield single_job.Single(directory, workers=1, timeout=60)
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.cmdline() == FOREVER:
                child.kill()
                left.append(child)
    assert not left


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (["sh", "-c", "exit 0"], 0, "the program ended with exit code 0; scheduler and workers wrote to "),
        (["sh", "-c", "exit 3"], 3, "the program ended with exit code 3"),
        (["sh", "-c", "kill -KILL $$"], 137, "the program ended with signal 9: exit code 137"),
        (["sh", "-c", "test $DASK_SCHEDULER_ADDRESS = tcp://127.0.0.1:9"], 0, "exit code 0"),
        (["/no/such/program"], 127, "/no/such/program cannot be started: No such file or directory"),
        (["/etc/passwd"], 126, "/etc/passwd cannot be started: Permission denied"),
        (
            ["sh", "-c", "kill -USR1 $PPID; sleep 600"],
            128 + signal.SIGUSR1,
            "SIGUSR1 arrived, at the end of",
        ),
    ],
)
async def test_a_single_job_ends_with_its_program_and_its_exit_code(
    single: single_job.Single, capfd: pytest.CaptureFixture[str], program: list[str], code: int, words: str
) -> None:
    assert await single.run(FOREVER, FOREVER, program) == code
    assert words in capfd.readouterr().err


async def test_a_program_of_a_single_job_can_save_its_results_when_the_job_ends(
    single: single_job.Single, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    program = f"trap 'touch {saved}; exit 0' TERM; kill -USR1 $PPID; sleep 500 & wait"
    assert await single.run(FOREVER, FOREVER, ["sh", "-c", program]) == 128 + signal.SIGUSR1
    assert saved.exists()


def test_a_single_job_leaves_no_credentials_behind(
    single: single_job.Single, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contact, made = single.directory.contact(), tmp_path / "single"
    assert contact is not None

    async def there(directory: ClusterDirectory) -> Contact:
        directory.write("dashboard.token", "secret")
        return contact

    monkeypatch.setattr(single_job, "_scheduler_contact", there)
    for name, value in {"HPCGPU_JOB_ID": "7", "HPCGPU_JOB_NAME": "single"}.items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen"
    program = ["sh", "-c", f"find $HPCGPU_CLUSTER_DIRECTORY -name '*.key' -o -name '*.pem' -o -name '*.token' > {seen}"]
    commands = [str(len(FOREVER)), *FOREVER, str(len(FOREVER)), *FOREVER, *program]
    assert single_job.main(["--workers", "1", "--timeout", "60", "local", str(made), *commands]) == 0
    secrets = [Path(line) for line in seen.read_text().splitlines()]
    assert {path.name for path in secrets} == {"key.pem", "cert.pem", "ucx.key", "dashboard.token"}
    assert not any(path.exists() for path in secrets)


@pytest.mark.parametrize("ended", ["the scheduler", "the workers"])
async def test_a_single_job_stops_its_program_if_a_part_of_its_cluster_ends(
    single: single_job.Single, capfd: pytest.CaptureFixture[str], tmp_path: Path, ended: str
) -> None:
    started = tmp_path / "started"
    ends = ["sh", "-c", f"until [ -e {started} ]; do sleep 0.02; done; echo it crashed; exit 1"]
    scheduler, workers = (ends, FOREVER) if ended == "the scheduler" else (FOREVER, ends)
    assert await single.run(scheduler, workers, ["sh", "-c", f"touch {started}; exec sleep 600"]) == 1
    text = capfd.readouterr().err
    assert f"{ended} ended: the program was stopped too" in text and "it crashed" in text


async def test_a_single_job_whose_cluster_does_not_start_starts_no_program(
    single: single_job.Single, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ["touch", str(tmp_path / "started")]
    single.directory.withdraw()
    assert await single.run(["sh", "-c", "echo no port is free; exit 1"], FOREVER, program) == 1
    text = capfd.readouterr().err
    assert "the scheduler ended too early: the program was not started" in text and "no port is free" in text
    single.timeout = 0.2
    assert await single.run(FOREVER, FOREVER, program) == 1
    assert "the job waited 0.2 s (death_timeout) for the scheduler: the program was not" in capfd.readouterr().err
    single.timeout = 60
    stops = ["sh", "-c", "kill -TERM $PPID; exec sleep 600"]
    assert await single.run(stops, FOREVER, program) == 128 + signal.SIGTERM
    assert "SIGTERM arrived while the job waited for the scheduler" in capfd.readouterr().err
    assert not (tmp_path / "started").exists()


def test_a_lifetime_of_workers_in_the_user_s_own_configuration_does_not_end_those_of_a_job(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Listening(monkeypatch, Contact(token="", job_id="1", workers="tcp://10.0.0.1:1", client="tcp://10.0.0.1:1"))
    environ: dict[str, str] = dict(complete_dask_commands.os.environ) | {
        "DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION": "60s"
    }
    monkeypatch.setattr(complete_dask_commands.os, "environ", environ)
    worker(OwnJob(job_id="17", name="demo-3"), directory)
    assert dask.config.collect_env(environ)["distributed"]["worker"]["lifetime"]["duration"] is None


@pytest.mark.parametrize("failing", ["contact.json", "journal.jsonl"])
def test_a_filesystem_that_fails_is_no_end_of_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    directory = create_directory.claim(tmp_path / "demo", None)
    assert start_again._check_scheduler(directory, "tls://127.0.0.1:1") is ConnectionResult.REFUSED, (
        "there certainly is no contact"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tls://127.0.0.1:{listening.getsockname()[1]}"
        directory.publish(Contact(token=directory.token(), job_id="1", workers=address, client=address))
        assert start_again._check_scheduler(directory, address) is ConnectionResult.BUSY, "it may only be busy"
        read = checked_files.read

        def fails(path: Path, *arguments: Any, **options: Any) -> bytes:
            if path.name == failing:
                raise OSError(errno.ESTALE, "Stale file handle")
            return read(path, *arguments, **options)

        monkeypatch.setattr(checked_files, "read", fails)
        assert start_again._check_scheduler(directory, address) is ConnectionResult.SILENT
        monkeypatch.undo()
        assert start_again._check_scheduler(directory, "tls://127.0.0.1:1") is ConnectionResult.REFUSED, (
            "this one has ended"
        )
    assert start_again._check_scheduler(directory, address) is ConnectionResult.REFUSED
