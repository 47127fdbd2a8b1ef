"""A client on a laptop, and a cluster behind a login node: what shells and sites forbid, and what breaks on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed import Client
from distributed.client import FutureCancelledError
from laptop import Relay
from sshd_bed import SECONDS, SYSTEM_PATH, LoginNode, Nodes, in_shell

import hpcgpu
from hpcgpu.client import reached_by_ssh
from hpcgpu.ssh import login, tunnel
from hpcgpu.ssh.login import Login
from tests import helpers
from tests.conftest import queue_in, told

pytestmark = pytest.mark.shows("A laptop reaches a cluster by ssh; its connection breaks")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster `demo` on hosts that go on when the login node ends; the variables that lead to it."""
    place = tmp_path_factory.mktemp("site")
    variables = {
        "HOME": str(place),
        "DASK_HPCGPU__CLUSTER_DIRECTORY": str(place / "clusters"),
        "DASK_TEMPORARY_DIRECTORY": str(place / "dask"),
        "HPCGPU_QUEUE_DIRECTORY": str(place / "queue"),
    }
    with queue_in(place):
        started = helpers.hpcgpu("start", "demo", *helpers.ON_CPUS, "--jobs", "1", **variables)
        assert started.returncode == 0, started.stderr
        try:
            yield variables
        finally:
            helpers.hpcgpu("stop", "demo", **variables)


@pytest.fixture
def reach(site: dict[str, str], login_node: Nodes) -> Callable[..., LoginNode]:
    """Starts a login node of the site."""
    return lambda **settings: login_node(environment=site, **settings)


@pytest.fixture
def connect() -> Iterator[Callable[[], Client]]:
    """Connects to the cluster."""
    clients: list[Client] = []

    def another() -> Client:
        clients.append(hpcgpu.connect("login1:demo", quiet=True, timeout=SECONDS))
        return clients[-1]

    yield another
    for client in clients:
        client.close()
    for one in reached_by_ssh._tunnels.values():  # they would try the login node until the program ends
        one.close()
    reached_by_ssh._tunnels.clear()


Connect = Callable[[], Client]
Reach = Callable[..., LoginNode]
FORBIDS = ("AllowTcpForwarding no", "AllowStreamLocalForwarding no", "DisableForwarding yes", "MaxSessions 1")


@pytest.mark.parametrize("shell", ["tcsh", "fish", "rbash"])
def test_a_client_works_whatever_the_shell_and_the_site_forbid(
    site: dict[str, str], reach: Reach, connect: Connect, shell: str
) -> None:
    reach(lines=[*FORBIDS, f"ForceCommand {in_shell(shell)}"])
    for start_up in (".tcshrc", ".bashrc", ".config/fish/config.fish"):
        path = Path(site["HOME"]) / start_up
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("echo Welcome\n")
    client = connect()
    assert client.submit(lambda x: x + 1, 41).result(SECONDS) == 42
    assert client.scheduler.address.startswith("tls://127.0.0.1:")


#: In place of hpcgpu: the connection breaks before the first command has answered.
BREAKS = """#!/bin/sh
[ ! -e "$HOME/broke" ] || exec {python} -P -m hpcgpu "$@"
touch "$HOME/broke"
kill -9 $PPID
sleep 100
"""


