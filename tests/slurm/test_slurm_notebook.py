"""A researcher's day in JupyterLab, on a real Slurm and in a real browser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from bed import SlurmBed
from browser import Notebook, Servers, dask_in, plots_follow_the_work

from tests.slurm.helpers import CPU, in_queue, stop

pytestmark = pytest.mark.shows("Notebooks and the page of JupyterLab")

Until = Callable[..., None]

WHOLE_NODE: dict[str, Any] = CPU | {"cores": 16}
START = f"""from hpcgpu import SlurmGPUCluster
cluster = SlurmGPUCluster(name="flights", jobs=1, if_exists="connect", shutdown_on_close=False, **{WHOLE_NODE!r})"""
TWO = """import time
print("this cell runs")
while len(cluster.scheduler_info["workers"]) < 2:
    time.sleep(0.1)
print("two workers")"""
OWN = f"""own = SlurmGPUCluster(name="own", **{CPU!r})
print(own.directory.path)"""


def ids(bed: SlurmBed) -> list[str]:
    return sorted(job.id for job in bed.squeue() if job.state != "COMPLETING")


def test_a_cluster_is_seen_scaled_kept_over_a_restart_and_ended_from_a_notebook(
    bed: SlurmBed, jupyter: Servers, page: Any, until: Until
) -> None:
    argv = ["sbatch", "--parsable", "--partition=gpu", "--nodes=4", "--exclusive", "-o/dev/null", "--wrap=sleep 1000"]
    others = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    server = jupyter("/user/ada/", arguments=["--ServerApp.jpserver_extensions=hpcgpu.jupyter=True"])
    server.write("flights.ipynb", START, "cluster", TWO)
    notebook = Notebook(page, server, "flights.ipynb")
    notebook.run_all()
    widget = notebook.output(1).locator(".hpcgpu")

    # a job waits, with Slurm's reason, then runs, while the last cell blocks
    notebook.output(2).get_by_text("this cell runs").wait_for()
    row = widget.locator("tr", has_text="flights-0")
    row.get_by_text("pending").wait_for()
    row.get_by_text("Resources").or_(row.get_by_text("Priority")).wait_for()
    subprocess.run(["scancel", others], check=True)
    row.get_by_text("running").wait_for()

    # a click makes a job, while it still blocks
    assert notebook.output(2).get_by_text("two workers").count() == 0
    widget.get_by_label("Size of the cluster").fill("2")
    widget.get_by_role("button", name="Scale").click()
    notebook.output(2).get_by_text("two workers").wait_for()
    assert sorted(in_queue(bed)) == ["flights-0", "flights-1", "flights-scheduler"]

    _plots_move(page, widget)

    # the kernel restarts, and the same line gets the same cluster
    before = ids(bed)
    [kernel] = server.request("api/kernels")
    server.request(f"api/kernels/{kernel['id']}/restart", {})
    server.write("again.ipynb", START, "cluster", "print('workers:', len(cluster.scheduler_info['workers']))", OWN)
    again = Notebook(page, server, "again.ipynb")
    again.run_all()
    again.output(2).get_by_text("workers: 2").wait_for()
    again.output(3).get_by_text("/own").wait_for()
    assert set(before) < set(ids(bed)), "no job of it was submitted again"

    # the server stops: what a kernel owns ends with it, what was left continues
    server.stop()
    until(lambda: not [name for name in in_queue(bed) if name.startswith("own")], "its jobs end")
    own = server.place.parent / "clusters" / "own"
    until(lambda: not (own / "tls").exists() and not (own / "dashboard.token").exists(), "no key is left")
    assert ids(bed) == before
    stop("flights")


def _plots_move(page: Any, widget: Any) -> None:
    """The link of the widget opens the dashboard behind Jupyter's login, and its plots follow the work."""
    with page.context.expect_page() as opened:
        widget.get_by_role("link", name="dashboard").click()
    dashboard = opened.value
    assert dashboard.url.endswith("/user/ada/hpcgpu/dashboard/flights/status"), "no token is in the address"
    plots_follow_the_work(dask_in(dashboard), "flights")
    dashboard.close()
