"""Whether a disk is full; the sentence for a user if a program cannot write, for this or another reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: A disk with fewer bytes left is full: some filesystems never allocate their last blocks.
_FULL = 65536

_REMEDIES = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Your quota is used up. Make room there",
    errno.EROFS: "Its filesystem is read-only now. Ask the site's support when it can be written again",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Check the owner and the permissions of the directory"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Somebody has removed or replaced the directory"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, getattr(errno, "EREMOTEIO", errno.EIO)),
        "Its filesystem has a fault. Try again later. If it stays, tell the site's support",
    ),
}


def is_full(path: Path) -> bool:
    """Whether the disk of a directory has no room for another file. False if that is not known."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL or 0 == disk.f_favail < disk.f_files


def cannot_be_written(
    path: Path | str, error: OSError, otherwise: str = "Check the directory and its filesystem"
) -> str:
    """Return what a program cannot write, why, and what a user can do; `path` is empty if it is not known."""
    why = f"{error.strerror or error}. {_REMEDIES.get(error.errno or 0, otherwise)}"
    return f"{path} cannot be written: {why}" if path else why


def file_error(error: OSError) -> str:
    """Return which file an error is about and what is wrong; if its disk is full, also what a user can do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return cannot_be_written(error.filename or "", error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
