"""Opens files that other users could have replaced by a symbolic link, by a FIFO that blocks, or by their own file.

All files are opened by this module where other users may write: in cluster directories, and where jobs write their
logs. The owner is checked first. A symbolic link at the end of the path is not followed. An open never blocks, and the
size of a read is limited. `hpcgpu.posix.ownership` checks who can change the directories above.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import stat
import time
from io import BufferedReader
from pathlib import Path

#: The most bytes that are read of a file.
LIMIT = 64 << 20
#: While another machine replaces a file, the read is repeated for this many seconds, after this first pause. Some
#: filesystems remember names for five seconds.
_TIMEOUT, _PAUSE = 6.0, 0.02
_NAMES = ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY")
#: Flags for `os.open`. Windows has only the last one, and other systems all but that.
SAFE: int = functools.reduce(operator.or_, (getattr(os, name, 0) for name in _NAMES))


def opened(path: Path, *, of_anyone: bool = False) -> BufferedReader:
    """Open a file of this user or of root for reading.

    Parameters
    ----------
    path : Path
    of_anyone : bool, default False
        Whether it may belong to another user: the user has chosen it, and nothing depends on it.

    Raises
    ------
    OSError
        The file does not exist, cannot be read, belongs to another user, or is no regular file.
    """
    owners = None if of_anyone else {0, os.geteuid()}
    _judge(path, os.lstat(path), owners)
    descriptor = os.open(path, os.O_RDONLY | SAFE)
    try:
        _judge(path, os.fstat(descriptor), owners)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path) -> bytes:
    """Return the content of a file that `opened` accepts.

    A network filesystem can lose a file that another machine replaces: its client still has the old file's handle. Then
    the name is looked up again, as long as its directory exists.

    Raises
    ------
    OSError
        As `opened`; or the file is larger than 64 MiB.
    """
    until, pause = time.monotonic() + _TIMEOUT, _PAUSE
    while True:
        try:
            with opened(path) as file:
                found = file.read(LIMIT + 1)
            break
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() > until or not _refresh_name(path):
                error.filename = str(path)  # that of a failed read names no file
                raise
        time.sleep(pause)
        pause *= 2
    if len(found) > LIMIT:
        raise OSError(errno.EFBIG, f"it is larger than {LIMIT >> 20} MiB", str(path))
    return found


def end(path: Path, size: int = LIMIT) -> bytes:
    """Return the last bytes of a file that `opened` accepts.

    Raises
    ------
    OSError
        As `opened`.
    """
    with opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


def created(path: Path) -> int:
    """Open an empty file of this user for writing, with mode 0600 if it is new; return its descriptor.

    Devices of root are opened too, such as ``/dev/null``.

    Raises
    ------
    OSError
        The file cannot be made or written, belongs to another user, is no regular file, or has another name too.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | SAFE, 0o600)
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

    The function sets the directory's mode to its present value. Otherwise the client may trust its cache.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | SAFE)
        try:
            about = os.fstat(descriptor)
            if about.st_uid == os.geteuid():
                os.fchmod(descriptor, stat.S_IMODE(about.st_mode))
        finally:
            os.close(descriptor)


def _refresh_name(path: Path) -> bool:
    """Make the client of a network filesystem look up a name again; return whether the name's directory exists."""
    refresh(path.parent)
    try:
        os.listdir(path.parent)  # noqa: PTH208 - a FUSE client refreshes the names that it lists
    except OSError:
        return False
    with contextlib.suppress(OSError):
        # No cache has this attribute, so the client asks the server. If the server answers ESTALE, the kernel looks up
        # the name again.
        os.getxattr(path, "user.hpcgpu", follow_symlinks=False)
    return True


def _judge(path: Path, about: os.stat_result, owners: set[int] | None) -> None:
    """Raise `OSError` unless it is a regular file, and belongs to one of these owners."""
    if owners is not None and about.st_uid not in owners:
        raise OSError(errno.EPERM, f"it belongs to uid {about.st_uid}, and hpcgpu uses only your own files", str(path))
    if stat.S_ISLNK(about.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if stat.S_ISDIR(about.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        what = "a FIFO" if stat.S_ISFIFO(about.st_mode) else "a device or socket"
        raise OSError(errno.EPERM, f"it is {what}, and no file", str(path))
