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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from tests.local.test_listeners import Bomb, anonymous, frames, listening, refused, speaks_http, works

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


async def test_no_process_listens_or_connects_without_a_key() -> None:
    with pytest.raises(OSError, match="does not have the key"):
        await listen("authenticated://127.0.0.1", lambda comm: None)
    async with echo(messages := list[Any]()) as address:
        with pytest.raises(OSError, match="this program does not have the key of the cluster"):
            await connect(address, timeout=60)
        with pytest.raises(OSError):
            await connect(address.replace("authenticated://", "tcp://"), timeout=3)
        await converse(address)
    assert messages == [{"x": 1}]


async def test_who_has_the_key_neither_listens_nor_connects_without_the_challenge() -> None:
    with pytest.raises(RuntimeError, match="connections of this cluster are authenticated, refusing communication"):
        await listen("tcp://127.0.0.1", lambda comm: None, **{ARGUMENT: KEY})
    plain = await listen("tcp://127.0.0.1", lambda comm: comm.write("hello"))
    with pytest.raises(RuntimeError, match="connections of this cluster are authenticated, refusing communication"):
        await connect(plain.contact_address, timeout=60, **{ARGUMENT: KEY})
    comm = await connect(plain.contact_address, timeout=150)
    assert await comm.read() == "hello", "other programs use plain TCP as ever"
    await comm.close()
    plain.stop()


async def test_a_process_of_a_cluster_with_tls_is_shown_by_the_option_of_dask_what_it_may_do_without(
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


async def test_an_answer_for_ucx_is_none_for_tcp() -> None:
    async with echo([]) as address:
        port = int(address.rpartition(":")[2])
        of_ucx = ucx_authentication.Connector(KEY, ucx_authentication.signed_address("127.0.0.1", port))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(of_ucx.hello())
        challenge = await asyncio.wait_for(reader.readexactly(80), 150)
        with pytest.raises(hpcgpu.errors.AuthenticationError):
            of_ucx.respond(challenge)
        writer.close()


async def test_a_program_that_requires_encryption_is_not_given_less() -> None:
    with pytest.raises(RuntimeError, match="encryption required"):
        await listen("authenticated://127.0.0.1", lambda comm: None, require_encryption=True, **{ARGUMENT: KEY})
    async with echo([]) as address:
        with pytest.raises(RuntimeError, match="encryption required"):
            await connect(address, require_encryption=True, **{ARGUMENT: KEY})


# A whole cluster


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue, request: pytest.FixtureRequest) -> Iterator[LocalGPUCluster]:
    """A cluster that tests share; `@pytest.mark.parametrize("cluster", [...], indirect=True)` is how workers start."""
    start = getattr(request, "param", "forkserver")
    with LocalGPUCluster(**CPU, jobs=2, name="target", security="authenticated", worker_start=start) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


def ports(cluster: LocalGPUCluster) -> list[tuple[str, int]]:
    """Each port on which a process of the cluster listens, and that does not speak HTTP: those of Dask."""
    reached = {("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port) for ip, port in listening(cluster)}
    return sorted(address for address in reached if not speaks_http(*address))


@pytest.mark.parametrize("cluster", ["spawn"], indirect=True)  # forkserver: tests/slurm/test_slurm_cluster.py
def test_members_work_together_and_strangers_are_refused_on_every_port(
    cluster: LocalGPUCluster, tmp_path: Path
) -> None:
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
            silent.enter_context(socket.create_connection((host, int(port)), timeout=150))
        # a few other connections may have ended
        until(lambda: len(scheduler.net_connections("tcp")) > count + 150, "the scheduler has the silent connections")
        assert client.submit(sum, [1, 2, 3]).result(timeout=150) == 6
        until(lambda: len(scheduler.net_connections("tcp")) < count + 20, "their file descriptors are free again")


def test_the_files_have_the_key_and_nothing_shows_it(cluster: LocalGPUCluster) -> None:
    tls = cluster.directory.tls
    assert [path.name for path in tls.iterdir()] == ["ucx.key"] and (tls / "ucx.key").stat().st_mode & 0o777 == 0o600
    key = (tls / "ucx.key").read_text()
    logs = "".join(map(str, cluster.get_logs().values()))
    assert "Start worker at" in logs and "workers are spawned" not in logs, "they start as the option says"
    shown = logs + repr(cluster.security) + cluster.job_script()
    arguments = " ".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    assert key not in shown + arguments + json.dumps(dict(os.environ))
    contact = cluster.directory.contact()
    assert contact is not None and contact.client.startswith("authenticated://")
    with urllib.request.urlopen(cluster.dashboard_link.removesuffix("/status") + "/health", timeout=150) as page:
        assert page.read() == b"ok", "the dashboard is as ever"


def test_a_program_without_hpcgpu_connects_with_what_is_in_its_environment(
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
