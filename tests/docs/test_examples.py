"""The examples of GPU libraries, with what stands in for these on CPUs: pandas, NumPy, XGBoost's release for CPUs.

`tests/gpu` runs the same files with cuDF, CuPy and XGBoost on a real GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcgpu.batch.local.queue import LocalQueue

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_join_with_pandas_in_place_of_cudf(queue: LocalQueue) -> None:
    lines = run("cudf_join", "--cpu", "--rows", "80000").splitlines()[-4:]
    countries, counts = zip(*(line.split()[:2] for line in lines), strict=True)
    assert countries == ("0", "1", "2", "3") and sum(map(int, counts)) == 80000, "each sale has found its customer"


def test_an_array_with_numpy_in_place_of_cupy(queue: LocalQueue) -> None:
    assert "of the variance of 50" in run("cupy_array", "--cpu", "--rows", "80000")


def test_a_model_is_trained_on_all_cpu_workers(queue: LocalQueue) -> None:
    pytest.importorskip("xgboost", reason="xgboost-cpu is not installed")
    said = run("xgboost_train", "--cpu", "--rows", "80000")
    before, after = (float(word) for word in said.split("fell from ")[1].split(" to "))
    assert "30 rounds" in said and after < before / 5
