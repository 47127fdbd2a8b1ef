"""Checks who can change the content of a path.

Only files that this user or root alone can change are executed, unpickled or used as credentials.

One rule applies to all paths. A path is walked from the root, through symbolic links, as the kernel walks it. Each
place on the way must belong to this user, to root, or to a user listed in ``HPCGPU_TRUSTED_UIDS``, and nobody else may
write to it. The sticky bit prevents others from renaming and removing files of this user (``man 7 inode``), so a
directory above may be like ``/tmp``.

This module sees modes only. Modes do not show the ACLs of NFSv4, GPFS and Lustre servers. They do show POSIX ACLs: the
mode then has the ACL's mask in the place of the group (``man 5 acl``). The result is true at the time of the check.
Windows has neither owners nor modes of this kind. There nothing is found: the user's own directories are private.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shlex
import stat
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcgpu.errors import ClusterWarning, NotTrusted

#: Ids of other users, separated by commas, who may own directories above the user's own: a project's owner, for
#: example.
VARIABLE = "HPCGPU_TRUSTED_UIDS"
_LINKS = 40  # symbolic links in one path, as many as the kernel follows


@dataclass(frozen=True)
class Weakness:
    """A place through which other users can change the content of a path.

    Attributes
    ----------
    why : str
        The owner and the mode of the place.
    advice : str
        What to do.
    by_group : bool
        Whether only members of a group can do so, and only by replacing the place: `why` names the owner.
    """

    why: str
    advice: str
    by_group: bool = False


def check(path: Path, *, group_may_write: bool = False) -> None:
    """Refuse a path that somebody else can change, or could have made.

    Warn if members of a group can replace it.

    Parameters
    ----------
    path : Path
        A file, or a directory all of whose content is trusted.
    group_may_write : bool, default False
        Whether people write this file. It may then belong to a listed user, such as the one who installs a site's
        software. If its group may write to it, as under umask 002, this is only a warning.

    Raises
    ------
    NotTrusted
        Somebody else can change it, or could have made it.
    OSError
        It is not there.
    """
    _judge(path, weaknesses(path, group_may_write=group_may_write))


def check_tree(path: Path, files: Iterable[Path]) -> None:
    """Refuse a directory, or files in it, that somebody else can change.

    The owner of a file always counts. Its mode does not count if nobody else can enter the directory: a script may have
    written the file under another umask.

    Parameters
    ----------
    path : Path
        The directory.
    files : iterable of Path
        Files at any depth; a file that no longer exists is left out.

    Raises
    ------
    NotTrusted
        Somebody else can change something.
    OSError
        The directory is not there.
    """
    check(path)
    entered = path.stat().st_mode & 0o077 != 0
    for file in files:
        check_owner(file, mode=entered)


def check_owner(path: Path, *, mode: bool = False) -> None:
    """Refuse a path that somebody else has made, even a symbolic link that leads nowhere. It need not exist.

    Parameters
    ----------
    path : Path
    mode : bool, default False
        Whether to refuse also what the mode lets somebody else change.

    Raises
    ------
    NotTrusted
        Somebody else has made the path, or can change it.
    """
    with contextlib.suppress(FileNotFoundError):
        about = os.lstat(path)
        found = _weakness(path, about, above=False)
        if found is not None and (mode or about.st_uid not in (0, os.geteuid())):
            _judge(path, [replace(found, by_group=False)])


def check_parent(path: Path) -> None:
    """Refuse a directory if other users can replace the private directories that are made in it.

    It may be like ``/tmp``, and a group may write to it.

    Raises
    ------
    NotTrusted
        Somebody else can replace what is made there.
    OSError
        It is not there.
    """
    _judge(path, weaknesses(path, shared=True))


def private_directory(path: Path) -> None:
    """Make a directory and its missing parents for this user alone.

    `Path.mkdir` gives the parents the umask's mode.

    Raises
    ------
    OSError
        It cannot be made.
    """
    for missing in reversed([place for place in (path, *path.parents) if not place.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _judge(path: Path, found: list[Weakness]) -> None:
    for weakness in found:
        if not weakness.by_group:
            raise NotTrusted(
                f"{path} is not used, because other users can change it: {weakness.why}. {weakness.advice}"
            )
    named = "; ".join(f"{weakness.why}. {weakness.advice}" for weakness in found)
    if named and named not in _warned:  # one warning for each, however many clusters are below
        _warned.add(named)
        warnings.warn(f"members of a group can replace {path}: {named}", ClusterWarning, stacklevel=4)


_warned: set[str] = set()


def weaknesses(path: Path, *, shared: bool = False, group_may_write: bool = False) -> list[Weakness]:
    """Return the places through which others can change the content of a path; none if the path can be trusted.

    The list ends with the first place that does not depend on a group. Places below it are not checked.

    Parameters
    ----------
    path : Path
        A file or directory.
    shared : bool, default False
        Whether it is a directory that may be like ``/tmp``.
    group_may_write : bool, default False
        Whether a group that may write to the path itself counts as for the directories above.

    Raises
    ------
    OSError
        It is not there.
    """
    if not hasattr(os, "geteuid"):
        return []
    found, may_group = list[Weakness](), shared or group_may_write
    for place, about, last in _walk(path):
        weakness = _weakness(place, about, above=shared or not last, listed=may_group or not last)
        if weakness is not None:
            found.append(replace(weakness, by_group=weakness.by_group and (may_group or not last)))
            if not found[-1].by_group:  # a link of another user may lead to a filesystem that does not answer
                break
    return found


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield each place on the way to a path, and whether it is the path itself, the last one."""
    place, parts, links = Path("/"), list(path.absolute().parts[1:]), 0
    yield place, os.lstat(place), not parts
    while parts:
        part = parts.pop(0)
        place = place.parent if part == ".." else place / part
        about = os.lstat(place)
        yield place, about, not parts and not stat.S_ISLNK(about.st_mode)
        if stat.S_ISLNK(about.st_mode):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = place.readlink()
            place = Path("/") if target.is_absolute() else place.parent
            parts = [part for part in target.parts if part != "/"] + parts


