"""Opens files that others could have made: a link elsewhere, a FIFO on which a read waits for ever, a file of theirs.

One way for all files that are read or written where other users may have been: in cluster directories, and where jobs
write their logs. The owner comes first, and no link is followed at the end of the path. No open waits, and what is read
has a limit. Who can change the directories above is a question for `hpcgpu.posix.ownership`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

__all__ = ["LIMIT", "created", "end", "opened", "read", "refresh"]

#: Bytes of a file that are read at once.
LIMIT = 64 << 20
#: Seconds for which a file is read again that others replace meanwhile, and the first pause.
_PATIENCE, _PAUSE = 1.0, 0.02
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def opened(path: Path) -> BinaryIO:
    """Open a file of this user or of root for reading.

    Raises
    ------
    OSError
        It is not there, cannot be read, belongs to somebody else, or is no file.
    """
    _judge(path, os.lstat(path), {0, os.geteuid()})
    descriptor = os.open(path, os.O_RDONLY | _SAFE)
    try:
        _judge(path, os.fstat(descriptor), {0, os.geteuid()})
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path, *, patience: float = _PATIENCE) -> bytes:
    """Return the content of such a file.

    A network filesystem can lose a file that another machine replaces: its client still has the old one's handle. Then
    it is looked up anew.

    Parameters
    ----------
    path : Path
    patience : float, default 1
        Seconds for which it is tried again.

    Raises
    ------
    OSError
        As `opened`; or it is larger than 64 MiB.
    """
    until, pause = time.monotonic() + patience, _PAUSE
    while True:
        try:
            with opened(path) as file:
                found = file.read(LIMIT + 1)
            break
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() > until:
                raise
        _look_again(path)
        time.sleep(pause)
        pause *= 2
    if len(found) > LIMIT:
        raise OSError(errno.EFBIG, f"it is larger than {LIMIT >> 20} MiB", str(path))
    return found


def end(path: Path, size: int = LIMIT) -> bytes:
    """Return the last bytes of such a file.

    Raises
    ------
    OSError
        As `opened`.
    """
    with opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


def created(path: Path) -> int:
    """Open an empty file of this user for writing, mode 0600 where it is new; return its descriptor.

    Devices of root are opened too, such as ``/dev/null``.

    Raises
    ------
    OSError
        It cannot be made or written; or what is there belongs to somebody else, is no file, or has another name too.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _SAFE, 0o600)
    try:
        about = os.fstat(descriptor)
        if not (stat.S_ISCHR(about.st_mode) and about.st_uid == 0):
            _judge(path, about, {os.geteuid()})
            if about.st_nlink > 1:
                raise OSError(errno.EPERM, "it is a hard link: the file has another name too", str(path))
            os.ftruncate(descriptor, 0)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refresh(directory: Path) -> None:
    """Make an NFS client ask the server for the content of a directory of this user.

    It sets the directory's mode, to what it is, because otherwise the client may trust its cache.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        try:
            about = os.fstat(descriptor)
            if about.st_uid == os.geteuid():
                os.fchmod(descriptor, stat.S_IMODE(about.st_mode))
        finally:
            os.close(descriptor)


def _look_again(path: Path) -> None:
    """Make the client of a network filesystem look a name up anew."""
    refresh(path.parent)
    with contextlib.suppress(OSError):
        os.listdir(path.parent)  # noqa: PTH208 - FUSE: what it lists, it knows anew
    with contextlib.suppress(OSError):
        # No cache has it, so the server is asked. Where it answers ESTALE, the kernel looks the name up anew.
        os.getxattr(path, "user.hpcgpu", follow_symlinks=False)


def _judge(path: Path, about: os.stat_result, owners: set[int]) -> None:
    """Raise `OSError` for what is no file of these owners."""
    if about.st_uid not in owners:
        raise OSError(errno.EPERM, f"it belongs to uid {about.st_uid}, and hpcgpu uses only your own files", str(path))
    if stat.S_ISLNK(about.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if stat.S_ISDIR(about.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        what = "a FIFO" if stat.S_ISFIFO(about.st_mode) else "a device or socket"
        raise OSError(errno.EPERM, f"it is {what}, and no file", str(path))
