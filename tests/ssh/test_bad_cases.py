"""What a user of a laptop reads when something is wrong between it and the login node."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from laptop import Terminal
from sshd_bed import ASKS_FOR_A_CODE, CODE, SYSTEM_PATH, LoginNode, Nodes, in_shell

import hpcgpu
from hpcgpu.errors import HostError
from hpcgpu.ssh import remote_command
from hpcgpu.ssh.login import Login
from tests import helpers

LIST = ("list", "--host", "login1")


def works(*arguments: str) -> str:
    done = helpers.hpcgpu(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*arguments: str, **environment: str) -> str:
    """What hpcgpu prints when it cannot do it: one sentence or more, without a traceback."""
    done = helpers.hpcgpu(*(arguments or LIST), **environment)
    assert done.returncode in (1, 2) and done.stdout == "", done
    error, _, hint = done.stderr.strip().partition("\n")
    assert error.startswith("Error: ") and "\n" not in hint, done.stderr
    assert not hint or hint.startswith("What this means and what to do: "), done.stderr
    return error.removeprefix("Error: ")


@pytest.fixture
def node(login_node: Nodes) -> LoginNode:
    return login_node()


def far_program(node: LoginNode, name: str, text: str) -> dict[str, str]:
    """A program on the far side, and the environment with which sessions find it first."""
    path = node.home / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return {"PATH": f"{path.parent}:{SYSTEM_PATH}"}


# The way to the host


def test_there_is_no_ssh(node: LoginNode, tmp_path: Path) -> None:
    said = refusal(PATH=str(tmp_path))
    assert said == "there is no program `ssh` on the PATH. Install OpenSSH's client"


def test_the_host_is_not_known(node: LoginNode) -> None:
    said = refusal("list", "--host", "nowhere.invalid")
    assert said.startswith(
        "ssh to nowhere.invalid fails: the host is not known. In its own words: ssh: Could not resolve"
    )
    assert said.endswith("aliases in ~/.ssh/config: what `ssh nowhere.invalid` understands is right here too")


@pytest.mark.parametrize("host", ["-oProxyCommand=touch run-by-ssh", "a b", "a\nb", "--", "-l"])
def test_what_ssh_would_take_for_an_option_is_no_host(node: LoginNode, host: str) -> None:
    assert refusal("list", f"--host={host}").startswith("host: write what `ssh` understands, such as login1 or ada@")
    assert node.calls() == []


def test_the_host_key_is_not_known(node: LoginNode) -> None:
    node.trust(known=False)
    said = refusal()
    assert said.startswith(
        "ssh to login1 fails: its host key is not known yet. In its own words: No ED25519 host key is"
    )
    assert said.endswith("Log in once with `ssh login1`, and compare the key with the one that the site publishes")


def test_the_host_key_has_changed(node: LoginNode) -> None:
    node.change_host_key()
    said = refusal()
    assert said.startswith("ssh to login1 fails: its host key has changed. In its own words: ")
    assert "or somebody listens in. Ask the site. If the new key is right, remove the old one" in said


def test_the_key_is_refused(node: LoginNode) -> None:
    node.refuse_keys()
    said = refusal()
    assert said.startswith("ssh to login1 fails: it refuses your key. In its own words: ")
    assert "Permission denied (publickey). Check which key `ssh -v login1` offers" in said


def test_the_login_node_is_down(node: LoginNode) -> None:
    node.stop()
    said = refusal()
    assert said.startswith(
        "ssh to login1 fails: it cannot be reached. In its own words: ssh: connect to host 127.0.0.1"
    )
    assert said.endswith("is not in a network, or not in the VPN, that reaches it")


def test_the_login_node_was_rebooted(node: LoginNode) -> None:
    works(*LIST)
    node.reboot()
    works(*LIST)


def test_a_temporary_directory_with_a_long_name(node: LoginNode, home: Path) -> None:
    long = Path("/tmp") / home.name.ljust(44, "%")[:44]  # as on macOS
    long.mkdir(mode=0o700)
    try:
        done = helpers.hpcgpu(*LIST, XDG_RUNTIME_DIR="", TMPDIR=str(long))
        assert (done.returncode, done.stdout, done.stderr) == (0, "No clusters.\n", "")
        assert len(list(long.glob("hpcgpu-ssh-*/" + 16 * "?"))) == 1
    finally:
        shutil.rmtree(long)


def test_programs_that_begin_at_once_share_one_connection(node: LoginNode) -> None:
    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(Login("login1").connect) for _ in range(4)]:
            call.result()
    assert len([call for call in node.calls() if "-fN" in call]) == 1


# A second factor


def test_nobody_is_there_for_a_second_factor(login_node: Nodes) -> None:
    login_node(code=True)
    said = refusal()
    assert said.startswith(
        "ssh to login1 fails: it asks for a password or a second factor, and nobody can answer here."
    )
    command = said.partition("In a terminal of this machine, run once: ")[2]
    with Terminal(["sh", "-c", f"{command}; echo exit code $?; cat"]) as terminal:  # a shell stays after the command
        terminal.expect("Password: ")
        terminal.type(CODE)
        terminal.expect("exit code 0")
        works(*LIST)


def test_a_second_factor_is_asked_for_in_a_terminal(login_node: Nodes) -> None:
    node = login_node(code=True)
    with Terminal(helpers.command(*LIST)) as terminal:
        terminal.expect("hpcgpu: logging in to login1")
        terminal.expect("Password: ")
        terminal.type(CODE)
        assert "No clusters." in terminal.end()
    works(*LIST)
    node.break_connections()
    assert "it asks for a password or a second factor, and nobody can answer here" in refusal()


def test_a_wrong_code_is_refused(login_node: Nodes) -> None:
    node = login_node(code=True)
    node.configure("NumberOfPasswordPrompts 1")
    with Terminal(helpers.command(*LIST)) as terminal:
        terminal.expect("Password: ")
        terminal.type("0")
        assert "Error: ssh to login1 fails" in terminal.end()
        assert terminal.exit_status == 1


def test_the_account_asks_something_for_each_command(login_node: Nodes) -> None:
    login_node(lines=[f"ForceCommand {ASKS_FOR_A_CODE}"])
    said = refusal()
    assert said.startswith("login1 does not run hpcgpu: it asks something on the terminal for each command")


# hpcgpu on the far side


def test_hpcgpu_is_missing_there(login_node: Nodes) -> None:
    login_node(environment={"PATH": SYSTEM_PATH})
    said = refusal()
    assert said.startswith("hpcgpu is not found on login1. In its own words: ")
    assert "To install it there, run: hpcgpu install --host login1" in said


def test_hpcgpu_has_another_version_there(login_node: Nodes, home: Path) -> None:
    node = login_node(environment={"PATH": f"{home / 'node/far/home/bin'}:{SYSTEM_PATH}"})
    far_program(
        node,
        "hpcgpu",
        f"#!{sys.executable}\nimport hpcgpu\nhpcgpu.__version__ = '0.0.1'\nfrom hpcgpu.cli import main\nmain()\n",
    )
    assert refusal() == (
        f"login1 has hpcgpu 0.0.1, and this machine has {hpcgpu.__version__}. To install the version of this machine "
        "there, run: hpcgpu install --host login1"
    )


def test_hpcgpu_is_too_old_there(login_node: Nodes, home: Path) -> None:
    node = login_node(environment={"PATH": f"{home / 'node/far/home/bin'}:{SYSTEM_PATH}"})
    old = f"#!{sys.executable}\nimport click\nclick.Group('hpcgpu')(prog_name='hpcgpu')\n"
    far_program(node, "hpcgpu", old)
    said = refusal()
    assert said.startswith("login1 has an hpcgpu that is too old to be used by ssh. In its own words: ")
    assert said.endswith("To install the version of this machine there, run: hpcgpu install --host login1")


def test_hpcgpu_is_broken_there(login_node: Nodes, home: Path) -> None:
    node = login_node(environment={"PATH": f"{home / 'node/far/home/bin'}:{SYSTEM_PATH}"})
    far_program(node, "hpcgpu", f"#!{sys.executable}\nraise ImportError('libcuda.so.1: wrong ELF class')\n")
    said = refusal()
    assert said.startswith("login1 does not run hpcgpu: the remote command ended with exit code 1. In its own words: ")
    assert "ImportError: libcuda.so.1: wrong ELF class" in said


def test_only_a_login_shell_has_hpcgpu_and_the_queue(login_node: Nodes) -> None:
    node = login_node(environment={"PATH": SYSTEM_PATH})
    far_program(node, "sbatch", "#!/bin/sh\n")
    venv = Path(sys.executable).parent
    (node.home / ".bash_profile").write_text(f"echo Welcome\nexport PATH={venv}:{node.home}/bin:$PATH\n")
    assert works(*LIST) == "No clusters.\n"


# Shells and their start-up files


@pytest.mark.parametrize(
    ("shell", "start_up"),
    [
        ("bash", ".bashrc"),
        ("tcsh", ".tcshrc"),
        ("fish", ".config/fish/config.fish"),
        ("rbash", ".bashrc"),
        ("dash", ""),
    ],
)
def test_another_shell_with_a_start_up_file_that_prints(login_node: Nodes, shell: str, start_up: str) -> None:
    node = login_node(lines=[f"ForceCommand {in_shell(shell)}"])
    if start_up:
        (node.home / start_up).parent.mkdir(parents=True, exist_ok=True)
        (node.home / start_up).write_text("echo '{}'; printf 'no end of line'; sh -c 'echo to all >&2'\n")
    done = helpers.hpcgpu("list", "--json", "--host", "login1")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], "")


@pytest.mark.parametrize(
    ("forced", "printed"),
    [
        (in_shell("/usr/sbin/nologin"), "It printed: This account is currently not available"),
        ("echo 'For rsync alone.' >&2; exit 1", "In its own words: For rsync alone"),
        ('git-shell -c "$SSH_ORIGINAL_COMMAND"', "In its own words: fatal: unrecognized command"),
    ],
)
def test_an_account_that_runs_no_commands(login_node: Nodes, forced: str, printed: str) -> None:
    if "git-shell" in forced and not Path("/usr/bin/git-shell").exists():
        pytest.skip("git is not installed as a package")
    login_node(lines=[f"ForceCommand {forced}"])
    said = refusal()
    assert said.startswith("login1 does not run hpcgpu: the remote command ended with exit code ")
    assert printed in said
    assert said.endswith("restricted to certain commands, or a start-up file that ends the shell, can be the cause")


def test_a_start_up_file_that_ends_the_shell(node: LoginNode) -> None:
    (node.home / ".bashrc").write_text("echo 'Choose a project first.'; exit 3\n")
    said = refusal()
    assert said.startswith(
        "login1 does not run hpcgpu: the remote command ended with exit code 3. It printed: Choose a"
    )


def test_a_start_up_file_that_prints_without_end(node: LoginNode) -> None:
    (node.home / ".bashrc").write_text("yes 'Choose a project:'\n")
    said = refusal()
    assert said.startswith("login1 does not run hpcgpu: it prints without end. It printed: Choose a project:")
    assert "start-up file" in said


def test_a_start_up_file_that_waits_for_input(node: LoginNode, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.home / ".bashrc").write_text("echo 'Choose a project:'; cat > /dev/null\n")
    monkeypatch.setattr(remote_command, "BEGINS_WITHIN", 15.0)
    with pytest.raises(
        HostError, match=r"login1 did not answer within 15 s. It printed: Choose a project:. A start-up"
    ):
        Login("login1").call(["list"])


# What the login node has no room for, or forbids


def test_the_home_is_full(login_node: Nodes) -> None:
    fill = 'head -c 100000 /dev/zero > "$FAR_HOME/file" || true'
    node = login_node(as_host=['mount -t tmpfs -o size=8k none "$FAR_HOME"', fill])
    assert works(*LIST) == "No clusters.\n"
    said = refusal("start", "demo", "--host", "login1", *helpers.ON_CPUS)
    assert str(node.home) in said and "No space left on device" in said


@pytest.mark.parametrize(
    "lines", [["AllowTcpForwarding no", "AllowStreamLocalForwarding no", "DisableForwarding yes"], ["MaxSessions 1"]]
)
def test_what_sites_forbid_is_not_needed(login_node: Nodes, lines: list[str]) -> None:
    login_node(lines=lines)
    assert works(*LIST) == works(*LIST) == "No clusters.\n"


def test_another_program_uses_the_only_session(login_node: Nodes, home: Path) -> None:
    node = login_node(lines=["MaxSessions 1"], code=True)
    node.configure(f"ControlPath {node.environment()['XDG_RUNTIME_DIR']}/own")
    with Terminal(["ssh", "-M", "login1", "echo begun; cat"]) as terminal:
        terminal.expect("Password: ")
        terminal.type(CODE)
        terminal.expect("begun")
        said = refusal()
    assert said.startswith("ssh to login1 fails: it allows no further session on one connection. In its own words: ")
    assert said.endswith("Close other programs that use the connection, or end it: ssh -O exit login1")
