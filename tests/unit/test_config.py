"""Configuration: the template, YAML files, environment variables; as programs meet them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcgpu.configuration.effective_options import effective, template
from hpcgpu.configuration.resolve import resolve
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions, SchedulerOptions, WorkerOptions

SHOW = """
from hpcgpu.configuration.resolve import resolve
options = resolve("slurm", {})
print(options.worker.queue, options.worker.walltime, options.scheduler.queue, options.cluster.jobs)
"""


def uncommented() -> dict[str, Any]:
    return dict(yaml.safe_load(re.sub(r"^( *)# ", r"\1", template(), flags=re.MULTILINE)))


def test_the_template_sets_nothing() -> None:
    assert yaml.safe_load(template()) == {"hpcgpu": None}


def test_the_template_without_its_comment_marks_sets_every_option_to_its_default() -> None:
    import dask

    config = uncommented()
    section = config["hpcgpu"]
    expected = {name.replace("_", "-") for cls in (ClusterOptions, WorkerOptions) for name in names(cls)} | {
        "scheduler",
        "slurm",
        "pbs",
    }
    assert set(section) == expected
    assert set(section["scheduler"]) == {"dashboard-address"} <= {n.replace("_", "-") for n in names(SchedulerOptions)}
    assert {"qos", "gpu-request"} < set(section["slurm"]) and "pbs-shape" in section["pbs"]
    for system in ("slurm", "pbs", "local"):
        plain = resolve(system, {"name": "x"})
        with dask.config.set(config):
            assert resolve(system, {"name": "x"}) == plain


def test_configuration_comes_from_files_and_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "hpcgpu.yaml").write_text(
        "hpcgpu: {jobs: 3, slurm: {queue: file, walltime: '01:00:00', scheduler: {queue: small}}}\n"
    )
    environ = os.environ | {"DASK_CONFIG": str(tmp_path), "DASK_HPCGPU__SLURM__QUEUE": "environment"}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environ, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["environment", "3600", "small", "3"]


@pytest.mark.parametrize("name", ["DASK_HPCGPU__SLURM__QUUE", "DASK_HPCGPU__QUUE"])
def test_an_unknown_key_is_refused_by_name(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], env=os.environ | {name: "x"}, capture_output=True, text=True)
    section = "hpcgpu.slurm" if "SLURM" in name else "hpcgpu"
    assert f"dask config {section} in the environment: unknown option 'quue': did you mean 'queue'?" in done.stderr


def test_the_options_in_effect_have_values_as_users_write_them_and_their_origin() -> None:
    def shown(**arguments: Any) -> dict[str, tuple[Any, str]]:
        return {one.name: (one.value, one.source) for one in effective("slurm", {"account": "m1", **arguments})}

    options = shown(walltime="1h", scheduler={"env": {"A": "1"}, "walltime": "2h"})
    assert "name" not in options, "it is made anew for each cluster"
    assert shown(name="demo")["name"] == ("demo", "argument")
    assert options["account"] == ("m1", "argument") and options["scheduler.account"] == ("m1", "inherited")
    assert options["walltime"] == (3600, "argument") and options["scheduler.walltime"] == (7200, "argument")
    assert options["scheduler.env"] == ({"A": "1"}, "argument")
    assert options["scheduler.queue"] == (None, "default")


def test_a_scheduler_of_a_section_that_is_local_hides_the_options_of_one_in_a_job() -> None:
    import dask

    with dask.config.set({"hpcgpu": {"scheduler": {"walltime": "4h"}, "local": {"scheduler": "local"}}}):
        [scheduler] = [one for one in effective("local", {}) if one.name.startswith("scheduler")]
    assert (scheduler.name, scheduler.value, scheduler.source) == ("scheduler", "local", "dask.config.set")