@pytest.mark.parametrize("shares", [True, False], ids=["", "as on Windows"])
def test_a_connection_that_breaks_before_the_answer_is_opened_again(
    login_node: Nodes, home: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    node = login_node(environment={"PATH": f"{home / 'node/far/home/bin'}:{SYSTEM_PATH}"})
    program = node.home / "bin/hpcgpu"
    program.parent.mkdir()
    program.write_text(BREAKS.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(login, "_SHARES", shares)
    monkeypatch.setattr(login, "_PAUSE", 0.1)
    assert b"No clusters" in Login("login1").call_again(["list"]).output
    assert (node.home / "broke").exists()


def test_a_login_node_whose_temporary_directory_others_can_change(
    site: dict[str, str], login_node: Nodes, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    login_node(environment={**site, "TMPDIR": str(tmp_path / "open")})
    with pytest.raises(hpcgpu.HostError, match=r"^login1 ended the connection: /.* is not used, because other users"):
        connect()


def test_futures_stay_when_the_connection_breaks(reach: Reach, connect: Connect, tmp_path: Path) -> None:
    node = reach()
    client = connect()
    done, large = client.submit(pow, 2, 10), client.submit(lambda: bytes(30_000_000), pure=False)
    assert done.result(SECONDS) == 1024
    future = client.submit(helpers.waits_for_file, str(tmp_path))
    for _ in range(3):
        node.break_connections()
    assert len(large.result(SECONDS)) == 30_000_000
    node.break_connections()
    (tmp_path / "go").touch()
    assert (future.result(SECONDS), done.result(SECONDS), done.status) == (None, 1024, "finished")


def test_futures_stay_when_the_login_node_is_silent_for_a_while(reach: Reach, connect: Connect, tmp_path: Path) -> None:
    node = reach()
    client = connect()
    with node.suspended():
        future = client.submit(helpers.waits_for_file, str(tmp_path))
        (tmp_path / "go").touch()
    assert future.result(SECONDS) is None


def future_outlasts(link: Relay, client: Client, place: Path) -> None:
    """A task goes on while the link is lost, and its result comes afterwards."""
    future = client.submit(helpers.waits_for_file, str(place))
    link.down()
    (place / "go").touch()
    link.up()
    assert future.result(SECONDS) is None


def test_futures_stay_when_the_laptop_changes_its_network(reach: Reach, connect: Connect, tmp_path: Path) -> None:
    node = reach()
    with Relay([node.port]) as link:
        node.configure(port=link.port)
        future_outlasts(link, connect(), tmp_path)


def test_a_slow_link_that_loses_packets(reach: Reach, connect: Connect) -> None:
    node = reach()
    with Relay([node.port], delay=0.1, loss=0.01) as link:
        node.configure(port=link.port)
        client = connect()
        assert client.submit(len, b"x" * 1_000_000).result(SECONDS) == 1_000_000


def test_the_login_node_is_rebooted(reach: Reach, connect: Connect, tmp_path: Path) -> None:
    node = reach()
    client = connect()
    future = client.submit(helpers.waits_for_file, str(tmp_path))
    node.reboot()
    with pytest.raises(FutureCancelledError, match="the connection through login1 broke, and the scheduler lives: run"):
        future.result(SECONDS)
    (tmp_path / "go").touch()
    assert client.submit(lambda x: x + 1, 41, pure=False).result(SECONDS) == 42


def test_the_login_node_is_away_for_longer(reach: Reach, connect: Connect) -> None:
    node = reach()
    client = connect()
    node.stop()
    with told("the connection to login1 is broken, and is tried again: ssh to login1 fails: it cannot be reached"):
        node.break_connections()
    node.start()
    assert client.submit(lambda x: x + 1, 41).result(SECONDS) == 42


def test_a_connection_that_stays_broken_is_tried_seldom_and_at_once_when_there_is_a_way(
    reach: Reach, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_OFTEN", 0.0)
    monkeypatch.setattr(tunnel, "_PAUSES", (0.1,))
    monkeypatch.setattr(tunnel, "_CHECKS", 0.1)
    node = reach()
    client = connect()
    node.stop()
    with told("the connection to login1 is broken, and is tried again every 5 min from now on: ssh to login1 fails"):
        node.break_connections()
    node.start()
    Login("login1").connect()  # as any other program does
    assert client.submit(lambda x: x + 1, 41).result(SECONDS) == 42


def test_a_name_of_several_login_nodes_leads_to_another_one_and_futures_stay(
    reach: Reach, connect: Connect, tmp_path: Path
) -> None:
    """ssh reaches the second node after the break, and through it the first one, which has the relay."""
    first = reach(name="first", as_host=["hostname login-a"])
    (tmp_path / "hosts").write_text("127.0.0.1 localhost login-a\n")
    second = reach(name="second", as_host=["hostname login-b", f"mount --bind {tmp_path}/hosts /etc/hosts"])
    (first.far / "authorized_keys").write_text((second.near / "id.pub").read_text())
    with (second.near / "known_hosts").open("a") as known:
        known.write((first.near / "known_hosts").read_text())
    with Relay([first.port, second.port]) as link:
        second.configure(port=link.port)
        future_outlasts(link, connect(), tmp_path)
        assert link.connections == 3


def test_two_laptops_and_one_cluster(reach: Reach, connect: Connect) -> None:
    reach()
    one, other = connect(), connect()
    one.publish_dataset(answer=42)
    assert other.get_dataset("answer") == 42
    one.close()
    assert other.submit(lambda x: x + 1, 41).result(SECONDS) == 42


@pytest.fixture
def node(login_node: Nodes) -> Iterator[LoginNode]:
    """A login node with an embedded queue of its own; a test that fails leaves no job in it."""
    node = login_node()
    with queue_in(node.home):
        yield node


def test_the_cluster_ended_while_the_laptop_slept(node: LoginNode, connect: Connect) -> None:
    with Relay([node.port]) as link:
        node.configure(port=link.port)
        assert helpers.hpcgpu("start", "demo", *helpers.ON_CPUS, "--jobs", "1", **node.site()).returncode == 0
        client = connect()
        future = client.submit(lambda: 42)
        assert future.result(SECONDS) == 42
        link.down()
        assert helpers.hpcgpu("stop", "demo", **node.site()).returncode == 0
        link.up()
        with pytest.raises(
            FutureCancelledError, match="the scheduler of cluster demo is gone: scheduler job 1 cancelled"
        ):
            client.submit(lambda x: x, future).result(SECONDS)
