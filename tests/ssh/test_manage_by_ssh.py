"""A cluster of a site whose compute nodes cannot submit jobs, from a laptop: a process of the login node manages it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_pbs
import pytest
import sshd_bed
from sshd_bed import SYSTEM_PATH, LoginNode

import hpcgpu
from hpcgpu.client.reached_by_ssh import close_tunnels
from tests.conftest import Until

pytestmark = pytest.mark.shows("A cluster of a login node, from a laptop over a real ssh")

PYTHONS = Path(sys.executable).parent
OPTIONS: dict[str, Any] = {"gpus_per_node": 0, "cores": 1, "memory": "1GB", "quiet": True, "poll_interval": 0.5}


@pytest.fixture
def node(home: Path, pbs: fake_pbs.Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoginNode]:
    """A login node of a PBS whose commands are there alone."""
    if reason := sshd_bed.why_not():
        pytest.skip(f"no login node can run here: {reason}")
    pbs.change(lambda state: state["environment"].update(PATH="/usr/bin:/bin"))
    with LoginNode(home / "node", environment={"PATH": f"{pbs.bin}:{PYTHONS}:{SYSTEM_PATH}"}) as node:
        for variable, value in node.environment().items():
            monkeypatch.setenv(variable, value)
        yield node
        close_tunnels()


def managers(node: LoginNode) -> list[int]:
    """The processes of the login node that manage clusters. One that is just starting a command counts twice."""
    return node.started(b"\0manage\0")


def test_the_login_node_manages_a_cluster_while_the_laptop_is_away(
    node: LoginNode, pbs: fake_pbs.Site, until: Until
) -> None:
    cluster = hpcgpu.PBSGPUCluster(host="login1", name="demo", shutdown_on_close=False, **OPTIONS)
    with cluster.get_client() as client:
        cluster.adapt(minimum_jobs=0, maximum_jobs=1)
        assert client.submit(sum, [1, 2]).result(timeout=200) == 3
        assert "hpcgpu manage (process " in cluster.snapshot().manager
    until(lambda: len(pbs.alive()) == 1, "the idle job ends, and the scheduler job stays")
    cluster.close()
    node.break_connections()
    with hpcgpu.connect("login1:demo", quiet=True) as client:
        assert client.submit(sum, [3, 4]).result(timeout=200) == 7
    until(lambda: len(managers(node)) == 1, "one process manages it")
    command = [str(PYTHONS / "hpcgpu"), "manage", "demo", "--host", "login1"]
    again = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "manages cluster demo already" in again.stderr, again.stderr
    subprocess.run([str(PYTHONS / "hpcgpu"), "stop", "demo", "--host", "login1"], check=True, capture_output=True)
    until(lambda: not managers(node), "it ends with the cluster")


def test_a_cluster_of_a_fixed_size_is_managed_by_the_login_node_too(
    node: LoginNode, until: Until, capfd: pytest.CaptureFixture[str]
) -> None:
    reported = ""

    def reports(words: str) -> bool:
        nonlocal reported
        reported += capfd.readouterr().err
        return re.search(words, reported) is not None

    with hpcgpu.PBSGPUCluster(host="login1", name="demo", jobs=1, **{**OPTIONS, "quiet": False}) as cluster:
        until(lambda: "hpcgpu manage (process " in cluster.snapshot().manager, "the login node manages it")
        until(lambda: reports(r"demo: hpcgpu manage \(process .*manages it from now on"), "the program reports it")
        why = "The scheduler job cannot: compute nodes of this site cannot submit jobs: `qsub` was not found"
        until(lambda: reports(why), "and the reason")
    until(lambda: not managers(node), "it ends with the cluster")
