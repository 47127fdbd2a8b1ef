"""`hpcgpu profiles new` and `check` on a PBS, as a real one was recorded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_pbs import Site

from hpcgpu.batch import system_registry
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.checks.check_profile import check_profile
from hpcgpu.profiles import site_profiles
from hpcgpu.profiles.draft_profile import draft


def test_a_draft_passes_the_check_until_the_queue_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "pbs", LocalQueue(tmp_path / "queue", gpus=4), {})
    monkeypatch.setenv("PATH", str(site.bin), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = site_profiles.user_directory() / "pbs.yaml"
    path.parent.mkdir(parents=True)
    text = draft(system_registry.system("pbs"))
    assert "\nneeds: [walltime]\n" in text and "# If jobs need an account" in text
    assert "# queue:     # without one, jobs go to workq" in text
    assert "#   off: not for you: enabled = False" in text
    path.write_text(text)
    assert {one.grade for one in check_profile(site_profiles.load("pbs"))} == {"ok", "not checked"}
    path.write_text(text.replace("options:", "options:\n  queue: gpu\n  walltime: 2h\n  select-extra: color=red"))
    [wrong] = [one for one in check_profile(site_profiles.load("pbs")) if one.grade == "failure"]
    assert (wrong.option, wrong.advice) == ("walltime", "walltime: '01:00:00' or less")
    path.write_text(text.replace("options:", "options:\n  queue: 'off'"))
    [wrong] = [one for one in check_profile(site_profiles.load("pbs")) if one.grade == "failure"]
    assert (wrong.option, wrong.machine, wrong.advice) == ("queue", "enabled = False", "queue: workq or gpu")
