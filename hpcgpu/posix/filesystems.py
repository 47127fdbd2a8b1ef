"""What kind of filesystem a path is on: the node's own disk, or one that several machines see."""

from __future__ import annotations

import re
from pathlib import Path

#: Filesystems that only one machine has.
_OF_ONE_MACHINE = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs"})
_MOUNTS = Path("/proc/self/mounts")


def filesystem(path: Path) -> str:
    """Return the type of the filesystem of a path; empty where it is not known."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    mounts = {_plain(fields[1]): fields[2] for line in lines if len(fields := line.split(" ")) > 2}
    return next((mounts[str(place)] for place in (path.resolve(), *path.resolve().parents) if str(place) in mounts), "")


def is_shared(path: Path) -> bool:
    """Whether other machines see the same directory; false if that is not known."""
    kind = filesystem(path)
    return bool(kind) and kind not in _OF_ONE_MACHINE


def is_local(path: Path) -> bool:
    """Whether no other machine sees the same directory; false if that is not known."""
    return filesystem(path) in _OF_ONE_MACHINE


def _plain(mountpoint: str) -> str:
    """Return the true path of a mount point: the kernel writes spaces and some other characters as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mountpoint)
