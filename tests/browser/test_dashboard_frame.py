"""What a script that runs on a page of Dask's dashboard can do, in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import ATTACK, LOOKS, TIMEOUT, Front, Jupyter, Servers, dask_in, plots_follow_the_work

from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, wait_until
from tests.helpers import ON_CPUS, hpcgpu

pytestmark = pytest.mark.shows("Notebooks and the page of JupyterLab")

ROOT = Path(__file__).parents[2]

#: Requests for a page as Dask sends it.
GET: dict[str, Any] = {"headers": {"Accept": "*/*"}, "timeout": 1000 * TIMEOUT}
#: A cell of somebody else's file, with a script in an attribute and one in a frame.
CELL = (
    "<img src=x onerror=window.ran=`image`>"
    "<iframe srcdoc=&lt;script&gt;parent.document.title=`frame`&lt;/script&gt;></iframe>"
)
#: Shows a text wherever Dask shows texts of others.
_SHOW = """
import logging, sys, time, hpcgpu
from distributed import wait

def log(text, name):
    logging.getLogger(name).warning(text)

def rename(text, dask_scheduler):
    [worker] = dask_scheduler.workers.values()
    worker.name = text

_, cluster, text = sys.argv
exec(compile("def stay():\\n import time\\n while True: time.sleep(0.1)", f"/{text}.py", "exec"))
with hpcgpu.connect(cluster, quiet=True) as client:
    failed = client.submit(float, text, key=text)
    wait(failed)
    client.run_on_scheduler(log, text, "distributed.scheduler")
    client.run(log, text, "distributed.worker")
    running = client.submit(stay, key=text + "-runs")
    client.publish_dataset(failed=failed, running=running)
    while not any(client.processing().values()):
        time.sleep(0.1)
    client.run_on_scheduler(rename, text)  # its own name is what the manager knows
"""
_UNESCAPE = """
import sys, hpcgpu

async def unescape(dask_scheduler):  # as in a table of Dask that nobody has looked at yet
    await dask_scheduler.plugins["hpcgpu"].dashboard  # it escapes texts when it is imported
    from bokeh.models.widgets.tables import HTMLTemplateFormatter
    from distributed.dashboard.components import scheduler as pages
    pages.HTMLTemplateFormatter = HTMLTemplateFormatter

with hpcgpu.connect(sys.argv[1], quiet=True) as client:
    client.run_on_scheduler(unescape)
"""


def run(program: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=TIMEOUT)


# The tests share one cluster, in this order: as it starts; with texts of others; with such texts that are not escaped.


@pytest.fixture(scope="module")
def demo(shared_queue: LocalQueue) -> Iterator[str]:
    """A cluster that runs in the background."""
    started = hpcgpu("start", "demo", *ON_CPUS, "--jobs", "1")
    assert started.returncode == 0, started.stderr
    yield "demo"
    hpcgpu("stop", "demo")
    wait_until(lambda: not live(shared_queue), "its jobs end")


@pytest.fixture(scope="module")
def escaped(demo: str) -> str:
    """The same; its texts are somebody else's: an exception, a key, a log, a file, the name of a worker."""
    run(_SHOW, demo, CELL)
    return demo


@pytest.fixture(scope="module")
def unescaped(escaped: str) -> str:
    run(_UNESCAPE, escaped)
    return escaped


Lab = Callable[..., Jupyter]
#: A page with one plot: that with six of them, `status`, costs the browser most of what these tests compute.
PLOT = "individual-task-stream"


@pytest.fixture(scope="module")
def server(kept_servers: Servers, shared_home: Path) -> Lab:
    """A JupyterLab with our extension, one for each path."""
    environment = {"JUPYTER_CONFIG_PATH": str(ROOT / "jupyter-config"), "HOME": str(shared_home)}
    return lambda base, *arguments: kept_servers(base, environment=environment, arguments=arguments)


def log_in(lab: Jupyter, page: Any) -> None:
    """From now on the browser has the cookie of the login, and no token."""
    page.goto(f"{lab.url}hpcgpu/?token={lab.token}")
    page.get_by_text("demo").first.wait_for()


