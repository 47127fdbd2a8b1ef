"""`hpcgpu profiles new` and `check` on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from bed import SlurmBed

from tests.helpers import hpcgpu, printed


@pytest.mark.shows("`profiles check` and `profiles new`")
def test_a_draft_passes_the_check_until_the_partition_changes(
    bed: SlurmBed, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    done = hpcgpu("profiles", "new", "bed")
    assert done.returncode == 0, done.stderr
    done = hpcgpu("profiles", "check", "bed")
    assert done.returncode == 0 and "0 failures" in done.stdout, done.stdout + done.stderr
    path = home / ".config" / "hpcgpu" / "profiles" / "bed.yaml"
    path.write_text(path.read_text().replace("cores: 16", "cores: 16\n  walltime: 2h\n  constraint: a100"))
    try:
        bed.set_partition("gpu", "MaxTime=60", "State=DOWN", "AllowAccounts=physics")
        found = printed("profiles check", hpcgpu("profiles", "check", "bed", "--json").stdout)
    finally:
        bed.set_partition("gpu", "MaxTime=INFINITE", "State=UP", "AllowAccounts=ALL")
    options = {one["option"]: (one["grade"], one["machine"], one["advice"]) for one in found["options"]}
    assert options["walltime"] == ("failure", "queue gpu: MaxTime=01:00:00", "walltime: '01:00:00' or less")
    assert options["queue"] == ("failure", "State=DOWN", "queue: shared or urgent")
    assert options["constraint"][0] == options["cores"][0] == options["gpu-type"][0] == "ok"
    assert not found["ok"]
