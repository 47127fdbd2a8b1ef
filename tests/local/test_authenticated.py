"""`security="authenticated"`: TCP without TLS, to which nobody outside the cluster can speak, over any port of Dask."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client
from distributed.comm import connect, listen
from distributed.security import Security

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.fabric import authenticated_tcp, ucx_authentication
from hpcgpu.fabric.ucx_authentication import ARGUMENT
from hpcgpu.store import certificates_and_keys
from tests.helpers import CPU, converse_with, echo_server
from tests.local.test_listeners import Bomb, anonymous, frames, refused, speaks_http, works

pytestmark = pytest.mark.shows("Strangers are refused at every port")

Until = Callable[..., None]
KEY = bytes(range(32))


# One connection


@pytest.fixture(autouse=True)
def _scheme() -> None:
    authenticated_tcp.install()


#: A listener with the key, and who talks to it with the same key.
echo = partial(echo_server, "authenticated://127.0.0.1", KEY)
converse = partial(converse_with, KEY)


async def raw(address: str, first: bytes = b"", *sent: bytes, answer: int = 0) -> bytes:
    """What a listener answers to bytes, until it closes the connection.

    So many bytes of answer are awaited before the rest is sent: who closes with unread bytes resets the connection,
    and what it had answered before can be lost.
    """
    host, port = address.split("://")[1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    answered = b""
    try:
        answered = await asyncio.wait_for(reader.readexactly(answer), 60)
        for one in sent:
            writer.write(one)
        return answered + await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return answered
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_who_knows_the_key_converses_and_no_other_does(caplog: pytest.LogCaptureFixture) -> None:
    messages: list[Any] = []
    async with echo(messages) as address:
        await converse(address)
        with pytest.raises(OSError, match="this program does not have the key of the cluster"):
            await connect(address, timeout=5)
        for other in (bytes(32), bytes(31) + b"\1"):
            with pytest.raises(OSError, match="did not prove that it belongs to this cluster"):
                await connect(address, timeout=5, **{ARGUMENT: other})
        with pytest.raises(OSError):
            await connect(address.replace("authenticated://", "tcp://"), timeout=3)
        await converse(address)
    assert messages == [{"x": 1}, {"x": 1}]
    assert "refused a connection from authenticated://127.0.0.1:" in caplog.text
    assert KEY.hex() not in caplog.text


async def test_no_process_listens_without_a_key() -> None:
    with pytest.raises(OSError, match="does not have the key"):
        await listen("authenticated://127.0.0.1", lambda comm: None)


async def test_who_has_the_key_neither_listens_nor_connects_without_the_challenge() -> None:
    with pytest.raises(RuntimeError, match="connections of this cluster are authenticated, refusing communication"):
        await listen("tcp://127.0.0.1", lambda comm: None, **{ARGUMENT: KEY})
    plain = await listen("tcp://127.0.0.1", lambda comm: comm.write("hello"))
    with pytest.raises(RuntimeError, match="connections of this cluster are authenticated, refusing communication"):
        await connect(plain.contact_address, timeout=60, **{ARGUMENT: KEY})
    comm = await connect(plain.contact_address, timeout=60)
    assert await comm.read() == "hello", "other programs use plain TCP as ever"
    await comm.close()
    plain.stop()


async def test_a_process_of_a_cluster_with_tls_is_told_by_the_option_of_dask_what_it_may_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ucx.key").write_text(KEY.hex())
    monkeypatch.setenv(ucx_authentication.VARIABLE, str(tmp_path / "ucx.key"))
    with dask.config.set({"distributed.comm.require-encryption": True}):
        plain = await listen("tcp://127.0.0.1", lambda comm: comm.write("hello"), require_encryption=False)
        comm = await connect(plain.contact_address, timeout=60, require_encryption=False)
    assert await comm.read() == "hello"
    await comm.close()
    plain.stop()
    with pytest.raises(RuntimeError, match="connections of this cluster are authenticated"):
        await listen("tcp://127.0.0.1", lambda comm: None)


async def test_a_program_that_requires_encryption_is_not_given_less() -> None:
    with pytest.raises(RuntimeError, match="encryption required"):
        await listen("authenticated://127.0.0.1", lambda comm: None, require_encryption=True, **{ARGUMENT: KEY})
    async with echo([]) as address:
        with pytest.raises(RuntimeError, match="encryption required"):
            await connect(address, require_encryption=True, **{ARGUMENT: KEY})


async def test_nothing_that_a_stranger_sends_is_answered_or_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "pwned"))
    messages: list[Any] = []
    async with echo(messages) as address:
        for sent in (frames(bomb) * 4, bomb.ljust(66), struct.pack("<Q", 2**62) * 10, os.urandom(4096), bytes(66)):
            assert await raw(address, sent) == b""
        await converse(address)
    assert not (tmp_path / "pwned").exists() and messages == [{"x": 1}]


async def test_a_stranger_that_knows_the_protocol_gets_a_challenge_and_no_further(tmp_path: Path) -> None:
    messages: list[Any] = []
    async with echo(messages) as address:
        port = int(address.rpartition(":")[2])
        stranger = ucx_authentication.Connector(bytes(32), ucx_authentication.signed_address("127.0.0.1", port))
        bomb = frames(pickle.dumps(Bomb(tmp_path / "pwned")))
        assert len(await raw(address, stranger.hello(), bytes(32), bomb, answer=80)) == 80
        assert len(await raw(address, stranger.hello(), stranger.hello()[:32], bomb, answer=80)) == 80
    assert not (tmp_path / "pwned").exists() and messages == []


@asynccontextmanager
async def listening(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address of a listener that is no member."""
    server = await asyncio.start_server(answer, "127.0.0.1")
    yield f"authenticated://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_what_was_recorded_is_refused_when_it_is_played_again() -> None:
    messages, recorded = list[Any](), list[bytes]()
    async with echo(messages) as address:
        host, port = address.split("://")[1].split(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Stand in for somebody who can read the network: pass on and note what a member sends."""
            there, here = await asyncio.open_connection(host, int(port))
            here.write(recorded_now := await reader.readexactly(66))
            recorded.append(recorded_now)
            here.write_eof()
            writer.write(await there.read())
            writer.close()
            here.close()

        async with listening(relay) as between:
            with pytest.raises(OSError):
                await connect(between, timeout=3, **{ARGUMENT: KEY})
        assert recorded
        for hello in recorded:  # meant for another port: not even the challenge is answered
            assert await raw(address, hello, bytes(32)) == b""
        await converse(address)
    assert messages == [{"x": 1}]


def member(address: str) -> ucx_authentication.Connector:
    """The challenge of a member that connects to this address, to be sent byte by byte."""
    host, port = address.split("://")[1].split(":")
    key = authenticated_tcp._key({ARGUMENT: KEY}, address)
    return ucx_authentication.Connector(key, ucx_authentication.signed_address(host, int(port)))


async def test_a_whole_conversation_that_was_recorded_is_refused_when_it_is_played_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bomb = frames(pickle.dumps(Bomb(tmp_path / "pwned")))
    async with echo(messages := []) as address:
        own, recorded = member(address), list[bytes]()
        host, port = address.split("://")[1].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(own.hello())
        recorded += [own.hello(), own.respond(await reader.readexactly(80))]
        writer.write(recorded[1])
        assert await asyncio.wait_for(reader.read(1), 60), "the listener takes it for a member, and speaks as Dask"
        writer.close()
        assert len(await raw(address, recorded[0], recorded[1], bomb, answer=80)) == 80
        await converse(address)
    assert messages == [{"x": 1}] and not (tmp_path / "pwned").exists()
    assert "the peer does not have the cluster's key" in caplog.text


async def test_a_listener_s_own_proofs_open_none_of_its_connections(tmp_path: Path) -> None:
    bomb = frames(pickle.dumps(Bomb(tmp_path / "pwned")))
    async with echo(messages := []) as address:
        host, port = address.split("://")[1].split(":")
        hello = member(address).hello()
        pairs = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for _, writer in pairs[:2]:
            writer.write(hello)
        challenges = [await reader.readexactly(80) for reader, _ in pairs[:2]]
        pairs[0][1].write(challenges[0][-32:] + bomb)  # its own proof
        pairs[1][1].write(challenges[0][-32:] + bomb)  # that of another connection
        pairs[2][1].write(challenges[0][:66] + bomb)  # a challenge as the first message
        for reader, writer in pairs:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        await converse(address)
    assert messages == [{"x": 1}] and not (tmp_path / "pwned").exists()


async def test_who_connects_does_not_take_its_own_words_for_those_of_a_member() -> None:
    async with echo(messages := []) as address:

        async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Connect back to a listener of the one who connects, and hand on what it says of its hello."""
            hello = await reader.readexactly(66)
            answered = await raw(address, hello[:-18] + member(address).hello()[-18:], bytes(32), answer=80)
            writer.write(answered)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

        async with listening(mirror) as where:
            with pytest.raises(OSError, match="did not prove that it belongs to this cluster"):
                await connect(where, timeout=60, **{ARGUMENT: KEY})
    assert messages == []


async def test_messages_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    bomb = frames(pickle.dumps(Bomb(tmp_path / "pwned")))
    async with echo(messages := []) as address:
        hello = member(address).hello()
        for sent in (hello[:-1] + bomb, hello[:16] + bomb, hello + hello + bomb, hello + bytes(31) + bomb):
            assert len(await raw(address, sent)) in (0, 80), "at most the challenge"
        await converse(address)
    assert messages == [{"x": 1}] and not (tmp_path / "pwned").exists()


async def test_an_answer_for_ucx_is_none_for_tcp() -> None:
    async with echo([]) as address:
        port = int(address.rpartition(":")[2])
        of_ucx = ucx_authentication.Connector(KEY, ucx_authentication.signed_address("127.0.0.1", port))
        challenge = await raw(address, of_ucx.hello(), bytes(32), answer=80)
        with pytest.raises(hpcgpu.errors.AuthenticationError):
            of_ucx.respond(challenge)


async def test_an_impostor_s_listener_gets_nothing_from_who_connects() -> None:
    after = asyncio.get_running_loop().create_future()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(66)
        writer.write(bytes(80))
        after.set_result(await reader.read())
        writer.close()

    async with listening(impostor) as address:
        with pytest.raises(OSError, match="did not prove that it belongs to this cluster"):
            await connect(address, timeout=5, **{ARGUMENT: KEY})
        assert await asyncio.wait_for(after, 60) == b"", "until it hangs up, it says no more"


async def test_a_peer_that_stalls_is_disconnected_in_time(caplog: pytest.LogCaptureFixture) -> None:
    stranger = ucx_authentication.Connector(KEY, bytes(18)).hello()
    with dask.config.set({"distributed.comm.timeouts.connect": "0.3s"}):
        async with echo([]) as address:
            for sent in ((), (stranger[:20],)):
                assert await raw(address, *sent) == b""
            assert len(await raw(address, member(address).hello())) == 80, "the challenge, and nobody answers it"
            assert len(await raw(address, member(address).hello() + bytes(31))) == 80
    assert caplog.text.count("it did not authenticate itself within 0.3 s") == 4


async def test_a_listener_that_stops_keeps_no_connection_that_is_not_authenticated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hello = ucx_authentication.Connector(KEY, bytes(18)).hello()
    async with echo([]) as address:
        host, port = address.split("://")[1].split(":")
        peers = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        peers[0][1].write(hello[:20])
        await converse(address)  # later than those two
    for reader, writer in peers:
        with suppress(ConnectionError):  # what was sent is not read
            assert await asyncio.wait_for(reader.read(), 20) == b"", "they need not wait for the limit of 10 s"
        writer.close()
    assert not caplog.records


async def test_who_only_looks_whether_somebody_listens_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with echo([]) as address:
        host, port = address.split("://")[1].split(":")
        for _ in range(3):
            socket.create_connection((host, int(port))).close()
        await converse(address)
    assert not caplog.records


async def test_a_name_is_dialled_too() -> None:
    async with echo(messages := []) as address:
        await converse(address.replace("127.0.0.1", "localhost"))
    assert messages == [{"x": 1}]


# A whole cluster


@pytest.fixture
def cluster(queue: LocalQueue, request: pytest.FixtureRequest) -> Iterator[LocalGPUCluster]:
    """A test may say by `@pytest.mark.parametrize("cluster", [...], indirect=True)` how workers start."""
    start = getattr(request, "param", "spawn")
    with LocalGPUCluster(**CPU, jobs=2, name="target", security="authenticated", worker_start=start) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


def ports(cluster: LocalGPUCluster) -> list[tuple[str, int]]:
    """Each port on which a process of the cluster listens, and that does not speak HTTP: those of Dask."""
    path = str(cluster.directory.path)
    jobs = [p for p in psutil.process_iter(["cmdline"]) if path in " ".join(p.info["cmdline"] or ())]
    every = {child for job in jobs for child in (job, *job.children(recursive=True))}
    found = {c.laddr for process in every for c in process.net_connections("tcp") if c.status == "LISTEN"}
    reached = {("127.0.0.1" if a.ip in ("0.0.0.0", "::") else a.ip, a.port) for a in found}
    return sorted(address for address in reached if not speaks_http(*address))


@pytest.mark.parametrize("cluster", ["spawn", "forkserver"], indirect=True)
def test_members_work_together_and_strangers_are_refused_on_every_port(
    cluster: LocalGPUCluster, tmp_path: Path
) -> None:
    assert "workers are spawned" not in "".join(map(str, cluster.get_logs().values())), "they start as the option says"
    workers = cluster.scheduler_info["workers"]
    first, second = workers
    named = [cluster.scheduler_address, *workers, *(worker["nanny"] for worker in workers.values())]
    assert all(address.startswith("authenticated://") for address in named)
    apart: dict[str, Any] = {"set_as_default": False}
    with Client(cluster, **apart) as client, hpcgpu.connect("target", **apart) as another:
        data = client.submit(lambda: bytes(1_000_000), workers=[first])
        assert client.submit(len, data, workers=[second]).result() == 1_000_000, "workers talk to each other"
        assert another.submit(sum, [1, 2]).result() == cluster.get_client().submit(sum, [1, 2]).result() == 3

        def inside() -> int:
            from distributed import worker_client

            with worker_client() as own:
                return int(own.submit(sum, [4, 5]).result())

        assert client.submit(inside).result() == 9, "a task has a client too"

        async def listens_plainly() -> str:
            try:
                await listen("tcp://127.0.0.1", lambda comm: None)
            except RuntimeError as error:
                return str(error)
            return "it does"

        said = [*client.run(listens_plainly).values(), client.run_on_scheduler(listens_plainly)]
        assert all("refusing communication from/to tcp://127.0.0.1" in one for one in said), said
    found = ports(cluster)
    assert {int(address.rpartition(":")[2]) for address in named} <= {port for _, port in found}
    assert len(found) >= 6, "scheduler for workers and for clients, two nannies, two workers"
    for host, port in found:
        for message in (
            frames(pickle.dumps(Bomb(tmp_path / "pwned"))) * 4,
            struct.pack("<Q", 2**62) + os.urandom(100),
            os.urandom(4096),
        ):
            with socket.create_connection((host, port), timeout=150) as stranger:
                stranger.sendall(message)
                assert answer(stranger) == b"", f"port {port} answers a stranger"
        with pytest.raises(OSError), socket.create_connection((host, port), timeout=150) as stranger:
            anonymous().wrap_socket(stranger)
    for address in named:
        for scheme in ("tcp", "authenticated"):
            refused(address.replace("authenticated", scheme), Security())
    assert not (tmp_path / "pwned").exists()
    works(cluster)


def answer(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1)
    except ConnectionError:
        return b""


def test_silent_peers_hold_neither_the_cluster_nor_its_file_descriptors(cluster: LocalGPUCluster, until: Until) -> None:
    host, port = cluster.scheduler_address.removeprefix("authenticated://").split(":")
    with Client(cluster) as client, ExitStack() as silent:
        scheduler = psutil.Process(client.run_on_scheduler(os.getpid))
        count = len(scheduler.net_connections("tcp"))
        for _ in range(200):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=60))
        until(lambda: len(scheduler.net_connections("tcp")) >= count + 200, "the scheduler took the connections")
        assert client.submit(sum, [1, 2, 3]).result(timeout=60) == 6
        until(lambda: len(scheduler.net_connections("tcp")) < count + 20, "their file descriptors are free again")


