"""The notebook of the examples runs from its first cell to its last, in a kernel of Jupyter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcgpu.batch.local.queue import LocalQueue

nbformat = pytest.importorskip("nbformat", reason="the extra `notebook` is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="the extra `notebook` is not installed")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "flights.ipynb"


def test_the_notebook_of_the_flights_runs_and_leaves_no_job(queue: LocalQueue) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = {
        number: " ".join(str(output.get("data", output.get("text", ""))) for output in cell.outputs)
        for number, cell in enumerate(cells)
    }
    assert "flights" in shown[0], "the cluster shows itself"
    assert "336776" in shown[1] and "Hawaiian Airlines Inc." in shown[2]


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


def test_the_demo_ends_with_the_command_that_opens_the_notebook() -> None:
    """``make -n`` prints what it would run."""

    def planned(target: str) -> list[str]:
        command = ["make", "--dry-run", "--no-print-directory", target]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    assert "make notebook" in planned("demo")[-1]
    install, opens = planned("notebook")
    assert install.endswith("environment.sh notebook")
    assert opens.endswith("jupyter lab examples/flights.ipynb")
