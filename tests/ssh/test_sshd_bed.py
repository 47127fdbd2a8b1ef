"""The login node of the tests does what the tests of hpcgpu need of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bed import process_of
from laptop import Relay, WhatPsShows, agent
from sshd_bed import SECONDS, LoginNode, Nodes, in_shell

from tests.conftest import Until

BATCH = ("-o", "BatchMode=yes")


@pytest.fixture
def node(login_node: Nodes) -> LoginNode:
    return login_node()


def said(node: LoginNode, *command: str) -> str:
    done = node.ssh(*BATCH, "login1", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(node: LoginNode, *arguments: str) -> str:
    done = node.ssh(*BATCH, *(arguments or ("login1", "true")))
    assert done.returncode == 255
    return done.stderr


def test_the_far_side_has_a_home_and_an_environment_of_its_own(login_node: Nodes, home: Path) -> None:
    odd = "a b'c\"d\\e$f;g=h%i#jü"
    node = login_node(environment={"ODD": odd, "DASK_HPCGPU__ACCOUNT": "proj1"})
    program = (
        "import os; print([os.environ.get(name) for name in ('HOME', 'ODD', 'DASK_HPCGPU__ACCOUNT')], os.getuid())"
    )
    assert said(node, f'python -c "{program}"') == f"{[str(node.home), odd, 'proj1']!r} {os.getuid()}\n"
    assert said(node, "hpcgpu", "list", "--json").strip() in ("[]", "{}")
    assert said(node, "echo $DASK_HPCGPU__CLUSTER_DIRECTORY $HPCGPU_QUEUE_DIRECTORY").split() == [
        f"{node.home}/clusters",
        f"{node.home}/queue",
    ]
    assert f"{home}/clusters" == os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"]
    assert node.calls()[0][:3] == [*BATCH, "login1"]
    assert node.far.stat().st_mode & 0o777 == node.near.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("shell", "start_up"), [("tcsh", ".tcshrc"), ("fish", ".config/fish/config.fish")])
def test_another_shell_runs_the_commands(login_node: Nodes, shell: str, start_up: str) -> None:
    node = login_node(lines=[f"ForceCommand {in_shell(shell)}"])
    (node.home / start_up).parent.mkdir(parents=True, exist_ok=True)
    (node.home / start_up).write_text("echo Welcome\n")
    told = said(node, "echo $version" if shell == "tcsh" else "echo $FISH_VERSION")
    assert told.startswith("Welcome\n" + ("tcsh" if shell == "tcsh" else ""))
    assert "syntax" not in said(node, "true")


def test_a_restricted_shell_changes_no_directory(login_node: Nodes) -> None:
    node = login_node(lines=[f"ForceCommand {in_shell('rbash')}"])
    done = node.ssh("login1", "cd /")
    assert done.returncode and "restricted" in done.stderr


def test_nothing_is_forwarded(login_node: Nodes, tmp_path: Path) -> None:
    node = login_node(lines=["AllowTcpForwarding no", "AllowStreamLocalForwarding no"])
    assert "administratively prohibited" in node.ssh(*BATCH, "-W", f"127.0.0.1:{node.port}", "login1").stderr


def test_one_session_on_one_connection(login_node: Nodes, tmp_path: Path, until: Until) -> None:
    node = login_node(lines=["MaxSessions 1"])
    master = tmp_path / "master"
    node.configure(f"ControlPath {master}")
    with subprocess.Popen(["ssh", "-M", "login1", "echo begun; cat"], stdin=-1, stdout=-1, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "begun\n"
        assert "Session open refused by peer" in node.ssh("login1", "true").stderr
        assert node.ssh("-O", "check", "login1").returncode == 0
        first.communicate("", timeout=SECONDS)


@contextmanager
def sleeper(node: LoginNode, then: str = "exec sleep 1000") -> Iterator[subprocess.Popen[str]]:
    """A session that runs."""
    command = ["ssh", *BATCH, "login1", f"echo $$; {then}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as session:
        try:
            assert session.stdout is not None and int(session.stdout.readline()) in node.started()
            yield session
        finally:
            session.kill()


def test_a_process_is_seen_while_it_becomes_another_program(tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.write_text('#!/bin/sh\nexec "$0"\n')
    again.chmod(0o700)
    with subprocess.Popen([again], env={"MARK": "1"}) as process:
        try:
            seen = [process_of(Path(f"/proc/{process.pid}")) for _ in range(300)]
        finally:
            process.kill()
    assert all(one is not None and b"MARK=1" in one.environment.split(b"\0") for one in seen)


def test_connections_break_and_the_login_node_goes_on(node: LoginNode) -> None:
    with sleeper(node) as one, sleeper(node) as other:
        node.break_connections()
        assert one.wait(SECONDS) == other.wait(SECONDS) == 255
    assert said(node, "echo yes") == "yes\n"


def test_a_suspended_login_node_reports_nothing_until_it_goes_on(node: LoginNode) -> None:
    with sleeper(node) as session:
        with node.suspended():
            assert "timed out" in refused(node, "-o", "ConnectTimeout=1", "login1", "true")
            assert session.poll() is None
        assert said(node, "echo yes") == "yes\n"


def test_a_slow_link(node: LoginNode) -> None:
    with Relay([node.port], delay=0.05, loss=0.2) as link:
        node.configure(host="slow", port=link.port)
        began = time.monotonic()
        assert node.ssh(*BATCH, "slow", "echo yes").stdout == "yes\n"
        assert time.monotonic() - began > 0.5
        assert node.ssh(*BATCH, "slow", "wc -c", text="x" * 100_000).stdout.strip() == "100000"


def test_a_link_that_is_down_or_cut(node: LoginNode) -> None:
    with Relay([node.port]) as link:
        node.configure(port=link.port)
        with sleeper(node) as session:
            link.down()
            assert session.wait(SECONDS) == 255
            assert "Connection refused" in refused(node)
        link.up()
        with sleeper(node):
            link.pass_nothing_on()
            assert "timed out" in refused(node, "-o", "ConnectTimeout=1", "login1", "true")
            link.pass_on()
            assert said(node, "echo yes") == "yes\n"


def test_an_agent_is_forwarded_only_if_somebody_asks(node: LoginNode, tmp_path: Path) -> None:
    process, socket = agent(tmp_path)
    with process:
        node.configure(f"IdentityAgent {socket}")
        assert said(node, "echo $SSH_AUTH_SOCK") == "\n"
        node.configure(f"IdentityAgent {socket}", "ForwardAgent yes")
        assert said(node, "echo $SSH_AUTH_SOCK") != "\n"
        process.send_signal(signal.SIGTERM)


def test_command_lines_of_both_sides_are_seen(node: LoginNode, until: Until) -> None:
    with WhatPsShows() as shown, sleeper(node, "sleep 1000; : a-secret"):
        for words in ("/usr/bin/ssh ", "bash -c "):
            until(lambda words=words: any(words in line for line in shown.having("a-secret")), f"{words} is seen")
