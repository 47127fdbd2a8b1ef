"""The table of jobs says how old it is."""

from __future__ import annotations

from pathlib import Path

from hpcgpu.display.jobinfo import JobInfo
from hpcgpu.display.table import JobTable

JOB = JobInfo(
    id="1", kind="worker", name="demo-0", state="running", reason="", waited=2.0, node="n1", workers=1, log=Path("/log")
)


def test_a_table_that_is_not_fresh_says_how_old_it_is() -> None:
    assert "last answer" not in repr(JobTable([JOB])) and "last answer" not in JobTable([JOB], 1.0)._repr_html_()
    assert repr(JobTable([JOB], 40.0)).endswith("States as of the queue's last answer, 40 s ago.")
    assert "last answer, 40 s ago" in JobTable([JOB], 40.0)._repr_html_()
