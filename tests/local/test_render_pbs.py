"""A cluster that is launched and stopped by its own scripts, on a PBS that pretends."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from distributed.security import Security
from fake_pbs import Site

import hpcgpu
from hpcgpu import PBSGPUCluster
from hpcgpu.scripts.bundle import make
from tests.helpers import PBS_CPU as CPU
from tests.helpers import fill, printed
from tests.helpers import hpcgpu as hpcgpu_command

pytestmark = pytest.mark.shows("Scripts that stand alone")

Until = Callable[..., None]

OPTIONS: dict[str, Any] = {name: value for name, value in CPU.items() if name != "quiet"}


def script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=250, cwd="/")


def test_launch_compute_launch_more_adopt_and_stop(pbs: Site, home: Path, until: Until) -> None:
    directory = make("pbs", OPTIONS, home / "a.cluster-of-mine").path
    done = script(directory / "launch.sh", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "scheduler job 0.pbs01 (a.cluster-of-mine-scheduler)\nworker job 1.pbs01 (a.cluster-of-mine-0)\n"
    )
    with hpcgpu.connect(directory, quiet=True) as client:
        client.wait_for_workers(2)
        assert client.submit(sum, [1, 2, 3]).result() == 6
    tls = directory / "tls"
    files = {"tls_ca_file": tls / "cert.pem", "tls_client_cert": tls / "cert.pem", "tls_client_key": tls / "key.pem"}
    security = Security(require_encryption=True, **{name: str(path) for name, path in files.items()})
    with Client(scheduler_file=str(directory / "scheduler.json"), security=security) as client:
        assert client.submit(sum, [1, 2]).result() == 3, "as the README says, with Dask alone"
        assert script(directory / "launch.sh").returncode == 0
        client.wait_for_workers(3)
    assert {job.split("-")[-1] for job in _names(pbs)} == {"scheduler", "0", "1", "2"}, "no second scheduler job"
    cluster = PBSGPUCluster.from_name(directory)
    cluster.wait_for_workers(3)
    cluster.detach()
    done = script(directory / "stop.sh")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "No job of a.cluster-of-mine is left."), done.stderr
    assert pbs.alive() == {} and not (directory / "contact.json").exists()
    assert script(directory / "launch.sh", "0").returncode == 0, "it can be launched again"
    with hpcgpu.connect(directory, quiet=True) as client:
        assert client.scheduler_info()["type"] == "Scheduler"
    assert script(directory / "stop.sh").returncode == 0


def _names(pbs: Site) -> list[str]:
    jobs = pbs.change(lambda state: [job for job in state["jobs"].values() if "end" not in job])
    return [job["variables"]["HPCGPU_PBS_JOB"] for job in jobs]


def test_stop_deletes_jobs_that_are_held_for_ever_and_no_others(
    fake_gpus: None, pbs: Site, home: Path, until: Until
) -> None:
    blocker = fill(pbs, home)
    directory = make("pbs", {"gpus_per_node": 1, "protocol": "tcp"}, home / "held").path
    assert script(directory / "launch.sh", "2").returncode == 0
    assert sorted(pbs.alive().values()) == ["H", "H", "Q", "R"]
    pbs.run("qdel", "1.pbs01")
    assert sorted(pbs.alive().values()) == ["H", "H", "R"]
    assert script(directory / "stop.sh").returncode == 0
    assert set(pbs.alive()) == {blocker}
    pbs.run("qdel", blocker)


def test_scripts_are_listed_as_a_cluster_from_their_launch_on(pbs: Site, home: Path) -> None:
    directory = make("pbs", OPTIONS, home / "clusters" / "later").path
    assert hpcgpu_command("list").stdout == "No clusters.\n"
    assert hpcgpu_command("stop", "--all").returncode == 0
    assert script(directory / "launch.sh", "0").returncode == 0, "stop --all leaves scripts that run nothing alone"
    [listed] = printed("list", hpcgpu_command("list", "--json").stdout)
    assert (listed["name"], [job["name"] for job in listed["jobs"]]) == ("later", ["later-scheduler"])
    assert script(directory / "stop.sh").returncode == 0


def test_a_queue_that_is_away_loses_nothing(pbs: Site, home: Path) -> None:
    directory = make("pbs", OPTIONS, home / "away").path
    pbs.set(down=True)
    done = script(directory / "launch.sh")
    assert done.returncode == 1 and "scheduler job away-scheduler was not submitted" in done.stderr
    pbs.set(down=False)
    assert script(directory / "launch.sh").returncode == 0
    pbs.set(down=True)
    done = script(directory / "stop.sh")
    assert done.returncode == 1 and "the queue does not answer" in done.stderr
    pbs.set(down=False)
    assert script(directory / "stop.sh").returncode == 0
    assert pbs.alive() == {}