def test_the_files_have_the_key_and_nothing_shows_it(cluster: LocalGPUCluster) -> None:
    tls = cluster.directory.tls
    assert [path.name for path in tls.iterdir()] == ["ucx.key"] and (tls / "ucx.key").stat().st_mode & 0o777 == 0o600
    key = (tls / "ucx.key").read_text()
    shown = "".join(map(str, cluster.get_logs().values())) + repr(cluster.security) + cluster.job_script()
    arguments = " ".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    assert key not in shown + arguments + json.dumps(dict(os.environ))
    contact = cluster.directory.contact()
    assert contact is not None and contact.client.startswith("authenticated://")
    with urllib.request.urlopen(cluster.dashboard_link.removesuffix("/status") + "/health", timeout=60) as page:
        assert page.read() == b"ok", "the dashboard is as ever"


def test_a_program_that_knows_nothing_of_hpcgpu_connects_with_what_is_in_its_environment(
    cluster: LocalGPUCluster,
) -> None:
    schemes = {found.name for found in entry_points(group="distributed.comm.backends")}
    assert "authenticated" in schemes, "hpcgpu was installed before it had this entry point: install it again"
    environment = certificates_and_keys.environment(cluster.directory) | {
        "DASK_SCHEDULER_ADDRESS": cluster.scheduler_address
    }
    program = "from distributed import Client; print(Client().submit(sum, [1, 2, 3]).result())"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.strip() == "6", ran.stderr


