"""What type checkers and editors see of the cluster classes is what the options are."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

import hpcgpu.configuration
from hpcgpu import LocalGPUCluster, PBSGPUCluster, SlurmGPUCluster
from hpcgpu.cluster import runner
from hpcgpu.configuration.classes import option_classes
from hpcgpu.options.common import ClusterOptions, WorkerOptions
from hpcgpu.options.schema import accepted, names
from hpcgpu.options.spelling import ALIASES

TYPED = Path(hpcgpu.configuration.__file__).with_name("typed.py")
HEAD = '''"""What users may write for each option, as type checkers and editors read it.

Made from the options by tests/unit/test_typed.py, which compares it with them: HPCGPU_UPDATE_GOLDEN=1 writes it anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypedDict

__all__ = [
{exported}
]
'''
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
SYSTEMS = {"slurm": "Slurm", "pbs": "PBS", "local": "Local"}


def typed() -> str:
    """Make the file."""
    classes = {"ClusterArguments": ("TypedDict", names(ClusterOptions))}
    for system, title in SYSTEMS.items():
        found = option_classes(system)
        classes[f"{title}WorkerArguments"] = ("TypedDict", names(found.worker))
        classes[f"{title}SchedulerArguments"] = ("TypedDict", names(found.scheduler))
        classes[f"{title}Arguments"] = (f"ClusterArguments, {title}WorkerArguments", {})
    options = names(ClusterOptions) | names(WorkerOptions)
    classes["RunnerArguments"] = ("TypedDict", {name: f for name, f in options.items() if name in runner.OPTIONS})
    head = HEAD.replace("{exported}", "\n".join(f'    "{name}",' for name in sorted(classes)))
    return head + "".join(_class(name, bases, fields) for name, (bases, fields) in classes.items())


def _class(name: str, bases: str, fields: Mapping[str, Field[Any]]) -> str:
    aliases = ALIASES if name != "RunnerArguments" else {}
    also = {alias: fields[of] for alias, of in aliases.items() if of in fields}
    kinds = {option: accepted(f).replace("'", '"') for option, f in {**fields, **also}.items()}
    lines: Iterator[str] = (f"    {option}: {kind} | None" for option, kind in kinds.items())
    return "\n".join(["", "", f"class {name}({bases}, total=False):", *(lines if kinds else ["    pass"]), ""])


def test_the_types_are_those_of_the_options() -> None:
    if os.environ.get("HPCGPU_UPDATE_GOLDEN"):
        TYPED.write_text(typed())
    assert TYPED.read_text() == typed(), (
        "hpcgpu/configuration/typed.py differs from the options: HPCGPU_UPDATE_GOLDEN=1 writes it anew"
    )


def test_a_type_checker_accepts_right_options_and_reports_wrong_names_and_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(WRONG) + "\n")
    given = ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *given, str(program)], capture_output=True, text=True, cwd=tmp_path
    )
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
