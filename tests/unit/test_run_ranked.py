"""The variables of a call on a worker that a program holds."""

from __future__ import annotations

import os

import pytest

from hpcgpu.dask_worker.run_ranked import _variables


@pytest.mark.parametrize("earlier_ends_first", [True, False])
@pytest.mark.parametrize("own", [None, "mine"])
def test_the_last_call_has_its_variables_and_the_end_of_all_brings_back_the_workers_own(
    monkeypatch: pytest.MonkeyPatch, own: str | None, earlier_ends_first: bool
) -> None:
    monkeypatch.setenv("RANK", own or "")
    if own is None:
        monkeypatch.delenv("RANK")
    earlier, later = _variables({"RANK": "3"}), _variables({"RANK": "0"})
    earlier.__enter__()
    later.__enter__()
    assert os.environ["RANK"] == "0"
    (earlier if earlier_ends_first else later).__exit__(None, None, None)
    assert os.environ["RANK"] == ("0" if earlier_ends_first else "3")
    (later if earlier_ends_first else earlier).__exit__(None, None, None)
    assert os.environ.get("RANK") == own
