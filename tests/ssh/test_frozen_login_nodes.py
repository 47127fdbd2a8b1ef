"""A login node, or a command of hpcgpu on it, hangs: the program on the laptop reports it, and Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from laptop import Terminal
from sshd_bed import LoginNode, Nodes

import hpcgpu
from hpcgpu.cli.far_side import _hangs
from hpcgpu.client.reached_by_ssh import close_tunnels
from hpcgpu.display.progress import Progress
from hpcgpu.ssh import remote_command
from tests import helpers
from tests.conftest import Until, queue_in

pytestmark = pytest.mark.shows("A laptop reaches a cluster by ssh; its connection breaks")

CONNECT = [sys.executable, "-c", "import hpcgpu; hpcgpu.connect('login1:demo')"]
WAITS = "cluster demo: waiting for its scheduler"


@pytest.fixture
def node(login_node: Nodes) -> Iterator[LoginNode]:
    """A login node with a cluster `demo`, whose scheduler begins when there is a file `go` in the home."""
    node = login_node()
    with queue_in(node.home):
        config = node.home / "site.json"
        config.write_text(json.dumps({"job_script_prologue": [f"until [ -e {node.home}/go ]; do sleep 0.2; done"]}))
        options = [*helpers.ON_CPUS, "--no-wait", "--config", str(config)]
        started = helpers.hpcgpu("start", "demo", *options, **node.site())
        assert started.returncode == 0, started.stderr
        yield node
        close_tunnels()
        helpers.hpcgpu("stop", "demo", **node.site())


def stop_commands(node: LoginNode) -> None:
    """Stop the commands of hpcgpu on the login node, as a file system does that does not answer."""
    found = node.started(b"\0far-side\0")
    assert found
    for pid in found:
        os.kill(pid, signal.SIGSTOP)


def test_a_wait_whose_command_is_stopped_is_reported_and_begins_anew(
    node: LoginNode, until: Until, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_command, "SILENCE", 20.0)
    said = ""

    def says(text: str) -> Callable[[], bool]:
        def now() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return text in said

        return now

    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(hpcgpu.connect, "login1:demo")
        until(says(WAITS), "it waits")
        stop_commands(node)
        until(says("hpcgpu list --host login1. It is tried again"), "it says that nothing comes any more")
        assert "no sign of life from login1 for 20 s, from `hpcgpu contact --wait -- demo`, which last said: " in said
        (node.home / "go").touch()
        connecting.result(120).close()


def test_ctrl_c_ends_a_wait_whose_command_is_stopped(node: LoginNode) -> None:
    with Terminal(CONNECT) as terminal:
        terminal.expect(WAITS)
        stop_commands(node)
        os.kill(terminal.pid, signal.SIGINT)
        shown = terminal.end()
    assert "no sign of life from login1 for 15 s" in shown and "KeyboardInterrupt" in shown


def test_ctrl_c_ends_a_login_that_gets_no_answer(login_node: Nodes, until: Until) -> None:
    node = login_node()
    with node.suspended(), Terminal(CONNECT) as terminal:
        until(lambda: any("-fN" in call for call in node.calls()), "it logs in")
        os.kill(terminal.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in terminal.end()


def test_a_wait_that_checks_nothing_any_more_gives_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _hangs()
    with Progress(True) as progress:
        progress.update("waiting for a file system")
        assert not _hangs()
        monkeypatch.setattr(Progress, "last_check", time.monotonic() - 301)
        assert _hangs()
    assert not _hangs()
