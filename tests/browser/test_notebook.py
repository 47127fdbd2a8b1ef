"""The widget in a real notebook: what a user sees of a cluster, and what the controls do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Jupyter, Notebook, Servers

from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import Until
from tests.helpers import GPU, block_queue, in_queue

pytestmark = pytest.mark.usefixtures("fake_gpus")

START = f"from hpcgpu import LocalGPUCluster\ncluster = LocalGPUCluster(name='flights', jobs=1, **{GPU!r})"
BLOCK = "cluster.wait_for_workers(2)\nprint('the workers are there')"


def started(server: Jupyter, page: Any, *cells: str) -> Notebook:
    """Run a notebook that shows the cluster in its second cell."""
    server.write("flights.ipynb", START, "cluster", *cells)
    notebook = Notebook(page, server, "flights.ipynb")
    notebook.run_all()
    return notebook


def test_a_job_waits_with_its_reason_and_then_runs_while_the_cell_blocks(
    jupyter: Servers, page: Any, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    notebook = started(jupyter(), page, BLOCK, "cluster.close()")
    widget = notebook.output(1).locator(".hpcgpu")
    row = widget.locator("tr", has_text="flights-0")
    row.get_by_text("pending").wait_for()
    row.get_by_text("Resources").wait_for()
    assert notebook.output(2).get_by_text("the workers are there").count() == 0
    queue.cancel([blocker])
    row.get_by_text("running").wait_for()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []
