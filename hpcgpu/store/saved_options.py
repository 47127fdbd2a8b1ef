"""The options of a cluster as its directory keeps them, ``options.json``.

They are those of the start, even if the configuration has changed since.

Values are kept as they were read, checked and completed, so that nothing is decided twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from hpcgpu.configuration.option_classes import option_classes
from hpcgpu.errors import OptionError
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import DEFAULT, ClusterOptions, Options, WorkerOptions
from hpcgpu.posix import json_records
from hpcgpu.store.directory import ClusterDirectory

_FILE = "options.json"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Saved:
    """What is kept: the options of the cluster, and of its further groups of workers by name."""

    options: Options
    groups: Mapping[str, WorkerOptions]

    def gpus(self, kind: str, group: str) -> int | None:
        """Return how many GPUs a job of this kind and group requests; None where that is not known."""
        if kind == "scheduler":
            return self.options.scheduler.gpus_per_node if self.options.scheduler is not None else 0
        found = self._workers().get(group)
        return found.nodes_per_job * found.gpus_per_node if found is not None else None

    def worker(self, group: str) -> WorkerOptions:
        """Return the options of a group of workers.

        Raises
        ------
        OptionError
            There is no such group.
        """
        if (found := self._workers().get(group)) is None:
            raise OptionError(f"no worker group named {group!r}: the groups are {', '.join(self._workers())}")
        return found

    def _workers(self) -> dict[str, WorkerOptions]:
        return {DEFAULT: self.options.worker, **self.groups}


def write(directory: ClusterDirectory, options: Options, groups: Mapping[str, WorkerOptions] | None = None) -> None:
    """Keep the options of a cluster."""
    content = {
        "system": options.system,
        "cluster": asdict(options.cluster),
        "worker": asdict(options.worker),
        "scheduler": asdict(options.scheduler) if options.scheduler is not None else None,
        "groups": {name: asdict(group) for name, group in (groups or {}).items()},
    }
    directory.write(_FILE, json.dumps(content, indent=1, default=_path))


def read(directory: ClusterDirectory) -> Saved:
    """Return the options of a cluster.

    Raises
    ------
    OptionError
        They are not there, or another release of hpcgpu wrote them in another way.
    """
    file = directory.path / _FILE
    try:
        content = json_records.read(file, dict[str, Any])
        scheduler = content["scheduler"]
        if not all(isinstance(content[part], dict) for part in ("cluster", "worker", "groups")):
            raise OptionError(f"{file} is damaged: it is not what hpcgpu writes")
        classes = option_classes(content["system"])
        options = Options(
            _build(ClusterOptions, content["cluster"]),
            _build(classes.worker, content["worker"]),
            _build(classes.scheduler, scheduler) if scheduler is not None else None,
            content["system"],
        )
        return Saved(options, {name: _build(classes.worker, group) for name, group in content["groups"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            f"the options of cluster {directory.path.name!r} cannot be read from {file}: {error}"
        ) from error


def read_if_known(directory: ClusterDirectory) -> Saved | None:
    """Return the options of a cluster; None if another release wrote them: the other facts are still shown."""
    try:
        return read(directory)
    except OptionError:
        return None


def group_to_json(worker: WorkerOptions) -> dict[str, Any]:
    """Return the options of a group of workers in the form in which a program sends them."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(worker), default=_path))
    return content


def group_from_json(system: str, sent: Mapping[str, Any]) -> WorkerOptions:
    """Return the options of a group of workers that a program has sent.

    Raises
    ------
    OptionError
        Another release of hpcgpu has sent them.
    ValueError
        They are damaged.
    """
    lists = json.loads(json.dumps(sent))  # Dask's protocol makes tuples of them
    return _build(option_classes(system).worker, lists)


def logs(directory: ClusterDirectory) -> Path:
    """Return the directory of the jobs' logs.

    It is the option `log_directory` if that can be read, else the one in the cluster directory.
    """
    try:
        return read(directory).options.cluster.log_directory or directory.logs
    except OptionError:  # of another release, or missing: a cluster of one job
        return directory.logs


def _build(cls: type[_T], kept: Mapping[str, Any]) -> _T:
    """Make one of the dataclasses. An option that is not in the file is newer than the cluster, and has its default."""
    if unknown := set(kept) - set(names(cls)):
        raise OptionError(
            f"it has options that this release of hpcgpu does not know ({', '.join(sorted(unknown))}): use the release "
            "that wrote it"
        )
    return cast("_T", json_records.convert(kept, cls))


def _path(value: object) -> dict[str, str]:
    assert isinstance(value, Path)
    return {"path": str(value)}
