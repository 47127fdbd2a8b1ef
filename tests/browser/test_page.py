"""The page of all clusters, and the dashboard behind Jupyter's login, in a real browser."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT, Jupyter, Servers, dask_in, plots_follow_the_work

from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, wait_until
from tests.helpers import CPU, ON_CPUS, hpcgpu

pytestmark = pytest.mark.shows("Notebooks and the page of JupyterLab")

ROOT = Path(__file__).parents[2]
#: What the wheel installs into an environment.
INSTALLED = {"JUPYTER_CONFIG_PATH": str(ROOT / "jupyter-config"), "JUPYTER_PATH": str(ROOT / "jupyter-data")}


@pytest.fixture
def lab(jupyter: Servers, queue: LocalQueue, home: Path) -> Jupyter:
    """A JupyterLab under a path prefix, as a hub has it."""
    return jupyter("/user/ada/", environment={**INSTALLED, "HOME": str(home)})


def clusters_page(lab: Jupyter, page: Any) -> Any:
    """Open the page by its card in the launcher."""
    page.goto(lab.lab(), wait_until="domcontentloaded")
    with page.context.expect_page() as opened:
        page.locator(".jp-LauncherCard", has_text="GPU clusters").click()
    clusters = opened.value
    clusters.set_default_timeout(1000 * TIMEOUT)
    clusters.errors = []
    clusters.on("pageerror", lambda error: clusters.errors.append(str(error)))
    assert clusters.url == f"{lab.url}hpcgpu/"
    return clusters


def test_the_launcher_opens_a_page_that_starts_and_stops_a_cluster_and_leads_to_its_dashboard(
    lab: Jupyter, page: Any, home: Path, queue: LocalQueue
) -> None:
    lab.request("hpcgpu/api/profiles", {"name": "mine", "options": {**CPU, "system": "local"}})
    clusters = clusters_page(lab, page)
    clusters.get_by_text("No clusters.").wait_for()
    clusters.get_by_label("Name").fill("made")
    clusters.get_by_label("Profile or saved form").select_option("mine")
    clusters.get_by_label("Walltime").fill("never")
    clusters.get_by_role("button", name="Start").click()
    clusters.get_by_text("made was not started: ").wait_for()
    assert "walltime" in clusters.get_by_role("status").last.inner_text()
    clusters.get_by_label("Walltime").fill("1h")
    clusters.get_by_role("button", name="Start").click()

    picture = clusters.locator(".hpcgpu")
    picture.locator("tr", has_text="made-0").get_by_text("running").wait_for()
    clusters.get_by_text('client = hpcgpu.connect("made")').wait_for()
    with clusters.context.expect_page() as opened:
        picture.get_by_role("link", name="dashboard").click()
    dashboard = opened.value
    assert dashboard.url == f"{lab.url}hpcgpu/dashboard/made/status"
    plots_follow_the_work(dask_in(dashboard), "made")

    picture.get_by_role("button", name="Stop").click()
    picture.get_by_role("button", name="Stop the cluster").click()
    clusters.get_by_text("No clusters.").wait_for()
    wait_until(lambda: not live(queue), "its jobs end")
    assert not (home / "clusters" / "made" / "dashboard.token").exists() and clusters.errors == page.errors == []


def test_names_of_others_are_text(lab: Jupyter, page: Any, home: Path) -> None:
    name = "<img src=x onerror=document.title=1>"
    (home / "clusters" / name).mkdir(parents=True)
    (home / "clusters" / name / "cluster.json").write_text("{}")
    (home / "clusters" / name).chmod(0o777)
    page.goto(f"{lab.url}hpcgpu/?token={lab.token}")
    page.get_by_role("button", name=name).wait_for()
    page.get_by_text("other users can change it").wait_for()
    page.get_by_role("button", name=name).click()
    page.get_by_text("is not a valid name").wait_for()
    assert page.locator("img").count() == 0 and page.title() == "GPU clusters" and page.errors == []


def test_the_button_new_of_dask_labextension_makes_a_cluster_and_its_panel_opens_a_plot(
    jupyter: Servers, page: Any, home: Path, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("dask_labextension") is None:  # importing it needs an event loop
        pytest.skip("dask-labextension is not installed")
    monkeypatch.setenv("DASK_CONFIG", str(home / "dask-config"))
    done = hpcgpu("jupyter-config", *ON_CPUS, "--jobs", "1")
    assert done.returncode == 0, done.stderr
    lab = jupyter("/user/ada/", environment={**INSTALLED, "HOME": str(home)})
    page.goto(lab.lab(), wait_until="domcontentloaded")
    page.locator("[data-id='dask-dashboard-launcher']").first.click()
    page.locator(".dask-DaskClusterManager").get_by_text("NEW", exact=True).click()
    page.locator(".dask-ClusterListing").get_by_text("Number of Workers: 1").wait_for()
    page.get_by_role("button", name="Task Stream", exact=True).click()
    plot = page.frame_locator("iframe[src*='individual-task-stream']").frame_locator("iframe")
    plot.locator(".bk-Figure").wait_for()
    assert "/user/ada/proxy/hpcgpu/" in page.locator("iframe[src*='individual-task-stream']").get_attribute("src")
    page.locator(".dask-ClusterListing").get_by_role("button", name="Shutdown").click()
    wait_until(lambda: not live(queue), "its jobs end")
