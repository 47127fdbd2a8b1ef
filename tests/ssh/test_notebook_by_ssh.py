"""A notebook on a laptop shows and controls a cluster of a login node: a real ssh, JupyterLab and browser."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from browser import Notebook, Servers, dask_in
from laptop import queue_of
from sshd_bed import LoginNode
from test_notebook import WITH

import hpcgpu
from hpcgpu.cluster.cluster_by_ssh import ClusterBySSH
from tests import helpers
from tests.conftest import Until
from tests.helpers import GPU, in_queue

pytestmark = [
    pytest.mark.usefixtures("fake_gpus"),
    pytest.mark.shows("A cluster of a login node, from a laptop over a real ssh"),
]

#: The first snapshot comes after the cell has ended, as over a slow link.
START = (
    "import hpcgpu.cluster.notebook; hpcgpu.cluster.notebook.FIRST = 0.0\n"
    "from hpcgpu import LocalGPUCluster\n"
    f"cluster = LocalGPUCluster(host='login1', name='flights', jobs=1, **{GPU!r})\n"
    "cluster.wait_for_workers(2)"
)
FLIGHTS = Path(__file__).parents[2] / "examples/flights.ipynb"
#: Ends after four more snapshots.
FOUR_MORE = """import time
seen = set()
while len(seen) < 5:
    seen.add(getattr(cluster._live.feed.latest, 'time', 0))
    time.sleep(0.1)
