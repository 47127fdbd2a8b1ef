"""The releases of other projects that hpcgpu is tested with."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """The releases of a distribution that hpcgpu is tested with, both ends included."""

    lowest: str
    highest: str

    def holds(self, version: str) -> bool:
        """Whether a version lies between the oldest and the newest of these releases."""
        return _numbers(self.lowest) <= _numbers(version) <= _numbers(self.highest)

    def precedes(self, version: str) -> bool:
        """Whether a version is older than all of these releases."""
        return _numbers(version) < _numbers(self.lowest)


def _numbers(version: str) -> tuple[int, ...]:
    """Return year, month and patch of a release: `26.10.0a12` is 26, 10, 0."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


#: What the tests run with: ``ci/lowest.txt`` has the lower end, ``ci/environment.sh test`` installs the upper one.
TESTED = {
    "dask": Release("2026.1.1", "2026.7.1"),
    "distributed": Release("2026.1.1", "2026.7.1"),
    "dask-cuda": Release("26.2.0", "26.10.0"),
    "distributed-ucxx": Release("0.48.0", "0.52.0"),
}
