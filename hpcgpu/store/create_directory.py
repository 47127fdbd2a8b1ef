"""How a cluster gets its directory and so its name: if several clusters want one name, exactly one gets it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path

from hpcgpu.errors import ClusterExists, Damaged
from hpcgpu.posix import ownership
from hpcgpu.posix.ownership import private_directory
from hpcgpu.store.cluster_json import FORMAT, About
from hpcgpu.store.directory import DASHBOARD_TOKEN, ClusterDirectory

#: Seconds for which a start on another machine may show no activity, before its name is free again. A directory that is
#: not complete at this age is removed.
_STARTING = 600.0
#: The token of the next directory, where a program must know its own cluster again; empty for a new one.
REQUESTED_TOKEN = ContextVar("REQUESTED_TOKEN", default="")
#: How often a name is tried. More than two attempts are needed only if others start and end clusters of that name
#: meanwhile.
_TRIES = 20


def claim(
    path: Path,
    alive: Callable[[ClusterDirectory], list[str]] | None,
    *,
    system: str = "",
    queue: str = "",
    security: bool | str = True,
    complete: Callable[[ClusterDirectory], None] = lambda directory: None,
) -> ClusterDirectory:
    """Create the directory of a new cluster exclusively: other programs see it complete or not at all.

    The directory is made under a hidden name, ``.NAME~RANDOM``. rename(2) then gives it its own name, and fails with
    ENOTEMPTY if a directory of that name holds something. The rename is atomic on NFS too, with one exception: "if the
    operation failed", the man page warns, the file may nevertheless have been renamed. So the name is read back. An
    interrupted start or a full disk leaves a hidden directory, which a later start removes.

    The directory of an earlier cluster of that name is kept, renamed ``NAME~DATE-TOKEN``, if that cluster was closed or
    none of its jobs is alive. The token is that of the earlier cluster. So only the first of several programs can
    rename its directory. No program can move the new directory away by mistake, because a directory that holds
    something already has the target name.

    Parameters
    ----------
    path : Path
    alive : callable or None
        Takes the directory of an earlier cluster, and returns the ids of its jobs that have not ended. It raises
        `ClusterExists` if they are not known. Without it, no job is looked up, and the earlier cluster is not marked as
        closed.
    system : str, optional
        Name of the batch system.
    queue : str, optional
        The identity of the queue that has the jobs, see `hpcgpu.batch.base.BatchSystem.identity`; empty if it is not
        known.
    security : bool or str, default True
        The option `security`: unless it is False, no process of the cluster may ever run without the credentials.
    complete : callable, optional
        Writes more into the directory, before others see it.

    Raises
    ------
    ClusterExists
        A cluster of that name may be alive.
    NotTrusted
        Other users could replace the directory.
    OSError
        The directory cannot be written.
    """
    private_directory(path.parent)
    ownership.check_parent(path.parent)
    _sweep(path.parent, now=time.time())
    directory, draft = ClusterDirectory(path), ClusterDirectory(_hidden(path))
    token, earlier = REQUESTED_TOKEN.get() or secrets.token_hex(16), list[ClusterDirectory]()
    about = About(
        name=path.name,
        token=token,
        created=time.time(),
        format=FORMAT,
        encrypted=bool(security),
        authenticated=security == "authenticated",
        system=system,
        queue=queue,
    )
    try:
        draft.path.mkdir(mode=0o700)
        draft.logs.mkdir(mode=0o700)
        draft.write("cluster.json", json.dumps(asdict(about)))
        draft.write(DASHBOARD_TOKEN, secrets.token_urlsafe(32))
        complete(draft)
        _take_name(directory, draft, token, alive, earlier)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        abandon(directory, token)
        raise
    finally:  # last of all, and also if another program got the name
        for one in earlier:
            one.remove_secrets()
    return directory


def _take_name(
    directory: ClusterDirectory,
    draft: ClusterDirectory,
    token: str,
    alive: Callable[[ClusterDirectory], list[str]] | None,
    earlier: list[ClusterDirectory],
) -> None:
    """Give the draft its name; add the directory that had that name before to `earlier`."""
    for _ in range(_TRIES):
        try:
            draft.path.rename(directory.path)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):  # a directory like /tmp does not let us move files of others
                ownership.check_owner(directory.path)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and not directory.has_token(token):
                raise
        if directory.has_token(token):
            return
        if (moved := _move_aside(directory, alive)) is not None:
            earlier.append(moved)
            if alive is not None and not moved.closed:  # none of its jobs is alive; `list --all` and `clean` read this
                with contextlib.suppress(OSError):
                    moved.close()
        directory.refresh()
    raise ClusterExists(
        f"another program has just started a cluster named {directory.path.name!r}, in {directory.path}: choose "
        f"another name, or stop it: hpcgpu stop {directory.in_shell}"
    )


def _move_aside(
    directory: ClusterDirectory, alive: Callable[[ClusterDirectory], list[str]] | None
) -> ClusterDirectory | None:
    """Rename the directory of an earlier cluster; return it, or None when another program was faster."""
    path = directory.path
    try:
        here = path.lstat()
        ownership.check(path)
    except FileNotFoundError:
        return None
    try:
        about = directory.name()
        mark, date = about.token, time.strftime("%Y%m%d-%H%M%S", time.gmtime(about.created))
    except Damaged:
        mark, date = f"{here.st_ino:08x}", "damaged"
    except (FileNotFoundError, NotADirectoryError):
        # another program moved it, or has the name by now
        if not _still(path, here) or (path / "cluster.json").exists():
            return None
        raise ClusterExists(
            f"{path} exists, and is not the directory of a cluster: choose another name, or remove it"
        ) from None
    try:
        why = _in_use(directory, alive, now=time.time())
    except OSError:
        if _still(path, here):
            raise
        return None
    if not _still(path, here):  # a part that was read may be of the cluster that replaced it
        return None
    if why:
        raise ClusterExists(why)
    aside = ClusterDirectory(path.with_name(f"{path.name}~{date}-{mark[:8]}"))
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        try:
            path.rename(aside.path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    moved = (
        aside.has_token(mark) if date != "damaged" else aside.path.exists() and aside.path.lstat().st_ino == here.st_ino
    )
    return aside if moved else None


def _in_use(directory: ClusterDirectory, alive: Callable[[ClusterDirectory], list[str]] | None, *, now: float) -> str:
    """Return why the name of an earlier cluster cannot be used; empty if it can."""
    if directory.closed:
        return ""
    path, name = directory.path, directory.path.name
    if why := directory.other_format() or _just_starting(directory, now=now):
        return f"{why}. Or choose another name"
    try:
        live = alive(directory) if alive is not None else []
    except Damaged as error:
        return (
            f"{error}. So it is not known whether jobs of cluster {name!r} run. Choose another name, or remove {path}"
        )
    if live:
        return (
            f"a cluster named {name!r} exists: its jobs {', '.join(live)} are in the queue (see {path}). To use it, "
            f'call hpcgpu.connect({directory.found_as!r}) or set if_exists="connect". To stop it, run: hpcgpu stop '
            f"{directory.in_shell}. Or choose another name"
        )
    return ""


def _just_starting(directory: ClusterDirectory, *, now: float) -> str:
    """Return why a cluster may soon have jobs, or may run without any; empty if neither is so."""
    path, name = directory.path, directory.path.name
    submits, manager, contact = directory.submits(), directory.manager(), directory.contact()
    if not submits and (path / "launch.sh").exists():
        return (
            f"{path} holds the scripts of a cluster named {name!r} that was not launched yet. Launch it, or remove "
            "that directory"
        )
    unknown = [s.time for s in submits if s.job_id is None and not s.refused and not s.ended]
    in_program = contact is not None and not contact.job_id  # its scheduler runs in the program itself
    if submits and not unknown and not in_program:
        return ""
    lives = manager.lives if manager is not None else None
    began = max([directory.modified, *unknown])
    if lives or (lives is None and (in_program or now - began < _STARTING)):
        what = "runs in" if in_program else "is being started by"
        return (
            f"a cluster named {name!r} {what} {manager or 'another program'}, in {path}. Try again later. To "
            f"stop it, run: hpcgpu stop {directory.in_shell}"
        )
    return ""


def _still(path: Path, here: os.stat_result) -> bool:
    """Whether a path is still the same directory as earlier."""
    try:
        now = path.lstat()
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (here.st_dev, here.st_ino)


def abandon(directory: ClusterDirectory, token: str) -> None:
    """Free the name of a cluster that submitted nothing, if the cluster with this token still has the name."""
    if not directory.has_token(token):
        return
    gone = ClusterDirectory(_hidden(directory.path))  # rename first: a half-removed directory must not block the name
    try:
        directory.path.rename(gone.path)
    except OSError:
        gone = directory
    if gone.has_token(token):
        shutil.rmtree(gone.path, ignore_errors=True)
    else:
        gone.path.rename(directory.path)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}~{secrets.token_hex(4)}")


def _sweep(root: Path, *, now: float) -> None:
    """Remove the incomplete directories that interrupted starts have left there."""
    for path in root.glob(".*~*"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            old = now - about.st_mtime > _STARTING
            if (
                old
                and re.fullmatch(r"[.][A-Za-z0-9][\w.-]*~[0-9a-f]{8}", path.name)
                and about.st_uid == os.getuid()
                and path.is_dir()
            ):
                shutil.rmtree(path, ignore_errors=True)