def _weakness(place: Path, about: os.stat_result, *, above: bool, listed: bool = False) -> Weakness | None:
    link = stat.S_ISLNK(about.st_mode)  # a link's mode has no meaning; its owner made it
    what = f"{place} belongs to {_user(about.st_uid)} and has mode {stat.S_IMODE(about.st_mode):04o}"
    trusted = {0, os.geteuid()} | (_listed() | _unmapped() if listed else set())
    if about.st_uid not in trusted:
        advice = "Use a directory of your own"
        if listed:
            advice += (
                f", or set {VARIABLE}={about.st_uid} here and in the jobs (option env) if you trust that user as "
                "much as yourself"
            )
        return Weakness(what, advice)
    if link or (above and about.st_mode & stat.S_ISVTX):
        return None
    if about.st_mode & stat.S_IWOTH:
        return Weakness(f"{what}, so that everybody can write there", _chmod(place, about, "o-w"))
    if about.st_mode & stat.S_IWGRP and not _private_group(place, about):
        return Weakness(
            f"{what}, so that the group {_group(about.st_gid)} can write there",
            _chmod(place, about, "g-w"),
            True,
        )
    return None


def _chmod(place: Path, about: os.stat_result, change: str) -> str:
    if about.st_uid == os.geteuid():
        return f"chmod {change} {shlex.quote(str(place))}"
    return "Use a directory that only you can write to"


def _private_group(place: Path, about: os.stat_result) -> bool:
    """Whether the group is the private group that most systems give each user, and no ACL names others."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(about.st_uid), grp.getgrgid(about.st_gid)
    except KeyError:
        return False
    if owner.pw_gid != about.st_gid or owner.pw_name != group.gr_name or set(group.gr_mem) - {owner.pw_name}:
        return False
    try:
        return not os.getxattr(place, "system.posix_acl_access")
    except OSError:  # none
        return True


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _listed() -> set[int]:
    return {int(uid) for uid in os.environ.get(VARIABLE, "").split(",") if uid.strip().isdecimal()}


@functools.cache
def _unmapped() -> set[int]:
    """The user id that a rootless container shows for root and all other users.

    The directories above ours mostly belong to root.
    """
    try:
        first = Path("/proc/self/uid_map").read_text().split()[:3]
        return set() if first == ["0", "0", "4294967295"] else {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()
