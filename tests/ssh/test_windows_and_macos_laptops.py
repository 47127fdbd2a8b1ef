"""The side of a laptop runs where Python lacks what only POSIX systems, or only Linux, have. See `pretended_system`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd_bed import LoginNode, Nodes

from tests.conftest import queue_in

pytestmark = pytest.mark.shows("A laptop with Windows or macOS, as far as a Linux can pretend to be one")

PRETENDED = str(Path(__file__).with_name("pretended_system.py"))
#: Permitted output. The second text is asyncio's: on Linux, the `kill` that is meant for Windows may take the exit code
#: of an ssh before asyncio does.
MAY_BE_SAID = ("waiting for its scheduler", "Unknown child process")
LIFE = """
import sys

import hpcgpu

options = {"gpus_per_node": 0, "cores": 1, "memory": "1GB", "quiet": True}
with hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **options) as cluster, cluster.get_client() as client:
    print(client.submit(sum, [1, 2]).result())
    cluster.upload_package(sys.argv[1])
    print(client.submit(lambda: __import__("mine").answer()).result())
    cluster.scale(jobs=0)
    with hpcgpu.connect("login1:demo", quiet=True) as other:
        print(other.scheduler.address == client.scheduler.address)
    print(sorted({job.kind for job in cluster.jobs}), "<table" in cluster._repr_html_())
"""


@pytest.fixture
def node(login_node: Nodes) -> Iterator[LoginNode]:
    """A login node with an embedded queue of its own; a test that fails leaves no job in it."""
    node = login_node()
    with queue_in(node.home):
        yield node


def run(system: str, *arguments: str) -> str:
    command = [sys.executable, PRETENDED, system, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    said = [line for line in done.stderr.splitlines() if not any(words in line for words in MAY_BE_SAID)]
    assert (done.returncode, said) == (0, []), done.stderr
    return done.stdout


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_program_on_such_a_laptop_has_the_whole_life_of_a_cluster(
    node: LoginNode, tmp_path: Path, system: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("def answer(): return 'of my own'\n")
    (tmp_path / "life.py").write_text(LIFE)
    printed = run(system, str(tmp_path / "life.py"), str(tmp_path / "mine"))
    assert printed.splitlines() == ["3", "of my own", "False", "['scheduler', 'worker'] True"]
    masters = [call for call in node.calls() if "-fN" in call]
    assert bool(masters) == (system == "darwin")  # the ssh of Windows shares no connection


def test_the_command_line_on_windows(node: LoginNode) -> None:
    options = ("--system", "local", "--gpus-per-node", "0", "--cores", "1", "--memory", "1GB", "--jobs", "1")
    hpcgpu = ("win32", "-m", "hpcgpu")
    assert 'hpcgpu.connect("login1:demo")' in run(*hpcgpu, "start", "demo", *options, "--host", "login1")
    assert "demo on local: running" in run(*hpcgpu, "top", "demo", "--host", "login1")
    assert "no job is left" in run(*hpcgpu, "stop", "demo", "--host", "login1")


def test_a_cluster_of_the_laptop_itself_is_refused_on_windows(home: Path) -> None:
    program = "import hpcgpu\ntry:\n    hpcgpu.SlurmGPUCluster()\nexcept hpcgpu.OptionError as error:\n    print(error)"
    path = home / "program.py"
    path.write_text(program)
    assert "on Windows hpcgpu only uses login nodes, by ssh" in run("win32", str(path))