def test_the_pages_of_dask_work_in_their_frame(server: Lab, page: Any, demo: str) -> None:
    lab = server("/user/ada/")
    log_in(lab, page)
    here = f"{lab.url}hpcgpu/dashboard/demo"
    page.goto(f"{here}/?theme=x")
    page.wait_for_url(f"{here}/status*")
    plots_follow_the_work(dask_in(page), "demo")
    assert page.title() == "Dask Diagnostic UI"
    dask_in(page).wait_for_function(
        "document.querySelector('#dask-logo img')?.naturalWidth > 0", timeout=1000 * TIMEOUT, polling=LOOKS
    )

    # links, of the navigation and of other pages; back; reload
    dask_in(page).get_by_role("link", name="Workers", exact=True).click()
    page.wait_for_url(f"{here}/workers")
    dask_in(page).get_by_text("tls://").first.wait_for()
    page.go_back()
    page.wait_for_url(f"{here}/status*")
    dask_in(page).get_by_role("link", name="Info", exact=True).click()
    page.wait_for_url(f"{here}/info/main/workers.html", wait_until="commit")  # its style sheet is of another host
    with page.context.expect_page() as opened:
        dask_in(page).get_by_role("link", name="logs", exact=True).first.click(modifiers=["Control"])
    logs = opened.value
    logs.wait_for_url(f"{here}/info/logs/**", wait_until="commit")
    dask_in(logs)
    logs.close()

    # a page with its own websocket, and one of another kind
    page.goto(f"{here}/statics/individual-cluster-map.html")
    dask = page.locator("iframe").element_handle().content_frame()
    dask.wait_for_selector("#vis circle, #vis line, #vis g", state="attached", timeout=1000 * TIMEOUT)
    page.goto(f"{here}/json/counts.json")
    assert '"workers": 1' in dask_in(page).locator("pre").inner_text()
    page.goto(f"{lab.url}hpcgpu/dashboard/other/status")
    assert "other" in dask_in(page).locator("pre").inner_text()
    assert page.errors == []


def test_behind_a_proxy_with_a_path_the_page_works_and_a_lost_connection_is_reported_and_comes_back(
    server: Lab, page: Any, demo: str
) -> None:
    """As Open OnDemand has it. The page tries to connect again sooner than it does for users."""
    sooner = "ms >= 3000 && ms <= 30000 ? 300 : ms"
    page.add_init_script(f"const real = setTimeout; setTimeout = (f, ms, ...more) => real(f, {sooner}, ...more)")
    lab = server("/node/gpu-12/18888/", "--ServerApp.allow_origin=*")
    front = Front(lab)
    lab.address = front.address
    log_in(lab, page)
    page.goto(f"{lab.url}hpcgpu/dashboard/demo/{PLOT}")
    plots_follow_the_work(dask_in(page), "demo")
    front.down()
    page.get_by_role("alert").filter(has_text="The connection was lost at ").wait_for()
    front.up()
    page.get_by_role("alert").wait_for(state="detached")
    plots_follow_the_work(dask_in(page), "demo")
    assert page.errors == []


def test_when_the_login_has_ended_the_page_leads_to_it_and_back(server: Lab, page: Any, demo: str) -> None:
    lab = server("/")
    log_in(lab, page)
    page.goto(f"{lab.url}hpcgpu/dashboard/demo/{PLOT}")
    dask_in(page)
    page.context.clear_cookies()  # the login ends
    page.reload()
    page.wait_for_url(re.compile(r"/login\?next="))
    page.locator("#password_input").fill(lab.token)
    page.locator("#login_submit").click()
    page.wait_for_url(f"{lab.url}hpcgpu/dashboard/demo/{PLOT}")
    dask_in(page).locator(".bk-Figure").first.wait_for()


def test_a_window_that_a_script_opens_has_no_powers_either(server: Lab, page: Any, demo: str) -> None:
    lab = server("/")
    log_in(lab, page)
    page.goto(f"{lab.url}hpcgpu/dashboard/demo/{PLOT}")
    dask = dask_in(page)
    dask.evaluate("""() => {
      const link = document.body.appendChild(document.createElement("a"));
      Object.assign(link, { id: "trap", target: "_blank", rel: "opener", textContent: "a link" });
      link.style = "position: fixed; top: 300px; left: 0; z-index: 99; background: yellow";
    }""")

    def click(address: str) -> None:
        dask.evaluate("address => { document.getElementById('trap').href = address }", address)
        dask.locator("#trap").click()

    # a window with a script for an address has the script's origin, which is none
    click(
        "javascript:document.title=`${self.origin} ${(() => { try { return document.cookie } catch { return '' } })()}`"
    )
    # a page of Jupyter that such a link opens does not know who opened it
    with page.context.expect_page(lambda window: window.url == f"{lab.url}hpcgpu/") as new:
        click(f"{lab.url}hpcgpu/")
    window = new.value
    window.get_by_text("demo").first.wait_for()
    assert window.evaluate("window.opener") is None
    # the window with the script would be there by now, and there is none, or one without powers
    for other in page.context.pages:
        assert other in (page, window) or other.evaluate("self.origin") == "null"
    assert lab.request("api/kernels") == []


