"""Differences of software between client, scheduler and workers reach the user before they break something."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import ClusterError, ClusterWarning
from tests.conftest import live, told
from tests.helpers import CPU, other


def test_a_scheduler_with_another_dask_is_an_error_with_the_table(queue: LocalQueue, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="client, scheduler and workers are incompatible") as caught:
        LocalGPUCluster(**CPU, jobs=1, env=other(tmp_path, "dask", "2020.1.0"))
    lines = str(caught.value).splitlines()
    assert [line.split()[:2] + line.split()[-1:] for line in lines if line.strip().startswith("fatal")] == [
        ["fatal", "dask", "2020.1.0"]
    ]
    assert "dask: dask must have the same version in all processes: install one version everywhere" in lines
    assert live(queue) == [], "no job is left"


def test_it_is_a_warning_where_the_user_wants_it_and_nothing_where_not(queue: LocalQueue, tmp_path: Path) -> None:
    env = other(tmp_path, "dask", "2020.1.0")
    with told("fatal +dask"):
        cluster = LocalGPUCluster(**CPU, env=env, environment_check="warn")
    cluster.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClusterWarning)
        LocalGPUCluster(**CPU, env=env, environment_check="off").close()


def test_a_worker_that_joins_with_other_software_is_reported(queue: LocalQueue, tmp_path: Path) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster:
        cluster.wait_for_workers(1)
        with told(r"warning +numpy .*1\.0\.0"):
            cluster.add_worker_group(
                "old", jobs=1, cores=1, memory="1GiB", gpus_per_node=0, env=other(tmp_path, "numpy", "1.0.0")
            )
            cluster.wait_for_workers(2)
        with pytest.warns(ClusterWarning), pytest.raises(ClusterError, match="are incompatible"):
            cluster.add_worker_group(
                "alien", jobs=1, cores=1, memory="1GiB", gpus_per_node=0, env=other(tmp_path, "dask", "2020.1.0")
            )
            cluster.wait_for_workers(3)


def test_who_connects_is_compared_too(queue: LocalQueue, tmp_path: Path) -> None:
    env = other(tmp_path, "dask", "2020.1.0")
    with LocalGPUCluster(**CPU, env=env, environment_check="off", name="met") as cluster:
        with pytest.raises(ClusterError, match=r"fatal +dask"):
            hpcgpu.connect(cluster.directory.path, quiet=True)
        with told(r"fatal +dask"):
            client = hpcgpu.connect(cluster.directory.path, quiet=True, environment_check="warn")
        client.close()
