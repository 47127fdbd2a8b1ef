"""What others prepare where Dask puts its temporary files is neither imported nor unpickled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU, GPU

pytestmark = pytest.mark.shows("Attacks of other users through files and directories")

Until = Callable[..., None]


@pytest.fixture
def prepared(home: Path) -> Path:
    """The node's directory for temporary files, in which somebody else was first: Dask takes any directory of these
    names.
    """
    node = home / "dask"
    node.mkdir()
    node.chmod(0o1777)
    for name in ("dask-scratch-space", f"dask-scratch-space-{os.getuid()}"):
        (node / name).mkdir()
        (node / name).chmod(0o777)
        (node / name / "prepared.py").write_text("")
        if os.geteuid() == 0:
            os.chown(node / name, 64321, 64321)
    return node


def looking(parameter: str) -> Callable[..., tuple[str, int, bool]]:
    """A function for `Client.run`: where a server has its temporary files, their mode, and whether it would import what
    was prepared.
    """

    def look(server: Any) -> tuple[str, int, bool]:
        import importlib.util
        from pathlib import Path

        directory = Path(server.local_directory)
        made = next((place for place in (directory, *directory.parents) if place.name.startswith("hpcgpu-")), directory)
        return server.local_directory, made.stat().st_mode & 0o777, importlib.util.find_spec("prepared") is not None

    if parameter == "dask_worker":
        return lambda dask_worker: look(dask_worker)  # noqa: PLW0108 (distributed reads the name of the argument)
    return lambda dask_scheduler: look(dask_scheduler)  # noqa: PLW0108


@pytest.mark.parametrize("options", [CPU, GPU], ids=["cpu", "gpu"])
def test_no_process_of_a_cluster_uses_a_scratch_directory_that_it_did_not_make(
    queue: LocalQueue, prepared: Path, fake_gpus: None, options: dict[str, Any], until: Until
) -> None:
    theirs = sorted(prepared.iterdir())
    with LocalGPUCluster(**options, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(options["gpus_per_node"] or 1)
        places = [client.run_on_scheduler(looking("dask_scheduler"))]
        for nanny in (False, True):
            places += client.run(looking("dask_worker"), nanny=nanny).values()
        for directory, mode, imports in places:
            assert Path(directory).relative_to(prepared).parts[0].startswith(f"hpcgpu-{os.getuid()}-")
            assert mode == 0o700 and not imports
    until(lambda: sorted(prepared.iterdir()) == theirs, "the jobs remove their own")


def test_neither_does_a_scheduler_in_this_program(queue: LocalQueue, prepared: Path) -> None:
    theirs = sorted(prepared.iterdir())
    with dask.config.set({"temporary-directory": str(prepared)}), LocalGPUCluster(**CPU, scheduler="local") as cluster:
        directory, mode, imports = looking("dask_scheduler")(cluster.scheduler)
        assert Path(directory).relative_to(prepared).parts[0].startswith(f"hpcgpu-{os.getuid()}-")
        assert mode == 0o700 and not imports
        assert not [place for place in sys.path if place.startswith(str(prepared)) and place != directory]
    assert sorted(prepared.iterdir()) == theirs


def test_a_local_directory_that_others_can_change_is_refused_before_anything_is_submitted(
    queue: LocalQueue, home: Path
) -> None:
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    with pytest.raises(OptionError, match=f"local_directory='{home}/open/mine': .*chmod o-w {home}/open"):
        LocalGPUCluster(**CPU, local_directory=str(home / "open" / "mine"))
    assert not (home / "clusters").exists()


def test_a_job_refuses_what_only_its_node_sees_and_reports_why(queue: LocalQueue, home: Path, until: Until) -> None:
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    with LocalGPUCluster(
        **CPU, name="node", local_directory="$SCRATCH/mine", env={"SCRATCH": str(home / "open")}
    ) as cluster:
        job = queue.submit(cluster.directory.path / "worker.sh", job_name="by-hand")
        until(lambda: queue.poll([job])[job].state.ended, "it refuses")
        assert queue.poll([job])[job].exit_code == 1
        log = (cluster.directory.logs / f"by-hand-{job}.log").read_text()
        assert f"chmod o-w {home}/open; or set local_directory to another directory" in log and "Traceback" not in log
