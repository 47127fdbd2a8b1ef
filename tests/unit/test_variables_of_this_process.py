"""Environment variables that hpcgpu sets for one process."""

from __future__ import annotations

import os

import pytest

from hpcgpu.posix import variables_of_this_process as variables


def test_variables_of_the_user_stay_and_what_is_set_later_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_first", {})
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", "/scratch")
    monkeypatch.delenv("OURS", raising=False)
    variables.remember(os.environ)
    variables.set_missing(os.environ, {"MINE": "2", "OURS": "3"})
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", "/scratch/of-this-process")
    assert (os.environ["MINE"], os.environ.pop("OURS")) == ("1", "3")
    passed_on = variables.without()
    assert passed_on["MINE"] == "1" and passed_on["DASK_TEMPORARY_DIRECTORY"] == "/scratch"
    assert "OURS" not in passed_on
