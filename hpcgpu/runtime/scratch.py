"""Temporary files of Dask: each of our Dask servers gets a fresh directory that no other user can have written to.

Dask uses any directory ``dask-scratch-space`` that it can write to, puts it on `sys.path`, and unpickles what it has
spilled there (`distributed.diskutils`, `distributed.core.Server`). On a node with several users, another user may have
made that directory. The directory of a process that was killed stays until the next one of this user starts on the
node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcgpu.errors import LaunchError, NotTrusted
from hpcgpu.posix.ownership import check_parent, private_directory, weaknesses
from hpcgpu.posix.paths import expand
from hpcgpu.posix.standard_streams import write_stderr

with contextlib.suppress(ImportError):  # on Windows, where only clients run
    import fcntl


def temporary_place(arguments: argparse.Namespace) -> Path:
    """Remove the option `local_directory` from the command; return the directory for Dask's temporary directory.

    Raises
    ------
    LaunchError
        It cannot be made, or others can change its content.
    """
    command: list[str] = arguments.command
    given = None
    if "--local-directory" in command:
        at = command.index("--local-directory")
        given = expanded(command[at + 1], os.environ)
        del command[at : at + 2]
    try:
        return temporary_directory(given)
    except (NotTrusted, OSError) as error:
        raise LaunchError(refusal(given, error)) from error


def expanded(path: str, environ: Mapping[str, str]) -> str:
    """Return a path with its variables replaced: some, such as ``$TMPDIR``, are often set only in the job."""
    try:
        found = expand(path, environ)
    except ValueError as error:
        raise LaunchError(f"local_directory={path!r}: {error}") from error
    if not os.path.isabs(found):  # noqa: PTH117  text
        raise LaunchError(
            f"local_directory={path!r} must be an absolute path, but in this job it is the relative path {found!r}"
        )
    return found


def temporary_directory(local_directory: str | None = None) -> Path:
    """Return the directory for temporary files, and make it if necessary.

    It is the given one, else that of Dask's configuration, else that of the node.

    Raises
    ------
    NotTrusted
        Others can change its content.
    OSError
        It cannot be made.
    """
    from dask import config

    if given := local_directory or config.get("temporary-directory", None):
        base = Path(given).absolute()
        private_directory(base)
        check_parent(base)
        return base
    refused: list[NotTrusted | OSError] = []
    for base in dict.fromkeys(Path(name).absolute() for name in (tempfile.gettempdir(), "/tmp", "/var/tmp")):
        try:
            check_parent(base)
        except (NotTrusted, OSError) as error:
            refused.append(error)
            continue
        for why in refused:  # the node's directory, not the user's choice: no reason to fail
            write_stderr(f"Dask's temporary files are in {base}: {why}")
        return base
    raise refused[0]


def refusal(given: str | None, error: NotTrusted | OSError) -> str:
    """Return why `temporary_directory` refused a directory, and what to write instead.

    Parameters
    ----------
    given : str, optional
        The option `local_directory`.
    error : NotTrusted or OSError
        What `temporary_directory` raised.
    """
    what = f"local_directory={given!r}" if given is not None else "temporary files of Dask"
    if isinstance(error, OSError):
        why = f"{error.filename or given} cannot be made on {socket.gethostname()}: {error.strerror or error}"
    else:
        why = str(error)
    advice = "set local_directory to another directory, such as '$TMPDIR'"
    return f"{what}: {why}; or {advice}" if isinstance(error, NotTrusted) else f"{what}: {why}. Please {advice}"


@contextlib.contextmanager
def made(base: Path) -> Iterator[Path]:
    """Make a directory that only this process uses, and remove it in the end.

    Parameters
    ----------
    base : Path
        From `temporary_directory`.
    """
    prefix = f"hpcgpu-{os.getuid()}-{socket.gethostname()}-"
    _sweep(base, prefix)
    path, lock = _make(base, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make(base: Path, prefix: str) -> tuple[Path, int]:
    """Make a directory and lock it: the lock marks it as in use as long as this process lives."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another process of this user removed it before it was locked
            continue
        with contextlib.suppress(OSError):  # a filesystem without locks: no process can lock it to remove it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # else it was removed while this process waited for the lock
            return path, lock
        os.close(lock)


def _sweep(base: Path, prefix: str) -> None:
    """Remove files that killed processes of this user left here.

    If others could redirect the removal to other files, nothing is removed.
    """
    if weaknesses(base, shared=True):
        return
    for path in base.glob(f"{prefix}*"):
        # of a host whose name begins like this host's name
        if not re.fullmatch("[a-z0-9_]{8}", path.name.removeprefix(prefix)):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
