"""`hpcgpu profiles new` and `check`, by an ordinary user on a login node, where accounting answers and is enforced."""

from __future__ import annotations

import json

import pytest
from site_bed import PYTHON, Site

DIRECTORY = ".config/hpcgpu/profiles"


@pytest.mark.shows("`profiles check` and `profiles new`")
def test_a_draft_passes_and_wrong_options_are_found_before_slurm_refuses_them(site: Site) -> None:
    hpcgpu = [PYTHON, "-m", "hpcgpu", "profiles"]
    try:
        site.exec("login1", [*hpcgpu, "new", "drafted", "--force"])
        drafted = site.exec("login1", ["cat", f"{DIRECTORY}/drafted.yaml"]).out
        assert "needs: [account, walltime]" in drafted and "# Your accounts: physics." in drafted
        done = site.exec("login1", [*hpcgpu, "check", "drafted"])
        assert "yours: physics" in done.out and "0 failures" in done.out

        wrong = "{queue: gpu, account: biology, qos: urgnt, walltime: 25h, gpu-type: h100, gpus-per-node: 4}"
        site.put("login1", f"{DIRECTORY}/wrong.yaml", f"system: slurm\noptions: {wrong}\n")
        done = site.exec("login1", [*hpcgpu, "check", "wrong", "--json"], check=False)
    finally:
        site.exec("login1", f"rm -f {DIRECTORY}/drafted.yaml {DIRECTORY}/wrong.yaml")
    assert done.code == 1, done.err
    found = {one["option"]: one["advice"] for one in json.loads(done.out)["options"] if one["grade"] == "failure"}
    assert found == {
        "account": "account: physics",
        "qos": "qos: urgent",
        "walltime": "walltime: '24:00:00' or less",
        "gpu-type": "gpu-type: a100",
    }
    for option in ("--account=biology", "--qos=urgnt", "--gres=gpu:h100:1"):
        assert site.exec("login1", ["sbatch", "--test-only", option, "--wrap=true"], check=False).code, option
