"""Who runs this process."""

from __future__ import annotations

import contextlib
import os


def user_name() -> str:
    """Return the user's name, or the user's id if the password database has no entry, as in some containers."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def group_names() -> frozenset[str]:
    """Return the names of the user's groups."""
    import grp

    names = set()
    for gid in {os.getgid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(gid).gr_name)
    return frozenset(names)