print("four more")"""


def test_what_is_asked_again_and_again_starts_no_ssh_also_where_the_answering_process_has_ended(
    node: LoginNode,
) -> None:
    with hpcgpu.LocalGPUCluster(host="login1", name="flights", jobs=1, **GPU) as cluster:
        assert isinstance(cluster, ClusterBySSH)
        assert cluster.questions.snapshot().name == "flights"
        calls = node.calls()
        for pid in node.started(b"hpcgpu\0answers\0"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert cluster.questions.snapshot().state == "running"
        assert "Scheduler at" in cluster.questions.log("flights-scheduler")
        with pytest.raises(hpcgpu.ClusterError, match="has no job 'other'"):
            cluster.questions.log("other")
        assert node.calls() == calls
    assert cluster.questions.snapshot().state == "closed"


def test_the_widget_is_live_starts_no_ssh_for_its_pictures_and_controls_the_cluster(
    node: LoginNode, jupyter: Servers, page: Any, until: Until
) -> None:
    server = jupyter()
    server.write("flights.ipynb", START, "cluster", FOUR_MORE)
    notebook = Notebook(page, server, "flights.ipynb")
    notebook.run_all()
    widget = notebook.output(1).locator(".hpcgpu")
    widget.locator(".hpcgpu-gpu", has_text="flights-0-1").wait_for()
    calls = node.calls()
    notebook.output(2).get_by_text("four more").wait_for()
    assert node.calls() == calls

    with page.context.expect_page() as opened:
        widget.get_by_role("link", name="dashboard").click()
    dashboard = opened.value
    dashboard.wait_for_url(re.compile(r"http://127\.0\.0\.1:\d+/status"))
    dask_in(dashboard)
    dashboard.close()

    node.break_connections()
    widget.get_by_role("button", name="flights-0").click()
    widget.get_by_role("region", name="Log of flights-0").get_by_text("dask cuda worker").first.wait_for()
    widget.get_by_label("Size of the cluster").fill("2")
    widget.get_by_role("button", name="Scale").click()
    widget.get_by_text("Scale: done.").wait_for()
    widget.locator("tr", has_text="flights-1").get_by_text("running").wait_for()
    widget.get_by_label("Fewest").fill("2")
    widget.get_by_label("Most").fill("1")
    widget.get_by_role("button", name="Adapt").click()
    widget.get_by_role("alert").filter(has_text="maximum").wait_for()
    widget.get_by_label("Fewest").fill("1")
    widget.get_by_label("Most").fill("2")
    widget.get_by_role("button", name="Adapt").click()
    widget.get_by_text("(adapts from 1 to 2 jobs)").wait_for()

    widget.get_by_role("button", name="Detach").click()
    widget.get_by_role("alertdialog").get_by_role("button", name="Detach").click()
    widget.get_by_role("alertdialog").wait_for(state="hidden")
    assert in_queue(queue_of(node), "flights"), "its jobs continue"
    notebook.command("docmanager:save")
    saved = server.notebooks / "flights.ipynb"
    until(lambda: "This is a picture" in saved.read_text(), "the notebook is saved")
    assert "token=" not in saved.read_text()
    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue_of(node), "flights"), "the jobs end")
    assert page.errors == []


def test_the_notebook_of_the_examples_needs_a_host_and_no_other_change(
    node: LoginNode, jupyter: Servers, page: Any, until: Until
) -> None:
    """Its buttons act while one more cell runs. What is clicked while the login node is not reached is done later."""
    go = node.home / "go"
    notebook = json.loads(FLIGHTS.read_text().replace("LocalGPUCluster(name=", "LocalGPUCluster(host='login1', name="))
    waits = (
        f"import pathlib, time\nprint('this cell runs')\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.1)"
    )
    assert "host='login1'" in notebook["cells"][1]["source"][2]
    notebook["cells"].insert(6, {**notebook["cells"][5], "id": "waits", "source": waits})
    notebook["cells"].append({**notebook["cells"][5], "id": "last", "source": "print('all cells have run')"})
    server = jupyter(arguments=WITH)
    (server.notebooks / "flights.ipynb").write_text(json.dumps(notebook))
    shown = Notebook(page, server, "flights.ipynb")
    shown.run_all()
    widget = shown.output(1).locator(".hpcgpu")
    shown.output(3).get_by_text("336776").wait_for()
    shown.output(5).get_by_text("Alaska Airlines").wait_for()
    shown.output(6).get_by_text("this cell runs").wait_for()
    widget.locator("tr", has_text="flights-1").get_by_text("running").wait_for()
    with page.context.expect_page() as opened:
        widget.get_by_role("link", name="dashboard").click()
    dask_in(opened.value)
    opened.value.close()
    node.stop()
    node.break_connections()
    said = widget.get_by_text(re.compile("This view was last updated at .* The cluster cannot be queried: "))
    said.wait_for()
    assert widget.locator("tr", has_text="flights-1").is_visible()
    widget.get_by_label("Size of the cluster").fill("1")
    widget.get_by_role("button", name="Scale").click()
    widget.get_by_role("button", name="Scale", disabled=True).wait_for()
    node.start()
    widget.get_by_text("Scale: done.").wait_for()
    said.wait_for(state="hidden")
    until(lambda: len(in_queue(queue_of(node), "flights")) == 2, "it is smaller while the cell runs")
    widget.get_by_role("button", name="flights-0").click()
    widget.get_by_role("region", name="Log of flights-0").get_by_text("Start worker").first.wait_for()
    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue_of(node), "flights"), "the jobs end")
    go.touch()
    shown.output(9).get_by_text("all cells have run").wait_for()
    assert page.errors == []


def test_a_notebook_that_connects_shows_the_cluster_live_too(
    node: LoginNode, jupyter: Servers, page: Any, until: Until
) -> None:
    started = helpers.hpcgpu("start", "flights", *helpers.ON_CPUS, "--host", "login1")
    assert started.returncode == 0, started.stderr
    server = jupyter()
    server.write("again.ipynb", "import hpcgpu; client = hpcgpu.connect('login1:flights', quiet=True)", "client")
    notebook = Notebook(page, server, "again.ipynb")
    notebook.run_all()
    widget = notebook.output(1).locator(".hpcgpu")
    widget.get_by_label("Size of the cluster").fill("1")
    widget.get_by_role("button", name="Scale").click()
    widget.locator("tr", has_text="flights-0").get_by_text("running").wait_for()
    widget.get_by_role("button", name="Stop").click()
    widget.get_by_role("button", name="Stop the cluster").click()
    widget.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue_of(node), "flights"), "the jobs end")
    assert page.errors == []
