"""Another program may listen at the port of a scheduler that has ended."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.client import lost_scheduler
from hpcgpu.dask_worker import start_again
from hpcgpu.errors import LaunchError
from hpcgpu.runtime import next_scheduler, scheduler_connection
from hpcgpu.runtime.scheduler_connection import ConnectionResult, check_alone, identify, wait_for_scheduler
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory


def cluster(path: Path) -> ClusterDirectory:
    path.mkdir(mode=0o700)
    directory = ClusterDirectory(path)
    about = {"name": "demo", "token": "t", "created": 1, "format": FORMAT, "system": "slurm"}
    directory.write("cluster.json", json.dumps(about))
    certificates_and_keys.create(directory, 3600)
    directory.take_over("python (process 1 on login1)")
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    return cluster(tmp_path / "demo")


@contextmanager
def listens(directory: ClusterDirectory, serve: Callable[[socket.socket], None]) -> Iterator[Contact]:
    """A program listens at the address of the cluster's contact."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        address = f"tls://127.0.0.1:{server.getsockname()[1]}"
        contact = Contact(token="t", job_id="1", workers=address, client=address)
        directory.publish(contact)
        yield contact
        server.shutdown(socket.SHUT_RDWR)


def with_key_of(of: ClusterDirectory, *, trusts: ClusterDirectory | None = None) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=(trusts or of).tls / "cert.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(of.tls / "cert.pem", of.tls / "key.pem")
        with context.wrap_socket(connection, server_side=True) as encrypted:
            encrypted.send(b"x")
            encrypted.recv(1)

    return serve


def http(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def silent(connection: socket.socket) -> None:
    while connection.recv(1000):
        pass


@pytest.fixture(params=["web server", "scheduler of another cluster"])
def stranger(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[socket.socket], None]:
    return http if request.param == "web server" else with_key_of(cluster(tmp_path / "other"))


def test_a_scheduler_proves_who_it_is(directory: ClusterDirectory) -> None:
    with listens(directory, with_key_of(directory)) as contact:
        assert identify(contact, directory) is ConnectionResult.ACCEPTED
        assert not next_scheduler._follows(directory.path, contact.workers)
        with pytest.raises(LaunchError, match="already has a scheduler"):
            check_alone(directory, "2")
    assert identify(contact, directory) is ConnectionResult.REFUSED


def test_a_scheduler_that_refuses_the_certificate_does_not_accept_the_connection(
    directory: ClusterDirectory, tmp_path: Path
) -> None:
    """Under TLS 1.3 the handshake of the other side ends without an error."""
    with listens(directory, with_key_of(directory, trusts=cluster(tmp_path / "other"))) as contact:
        assert identify(contact, directory) is not ConnectionResult.ACCEPTED


async def test_another_program_at_its_port_is_no_scheduler(
    directory: ClusterDirectory, stranger: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listens(directory, stranger) as contact:
        assert identify(contact, directory) is ConnectionResult.REFUSED
        assert next_scheduler._follows(directory.path, contact.workers), "the worker job waits for the next one"
        assert start_again._check_scheduler(directory, contact.workers) is ConnectionResult.REFUSED
        check_alone(directory, "2")  # the next scheduler starts
        looks = iter([True, True, False])
        monkeypatch.setattr(lost_scheduler, "restarts_scheduler", lambda *_: next(looks))
        monkeypatch.setattr(lost_scheduler, "_INTERVAL", 0)
        assert await lost_scheduler.next_contact(directory, contact.client) == ""
        assert next(looks, None) is None, "the client waits for the next one"


async def test_a_scheduler_job_is_distinguished_from_an_earlier_one_that_had_the_same_address(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is a random one of the same node."""
    monkeypatch.setattr(next_scheduler, "_served", ["", "1"])
    with listens(directory, with_key_of(directory)) as contact:
        assert not next_scheduler._follows(directory.path, contact.workers), "it lives: its workers end as intended"
        assert await lost_scheduler.next_contact(directory, contact.client, "1") == "", "it lives"
        directory.publish(replace(contact, job_id="2"))
        assert next_scheduler._follows(directory.path, contact.workers), "the job starts workers for the next one"
        assert await lost_scheduler.next_contact(directory, contact.client, "1") == contact.client
        assert await lost_scheduler.next_contact(directory, contact.client, "2") == ""


def test_a_worker_job_does_not_start_its_workers_for_another_program(
    directory: ClusterDirectory, stranger: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Queue(BatchSystem):
        def __init__(self) -> None:
            pass

    Queue.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    status: JobStatus | None = None
    monkeypatch.setattr(scheduler_connection.SchedulerWatch, "poll", lambda *_, **__: status)
    with listens(directory, stranger), pytest.raises(LaunchError, match="no scheduler answered within 1 s"):
        wait_for_scheduler(directory, Queue(), 1, restart_wait=1)


def test_a_scheduler_that_only_is_busy_is_not_taken_for_another_program(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_connection, "_TIMEOUT", 0.1)
    monkeypatch.setattr(next_scheduler, "_PAUSE", 0.0)
    with listens(directory, silent) as contact:
        assert identify(contact, directory) is ConnectionResult.BUSY
        with pytest.raises(LaunchError, match="already has a scheduler"):
            check_alone(directory, "2")
        assert next_scheduler._follows(directory.path, contact.workers), "the first step of the job finds it again"
        directory.intend("demo-scheduler", "scheduler")
        directory.submitted("demo-scheduler", "1")
        directory.ended({"demo-scheduler": "1"})
        check_alone(directory, "2")  # its job has ended, so it is another program
