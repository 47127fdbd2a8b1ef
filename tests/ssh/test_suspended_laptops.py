"""A laptop is suspended, or its link is down, in each phase of a program that has a cluster of a login node.

Here seconds are enough: the login node forgets a laptop after three, and the laptop gives its connection up as fast.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from bed import processes
from laptop import Relay, Terminal, queue_of
from sshd_bed import LoginNode, Nodes

from hpcgpu.batch.local.queue import LocalQueue
from tests import helpers
from tests.conftest import Until, live, queue_in, wait_until

pytestmark = pytest.mark.shows("A laptop reaches a cluster by ssh; its connection breaks")

#: The login node ends the sessions of a laptop that sends nothing for three seconds.
FORGETS = ("ClientAliveInterval 1", "ClientAliveCountMax 3")
#: What takes minutes takes seconds in the program. It waits for a line of its input before each phase.
BEGINS = """
import time
from hpcgpu.client.reached_by_ssh import _tunnels
from hpcgpu.ssh import login
login._TIMES = ("-o", "ConnectTimeout=3", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3")
login._PAUSE = 0.5
import hpcgpu

def phase(name):
    while not all(tunnel._streams.connected.is_set() for tunnel in list(_tunnels.values())):
        time.sleep(0.05)
    print("phase", name)
    input()
"""
#: Seconds after which Dask's sockets in the jobs have given up if nobody reads: distributed.comm.timeouts.tcp is 30 s.
DASK_GIVES_UP = 35
LARGE = 60_000_000


@dataclass
class Laptop:
    """A program on it, its link, and whether it is suspended while it is away."""

    node: LoginNode
    link: Relay
    terminal: Terminal
    suspended: bool

    def begin(self, phase: str) -> None:
        """Let the program begin a phase."""
        self.terminal.expect(f"phase {phase}")
        self.terminal.type("")

    def away(self, seconds: float = 0.0) -> None:
        """Be away until it is noticed, and for so long at least, and come back."""
        stopped = self._processes() if self.suspended else []
        tell(stopped, signal.SIGSTOP)
        self.link.pass_nothing_on()
        sessions = set(self.node.sessions())
        wait_until(lambda: not sessions & set(self.node.sessions()), "the login node has forgotten the laptop")
        if not self.suspended:
            tried = self.link.connections
            wait_until(lambda: self.link.connections > tried + 1, "the laptop tries to come back")
        time.sleep(seconds)  # it is the time alone that matters
        self.link.pass_on()
        tell(stopped, signal.SIGCONT)

    def away_during_a_command(self, begun: Callable[[], object] = lambda: True) -> None:
        """Be away while a command runs on the login node. It goes on later.

        Where it has ended before this test could stop it, its answer arrives, and there is nothing to be away from.
        """
        before = commands(self.node)
        self.terminal.type("")
        wait_until(lambda: commands(self.node) - before and begun(), "the command has begun")
        stopped = commands(self.node) - before
        tell(stopped, signal.SIGSTOP)
        if not any(map(is_stopped, stopped)):
            return
        try:
            self.away()
        finally:
            tell(stopped, signal.SIGCONT)

    def _processes(self) -> set[int]:
        """The program, and each ssh that it has started."""
        mark = f"XDG_RUNTIME_DIR={self.node.environment()['XDG_RUNTIME_DIR']}".encode()
        found = {process.pid for process in processes() if mark in process.environment.split(b"\0")}
        assert self.terminal.pid in found
        return found


def tell(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process is there, and stopped: one that has ended is not."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        wait_until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE), "it is stopped")
        return process.status() == psutil.STATUS_STOPPED
    return False


def commands(node: LoginNode) -> set[int]:
    """The commands of hpcgpu that the laptop runs on the login node."""
    return set(node.started(b"\0far-side\0"))


@pytest.fixture
def node(login_node: Nodes) -> Iterator[LoginNode]:
    node = login_node(lines=FORGETS)
    with queue_in(node.home):
        yield node
        helpers.hpcgpu("stop", "demo", **node.site())


Start = Callable[..., Laptop]


@pytest.fixture
def start(node: LoginNode) -> Iterator[Start]:
    """Starts a program on a laptop."""
    with ExitStack() as stack:
        link = stack.enter_context(Relay([node.port]))
        node.configure(port=link.port)

        def begin(program: str, *, suspended: bool = False) -> Laptop:
            terminal = stack.enter_context(Terminal([sys.executable, "-c", BEGINS + program]))
            return Laptop(node, link, terminal, suspended)

        yield begin


def options(node: LoginNode) -> dict[str, Any]:
    """Of a cluster whose jobs begin when there is a file of their name in the home."""
    waits = f"until [ -e {node.home}/$HPCGPU_JOB_NAME ]; do sleep 0.1; done"
    return {
        "host": "login1",
        "name": "demo",
        "jobs": 1,
        "gpus_per_node": 0,
        "cores": 1,
        "memory": "1GB",
        "poll_interval": 0.5,
        "job_script_prologue": [waits],
    }


LIFE = """
from pathlib import Path

home = Path({home!r})

def task(name):
    (home / f"{{name}} begun").touch()
    while not (home / f"{{name}} ends").exists():
        time.sleep(0.1)
    return f"result of {{name}}"

async def large():
    import asyncio
    (home / "large begun").touch()
    while not (home / "large ends").exists():
        await asyncio.sleep(0.1)
    return bytes({large})

phase("start")
cluster = hpcgpu.LocalGPUCluster(**{options!r})
phase("connect")
cluster.wait_for_workers()
client = cluster.get_client()
phase("compute")
print(client.submit(task, "task").result())
phase("gather")
print(len(client.run_on_scheduler(large)), "bytes")
phase("scale")
cluster.scale(jobs=2)
phase("adapt")
cluster.adapt(minimum_jobs=1, maximum_jobs=2)
phase("checkpoint")
print(cluster.checkpoint(client.submit(task, "data"), home / "saved", name="numbers").path)
phase("close")
cluster.close()
print("closed")
"""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "link down"])
def test_a_program_goes_on_wherever_it_was(node: LoginNode, start: Start, until: Until, suspended: bool) -> None:
    program = LIFE.format(home=str(node.home), options=options(node), large=LARGE)
    laptop = start(program, suspended=suspended)
    terminal, home, queue = laptop.terminal, node.home, queue_of(node)

    def file(name: str) -> Callable[[], bool]:
        return (home / name).exists

    terminal.expect("phase start")
    laptop.away_during_a_command(file("clusters/demo/cluster.json"))
    terminal.expect("waiting for its scheduler")
    laptop.away()  # while the scheduler job waits
    (home / "demo-scheduler").touch()
    laptop.begin("connect")
    terminal.expect("0 of 1 workers are connected")
    laptop.away()
    (home / "demo-0").touch()
    laptop.begin("compute")
    until(file("task begun"), "the task runs")
    laptop.away()
    (home / "task ends").touch()
    terminal.expect("result of task")
    laptop.begin("gather")
    until(file("large begun"), "the scheduler has the request")
    laptop.link.pass_nothing_on()
    (home / "large ends").touch()
    laptop.away(DASK_GIVES_UP)
    terminal.expect(f"{LARGE} bytes")
    terminal.expect("phase scale")
    laptop.away_during_a_command()
    (home / "demo-1").touch()
    terminal.expect("phase adapt")
    laptop.away_during_a_command()
    laptop.begin("checkpoint")
    until(file("data begun"), "it computes what it saves")
    laptop.away()
    (home / "data ends").touch()
    terminal.expect(f"{home}/saved/numbers/000001")
    terminal.expect("phase close")
    laptop.away_during_a_command()
    terminal.expect("closed")
    terminal.end()
    assert terminal.exit_status == 0
    assert not live(queue)
    assert [path.name for path in (home / "clusters").iterdir()] == ["demo"]
    assert submitted(queue) == ["demo-0", "demo-1", "demo-scheduler"]


#: Of a program that does not wait for its cluster.
SHORT = """
phase("start")
cluster = hpcgpu.LocalGPUCluster(wait=False, **{options!r})
phase("end")
"""


def submitted(queue: LocalQueue) -> list[str]:
    """The names of all jobs that there were."""
    return sorted(status.name for status in queue.poll([str(number) for number in range(1, 20)]).values())


def test_a_start_that_nothing_reports_is_not_doubled(node: LoginNode, start: Start) -> None:
    laptop = start(SHORT.format(options=options(node)))
    laptop.terminal.expect("phase start")
    laptop.away_during_a_command()
    laptop.begin("end")
    laptop.terminal.end()
    assert laptop.terminal.exit_status == 0
    assert not live(queue_of(node))
    assert submitted(queue_of(node)) == ["demo-0", "demo-scheduler"]


def test_a_name_that_is_in_use_is_refused_also_after_a_break(node: LoginNode, start: Start) -> None:
    """The cluster of that name is not that of this start."""
    assert helpers.hpcgpu("start", "demo", *helpers.ON_CPUS, **node.site()).returncode == 0
    laptop = start(SHORT.format(options=options(node)))
    laptop.terminal.expect("phase start")
    laptop.away_during_a_command()
    laptop.terminal.expect("ClusterExists")
    laptop.terminal.end()
    assert submitted(queue_of(node)) == ["demo-scheduler"]


def test_a_laptop_without_a_network_starts_nothing(node: LoginNode, start: Start) -> None:
    laptop = start(SHORT.format(options=options(node)))
    laptop.link.pass_nothing_on()
    laptop.begin("start")
    laptop.terminal.expect("ssh to login1 fails: it does not answer")
    laptop.terminal.end()
    assert not submitted(queue_of(node))


def test_a_program_that_ends_without_a_network_reports_how_its_jobs_end(node: LoginNode, start: Start) -> None:
    laptop = start("login._TRIED_FOR = 2\n" + SHORT.format(options=options(node)))
    laptop.begin("start")
    laptop.terminal.expect("phase end")
    laptop.link.down()
    laptop.terminal.type("")
    before = laptop.terminal.expect("hpcgpu: the jobs of cluster demo may still run: ssh to login1 fails: ")
    tried = [line for line in before.splitlines() if "It is tried again" in line]
    assert len(tried) == len(set(tried)), "each reason is said once"
    laptop.terminal.expect("Later, run: hpcgpu stop demo --host login1")
    laptop.terminal.end()
    laptop.link.up()
    assert len(live(queue_of(node))) == 2
    assert helpers.hpcgpu("stop", "demo", **node.site()).returncode == 0
