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
from bed import BedError
from laptop import Relay, Terminal, WhatPsShows, agent
from sshd_bed import ASKS_FOR_A_CODE, CODE, LoginNode, Nodes, in_shell

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


def test_start_up_files_are_those_of_its_home(node: LoginNode) -> None:
    (node.home / ".bashrc").write_text("echo Welcome\n")
    assert said(node, "echo done") == "Welcome\ndone\n"


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


def test_keys(node: LoginNode) -> None:
    node.trust(known=False)
    assert "No ED25519 host key is known for" in refused(node)
    node.trust()
    assert said(node, "echo yes") == "yes\n"
    node.change_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused(node)
    node.trust()
    assert said(node, "echo yes") == "yes\n"
    node.refuse_keys()
    assert "Permission denied (publickey)" in refused(node)


def test_a_host_that_nobody_knows(node: LoginNode) -> None:
    assert "Could not resolve hostname" in refused(node, "nowhere.invalid", "true")


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
        first.communicate("", timeout=30)


@pytest.mark.parametrize("by_pam", [False, True])
def test_a_second_factor(login_node: Nodes, by_pam: bool) -> None:
    node = login_node(code=True) if by_pam else login_node(lines=[f"ForceCommand {ASKS_FOR_A_CODE}"])
    if by_pam:
        assert "Permission denied (keyboard-interactive)" in refused(node)
    else:
        assert node.ssh(*BATCH, "login1", "echo in").stdout == ""
    for code, comes_in in ((CODE, True), ("0", False)):
        with Terminal(["ssh", "-t", "-o", "NumberOfPasswordPrompts=1", "login1", "echo I am in"]) as terminal:
            terminal.expect("Password: " if by_pam else "Verification code: ")
            terminal.type(code)
            assert ("I am in" in terminal.end()) is comes_in
            assert (terminal.exit_status == 0) is comes_in


def test_a_host_name_and_a_full_disk_of_its_own(login_node: Nodes) -> None:
    node = login_node(as_host=["hostname login1", 'mount -t tmpfs -o size=8k none "$FAR_HOME"'])
    assert said(node, "hostname") == "login1\n"
    assert "No space left on device" in node.ssh("login1", "head -c 100000 /dev/zero > ~/file").stderr
    assert not (node.home / "file").exists()  # nothing is mounted here


@contextmanager
def sleeper(node: LoginNode) -> Iterator[subprocess.Popen[str]]:
    """A session that runs."""
    command = ["ssh", *BATCH, "login1", "echo $$; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as session:
        try:
            assert session.stdout is not None and int(session.stdout.readline()) in node.started()
            yield session
        finally:
            session.kill()


def test_connections_break_and_the_login_node_goes_on(node: LoginNode) -> None:
    with sleeper(node) as one, sleeper(node) as other:
        node.break_connections()
        assert one.wait(30) == other.wait(30) == 255
    assert said(node, "echo yes") == "yes\n"


def test_sessions_go_on_when_nobody_listens(node: LoginNode) -> None:
    with sleeper(node) as session:
        node.stop()
        assert "Connection refused" in refused(node)
        assert session.poll() is None
        node.start()
        assert said(node, "echo yes") == "yes\n"
        node.break_connections()  # those of before too
        assert session.wait(30) == 255


def test_a_reboot_ends_what_sessions_left_there(node: LoginNode) -> None:
    said(node, "setsid sleep 1000 > /dev/null 2>&1 < /dev/null &")
    assert len(node.started()) == 1
    node.reboot()
    assert node.started() == []
    assert said(node, "echo yes") == "yes\n"


def test_a_suspended_login_node_says_nothing_until_it_goes_on(node: LoginNode) -> None:
    with sleeper(node) as session:
        with node.suspended():
            assert "timed out" in refused(node, "-o", "ConnectTimeout=1", "login1", "true")
            assert session.poll() is None
        assert said(node, "echo yes") == "yes\n"


def test_the_end_ends_all(login_node: Nodes, home: Path) -> None:
    with LoginNode(home / "other") as node:
        environment = os.environ | node.environment()
        session = subprocess.Popen(["ssh", "login1", "echo begun; exec sleep 1000"], env=environment, stdout=-1)
        assert session.stdout is not None and session.stdout.readline() == b"begun\n"
    with session:
        assert session.wait(30) == 255
    assert node.started() == []


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
            assert session.wait(30) == 255
            assert "Connection refused" in refused(node)
        link.up()
        with sleeper(node):
            link.pass_nothing_on()
            assert "timed out" in refused(node, "-o", "ConnectTimeout=1", "login1", "true")
            link.pass_on()
            assert said(node, "echo yes") == "yes\n"


def test_a_name_for_two_login_nodes(login_node: Nodes) -> None:
    other = login_node("other", environment={"WHICH": "other"})
    node = login_node(environment={"WHICH": "node"})
    with Relay([node.port, other.port]) as names:
        node.configure("StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", host="login", port=names.port)
        (other.far / "authorized_keys").write_text((node.far / "authorized_keys").read_text())
        assert [node.ssh("login", "echo $WHICH").stdout for _ in range(3)] == ["node\n", "other\n", "node\n"]


def test_a_jump_host_and_a_user_name(node: LoginNode) -> None:
    node.configure("ProxyJump login1", host="inner")
    assert node.ssh(*BATCH, "inner", "echo yes").stdout == "yes\n"
    assert "Permission denied" in refused(node, "nobody-of-this-name@login1", "true")


def test_an_agent_is_forwarded_only_if_somebody_asks(node: LoginNode, tmp_path: Path) -> None:
    process, socket = agent(tmp_path)
    with process:
        node.configure(f"IdentityAgent {socket}")
        assert said(node, "echo $SSH_AUTH_SOCK") == "\n"
        node.configure(f"IdentityAgent {socket}", "ForwardAgent yes")
        assert said(node, "echo $SSH_AUTH_SOCK") != "\n"
        process.send_signal(signal.SIGTERM)


def test_command_lines_of_both_sides_are_seen(node: LoginNode) -> None:
    with WhatPsShows() as shown, sleeper(node):
        assert said(node, "sleep 0.5; : a-secret") == ""
    assert any(line.startswith("/usr/bin/ssh") for line in shown.having("a-secret"))
    assert any("bash -c" in line for line in shown.having("a-secret"))


def test_what_no_sshd_can_read_is_said(home: Path) -> None:
    with (
        pytest.raises(BedError, match="Bad configuration option: NoSuchThing"),
        LoginNode(home / "broken", lines=["NoSuchThing yes"]),
    ):
        pass
