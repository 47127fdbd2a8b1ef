"""Whether the directory of a cluster was removed: then nobody can find the cluster any more, and its jobs must end.

A filesystem that hangs or fails for a while proves nothing. A directory counts as removed only if several checks, over
minutes, have found that it is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpcgpu.errors import Damaged
from hpcgpu.store.directory import ClusterDirectory

#: Variable that overrides `_TIMEOUT`, in seconds.
VARIABLE = "HPCGPU_DIRECTORY_GONE_AFTER"
#: Seconds for which a directory must be missing, and the number of checks that must have found it missing.
_TIMEOUT, _CHECKS = 300.0, 3
#: Factor of these seconds if the directory above is missing too: perhaps the filesystem is not mounted now.
_UNMOUNTED = 6.0


def missing(directory: Path) -> bool:
    """Whether a directory is certainly missing now; False if the filesystem fails."""
    try:
        directory.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def directory_exists(directory: ClusterDirectory, token: str) -> bool | None:
    """Return whether a cluster has its directory; None if that is not known, because the filesystem fails.

    A directory with neither ``cluster.json`` nor a journal does not count: nobody could find the cluster there. The
    directory of another cluster does not count either.
    """
    missing = 0
    for name in ("cluster.json", "journal.jsonl"):
        try:
            (directory.path / name).stat()
        except FileNotFoundError:
            missing += 1
        except OSError:
            return None
    if missing == 2:
        return False
    try:
        return directory.token() == token
    except FileNotFoundError:
        return True
    except (OSError, Damaged):
        return None


class RemovalWatch:
    """Checks repeatedly whether a cluster still has its directory.

    Parameters
    ----------
    directory : ClusterDirectory
    token : str
        Token of the cluster; see `ClusterDirectory.token`.
    environ : mapping, optional
    """

    def __init__(self, directory: ClusterDirectory, token: str, environ: Mapping[str, str] = os.environ) -> None:
        self.directory = directory
        self.token = token
        try:
            self.timeout = max(0.0, float(environ.get(VARIABLE, _TIMEOUT)))
        except ValueError:
            self.timeout = _TIMEOUT
        self._since: float | None = None
        self._checks = 0

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        return max(0.1, self.timeout / 10)

    def check(self, *, now: float) -> str:
        """Check once; return since when the directory is gone, in words, if it counts as removed; else empty text."""
        if directory_exists(self.directory, self.token) is not False:
            self._since, self._checks = None, 0
            return ""
        self._since, self._checks = self._since if self._since is not None else now, self._checks + 1
        path = self.directory.path
        timeout = self.timeout * (1.0 if path.parent.exists() else _UNMOUNTED)
        if self._checks < _CHECKS or now - self._since < timeout:
            return ""
        return f"its directory {path} was removed: it has been missing for {now - self._since:.0f} s"
