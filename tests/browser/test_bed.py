"""The bed itself: a notebook runs in a real JupyterLab under the path prefix of a hub, and nothing is left."""

from __future__ import annotations

from typing import Any

from browser import Notebook, Servers


def test_a_notebook_runs_in_jupyterlab_and_its_server_leaves_no_process(jupyter: Servers, page: Any) -> None:
    server = jupyter("/user/ada/")  # most tests have none
    server.write("sum.ipynb", "print(40 + 2)")
    notebook = Notebook(page, server, "sum.ipynb")
    notebook.run_all()
    notebook.output(0).get_by_text("42").wait_for()
    assert page.url.startswith(f"{server.url}lab/")
    assert len(server.processes()) == 2, "the server and a kernel"
    server.stop()
    assert server.processes() == []
