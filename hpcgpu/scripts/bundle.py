"""Scripts that stand alone: a cluster directory that a person without Python launches, and one job that runs all.

The directory is like that of any other cluster, so `hpcgpu list`, `hpcgpu stop`, `hpcgpu.connect` and ``from_name``
find it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgpu.batch import system_registry
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.posix.ownership import private_directory
from hpcgpu.posix.paths import written
from hpcgpu.scaling.wanted_state import Detach, Wanted, apply
from hpcgpu.scripts import container, render
from hpcgpu.store import certificates_and_keys, create_directory, saved_options
from hpcgpu.store.directory import ClusterDirectory

#: Seconds without work after which a cluster without a manager ends.
_IDLE_TIMEOUT = 3600.0


def make(system: str, arguments: Mapping[str, Any], path: Path) -> ClusterDirectory:
    """Write the directory of a cluster with ``launch.sh``, ``stop.sh``, ``README`` and the job scripts.

    Parameters
    ----------
    system : str
        Name of the batch system.
    arguments : mapping
        Options of the cluster. Its name is that of the directory; ``idle_timeout`` is an hour by default.
    path : Path
        A directory that does not exist, is empty, or holds scripts of this function that nobody has launched.

    Raises
    ------
    OptionError
        An option has a value that is not allowed, or the directory holds something else.
    """
    render.check_launch(system)
    path = path.expanduser().absolute()
    options = _resolve(system, {"idle_timeout": _IDLE_TIMEOUT, **arguments}, path)
    if options.scheduler is None:
        raise OptionError("scheduler='local': standalone scripts need a scheduler job. Leave scheduler out")
    if options.cluster.on_scheduler_end == "restart":
        raise OptionError(
            "on_scheduler_end='restart' does not work with standalone scripts: no program manages their cluster and "
            "submits another scheduler job. Write --on-scheduler-end end, or start the cluster by `hpcgpu start`"
        )
    if options.cluster.jobs:
        raise OptionError(f"jobs={options.cluster.jobs}: give the number of worker jobs to launch.sh instead")
    files = render.render_bundle(system, options, path)
    _make_room(path)
    render.make_log_directory(options)

    def complete(directory: ClusterDirectory) -> None:
        if options.cluster.security:
            certificates_and_keys.create(directory)
        saved_options.write(directory, options)
        directory.want(apply(Wanted(), Detach()))
        container.provide(directory.path, options.worker, options.scheduler)
        for name, text in files.items():
            script = directory.write(name, text)
            if name.endswith(".sh"):
                script.chmod(0o700)

    return create_directory.claim(path, None, system=system, security=options.cluster.security, complete=complete)


def make_single(system: str, arguments: Mapping[str, Any], path: Path, program: Sequence[str]) -> Path:
    """Write one script that runs scheduler, workers and a program, and return its path, such as ``PATH/NAME.sbatch``.

    Each job that is submitted from it has its own cluster directory beside the script, made when it runs.

    Parameters
    ----------
    system : str
        Name of the batch system.
    arguments : mapping
        Options of the cluster; ``nodes_per_job`` is the number of nodes.
    path : Path
        Directory for the script.
    program : sequence of str
        Its command line.

    Raises
    ------
    OptionError
        An option is not allowed, or a script of that name exists.
    """
    render.check_single(system)
    path = path.expanduser().absolute()
    options = _resolve(system, {"log_directory": written(path), **arguments}, path / path.name)
    if options.scheduler is None:
        raise OptionError("scheduler='local' is not needed with a single job: the scheduler runs in that job")
    if options.worker.container or options.scheduler.container:
        raise OptionError(
            "container does not work with a single job: its srun commands cannot run in a container. Leave container "
            "out and install hpcgpu on the nodes, or start a cluster"
        )
    text = render.render_single(system, options, path / path.name, program)
    private_directory(path)
    render.make_log_directory(options)
    script = path / f"{path.name}.{system_registry.system(system).suffix}"
    try:
        # the option `env` may hold secrets
        with os.fdopen(os.open(script, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o700), "w") as file:
            file.write(text)
    except FileExistsError as error:
        raise OptionError(f"{script} already exists: remove it, or choose another directory") from error
    return script


def _resolve(system: str, arguments: Mapping[str, Any], path: Path) -> Options:
    given = {"name": path.name, "cluster_directory": written(path.parent), "shutdown_on_close": False, "lease": 0}
    return resolve(system, {**arguments, **given})


def _make_room(path: Path) -> None:
    """Mark scripts that may be replaced without loss as closed.

    The scripts are then renamed and not removed, because somebody may have changed them.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / "launch.sh").exists() or not (path / "cluster.json").exists():
        raise OptionError(f"{path} already exists and is not a cluster directory: choose another directory")
    directory = ClusterDirectory.existing(path)
    if directory.submits() or directory.contact() is not None or any(directory.logs.glob("*")):
        raise OptionError(
            f"the scripts in {path} were launched before, and their journal and logs are kept: choose another directory"
        )
    directory.close()
