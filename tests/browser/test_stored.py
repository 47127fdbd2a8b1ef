"""What a notebook shows of a cluster that its kernel does not show: the file has a picture, the server has more."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT, Jupyter, Notebook, Servers
from test_notebook import WITH, started
from test_page import INSTALLED

from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.existing_clusters.lookup import locate
from tests.conftest import Until
from tests.helpers import GPU, block_queue, in_queue

pytestmark = pytest.mark.usefixtures("fake_gpus")

ERROR = "Error displaying widget"
#: The constructor waits for the scheduler job.
WAITS = GPU | {"scheduler": {"gpus_per_node": 1}, "quiet": False}
START = f"from hpcgpu import LocalGPUCluster\ncluster = LocalGPUCluster(name='flights', jobs=1, **{WAITS!r})"
#: How often the view is put into its cell again: JupyterLab empties the cell, shows "Loading", and then its error.
COUNT_REDRAWS = """(view) => {
    const place = view.parentElement;
    window.redraws = 0;
    new MutationObserver((records) => {
        window.redraws += records.filter((record) => [...record.addedNodes].includes(place)).length;
    }).observe(place.parentElement, { childList: true });
}"""
KERNEL_IDLE = "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
OUTPUTS = "JSON.stringify(window.jupyterapp.shell.currentWidget.content.widgets[0].model.outputs.toJSON())"


def starting(server: Jupyter, page: Any) -> Any:
    """Run a notebook whose cell waits for the cluster; return what shows it."""
    server.write("flights.ipynb", START)
    notebook = Notebook(page, server, "flights.ipynb")
    notebook.run_all()
    widget = notebook.output(0).locator(".hpcgpu")
    widget.locator("tr", has_text="flights-scheduler").get_by_text("pending").wait_for()
    return widget


def setting(server: Jupyter, name: str, content: dict[str, Any]) -> None:
    path = server.place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def save(page: Any) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")


def saved_state(notebook: Path) -> str:
    """What the file has of widgets; empty while the server writes it."""
    with suppress(ValueError):
        return json.dumps(json.loads(notebook.read_text())["metadata"])
    return ""


def open_tab(page: Any, server: Jupyter, cell: int) -> Any:
    """Open the notebook in a new tab, while the kernel may be busy; return the output of a cell."""
    again = page.context.new_page()
    again.set_default_timeout(1000 * TIMEOUT)
    again.goto(server.lab("flights.ipynb"), wait_until="domcontentloaded")
    output = again.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-Cell-outputArea")
    output.wait_for()
    return output


@contextmanager
def opened_again(page: Any, server: Jupyter, cell: int) -> Iterator[Any]:
    """The output of a cell, in a new tab."""
    output = open_tab(page, server, cell)
    yield output
    assert output.get_by_text(ERROR).count() == 0
    output.page.close()


@contextmanager
def restored_from_file(page: Any, server: Jupyter, cell: int) -> Iterator[Any]:
    """The output of a cell whose widget JupyterLab itself has restored from the file, in a new tab.

    JupyterLab alone does so sometimes and sometimes shows an error: if the kernel connects meanwhile, `restoreWidgets`
    of jupyterlab_widgets 3.0 marks its models as restored before those of the file are there.
    """
    for _ in range(10):
        output = open_tab(page, server, cell)
        output.locator(".hpcgpu-state").or_(output.get_by_text(ERROR)).first.wait_for()
        if output.get_by_text(ERROR).count() == 0:
            break
        output.page.close()
    yield output
    output.page.close()


class HeldRestore:
    """Holds the messages by which JupyterLab restores its widgets from a kernel, until `release`."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._held: list[Callable[[], None]] | None = []
        page.context.route_web_socket(re.compile("/api/kernels/.*/channels"), self._connect)

    def _connect(self, socket: Any) -> None:
        kernel = socket.connect_to_server()

        def forward(message: str | bytes) -> None:
            content = message if isinstance(message, bytes) else message.encode()
            if self._held is not None and b'"msg_type":"comm_' in content:
                self._held.append(lambda: kernel.send(message))
            else:
                kernel.send(message)

        socket.on_message(forward)

    def asked(self) -> bool:
        """Whether JupyterLab has asked the kernel for its widgets; the browser may need long to start a kernel."""
        self._page.evaluate("true")  # Playwright calls `forward` only while it waits for the browser
        return bool(self._held)

    def release(self) -> None:
        assert self._held
        held, self._held = self._held, None
        for send in held:
            send()


def stop(output: Any, queue: LocalQueue, until: Until) -> None:
    output.get_by_role("button", name="Stop").click()
    output.get_by_role("button", name="Stop the cluster").click()
    output.get_by_text("closed", exact=True).wait_for()
    until(lambda: not in_queue(queue, "flights"), "the jobs end")


