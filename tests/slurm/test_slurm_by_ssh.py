"""A laptop has the whole life of a cluster on a real Slurm, over a real ssh."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sshd_bed
from bed import SlurmBed, processes
from distributed import Client, Event
from distributed.client import FutureCancelledError
from sshd_bed import LoginNode

import hpcgpu
from hpcgpu import SlurmGPUCluster
from hpcgpu.client.reached_by_ssh import close_tunnels
from tests.helpers import hpcgpu as run
from tests.slurm.helpers import CPU, in_queue

pytestmark = pytest.mark.shows("A cluster of a login node, from a laptop over a real ssh")

Until = Callable[..., None]


@pytest.fixture
def login_node(bed: SlurmBed, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoginNode]:
    """A login node where only a login shell finds Slurm and hpcgpu. The laptop has no Slurm."""
    if reason := sshd_bed.why_not():
        pytest.skip(f"no login node can run here: {reason}")
    shells = home / "shells"
    shells.mkdir()
    for shell in ("sh", "bash"):
        (shells / shell).symlink_to(f"/bin/{shell}")
    with LoginNode(home / "node", environment={"PATH": str(shells)}) as node:
        (node.home / ".bash_profile").write_text(
            f"export SLURM_CONF={bed.conf} PATH={Path(sys.executable).parent}:$PATH\necho Welcome to login1\n"
        )
        for variable, value in node.environment().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.delenv("SLURM_CONF")
        yield node
        close_tunnels()


def test_a_laptop_has_the_whole_life_of_a_cluster_on_slurm(login_node: LoginNode, bed: SlurmBed, until: Until) -> None:
    cluster = SlurmGPUCluster(host="login1", name="demo", jobs=1, on_scheduler_end="restart", **CPU)
    with cluster.get_client() as client:
        assert client.submit(sum, [1, 2]).result() == 3
        cluster.scale(jobs=2)
        cluster.wait_for_workers(2, timeout=120)
        jobs = ["demo-0", "demo-1", "demo-scheduler", "demo-scheduler2"]
        until(lambda: sorted(in_queue(bed)) == jobs, "the next scheduler job waits")
        cluster.adapt(minimum_jobs=1, maximum_jobs=1)
        until(lambda: len(in_queue(bed)) == 3, "adaptive scaling ends a job")
        assert "Scheduler at" in str(cluster.get_logs())
        assert "scheduler job" in cluster.report()
        lost = client.submit(Event("never").wait)
        for process in processes():
            if b"SLURM_JOB_NAME=demo-scheduler" in process.environment.split(b"\0"):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(FutureCancelledError, match="the scheduler is gone"):
            lost.result()
        assert client.submit(sum, [2, 3], pure=False).result(timeout=150) == 5
    cluster.detach()
    close_tunnels()
    with hpcgpu.connect("login1:demo", quiet=True) as client:
        assert isinstance(client, Client)
        assert client.submit(sum, [3, 4], pure=False).result(timeout=150) == 7
    done = run("stop", "demo", "--host", "login1")
    assert "no job is left" in done.stdout, done.stderr