def test_the_same_without_jupyter(page: Any, demo: str) -> None:
    """`hpcgpu dashboard`."""
    printed = hpcgpu("dashboard", demo)
    link = printed.stdout.strip()
    here = link.partition("/status")[0]
    page.goto(link)
    page.wait_for_url(f"{here}/status")
    plots_follow_the_work(dask_in(page), demo)
    dask_in(page).get_by_role("link", name="Info", exact=True).click()
    page.wait_for_url(f"{here}/info/main/workers.html", wait_until="commit")  # its style sheet is of another host
    dask_in(page).get_by_text("tls://").first.wait_for()


#: What a text makes that is taken for HTML.
MADE = "img[src=x], iframe[srcdoc]"


def test_text_of_others_is_text(server: Lab, page: Any, escaped: str) -> None:
    lab = server("/")
    log_in(lab, page)
    here = f"{lab.url}hpcgpu/dashboard/demo"
    known = page.request.get(f"{here}/json/identity.json", **GET).json()
    [worker] = (quote(address, safe="") for address in known["workers"])
    for path in (
        "exceptions",
        "workers",
        "info/main/workers.html",
        "info/main/logs.html",
        "info/main/exceptions.html",
        f"info/logs/{worker}.html",
        f"info/call-stacks/{worker}.html",
        f"info/task/{quote(CELL, safe='')}.html",
    ):
        page.goto(f"{here}/{path}", wait_until="commit")  # some have a style sheet of another host
        dask = dask_in(page)
        dask.get_by_text("onerror=window.ran").first.wait_for(state="attached")
        assert dask.locator(MADE).count() == 0, path
        assert dask.evaluate("window.ran") is None and "frame" not in (dask.title(), page.title()), path


def is_made_and_runs_not(page: Any) -> Any:
    """Wait until a page of Dask takes the text for HTML, and return its frame: no script of the text runs there."""
    dask = dask_in(page)
    dask.locator(MADE).first.wait_for(state="attached")
    dask.evaluate("""() => new Promise((done) => {  // an image like that one fails, and then its script would have run
      const image = document.body.appendChild(new Image());
      image.onerror = done;
      image.src = "x";
    })""")
    assert dask.evaluate("window.ran") is None and dask.title() != "frame"
    return dask


def test_a_script_on_a_page_of_dask_has_no_powers(server: Lab, page: Any, unescaped: str) -> None:
    """Under a path prefix, as a hub has: test_page.py."""
    lab = server("/")
    log_in(lab, page)
    for prefix in ("hpcgpu/dashboard/demo", "proxy/hpcgpu/demo"):
        page.goto(f"{lab.url}{prefix}/exceptions")
        dask = is_made_and_runs_not(page)
        assert dask.evaluate(ATTACK, ["/", "planted"]) == [], "nor would one that did run"
        assert page.url == f"{lab.url}{prefix}/exceptions" and "frame" not in (dask.title(), page.title())
    assert lab.request("api/kernels") == [] and not list(lab.notebooks.iterdir())
    assert "planted" not in lab.log
    # what Dask sends runs nowhere by itself
    page.goto("about:blank")
    raw = page.request.get(f"{lab.url}hpcgpu/dashboard/demo/exceptions", **GET)
    assert raw.status == 200 and raw.headers["content-security-policy"].endswith(", sandbox")


def test_a_script_on_a_page_of_dask_has_no_powers_without_jupyter(page: Any, unescaped: str) -> None:
    """A script that sends away what it sees would be one of the owner's browser, too."""
    printed = hpcgpu("dashboard", unescaped)
    link = printed.stdout.strip()
    here = link.partition("/status")[0]
    page.goto(link)
    page.wait_for_url(f"{here}/status")
    page.goto(f"{here}/exceptions")
    dask = is_made_and_runs_not(page)
    assert dask.evaluate(ATTACK, ["/", "planted"]) == []
    reads = "async () => { try { return (await fetch('/json/identity.json')).status } catch { return 'refused' } }"
    assert dask.evaluate(reads) == "refused" and page.url == f"{here}/exceptions"
    raw = page.request.get(f"{here}/exceptions", **GET)
    assert raw.status == 200 and raw.headers["content-security-policy"] == "sandbox"
