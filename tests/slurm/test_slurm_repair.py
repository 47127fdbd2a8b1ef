"""Jobs that were scaled away and jobs that lack workers, on a real Slurm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bed import SlurmBed

from hpcgpu import SlurmGPUCluster
from hpcgpu.existing_clusters.lookup import locate
from tests.conftest import told
from tests.helpers import asks_for, hpcgpu, messages, poll_and_decide, time_passes, two_of_four_are_missing
from tests.slurm.helpers import A100, CPU, in_queue, submits

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]


def test_jobs_that_were_scaled_away_stay_away(bed: SlurmBed, until: Until) -> None:
    """The first program sees none of them end: Slurm still lists them, as completing or cancelled, when the next one
    comes.
    """
    cluster = SlurmGPUCluster(name="few", jobs=3, shutdown_on_close=False, **CPU)
    cluster.wait_for_workers(3)
    cluster.detach()
    done = hpcgpu("scale", "few", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    [kept] = [submit.name for submit in locate("few").submits() if submit.kind == "worker" and not submit.unwanted]
    with SlurmGPUCluster.from_name("few") as again:
        again.wait_for_workers(1)
        until(lambda: sorted(in_queue(bed)) == [kept, "few-scheduler"], "one is left")
        poll_and_decide(again)
        again.settle()
        assert len(submits(again)) == 3, "it submitted a job"
        assert list(again.workers) == [kept]
        asks_for(again, 1, "1 job")
        assert "worker job" not in messages(again), "it reported that one failed"


def test_a_job_of_two_nodes_on_one_of_which_the_process_fails_is_reported_and_replaced(
    bed: SlurmBed, until: Until, home: Path
) -> None:
    """The launcher of node 1 fails, as one does whose interface or GPU is missing there."""
    healed = home / "healed"
    python = home / "python"
    options = A100 | {"gpus_per_node": 2, "nodes_per_job": 2, "python": str(python)}
    python.write_text(
        f'#!/bin/bash\nif [ "${{SLURM_NNODES-}}" = 2 ] && [ "${{SLURM_NODEID-}}" = 1 ] && [ ! -e {healed} ]; then\n'
        f"    echo 'no driver here' >&2; exit 3\nfi\nexec {sys.executable} \"$@\"\n"
    )
    python.chmod(0o755)
    with SlurmGPUCluster(name="half", jobs=1, worker_restarts=0, **options) as cluster:
        cluster.wait_for_workers(2)
        until(lambda: two_of_four_are_missing(cluster), "the table of jobs says so")
        healed.touch()
        with told(
            r"on its node 1 .*takes its place(?=(.|\n)*1: no driver here)(?=(.|\n)*task 1: Exited with exit code 3)"
        ):
            time_passes(cluster, "half-0", until)
        cluster.wait_for_workers(4)
        until(lambda: list(cluster.workers) == ["half-1"], "the job that was short goes when the other is complete")