def test_such_a_cluster_is_taken_over_and_ends(queue: LocalQueue) -> None:
    options: dict[str, Any] = CPU | {"security": "authenticated", "name": "kept", "shutdown_on_close": False}
    with LocalGPUCluster(jobs=1, **options) as cluster:
        cluster.wait_for_workers(1)
    with LocalGPUCluster.from_name("kept") as later, Client(later) as client:
        assert later.security.get_connection_args("client")[ARGUMENT]
        assert client.submit(sum, [1, 2, 3]).result() == 6
        later.close()
    assert not later.directory.tls.exists()


def test_a_configuration_that_requires_encryption_is_refused_at_once(queue: LocalQueue) -> None:
    with (
        dask.config.set({"distributed.comm.require-encryption": True}),
        pytest.raises(hpcgpu.OptionError, match=r"comm\.require-encryption: remove it there"),
    ):
        LocalGPUCluster(**CPU, security="authenticated")


def test_a_scheduler_in_the_program_is_protected_too(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, jobs=1, scheduler="local", security="authenticated") as cluster:
        cluster.wait_for_workers(1)
        assert cluster.scheduler_address.startswith("authenticated://")
        refused(cluster.scheduler_address.replace("authenticated", "tcp"), Security())
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2, 3]).result() == 6
