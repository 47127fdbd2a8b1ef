"""Some of the ends that a scheduler job has; benchmarks/scheduler_ends.py brings all of them about, again and again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bed import SlurmBed

from hpcgpu.scaling import replace_failed_jobs, scheduler_restarts

pytestmark = pytest.mark.shows("A scheduler job that ends too early, and is restarted")


@pytest.mark.timeout(600)
def test_a_cluster_goes_on_after_other_ends_of_its_scheduler_job(
    bed: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(scheduler_restarts, "LIMIT", scheduler_restarts.LIMIT)  # it is set below
    monkeypatch.setattr(replace_failed_jobs, "_BACKOFF", replace_failed_jobs._BACKOFF)
    monkeypatch.setattr(replace_failed_jobs, "_EXCLUDED", replace_failed_jobs._EXCLUDED)
    ends = __import__("scheduler_ends")
    monkeypatch.setattr("slurm_ends.SUSPENDED", 5.0)
    rounds = [("suspended", "nothing"), ("node off", "manager"), ("out of memory", "worker node")]
    try:
        report = ends.attack(ends.slurm_queue(bed), tmp_path, rounds, seed=1)
    finally:
        bed.set_partition("urgent", "Nodes=n[0-3]")
        sys.modules.pop("scheduler_ends")
        sys.modules.pop("slurm_ends")
    assert report.wrong == []
    assert sum(report.rounds.values()) == 3 and report.lost == 1
