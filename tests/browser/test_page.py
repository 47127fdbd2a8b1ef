"""The page of all clusters, and the dashboard behind Jupyter's login, in a real browser."""

from __future__ import annotations

import ast
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import ATTACK, Jupyter, Servers, dask_in, plots_follow_the_work

from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.existing_clusters.lookup import locate
from tests.conftest import live, wait_until
from tests.helpers import CPU, ON_CPUS, hpcgpu, kill_program

pytestmark = pytest.mark.shows("Notebooks and the page of JupyterLab")

ROOT = Path(__file__).parents[2]
#: As long as a name may be.
NAME = "a-name-that-is-as-long-as-that-of-a-cluster-may-be"
#: What the wheel installs into an environment.
INSTALLED = {"JUPYTER_CONFIG_PATH": str(ROOT / "jupyter-config"), "JUPYTER_PATH": str(ROOT / "jupyter-data")}


@pytest.fixture(scope="module")
def lab(shared_jupyter: Servers, shared_queue: LocalQueue, shared_home: Path) -> Jupyter:
    """A JupyterLab under a path prefix, as a hub has it, for the tests that leave no cluster."""
    return shared_jupyter("/user/ada/", environment={**INSTALLED, "HOME": str(shared_home)})


def clusters_page(lab: Jupyter, page: Any) -> Any:
    """Open the page by its card in the launcher, in a tab of JupyterLab."""
    page.goto(lab.lab(), wait_until="domcontentloaded")
    page.locator(".jp-LauncherCard", has_text="GPU clusters").click()
    return in_its_tab(lab, page)


def in_its_tab(lab: Jupyter, page: Any) -> Any:
    page.locator(".lm-TabBar-tab.lm-mod-current", has_text="GPU clusters").wait_for()
    frame = page.locator("#hpcgpu-clusters iframe")
    assert frame.get_attribute("src") == f"{lab.url}hpcgpu/" and len(page.context.pages) == 1
    return frame.element_handle().content_frame()


