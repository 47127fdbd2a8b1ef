"""The widget in a real notebook: what a user sees of a cluster, and what the controls do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from browser import Jupyter, Notebook, Servers, dask_in
from test_page import INSTALLED

from hpcgpu import connect
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import Until
from tests.helpers import GPU, block_queue, hpcgpu, in_queue

pytestmark = pytest.mark.usefixtures("fake_gpus")

START = f"from hpcgpu import LocalGPUCluster\ncluster = LocalGPUCluster(name='flights', jobs=1, **{GPU!r})"
WITH, WITHOUT = ([f"--ServerApp.jpserver_extensions=hpcgpu.jupyter={on}"] for on in (True, False))
BLOCK = "cluster.wait_for_workers(2)\nprint('the workers are there')"


def started(server: Jupyter, page: Any, *cells: str) -> Notebook:
    """Run a notebook that shows the cluster in its second cell."""
    server.write("flights.ipynb", START, "cluster", *cells)
    notebook = Notebook(page, server, "flights.ipynb")
    notebook.run_all()
    return notebook


def test_a_job_waits_with_its_reason_and_then_runs_while_the_cell_blocks(
    servers: Servers, page: Any, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    go = home / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.1)"
    notebook = started(servers(), page, BLOCK, wait, "cluster.close()")
    widget = notebook.output(1).locator(".hpcgpu")
    row = widget.locator("tr", has_text="flights-0")
    row.get_by_text("pending").wait_for()
    row.get_by_text("Resources").wait_for()
    assert notebook.output(2).get_by_text("the workers are there").count() == 0
    queue.cancel([blocker])
    row.get_by_text("running").wait_for()
    go.touch()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []


def test_the_controls_change_the_cluster_and_show_errors_and_logs(
    servers: Servers, page: Any, queue: LocalQueue, until: Until
) -> None:
    """Without the extension of the server: requests go to the kernel."""
    notebook = started(servers(arguments=WITHOUT), page, "cluster.wait_for_workers(2)")
    widget = notebook.output(1).locator(".hpcgpu")
    widget.locator(".hpcgpu-gpu", has_text="flights-0-1").wait_for()
    notebook.wait_idle()

    widget.get_by_label("Fewest").fill("0")
    widget.get_by_label("Most").fill("0")
    widget.get_by_role("button", name="Adapt").click()
    widget.get_by_role("alert").filter(has_text="maximum").wait_for()

    widget.get_by_label("Size of the cluster").fill("2")
    widget.get_by_role("button", name="Scale").click()
    widget.get_by_text("Scale: done.").wait_for()
    widget.locator("tr", has_text="flights-1").get_by_text("running").wait_for()

    widget.get_by_role("button", name="flights-0").click()
    widget.get_by_role("region", name="Log of flights-0").get_by_text("dask cuda worker").first.wait_for()

    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []


def test_a_detached_cluster_continues_and_the_widget_goes_on_showing_it(
    servers: Servers, page: Any, queue: LocalQueue, until: Until
) -> None:
    notebook = started(servers(arguments=WITHOUT, environment=INSTALLED), page)
    widget = notebook.output(1).locator(".hpcgpu")
    widget.locator("tr", has_text="flights-0").get_by_text("running").wait_for()
    notebook.wait_idle()
    widget.get_by_role("button", name="Detach").click()
    widget.get_by_role("alertdialog").get_by_role("button", name="Detach").click()
    widget.get_by_text("was detached from this program").wait_for()
    assert widget.locator(".hpcgpu-state").inner_text() == "running"
    assert len(in_queue(queue, "flights")) == 2
    done = hpcgpu("scale", "flights", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    widget.locator("tr", has_text="flights-1").get_by_text("running").wait_for()
    widget.get_by_label("Size of the cluster").fill("1")
    widget.get_by_role("button", name="Scale").click()
    widget.get_by_text("Scale: done.").wait_for()
    until(lambda: len(in_queue(queue, "flights")) == 2, "the kernel does what the command does")
    assert len(page.locator(".hpcgpu").all()) == 1 and notebook.output(1).locator(".jp-OutputArea-child").count() == 1
    widget.get_by_label("Most").fill("1")
    widget.get_by_role("button", name="Adapt").click()
    widget.get_by_text("Adapt: done.").wait_for()
    widget.get_by_text("(adapts from 0 to 1 jobs)").wait_for()
    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []


def test_the_widget_and_the_dashboard_go_on_with_the_next_scheduler(
    servers: Servers, page: Any, queue: LocalQueue, home: Path, until: Until
) -> None:
    hold = home / "hold"
    prologue = {"gpus_per_node": 0, "job_script_prologue": [f"while [ -e {hold} ]; do sleep 0.1; done"]}
    options = GPU | {"on_scheduler_end": "restart", "scheduler": prologue}
    server = servers(arguments=WITH)
    start = f"from hpcgpu import LocalGPUCluster\ncluster = LocalGPUCluster(name='flights', jobs=1, **{options!r})"
    server.write("flights.ipynb", start, "cluster", "cluster.wait_for_workers(2)")
    notebook = Notebook(page, server, "flights.ipynb")
    notebook.run_all()
    widget = notebook.output(1).locator(".hpcgpu")
    link = widget.locator("a[href='/hpcgpu/dashboard/flights/status']")
    widget.locator(".hpcgpu-gpu", has_text="flights-0-1").wait_for()
    link.wait_for()
    hold.touch()
    with connect("flights", quiet=True, set_as_default=False) as client:
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
    widget.get_by_text("restarting", exact=True).wait_for()
    widget.get_by_text("1 worker job keeps its 2 GPUs and waits for it").wait_for()
    link.wait_for(state="hidden")
    hold.unlink()
    widget.locator(".hpcgpu-gpu", has_text="flights-0-1").wait_for()
    widget.locator(".hpcgpu-state").get_by_text("running").wait_for()
    with page.context.expect_page() as opened:
        link.click()
    dask_in(opened.value)
    assert hpcgpu("stop", "flights").returncode == 0
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []


def test_a_kernel_that_restarts_and_a_click_let_the_widget_ask_the_server_at_once(
    servers: Servers, page: Any, queue: LocalQueue, until: Until
) -> None:
    """What the widget asks again and again is switched off here."""
    never = "ms >= 3000 && ms <= 5000 ? 1e9 : ms"
    page.add_init_script(f"const real = setInterval; setInterval = (f, ms, ...more) => real(f, {never}, ...more)")
    server = servers(arguments=WITH)
    notebook = started(server, page, "cluster.wait_for_workers(2); cluster.detach()")
    widget = notebook.output(1).locator(".hpcgpu")
    widget.get_by_text("was detached from this program").wait_for()
    widget.locator("a[href^='/hpcgpu/dashboard/']").wait_for()
    notebook.wait_idle()
    with page.expect_request(lambda sent: sent.url.endswith("/hpcgpu/api/clusters/flights")):
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    widget.get_by_text("was detached from this program").wait_for(state="detached")
    widget.get_by_label("Size of the cluster").fill("2")
    widget.get_by_role("button", name="Scale").click()
    widget.get_by_text("Scale: done.").wait_for()
    widget.locator("tr", has_text="flights-1").wait_for()
    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []


def test_after_the_kernel_has_ended_the_server_shows_and_changes_the_cluster(
    servers: Servers, page: Any, queue: LocalQueue, until: Until
) -> None:
    server = servers(arguments=WITH)
    notebook = started(server, page, "cluster.wait_for_workers(2); cluster.detach()")
    widget = notebook.output(1).locator(".hpcgpu")
    widget.get_by_text("was detached from this program").wait_for()
    [kernel] = server.request("api/kernels")
    server.request(f"api/kernels/{kernel['id']}", method="DELETE")
    until(lambda: len(server.processes()) == 1, "the kernel ends")
    widget.get_by_label("Size of the cluster").fill("2")
    widget.get_by_role("button", name="Scale").click()
    widget.get_by_text("Scale: done.").wait_for()
    widget.locator("tr", has_text="flights-1").get_by_text("running").wait_for()
    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")
    assert page.errors == []
