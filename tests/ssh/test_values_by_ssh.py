"""What users give reaches the login node as it is: no shell reads it, and no list of processes shows it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from laptop import WhatPsShows, agent
from sshd_bed import SYSTEM_PATH, LoginNode, Nodes, in_shell

from hpcgpu.errors import HpcgpuError, OptionError
from hpcgpu.ssh.login import Login
from tests import helpers
from tests.conftest import queue_in

#: What is not a control character, of ASCII and beyond.
PRINTABLE = "".join(map(chr, range(32, 127))) + "äß€ ☃ 𝛑"
#: All that the value of a variable can have.
ODD = "".join(map(chr, range(1, 128))) + PRINTABLE + "\u202e\u00a0\u2028"
#: What a shell would run, or take apart.
HOSTILE = (
    "$(touch run-by-a-shell)",
    "`touch run-by-a-shell`",
    "'; touch run-by-a-shell; '",
    '"; touch run-by-a-shell; "',
    "\\'; touch run-by-a-shell; #",
    "| touch run-by-a-shell &",
    "!touch !! !$",
    "~root *.py {a,b} [a-z] $HOME %d",
    "-oProxyCommand=touch run-by-a-shell",
    "",
    " ",
)
SECRET = "a-value-that-nobody-sees"


@pytest.fixture
def node(login_node: Nodes) -> Iterator[LoginNode]:
    """A login node with an embedded queue; the test fails if it leaves a job there."""
    node = login_node()
    with queue_in(node.home):
        yield node


@pytest.mark.parametrize("shell", ["bash", "tcsh", "fish"])
def test_no_shell_reads_what_a_user_gives(login_node: Nodes, shell: str) -> None:
    node = login_node(lines=[f"ForceCommand {in_shell(shell)}"])
    with pytest.raises(OptionError) as told:
        Login("login1").call(["status", "--", "demo", *HOSTILE, PRINTABLE])
    assert str(told.value) == f"Got unexpected extra arguments ({' '.join([*HOSTILE, PRINTABLE])})"
    assert not list(node.far.rglob("run-by-a-shell")) and not Path.home().joinpath("run-by-a-shell").exists()


@pytest.mark.parametrize(
    "name", ["two\nlines\r\n", "\x01\x1b[31m\x7f", "a" * 100_000, "/no/such\u202e", "-oProxyCommand=touch x", ""]
)
def test_what_is_wrong_with_a_name_is_reported_as_there(node: LoginNode, name: str) -> None:
    there = helpers.hpcgpu("status", "--", name, **node.site()) if len(name) < 1000 else None
    with pytest.raises(HpcgpuError) as told:
        Login("login1").call(["status", "--", name])
    if there is not None:
        assert there.stderr.partition("\nWhat this means")[0].strip() == f"Error: {told.value}"


def test_what_is_not_utf_8_stays_here(node: LoginNode) -> None:
    with pytest.raises(OptionError, match=r"'\\udcff': it is not UTF-8, so it cannot be sent to login1"):
        Login("login1").call(["status", "\udcff"])


def test_options_with_all_of_ascii_and_more(node: LoginNode) -> None:
    clusters = node.home / PRINTABLE.replace("/", "")
    spelled = str(clusters).replace("$", "$$")  # a dollar sign begins the name of a variable
    started = helpers.hpcgpu(
        *("start", "demo", "--host", "login1", *helpers.ON_CPUS, "--json"),
        *("--cluster-directory", spelled, "--env", f"ODD={ODD}", "--env", f"HOSTILE={HOSTILE}"),
    )
    assert started.returncode == 0, started.stderr
    name = f"{spelled}/demo"
    try:
        assert json.loads(started.stdout)["directory"] == str(clusters / "demo")
        saved = json.loads((clusters / "demo/options.json").read_text())
        assert dict(saved["scheduler"]["env"]) == {"ODD": ODD, "HOSTILE": str(HOSTILE)}
        assert json.loads(helpers.hpcgpu("status", name, "--json", "--host", "login1").stdout)["name"] == "demo"
    finally:
        stopped = helpers.hpcgpu("stop", name, "--host", "login1")
    assert stopped.returncode == 0, stopped.stderr


def secrets_of(directory: Path) -> list[str]:
    """What the keys of a cluster have in them."""
    texts = [path.read_text().strip() for path in (directory / "tls").iterdir() if path.suffix in (".key", ".pem")]
    return [line for text in texts for line in text.splitlines() if "-----" not in line] + [SECRET]


def test_no_list_of_processes_shows_a_value_or_a_key(node: LoginNode) -> None:
    program = (
        "import hpcgpu, sys; client = hpcgpu.connect(f'login1:{sys.stdin.read()}', quiet=True); "
        "print(client.submit(lambda x: x + 1, 41).result(), flush=True); client.close()"
    )
    with WhatPsShows() as shown:
        login = Login("login1")
        start = ["start", "demo", *helpers.ON_CPUS, "--jobs", "1", "--env", f"ODD={SECRET}", "--json"]
        directory = Path(json.loads(login.call(start, show_errors=False).output)["directory"])
        keys = secrets_of(directory)
        done = subprocess.run(
            [helpers.command()[0], "-c", program], input="demo", capture_output=True, text=True, timeout=120
        )
        login.call(["status", "--json", "--", "demo"])
        with pytest.raises(HpcgpuError):
            login.call(["status", SECRET])
        login.call(["stop", "--", "demo"])
    assert (done.stdout, done.stderr) == ("42\n", "")
    assert len(keys) > 10 and len(shown.lines) > 10
    assert [(key, shown.having(key)) for key in keys if shown.having(key)] == []
    assert not [call for call in node.calls() if any(key in word for word in call for key in (*keys, "demo"))]


def test_only_the_user_can_use_the_connection(node: LoginNode) -> None:
    Login("login1").call(["list"])
    directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "hpcgpu"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = [path.stat().st_mode for path in directory.iterdir()]  # the connection's socket, and a lock
    assert any(map(stat.S_ISSOCK, modes))
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


@pytest.mark.parametrize("own_connection", [False, True])
def test_the_agent_is_never_forwarded(login_node: Nodes, home: Path, own_connection: bool) -> None:
    # what the login node has, before hpcgpu begins: there root can use an agent
    sees = 'echo "${SSH_AUTH_SOCK:-none}" >> "$HOME/agents"; eval "$SSH_ORIGINAL_COMMAND"'
    path = f"{home / 'node/far/home/bin'}:{SYSTEM_PATH}"
    node = login_node(environment={"PATH": path}, lines=[f"ForceCommand {sees}"])
    tells = node.home / "bin/hpcgpu"
    tells.parent.mkdir()
    tells.write_text('#!/bin/sh\necho "agent: ${SSH_AUTH_SOCK:-none}, display: ${DISPLAY:-none}" >&2\nexit 1\n')
    tells.chmod(0o755)
    process, socket = agent(Path(os.environ["XDG_RUNTIME_DIR"]))
    with process:
        lines = ["ForwardAgent yes", "ForwardX11 yes", f"IdentityAgent {socket}"]
        if own_connection:
            lines += ["ControlMaster auto", f"ControlPath {socket.parent}/own", "ControlPersist yes"]
        node.configure(*lines)
        if own_connection:
            node.ssh("login1", "true")
        said = helpers.hpcgpu("list", "--host", "login1").stderr
        process.terminate()
    assert "agent: none, display: none" in said
    if not own_connection:
        assert set((node.home / "agents").read_text().split()) == {"none"}
