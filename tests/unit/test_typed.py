"""What type checkers and editors see of the cluster classes is what the options are."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import hpcgpu.configuration
from hpcgpu import LocalGPUCluster, PBSGPUCluster, SlurmGPUCluster, runner
from hpcgpu.configuration.signatures import module, of_system, shared, typed_dict
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions, WorkerOptions

TYPED = Path(hpcgpu.configuration.__file__).with_name("typed.py")
MADE = (
    "Made from the options by tests/unit/test_typed.py, which compares it with them: HPCGPU_UPDATE_GOLDEN=1 writes it "
    "anew."
)
PROGRAM = """
from datetime import timedelta
from hpcgpu import LocalGPUCluster, PBSGPUCluster, SlurmGPUCluster, SlurmGPURunner

cluster = SlurmGPUCluster(
    name="demo", jobs=2, gpus_per_node=4, walltime=timedelta(hours=2), memory="60GB", env={"A": "1"}, qos="high",
    partition="gpu", scheduler={"queue": "small", "dashboard_address": ":0"}, rmm_pool_size=0.5, security=None,
    job_extra_directives=["--exclusive"],
)
cluster.add_worker_group("big", jobs=1, memory="1TB", gpus_per_node=0, constraint="bigmem")
PBSGPUCluster(walltime="2h", scheduler="local", select_extra="system=polaris").add_worker_group("big", place="scatter")
LocalGPUCluster(gpus_per_node=2, protocol="tcp")
SlurmGPURunner(protocol="ucx", death_timeout="5m")
"""
#: Lines that must be refused, each for the reason that mypy names.
WRONG = {
    'SlurmGPUCluster(quue="gpu")': 'Unexpected keyword argument "quue"',
    'SlurmGPUCluster(pbs_shape="flat")': 'Unexpected keyword argument "pbs_shape"',
    'PBSGPUCluster(qos="high")': 'Unexpected keyword argument "qos"',
    "LocalGPUCluster(place='scatter')": 'Unexpected keyword argument "place"',
    "SlurmGPUCluster(walltime=60)": 'Argument "walltime" to "SlurmGPUCluster" has incompatible type "int"',
    "SlurmGPUCluster(gpus_per_node='4')": 'Argument "gpus_per_node" to "SlurmGPUCluster" has incompatible type "str"',
    "SlurmGPUCluster(protocol='http')": 'Argument "protocol" to "SlurmGPUCluster" has incompatible type',
    "SlurmGPUCluster(job_extra_directives='--exclusive')": 'Argument "job_extra_directives" to "SlurmGPUCluster" '
    'has incompatible type "str"',
    "SlurmGPUCluster(scheduler={'jobs': 1})": 'Argument "scheduler" to "SlurmGPUCluster" has '
    'incompatible type "dict[str, int]"',
    "SlurmGPUCluster(scheduler='remote')": 'Argument "scheduler" to "SlurmGPUCluster" has incompatible type',
    "cluster.add_worker_group('big', cores='4')": 'Argument "cores" to "add_worker_group" of "SlurmGPUCluster" '
    'has incompatible type "str"',
    "cluster.add_worker_group('big', place='x')": 'Unexpected keyword argument "place"',
    "SlurmGPURunner(queue='gpu')": 'Unexpected keyword argument "queue"',
}
#: The sources of other packages are not read, which takes mypy twelve times as long: what has no stubs is Any, but for
#: the classes that ours are derived from.
SETTINGS = """
[mypy]
strict = True
follow_imports = skip

[mypy-hpcgpu.*,distributed.deploy.*]
follow_imports = silent
"""
SYSTEMS = {"slurm": "Slurm", "pbs": "PBS", "local": "Local"}


def typed() -> str:
    """Make the file."""
    classes = shared()
    for system, title in SYSTEMS.items():
        classes |= of_system(system, title)
    options = names(ClusterOptions) | names(WorkerOptions)
    of_runner = {name: f for name, f in options.items() if name in runner.OPTIONS}
    classes["RunnerArguments"] = typed_dict("RunnerArguments", of_runner, aliases={})
    return module(MADE, classes)


def test_the_types_are_those_of_the_options() -> None:
    if os.environ.get("HPCGPU_UPDATE_GOLDEN"):
        TYPED.write_text(typed())
    assert TYPED.read_text() == typed(), (
        "hpcgpu/configuration/typed.py differs from the options: HPCGPU_UPDATE_GOLDEN=1 writes it anew"
    )


def test_a_type_checker_accepts_right_options_and_reports_wrong_names_and_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(WRONG) + "\n")
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    given = ["--config-file", str(settings), "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *given, str(program)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1, f"it found errors, and did not fail itself: {done.stdout}{done.stderr}"
    first = PROGRAM.count("\n") + 1
    found = [line.split(":", 2)[1:] for line in done.stdout.splitlines() if ": error: " in line]
    reports = {int(number): text for number, text in found}
    assert not [text for number, text in reports.items() if number < first], done.stdout
    for number, (line, message) in enumerate(WRONG.items(), first):
        assert message in reports.get(number, ""), (
            f"{line}: {reports.get(number, 'accepted')}\n{done.stdout}{done.stderr}"
        )


def test_a_signature_lists_the_options_of_its_own_batch_system() -> None:
    slurm, pbs, local = (
        set(inspect.signature(cls).parameters) for cls in (SlurmGPUCluster, PBSGPUCluster, LocalGPUCluster)
    )
    assert {"queue", "scheduler", "qos", "jobs"} < slurm and "pbs_shape" not in slurm
    assert {"queue", "scheduler", "pbs_shape", "pbs_launcher"} < pbs and "qos" not in pbs
    assert local == slurm & pbs
    assert "walltime : str or timedelta, optional" in (SlurmGPUCluster.__doc__ or "") and "pbs_shape" not in (
        SlurmGPUCluster.__doc__ or ""
    )
