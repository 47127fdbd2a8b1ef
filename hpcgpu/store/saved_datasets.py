"""The published datasets of a cluster that have a checkpoint, a file for each: ``dataset-NAME.json``.

The next scheduler of the cluster publishes them again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from hpcgpu.errors import Damaged
from hpcgpu.posix import json_records
from hpcgpu.store.directory import ClusterDirectory


@dataclass(frozen=True)
class SavedDataset:
    """A dataset.

    Attributes
    ----------
    name : str
        Under which it is published.
    checkpoint : str
        The directory of its checkpoint.
    """

    name: str
    checkpoint: str


def record(directory: ClusterDirectory, dataset: SavedDataset) -> None:
    """Record that a dataset was saved."""
    directory.write(_file(dataset.name), json.dumps(asdict(dataset)))


def forget(directory: ClusterDirectory, name: str) -> None:
    """Record that a dataset is no longer published. Its checkpoint stays."""
    (directory.path / _file(name)).unlink(missing_ok=True)


def read(directory: ClusterDirectory) -> list[SavedDataset]:
    """Return the datasets; one whose file cannot be read is left out."""
    directory.refresh()
    found = []
    for path in sorted(directory.path.glob(_file("*"))):
        with suppress(OSError, Damaged):
            found.append(json_records.read(path, SavedDataset))
    return found


def _file(name: str) -> str:
    return f"dataset-{name}.json"
