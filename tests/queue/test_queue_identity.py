"""Two systems that share a home directory: what one gets of its own queue proves nothing of clusters in the queue of
the other.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner, Result
from fake_slurm import Site

from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.cli import main
from hpcgpu.errors import ClusterExists, OtherQueue
from hpcgpu.existing_clusters.query_jobs import live_jobs
from hpcgpu.existing_clusters.stop import stop
from hpcgpu.manager import start_cluster
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory


@pytest.fixture
def cluster(site: Site, slurm: Slurm, tmp_path: Path) -> ClusterDirectory:
    """A cluster with a job in the queue of Slurm cluster alpha."""
    directory = create_directory.claim(
        tmp_path / "clusters" / "demo",
        lambda earlier: [],
        system="slurm",
        queue=slurm.identity(),
        complete=lambda draft: draft.tls.mkdir(),
    )
    directory.intend("demo-scheduler", "scheduler")
    directory.submitted("demo-scheduler", site.job(7, "RUNNING", j="demo-scheduler"))
    return directory


@pytest.fixture
def beta(cluster: ClusterDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """From now on this is a login node of Slurm cluster beta."""
    (tmp_path / "other").mkdir()
    site = Site(tmp_path / "other", cluster="beta")
    monkeypatch.setenv("PATH", str(site.bin), prepend=os.pathsep)
    return site


def hpcgpu(directory: ClusterDirectory, *arguments: str) -> Result:
    with dask.config.set({"hpcgpu.cluster-directory": str(directory.path.parent)}):
        return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.mark.parametrize("which", ["demo", "--all"])
def test_stop_on_the_login_node_of_another_system_changes_nothing_and_names_both_queues(
    cluster: ClusterDirectory, site: Site, beta: Site, which: str
) -> None:
    done = hpcgpu(cluster, "stop", which)
    assert done.exit_code == 1 and "no job is left" not in done.output
    assert (
        "cluster demo belongs to the queue 'alpha' of batch system 'slurm', but this machine uses the queue 'beta'"
        in done.stderr
    )
    assert cluster.tls.is_dir() and not cluster.closing
    with pytest.raises(OtherQueue):
        stop(cluster, Slurm())
    assert cluster.tls.is_dir() and not cluster.closing and site.jobs(T="RUNNING") == ["7"]


def test_list_on_the_login_node_of_another_system_keeps_the_cluster_and_reports_where_it_is(
    cluster: ClusterDirectory, beta: Site
) -> None:
    beta.change(
        lambda state: state["accounting"].update({"7": "7|COMPLETED|0:0|n1|1|2|demo-scheduler"})
    )  # its own job of that id
    os.utime(cluster.path, (1, 1))
    (row,) = json.loads(hpcgpu(cluster, "list", "--json").stdout)
    assert row["name"] == "demo" and "belongs to the queue 'alpha'" in row["problem"] and row["jobs"] == []
    assert "demo" in (text := hpcgpu(cluster, "list").stdout) and "unknown" in text
    assert cluster.tls.is_dir() and not cluster.closed
    with pytest.raises(ClusterExists, match=r"belongs to the queue 'alpha' .* Or choose another name"):
        create_directory.claim(cluster.path, start_cluster.alive)
    status = hpcgpu(cluster, "status", "demo")
    assert (
        "this machine uses the queue 'beta'" in status.stdout and "The state of its jobs is not known" in status.stdout
    )


def test_where_the_cluster_is_it_is_stopped(cluster: ClusterDirectory, site: Site) -> None:
    done = hpcgpu(cluster, "stop", "demo")
    assert (done.exit_code, done.stdout) == (0, "demo: 1 job cancelled, no job is left\n")
    assert site.jobs(T="RUNNING") == [] and cluster.closed


@pytest.mark.parametrize(
    "fault", [{"rc": 1}, {"stdout": "slurm_load_ctl_conf error"}, {"hang": True}, {"stdout": "ClusterName = (null)\n"}]
)
def test_a_queue_that_does_not_identify_itself_is_asked_for_the_jobs(
    cluster: ClusterDirectory, site: Site, fault: dict[str, object]
) -> None:
    site.fault("scontrol", **fault)
    batch = Slurm(timeout=0.5 if "hang" in fault else 60)
    assert batch.identity() == "" and batch.identity() == ""
    batch.timeout = 60
    assert [job.job_id for job in live_jobs(cluster, batch)] == ["7"]
    assert len(site.calls("scontrol")) == 2, "it is asked once: by the start, and by this one"


def test_a_cluster_that_was_made_before_queues_had_names_is_found(cluster: ClusterDirectory, site: Site) -> None:
    about = json.loads((cluster.path / "cluster.json").read_text())
    assert about.pop("queue") == "alpha"
    cluster.write("cluster.json", json.dumps(about))
    assert [job.job_id for job in live_jobs(cluster, Slurm())] == ["7"]
    assert len(site.calls("scontrol")) == 1, "nobody asks where there is nothing to compare with"
