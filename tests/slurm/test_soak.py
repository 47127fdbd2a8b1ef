"""A short soak: the one of benchmarks/soak.py, which runs for an hour in full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bed import SlurmBed

pytestmark = pytest.mark.shows("All kinds of faults at once, for minutes")


@pytest.mark.timeout(600)
def test_a_cluster_that_is_left_alone_while_everything_fails(bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    soak = __import__("soak")
    report = soak.soak(bed, minutes=2.5)
    soak.show(report)
    assert report.wrong == []
    assert {"job cancelled", "node down", "slurmctld restarted", "scheduler killed"} <= set(report.faults)
    assert report.results > 0
    sys.modules.pop("soak")
