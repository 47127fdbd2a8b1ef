"""Dask's TLS connections as hpcgpu makes them: what a healthy connection bears, how one ends, and who is dropped."""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import ctypes
import datetime
import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from distributed import Client, Scheduler
from distributed.comm import connect, listen, tcp
from distributed.comm.core import CommClosedError
from distributed.comm.registry import backends
from distributed.security import Security

from hpcgpu.client.connect import wait_for_contact
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import CertificateError, ClusterError
from hpcgpu.fabric import certificate_errors, tls_connections
from hpcgpu.manager import start_cluster
from hpcgpu.runtime.scheduler_connection import answers
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from tests.unit.simulated import Queue

DAY = datetime.timedelta(days=1)


@pytest.fixture
def upstream() -> Iterator[tcp.TLSBackend]:
    """distributed's own transport, put back afterwards."""
    before = backends["tls"]
    backends["tls"] = plain = tcp.TLSBackend()
    yield plain
    backends["tls"] = before


@pytest.fixture
def ours(upstream: tcp.TLSBackend) -> None:
    tls_connections.install()
    assert backends["tls"] is not upstream


async def test_a_peer_that_closes_before_tls_begins_is_a_broken_connection(
    ours: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tornado raises a ValueError, with which a client would not try again."""

    async def closed(*_: Any, **__: Any) -> None:
        raise ValueError("IOStream is not idle; cannot convert to SSL")

    monkeypatch.setattr(tcp.TLSConnector, "connect", closed)
    security = Security.temporary().get_connection_args("client")
    with pytest.raises(OSError, match="Timed out trying to connect to tls"):
        await connect("tls://127.0.0.1:1", timeout=0.5, **security)


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.temporary()


def leave_error() -> None:
    """Leave an entry in this thread's queue of OpenSSL errors, as CPython does when a connection breaks under OpenSSL
    3.4 and later.
    """
    try:
        library = ctypes.PyDLL(_ssl.__file__)
        new, set_error = library.ERR_new, library.ERR_set_error
    except (AttributeError, OSError):
        pytest.skip("this Python hides OpenSSL's functions: no entry can be made on purpose")
    new()
    set_error(2, errno.EPIPE, None)  # ERR_LIB_SYS


@contextlib.asynccontextmanager
async def connection(security: Security) -> AsyncIterator[tuple[Any, Any]]:
    """Yield both ends of a TLS connection of distributed."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def serve(comm: Any) -> None:
        accepted.set_result(comm)

    async with listen("tls://127.0.0.1:0", serve, **security.get_listen_args("scheduler")) as listener:
        comm = await connect(listener.contact_address, **security.get_connection_args("client"))
        other = await accepted
        try:
            yield comm, other
        finally:
            comm.abort()
            other.abort()
            tls_connections.clear_errors()


@pytest.mark.parametrize("reader", ["connecting", "listening"])
async def test_an_error_that_another_connection_left_behind_does_not_break_a_healthy_one(
    ours: None, security: Security, reader: str
) -> None:
    async with connection(security) as ends:
        here, there = ends if reader == "connecting" else reversed(ends)
        leave_error()
        reading = asyncio.ensure_future(here.read())  # there is nothing to read yet
        await asyncio.sleep(0)
        leave_error()
        await there.write("still here")
        assert await reading == "still here"
        leave_error()
        await here.write("so am I")
        assert await there.read() == "so am I"


async def test_cpython_still_needs_that(upstream: None, security: Security) -> None:
    async with connection(security) as (here, there):
        leave_error()
        try:
            reading = asyncio.ensure_future(here.read())
            await asyncio.sleep(0)
            await there.write("still here")
            with contextlib.suppress(CommClosedError):
                assert await reading != "still here", (
                    "this CPython clears OpenSSL's error queue itself (python/cpython#148594): once the oldest that "
                    "hpcgpu supports does, "
                    "remove clear_errors from hpcgpu/fabric/tls_connections.py"
                )
        finally:
            tls_connections.clear_errors()


def raw_pair(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return both ends of a TLS connection without waiting, as tornado has them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    one.setblocking(False)
    other.setblocking(False)
    ends = (
        client.wrap_socket(one, do_handshake_on_connect=False),
        server.wrap_socket(other, server_side=True, do_handshake_on_connect=False),
    )
    done: set[ssl.SSLSocket] = set()
    while len(done) < 2:
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                end.do_handshake()
                done.add(end)
    return ends


def contexts(security: Security, *, client: bool, server: bool) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return contexts for both ends, with our socket where it requests that."""
    both = (security.get_connection_args("client")["ssl_context"], security.get_listen_args("scheduler")["ssl_context"])
    for context, our in zip(both, (client, server), strict=True):
        if our:
            context.sslsocket_class = tls_connections.Socket
    return both


def read(end: ssl.SSLSocket) -> bytes:
    """Read what is there, as tornado does; wait for the first byte, for the error or for the end."""
    buffer = bytearray(100)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(ssl.SSLWantReadError):
            return bytes(buffer[: end.recv_into(buffer, 100)])
    raise AssertionError("nothing came")


def drain(end: ssl.SSLSocket, size: int) -> list[int]:
    """Read so many bytes; return how many came with each call that had any."""
    counts: list[int] = []
    deadline = time.monotonic() + 30
    while sum(counts) < size and time.monotonic() < deadline:
        with contextlib.suppress(ssl.SSLWantReadError):
            counts.append(end.recv_into(bytearray(size - sum(counts))))
    assert sum(counts) == size
    return counts


def beneath(end: ssl.SSLSocket) -> socket.socket:
    """Return the connection without its TLS."""
    return socket.socket(fileno=os.dup(end.fileno()))


def arrived(end: ssl.SSLSocket, size: int) -> None:
    """Wait until so much is in the buffer of a connection that reading it needs no waiting."""
    deadline, there = time.monotonic() + 30, 0
    with beneath(end) as plain:
        while there < size and time.monotonic() < deadline:
            there = len(plain.recv(2 * size, socket.MSG_PEEK))
    assert there >= size


def test_one_call_reads_all_records_that_are_there(security: Security) -> None:
    far, near = raw_pair(*contexts(security, client=False, server=True))
    data = os.urandom(40_000)  # three records
    assert far.send(data) == len(data)
    arrived(near, len(data))
    buffer = bytearray(100_000)
    assert near.recv_into(buffer) == len(data) and buffer[: len(data)] == data
    assert still_open(near)
    assert far.send(data) == len(data)
    arrived(near, len(data))
    assert near.recv_into(buffer, 20_000) == 20_000 and buffer[:20_000] == data[:20_000], "no more than was asked for"
    assert near.recv_into(memoryview(buffer)) == 20_000 and buffer[:20_000] == data[20_000:]
    for end in (far, near):
        end.close()


def test_an_end_is_reported_after_the_data_before_it(security: Security) -> None:
    far, near = raw_pair(*contexts(security, client=False, server=True))
    far.send(b"x" * 20_000)
    with contextlib.suppress(ssl.SSLError):
        far.unwrap()
    far.close()
    assert sum(drain(near, 20_000)) == 20_000
    assert read(near) == b"" and read(near) == b""
    near.close()


def test_an_error_is_reported_after_the_data_before_it_and_hurts_no_other_connection(security: Security) -> None:
    client, server = contexts(security, client=False, server=True)
    (far, near), (other, other_far) = raw_pair(client, server), raw_pair(client, server)
    far.send(b"x" * 20_000)
    with beneath(far) as plain:
        plain.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # no record of far
    arrived(near, 20_037)
    buffer = bytearray(50_000)
    assert near.recv_into(buffer) == 20_000
    with pytest.raises(ssl.SSLError):
        near.recv_into(buffer)
    other.send(b"hello")
    assert read(other_far) == b"hello"
    for end in (far, near, other, other_far):
        end.close()


def still_open(end: ssl.SSLSocket) -> bool:
    try:
        end.recv_into(bytearray(10), 10)
    except ssl.SSLWantReadError:
        return True
    return False


def test_a_peer_that_goes_away_without_a_word_does_not_break_another_connection(security: Security) -> None:
    """Python's ssl alone, on OpenSSL 3.4 and later: this fails without `clear_errors`."""
    client, server = contexts(security, client=False, server=True)
    (far, near), (leaving, left) = raw_pair(client, server), raw_pair(client, server)
    leaving.send(b"x")
    assert read(left) == b"x"
    left.send(b"unread answer")
    socket.socket.shutdown(leaving, socket.SHUT_RDWR)
    socket.socket.close(leaving)
    with contextlib.suppress(OSError):
        assert read(left) == b""
    with contextlib.suppress(OSError):
        left.send(b"to nobody")
    assert still_open(near)
    far.send(b"hello")
    assert read(near) == b"hello"
    for end in (far, near, left):
        end.close()


@pytest.mark.parametrize("unread", [False, True], ids=["idle", "with an unread answer"])
@pytest.mark.parametrize("way", ["close", "shutdown and close"])
def test_a_plain_peer_sees_our_end_of_a_connection_as_an_end_and_keeps_its_others(
    security: Security, way: str, unread: bool
) -> None:
    client, server = contexts(security, client=False, server=True)
    (peer, ours), (other, other_far) = raw_pair(client, server), raw_pair(client, server)
    peer.suppress_ragged_eofs = False  # an end without close_notify would raise
    other_far.send(b"session tickets are read with the first data")
    assert read(other)
    if unread:
        peer.send(b"unread")
    if way != "close":  # as distributed's TCP.close does
        ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    assert read(peer) == b"", "no close_notify came"
    assert still_open(other), "the end of one connection broke another"
    for end in (peer, other, other_far):
        end.close()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_comms_end_with_close_notify(ours: None, security: Security, how: str) -> None:
    async with connection(security) as (here, there):
        there.stream.socket.suppress_ragged_eofs = False
        if how == "close":
            await here.close()
        else:
            here.abort()
        with pytest.raises(CommClosedError) as seen:
            await there.read()
        assert not isinstance(seen.value.__cause__, ssl.SSLError), "no close_notify came"


def test_a_forked_child_does_not_end_the_connection_of_its_parent(security: Security) -> None:
    near, far = raw_pair(*contexts(security, client=True, server=True))
    child = os.fork()
    if child == 0:
        near.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    near.send(b"the parent goes on")
    assert read(far) == b"the parent goes on"
    near.close()
    assert read(far) == b""
    far.close()


async def test_closing_waits_for_nobody(ours: None, security: Security) -> None:
    async with connection(security) as (here, there):
        there.stream.io_loop.remove_handler(there.stream.socket)  # a peer that hangs, and whose buffers are full
        there.stream._state = None
        here.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(64):
            await here.write(b"x" * 2**20)
        here.abort()
        assert here.closed()


def test_each_thread_clears_its_own_queue() -> None:
    """OpenSSL's queue is one for each thread, and its objects are not for two at a time."""
    failed: list[BaseException] = []

    def many() -> None:
        try:
            for _ in range(2000):
                tls_connections.clear_errors()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# Peers that send nothing


def sockets_of_this_process() -> int:
    return len(psutil.Process().net_connections(kind="tcp"))


async def test_a_silent_peer_is_dropped_and_the_others_are_served(ours: None, security: Security) -> None:
    before = sockets_of_this_process()
    with dask.config.set({"distributed.comm.timeouts.connect": "3s"}):
        scheduler = await Scheduler(security=security, protocol="tls", host="127.0.0.1", dashboard=False, port=0)
    async with scheduler:
        port, idle = scheduler.port, sockets_of_this_process()
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        loris = asyncio.ensure_future(drip(port))
        async with Client(scheduler.address, security=security, asynchronous=True) as client:
            assert (await client.scheduler.identity())["type"] == "Scheduler"
        for reader, writer in silent:
            assert await asyncio.wait_for(reader.read(), 60) == b"", "a silent peer was not dropped"
            writer.close()
        assert await asyncio.wait_for(loris, 60) > 1, "a slow peer was not served at all"
        await until(lambda: sockets_of_this_process() <= idle, "the file descriptors are free again")
    await until(lambda: sockets_of_this_process() <= before, "everything is closed")


async def test_a_peer_that_leaves_right_after_its_handshake_is_no_error(
    ours: None, security: Security, caplog: pytest.LogCaptureFixture
) -> None:
    context = security.get_connection_args("client")["ssl_context"]

    def knock(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection, context.wrap_socket(connection):
            pass

    async with Scheduler(host="127.0.0.1", port=0, protocol="tls", security=security, dashboard=False) as scheduler:
        for _ in range(50):
            await asyncio.to_thread(knock, int(scheduler.address.rpartition(":")[2]))
        async with Client(scheduler.address, security=security, asynchronous=True) as client:
            assert (await client.scheduler.identity())["type"] == "Scheduler"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def drip(port: int) -> int:
    """Send the beginning of a handshake, a byte at a time, until the connection ends; return how many were sent."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    over, sent = asyncio.ensure_future(reader.read()), 0
    for byte in outgoing.read():
        if over.done():
            break
        writer.write(bytes([byte]))
        sent += 1
        await asyncio.wait([over], timeout=0.1)
    with contextlib.suppress(ConnectionError):
        await over
    writer.close()
    return sent


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


# Certificates that are not valid now


def certificate(begin: datetime.timedelta, end: datetime.timedelta, subject: str = "hpcgpu") -> tuple[str, str]:
    """Return key and certificate, valid from and until then, counted from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin)
        .not_valid_after(now + end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem.decode(), made.public_bytes(serialization.Encoding.PEM).decode()


def cluster(path: Path, key: str, certificates: str) -> ClusterDirectory:
    """Make a cluster directory with these credentials."""
    directory = create_directory.claim(path, lambda submits: [], system="local", security=True)
    directory.tls.mkdir(mode=0o700)
    directory.write("tls/key.pem", key)
    directory.write("tls/cert.pem", certificates)
    directory.write("tls/ucx.key", "00" * 32)
    return directory


@contextlib.asynccontextmanager
async def scheduler_of(directory: ClusterDirectory) -> AsyncIterator[Contact]:
    async def serve(comm: Any) -> None:
        await comm.close()

    arguments = certificates_and_keys.security(directory).get_listen_args("scheduler")
    async with listen("tls://127.0.0.1:0", serve, **arguments) as listener:
        address = listener.contact_address
        yield Contact(token=directory.token(), job_id="1", workers=address, client=address, dashboard="", fabric="")


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [
        (-2 * DAY, -DAY, "the certificate of cluster {name} expired on 20"),
        (DAY, 2 * DAY, "the certificate of cluster {name} is not valid before 20"),
    ],
    ids=["expired", "not yet valid"],
)
async def test_a_certificate_that_is_not_valid_now_is_reported_with_its_date_and_this_machine(
    ours: None, tmp_path: Path, begin: datetime.timedelta, end: datetime.timedelta, words: str
) -> None:
    directory = cluster(tmp_path / "demo", *certificate(begin, end))
    async with scheduler_of(directory) as contact:
        with pytest.raises(CertificateError) as probed:
            await asyncio.to_thread(answers, contact, directory)
        directory.publish(contact)
        with pytest.raises(ClusterError) as waited:
            await asyncio.to_thread(wait_for_contact, directory, timeout=30, quiet=True)
        with pytest.raises(CommClosedError) as connected:
            await connect(
                contact.client, timeout=30, **certificates_and_keys.security(directory).get_connection_args("client")
            )
    for seen in (probed, waited):
        assert words.format(name="demo") in str(seen.value)
        assert socket.gethostname() in str(seen.value)
    assert words.format(name="demo").replace("the certificate of cluster demo", "the cluster's certificate") in str(
        connected.value
    )


async def test_a_scheduler_whose_clock_is_wrong_is_named(ours: None, tmp_path: Path) -> None:
    """Its clock cannot be set here: the client shows another certificate than the one whose dates it has, which has
    expired.
    """
    key, good = certificate(-DAY, DAY)
    old_key, old = certificate(-2 * DAY, -DAY, "old")
    there, here = cluster(tmp_path / "there", key, good + old), cluster(tmp_path / "here", old_key, old)
    (tmp_path / "good.pem").write_text(good)
    files = {"tls_client_cert": str(here.tls / "cert.pem"), "tls_client_key": str(here.tls / "key.pem")}
    client = Security(tls_ca_file=str(tmp_path / "good.pem"), require_encryption=True, **files)
    async with scheduler_of(there) as contact:
        with pytest.raises(CommClosedError, match=f"refuses .*check the clock of the machine at {contact.client}"):
            await connect(contact.client, timeout=30, **client.get_connection_args("client"))


def test_what_messages_report_of_dates() -> None:
    day = 86400.0
    assert certificate_errors.problem(0, 2 * day, now=day, host="login1") == ""
    assert certificate_errors.problem(day, 2 * day, now=0, host="login1", what="it") == (
        "it is not valid before 1970-01-02 00:00:00 UTC, and the clock of login1 says 1970-01-01 00:00:00 UTC: check "
        "the clock of login1"
    )
    assert "it expired on 1970-01-02 00:00:00 UTC" in certificate_errors.problem(
        0, day, now=2 * day, host="login1", what="it"
    )


@pytest.mark.parametrize(
    "reason", ["SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSL/TLS_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_BAD_CERTIFICATE"]
)
def test_a_peer_that_refuses_a_certificate_for_its_dates_has_a_wrong_clock(reason: str) -> None:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    assert "check the clock of the machine at 10.0.0.1:8786" in certificate_errors.refusal(error, "10.0.0.1:8786")
    error.reason = "TLSV1_ALERT_UNKNOWN_CA"
    assert certificate_errors.refusal(error, "10.0.0.1:8786") == ""


# What a cluster's own credentials are


def test_a_certificate_outlasts_ninety_days_in_the_queue_and_the_walltime_after_them(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local", security=True)
    certificates_and_keys.create(directory, walltime=7200)
    made = x509.load_pem_x509_certificate((directory.tls / "cert.pem").read_bytes())
    now, minute = datetime.datetime.now(datetime.UTC), datetime.timedelta(minutes=1)
    assert made.not_valid_after_utc > now + 90 * DAY + 120 * minute - minute
    assert made.not_valid_before_utc < now - DAY + minute, "a node's clock may be behind"


@pytest.mark.parametrize(("end", "days"), [("end", 90), ("restart", 3650)])
def test_the_certificate_outlasts_all_scheduler_jobs_that_follow_the_first_one(
    tmp_path: Path, end: str, days: int
) -> None:
    """A detached cluster may have one after the other for years, and its workers and clients keep the certificate."""
    options = {"name": "demo", "cluster_directory": str(tmp_path), "gpus_per_node": 1, "on_scheduler_end": end}
    directory, _ = start_cluster.claim(resolve("slurm", options | {"scheduler": {"walltime": "2h"}}), Queue())
    made = x509.load_pem_x509_certificate((directory.tls / "cert.pem").read_bytes())
    left = made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert days * DAY - DAY < left < (days + 1) * DAY


async def test_a_process_in_a_job_takes_and_makes_no_connection_that_is_not_encrypted(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local", security=True)
    certificates_and_keys.create(directory)
    configured = dask.config.merge(
        dask.config.config, dask.config.collect_env(certificates_and_keys.environment(directory))
    )
    with dask.config.set(distributed=configured["distributed"]):
        for role in ("scheduler", "worker", "client"):
            with pytest.raises(RuntimeError, match="encryption required"):
                await connect("tcp://127.0.0.1:1", **Security().get_connection_args(role))
        with pytest.raises(RuntimeError, match="encryption required"):
            await listen("tcp://127.0.0.1:0", lambda comm: None, **Security().get_listen_args("worker"))


def test_a_connection_ends_also_if_a_child_still_has_a_copy_of_it(security: Security) -> None:
    near, far = raw_pair(*contexts(security, client=True, server=True))
    with beneath(near), beneath(far) as plain:
        near.shutdown(socket.SHUT_RDWR)
        near.close()
        plain.settimeout(20)
        while plain.recv(4096):
            pass
    far.close()