def cut(page: Any) -> Any:
    """Return what is wider than its place, or ends to the right of the window."""
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((one) => one.clientWidth > 0 && !one.closest("svg"))
        .filter((one) => one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth)
        .map((one) => `${one.tagName} ${one.className} ${one.textContent.slice(0, 40)}`)"""
    )


def test_the_launcher_opens_a_page_that_starts_and_stops_a_cluster_and_leads_to_its_dashboard(
    lab: Jupyter, page: Any, shared_home: Path, shared_queue: LocalQueue
) -> None:
    lab.request("hpcgpu/api/profiles", {"name": "mine", "options": {**CPU, "system": "local"}})
    clusters = clusters_page(lab, page)
    clusters.get_by_text("No clusters.").wait_for()
    clusters.get_by_label("Name").fill(NAME)
    clusters.get_by_label("Profile or saved form").select_option("mine")
    clusters.get_by_label("Walltime").fill("never")
    clusters.get_by_role("button", name="Start").click()
    clusters.get_by_text(f"{NAME} was not started: ").wait_for()
    assert "walltime" in clusters.get_by_role("status").last.inner_text()
    clusters.get_by_label("Walltime").fill("1h")
    clusters.get_by_role("button", name="Start", exact=True).click()

    picture = clusters.locator(".hpcgpu")
    picture.locator("tr", has_text=f"{NAME}-0").get_by_text("running").wait_for()
    clusters.locator("main > table tr", has_text=NAME).get_by_text("running").wait_for()
    assert "waits" not in clusters.get_by_role("status").last.inner_text(), "it runs"
    clusters.get_by_text(f'client = hpcgpu.connect("{NAME}")').wait_for()
    with page.context.expect_page() as opened:
        picture.get_by_role("link", name="dashboard").click()
    dashboard = opened.value
    assert dashboard.url == f"{lab.url}hpcgpu/dashboard/{NAME}/status"
    plots_follow_the_work(dask_in(dashboard), NAME)
    dashboard.close()

    # JupyterLab opens the tab again after a reload
    wait_until(lambda: "hpcgpu:clusters" in str(lab.request("lab/api/workspaces/test")), "it has saved its layout")
    page.goto(f"{lab.url}lab/workspaces/test", wait_until="domcontentloaded")
    page.locator(".lm-TabBar-tab", has_text="GPU clusters").click()
    clusters = in_its_tab(lab, page)
    picture = clusters.locator(".hpcgpu")
    picture.locator("tr", has_text=f"{NAME}-0").get_by_text("running").wait_for()

    picture.get_by_role("button", name="Stop").click()
    picture.get_by_role("button", name="Stop the cluster").click()
    clusters.get_by_text("No clusters.").wait_for()
    wait_until(lambda: not live(shared_queue), "its jobs end")
    assert not (shared_home / "clusters" / NAME / "dashboard.token").exists() and page.errors == []


def test_a_click_detaches_a_cluster_whose_program_was_killed(
    lab: Jupyter, page: Any, home: Path, shared_queue: LocalQueue
) -> None:
    kill_program(CPU | {"name": "orphan", "jobs": 1})
    assert not locate("orphan").detached, "its lease runs"
    page.goto(f"{lab.url}hpcgpu/?token={lab.token}#orphan")
    picture = page.locator(".hpcgpu")
    picture.get_by_role("button", name="Detach").click()
    picture.get_by_role("alertdialog").get_by_role("button", name="Detach").click()
    picture.get_by_role("button", name="Detach").wait_for(state="hidden")
    assert locate("orphan").detached and len(live(shared_queue)) == 2
    assert hpcgpu("stop", "orphan").returncode == 0 and page.errors == []


def test_the_form_can_express_the_first_program_of_the_readme(lab: Jupyter, page: Any, shared_home: Path) -> None:
    page.goto(f"{lab.url}hpcgpu/?token={lab.token}")
    page.get_by_text("No clusters.").wait_for()
    for label, text in {
        "Queue": "gpu",
        "Account": "m1234",
        "Walltime": "02:00:00",
        "GPUs per node": "4",
        "Type of GPU": "a100",
        "Cores per node": "16",
        "Memory per node": "60GB",
        "Queue of the scheduler job": "shared",
        "Worker jobs": "3",
        "Name": "first",
    }.items():
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_label("Batch system").select_option("slurm")
    page.get_by_role("button", name="Save this form").click()
    page.get_by_text("Saved as your profile first").wait_for()
    written = yaml.safe_load((shared_home / ".config/hpcgpu/profiles/first.yaml").read_text())["options"]
    [program] = re.findall(
        r"```python\n(from hpcgpu import SlurmGPUCluster\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    [call] = [
        one for one in ast.walk(ast.parse(program)) if getattr(getattr(one, "func", None), "id", "").endswith("Cluster")
    ]
    assert isinstance(call, ast.Call)
    assert written == {str(one.arg).replace("_", "-"): ast.literal_eval(one.value) for one in call.keywords}
    for width in (800, 620, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert cut(page) == []


def test_a_name_that_cannot_be_is_refused_in_our_own_words(lab: Jupyter, page: Any) -> None:
    for name, said in (("my cluster", "my cluster was not started: "), ("", "The cluster was not")):
        page.goto(f"{lab.url}hpcgpu/?token={lab.token}")
        page.get_by_label("Name", exact=True).fill(name)
        page.get_by_role("button", name="Start", exact=True).click()
        page.get_by_text("begin with a letter or digit").wait_for()
        assert said in page.get_by_role("status").last.inner_text()


def test_names_of_others_are_text(lab: Jupyter, page: Any, shared_home: Path) -> None:
    name = "<img src=x onerror=document.title=1>"
    place = shared_home / "clusters" / name
    place.mkdir(parents=True)
    (place / "cluster.json").write_text("{}")
    place.chmod(0o777)
    page.goto(f"{lab.url}hpcgpu/?token={lab.token}")
    page.get_by_role("button", name=name).wait_for()
    page.get_by_text("other users can change it").wait_for()
    page.set_viewport_size({"width": 400, "height": 900})
    assert cut(page) == []
    page.get_by_role("button", name=name).click()
    page.get_by_text("is not a valid name").wait_for()
    assert page.locator("img").count() == 0 and page.title() == "GPU clusters" and page.errors == []
    shutil.rmtree(place)


def test_the_button_new_of_dask_labextension_makes_a_cluster_and_its_panel_opens_a_plot(
    jupyter: Servers, page: Any, home: Path, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("dask_labextension") is None:  # importing it needs an event loop
        pytest.skip("dask-labextension is not installed")
    monkeypatch.setenv("DASK_CONFIG", str(home / "dask-config"))
    done = hpcgpu("jupyter-config", *ON_CPUS, "--jobs", "1", "--scheduler", "walltime=3h")
    assert done.returncode == 0, done.stderr
    lab = jupyter("/user/ada/", environment={**INSTALLED, "HOME": str(home)})
    page.goto(lab.lab(), wait_until="domcontentloaded")
    page.locator("[data-id='dask-dashboard-launcher']").first.click()
    page.locator(".dask-DaskClusterManager").get_by_text("NEW", exact=True).click()
    page.locator(".dask-ClusterListing").get_by_text("Number of Workers: 1").wait_for()
    [made] = lab.request("hpcgpu/api/clusters")["clusters"]
    assert 2.5 < made["time_left"] / 3600 <= 3, "its scheduler job has the option"
    page.get_by_role("button", name="Task Stream", exact=True).click()
    plot = page.frame_locator("iframe[src*='individual-task-stream']").frame_locator("iframe")
    plot.locator(".bk-Figure").wait_for()
    frame = page.locator("iframe[src*='individual-task-stream']").element_handle().content_frame()
    dask = frame.locator("iframe").element_handle().content_frame()
    assert dask.evaluate(ATTACK, ["/user/ada/", "planted"]) == [] and "planted" not in lab.log
    assert "/user/ada/proxy/hpcgpu/" in page.locator("iframe[src*='individual-task-stream']").get_attribute("src")
    page.locator(".dask-ClusterListing").get_by_role("button", name="Shutdown").click()
    wait_until(lambda: not live(queue), "its jobs end")