def test_a_tab_that_is_opened_again_while_the_constructor_waits_shows_the_cluster(
    servers: Servers, page: Any, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    server = servers(arguments=WITH, environment=INSTALLED)
    starting(server, page)
    save(page)
    page.goto("about:blank")
    with opened_again(page, server, 0) as output:
        row = output.locator(".hpcgpu tr", has_text="flights-scheduler")
        row.get_by_text("pending").wait_for()
        queue.cancel([blocker])
        row.get_by_text("running").wait_for()
        # the kernel answers again: its widget takes the place of the server's view, and of a question in it
        output.locator("link[href$='widget.css']").wait_for(state="detached")
        stop(output, queue, until)


def test_what_is_typed_stays_when_the_picture_in_the_file_is_replaced(
    servers: Servers, page: Any, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    widget = starting(servers(arguments=WITH, environment=INSTALLED), page)
    assert page.evaluate(f"() => {OUTPUTS}.includes('</b>: waiting')")
    widget.get_by_label("Size of the cluster").fill("7")
    queue.cancel([blocker])
    page.wait_for_function(f"() => {OUTPUTS}.includes('</b>: running')", timeout=1000 * TIMEOUT)
    widget.get_by_text("running", exact=True).first.wait_for()
    assert widget.get_by_label("Size of the cluster").input_value() == "7"
    stop(widget, queue, until)
    assert page.errors == []


def test_without_our_extension_of_jupyterlab_what_is_typed_stays_and_a_saved_widget_of_an_ended_cluster_has_no_buttons(
    jupyter: Servers, page: Any, queue: LocalQueue, home: Path, until: Until
) -> None:
    """JupyterLab draws the whole output anew then, and `Save Widget State Automatically` is on."""
    blocker = block_queue(queue, home)
    server = jupyter(arguments=WITH)
    setting(server, "config/labconfig/page_config.json", {"disabledExtensions": {"hpcgpu": True}})
    setting(server, "settings/@jupyter-widgets/jupyterlab-manager/plugin.jupyterlab-settings", {"saveState": True})
    widget = starting(server, page)
    assert page.evaluate("() => window.jupyterapp.commands.hasCommand('hpcgpu:open')") is False
    size = widget.get_by_label("Size of the cluster")
    size.fill("7")
    widget.get_by_role("button", name="flights-scheduler").click()
    widget.get_by_role("region", name="Log of flights-scheduler").wait_for()
    size.focus()
    queue.cancel([blocker])
    page.wait_for_function(f"() => {OUTPUTS}.includes('</b>: running')", timeout=1000 * TIMEOUT)
    widget.locator(".hpcgpu-state").get_by_text("running").wait_for()
    assert size.input_value() == "7"
    page.wait_for_function("() => document.activeElement.getAttribute('aria-label') === 'Size of the cluster'")
    assert widget.get_by_role("region", name="Log of flights-scheduler").is_visible()

    save(page)
    path = server.notebooks / "flights.ipynb"
    until(lambda: '"state": "running"' in saved_state(path), "its state is saved")
    page.goto("about:blank")
    [kernel] = server.request("api/kernels")
    server.request(f"api/kernels/{kernel['id']}", method="DELETE")
    until(lambda: not in_queue(queue, "flights"), "the jobs end with their program, by their lease")
    with restored_from_file(page, server, 0) as output:
        output.locator(".hpcgpu-state").filter(has_text=re.compile("closed|ended")).wait_for()
        assert output.get_by_role("button", name="Stop").filter(visible=True).count() == 0
    shutil.rmtree(locate("flights").path)
    with restored_from_file(page, server, 0) as output:
        output.get_by_text("last known: ").wait_for()
        output.get_by_text("This view was last updated at ").wait_for()
        for name in ("Scale", "Adapt", "Detach", "Stop"):
            assert output.get_by_role("button", name=name).filter(visible=True).count() == 0
    assert page.errors == []


def test_a_notebook_with_another_kernel_shows_the_cluster_while_it_lives_and_later_its_picture(
    servers: Servers, page: Any, queue: LocalQueue, until: Until
) -> None:
    server = servers(arguments=WITH, environment=INSTALLED)
    notebook = started(server, page, "cluster.wait_for_workers(2); cluster.detach()")
    notebook.output(1).get_by_text("was detached from this program").wait_for()
    save(page)
    page.goto("about:blank")
    [kernel] = server.request("api/kernels")
    server.request(f"api/kernels/{kernel['id']}", method="DELETE")
    restore = HeldRestore(page)
    with opened_again(page, server, 1) as output:
        output.locator(".hpcgpu-state").get_by_text("running").wait_for()
        output.get_by_label("Size of the cluster").fill("2")
        output.get_by_role("button", name="Scale").click()
        output.get_by_text("Scale: done.").wait_for()
        output.locator("tr", has_text="flights-1").get_by_text("running").wait_for()
        output.get_by_label("Size of the cluster").fill("7")
        output.get_by_role("button", name="Stop").click()
        question = output.get_by_role("alertdialog", name="Stop the cluster?")
        question.wait_for()
        output.locator(".hpcgpu").evaluate(COUNT_REDRAWS)
        until(restore.asked, "JupyterLab asks the kernel for its widgets")
        restore.release()
        output.page.wait_for_function("() => window.redraws >= 1")  # three, but two may come before the kernel's answer
        output.page.wait_for_function(KERNEL_IDLE)
        assert question.is_visible()
        assert output.get_by_text("Scale: done.").is_visible()
        assert output.get_by_label("Size of the cluster").input_value() == "7"
        assert question.get_by_role("button", name="Stop the cluster").evaluate("(it) => it === document.activeElement")
        question.get_by_role("button", name="Cancel").click()
        stop(output, queue, until)
    shutil.rmtree(locate("flights").path)
    with opened_again(page, server, 1) as output:
        output.get_by_text("This is a picture: it does not change").wait_for()
        assert output.get_by_text("The last known state, of").is_visible()
        output.page.wait_for_function(KERNEL_IDLE)
        assert output.get_by_role("button").count() == 0
        assert output.get_by_text("This is a picture: it does not change").is_visible()
