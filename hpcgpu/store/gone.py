"""Whether the directory of a cluster was removed: then nobody can find the cluster any more, and its jobs must end.

A filesystem that hangs or fails for a while proves nothing. Only a directory that is seen to be missing, again and
again for minutes, counts as removed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcgpu.errors import Damaged
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["VARIABLE", "Gone", "is_there"]

#: Variable that overrides `_PATIENCE`, in seconds.
VARIABLE = "HPCGPU_DIRECTORY_GONE_AFTER"
#: Seconds for which a directory must be missing, and looks that must have found it missing.
_PATIENCE, _LOOKS = 300.0, 3
#: The factor where the directory above is missing too: perhaps the filesystem is not mounted now.
_UNMOUNTED = 6.0


def is_there(directory: ClusterDirectory, token: str) -> bool | None:
    """Return whether a cluster has its directory; None where that is not known, as the filesystem does not say.

    A directory that holds neither ``cluster.json`` nor a journal is none: nothing would find the cluster there. Nor is
    that of another cluster.
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


class Gone:
    """Looks again and again whether a cluster still has its directory.

    Parameters
    ----------
    directory : ClusterDirectory
    token : str
        Of the cluster; see `ClusterDirectory.token`.
    environ : mapping, optional
    """

    def __init__(self, directory: ClusterDirectory, token: str, environ: Mapping[str, str] = os.environ) -> None:
        self.directory = directory
        self.token = token
        try:
            self.patience = max(0.0, float(environ.get(VARIABLE, _PATIENCE)))
        except ValueError:
            self.patience = _PATIENCE
        self._since: float | None = None
        self._looks = 0

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return max(0.1, self.patience / 10)

    def look(self, *, now: float) -> str:
        """Look once; return since when the directory is gone, in words, if it counts as removed; else nothing."""
        if is_there(self.directory, self.token) is not False:
            self._since, self._looks = None, 0
            return ""
        self._since, self._looks = self._since if self._since is not None else now, self._looks + 1
        path = self.directory.path
        patience = self.patience * (1.0 if path.parent.exists() else _UNMOUNTED)
        if self._looks < _LOOKS or now - self._since < patience:
            return ""
        return f"its directory {path} was removed: it has been missing for {now - self._since:.0f} s"
