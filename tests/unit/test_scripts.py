"""Scripts: golden files, quoting, directives."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.options import OptionError, resolve
from hpcgpu.scripts import directive_value, parse_directive, render

GOLDEN = Path(__file__).parent / "golden"
PLACE = Path("/home/me/.hpcgpu/clusters/demo")
BASE: dict[str, Any] = {"name": "demo", "python": "/opt/python/bin/python"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "slurm-a100.sbatch": (
        "slurm",
        "worker",
        {
            "queue": "gpu",
            "account": "m1234",
            "walltime": "02:00:00",
            "gpus_per_node": 4,
            "gpu_type": "a100",
            "cores": 16,
            "memory": "60GB",
            "env": {"GREETING": 'it\'s "me"'},
            "job_script_prologue": ["module load cuda"],
            "job_extra_directives": ["--exclusive", '--comment="two words"'],
        },
    ),
    "slurm-scheduler-prefer.sbatch": (
        "slurm",
        "scheduler",
        {"queue": "gpu", "account": "m1", "gpus_per_node": 4, "gpu_type": "a100", "scheduler": {"queue": "shared", "prefer": "t4"}},
    ),
    "slurm-two-nodes.sbatch": ("slurm", "worker", {"nodes_per_job": 2, "gpus_per_node": 4, "cores": 8, "interface": "ib0"}),
    "slurm-cpu.sbatch": ("slurm", "worker", {"gpus_per_node": 0, "cores": 8, "memory": "64GiB", "resources": {"MEMORY": 60e9}}),
    "slurm-gpus-per-node.sbatch": ("slurm", "worker", {"gpus_per_node": 4, "gpu_request": "gpus-per-node", "constraint": "gpu&hbm80g"}),
    "slurm-whole-nodes.sbatch": ("slurm", "worker", {"gpus_per_node": 4, "gpu_request": "none", "queue": "gh"}),
    "slurm-ucx-rmm.sbatch": ("slurm", "worker", {"protocol": "ucx", "rmm_pool_size": 0.8, "enable_nvlink": False, "rmm_async": True}),
    "local-worker.sh": ("local", "worker", {"gpus_per_node": 2, "walltime": "1h"}),
    "local-scheduler.sh": ("local", "scheduler", {"gpus_per_node": 2, "idle_timeout": "1h"}),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    system, kind, given = CASES[name]
    text = render(system, kind, resolve(system, BASE | given), PLACE)
    if os.environ.get("HPCGPU_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_golden_scripts_pass_shellcheck() -> None:
    subprocess.run(["shellcheck", *map(str, sorted(GOLDEN.iterdir()))], check=True)


@pytest.mark.parametrize(("value", "quoted"), [("gpu", "gpu"), ("a b", '"a b"'), ("x\\y", '"x\\\\y"'), ('"', '"\\""'), ("#", '"#"')])
def test_directives_are_quoted_for_sbatch_s_own_parser(value: str, quoted: str) -> None:
    assert directive_value(value) == quoted


def test_a_directive_is_skipped_by_its_name_not_by_substring() -> None:
    given = BASE | {"job_directives_skip": ["-n", "--mem"], "memory": "1GB", "job_extra_directives": ["-N run-new", "--ntasks=1"]}
    with pytest.raises(OptionError, match="-N belongs to nodes_per_job"):
        render("slurm", "worker", resolve("slurm", given), PLACE)
    text = render("slurm", "worker", resolve("slurm", given | {"job_directives_skip": ["-n", "-N", "--mem"]}), PLACE)
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH -N run-new" in directives and "#SBATCH --ntasks=1" in directives and "#SBATCH --ntasks-per-node=1" in directives
    assert not [line for line in directives if "--mem" in line or "--nodes" in line]


def test_an_option_that_hpcgpu_owns_is_refused_among_the_extra_directives() -> None:
    with pytest.raises(OptionError, match="--time belongs to walltime; set that instead"):
        render("slurm", "worker", resolve("slurm", BASE | {"job_extra_directives": ["--time=1"]}), PLACE)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("--exclusive", ("--exclusive", None)), ("-C gpu", ("-C", "gpu")), ('--a="b c"', ("--a", "b c")), ("--a b", ("--a", "b"))],
)
def test_directives_of_the_user_are_taken_apart(text: str, parsed: tuple[str, str | None]) -> None:
    assert parse_directive(text) == parsed


def test_values_reach_the_job_s_environment_unchanged() -> None:
    odd = {"A": 'x"; rm -rf / #\n\n\ttwo  ', "B": "`id` $(id) \\n it's", "C": "µ"}
    text = render("slurm", "worker", resolve("slurm", BASE | {"env": odd}), PLACE)
    body = text[: text.index("\nexec ")] + "\nenv -0\n"
    out = subprocess.run(["bash", "-c", body], check=True, capture_output=True, text=True).stdout
    found = dict(entry.split("=", 1) for entry in out.split("\0") if "=" in entry)
    assert {name: found[name] for name in odd} == odd


def test_own_templates_count_before_the_package_s(tmp_path: Path) -> None:
    (tmp_path / "environment.j2").write_text("# my own preamble\n")
    text = render("slurm", "worker", resolve("slurm", BASE | {"template_directory": tmp_path}), PLACE)
    assert "# my own preamble" in text and "exec " in text
