"""The end of the scheduler's walltime comes from a real Slurm, also where somebody changes it."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bed import SlurmBed

from hpcgpu import SlurmGPUCluster
from hpcgpu.notify import Notice
from tests.slurm.helpers import CPU

Until = Callable[..., None]


def test_a_walltime_that_is_shortened_is_reported_before_it_ends(bed: SlurmBed, home: Path, until: Until) -> None:
    notices: list[Notice] = []
    saved = threading.Event()
    options = {**CPU, "walltime": "2h", "notify": notices.append, "on_ending": lambda cluster: saved.set()}
    with SlurmGPUCluster(**options, name="soon", jobs=1) as cluster:
        cluster.wait_for_workers()
        until(lambda: [notice.event for notice in notices] == ["ready"], "it is ready, and ends in two hours")
        scheduler = next(job for job in cluster.jobs if job.kind == "scheduler")
        minutes = math.ceil((time.time() - (scheduler.started or 0) + 30) / 60)  # it may have started slowly
        subprocess.run(["scontrol", "update", f"JobId={scheduler.id}", f"TimeLimit={minutes}"], check=True)
        assert saved.wait(150), "in the second half of the minute"
        assert cluster.status.name == "running"
        until(lambda: "ending" in [notice.event for notice in notices], "the end is told")
        ending = next(notice for notice in notices if notice.event == "ending")
        assert f"the walltime of the scheduler job {scheduler.id} ends in" in ending.message
    assert [notice.event for notice in notices][-1] == "ended"
