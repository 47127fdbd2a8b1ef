"""Which cluster a directory belongs to, ``cluster.json``; and in which format its files are.

All readers read this file first. Its number `FORMAT` counts for all files of the directory, and for the answers of the
scheduler's own calls (`hpcgpu.runtime.wire`): it grows whenever one of them changes so that another version of hpcgpu
would misread it. A cluster of another format is refused, with a sentence. `hpcgpu stop` can nevertheless cancel its
jobs: the fields of `Name`, and the lines of the journal that tell of submits, are the same in all formats.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass

from hpcgpu import __version__
from hpcgpu.errors import Damaged, HpcgpuError, OtherFormat
from hpcgpu.posix import records
from hpcgpu.posix.printable import printable
from hpcgpu.store.files import Files

__all__ = ["FORMAT", "About", "Identity"]

#: Of the files that this version writes, and reads. 2: the answer of ``hpcgpu_load`` has `at_once`. 3: the scheduler
#: answers with what has changed since its last answer. 4: a manager reports its worker groups with its heartbeats.
#: 5: the load of a worker has its calls. 6: the proof of a dashboard signs the address that was reached. 7: what the
#: user wants of the worker groups is in ``wanted.json``, and a request to the manager is a command.
FORMAT = 7


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The format, which is read before all else; none is written by versions before format 1."""

    format: int | None = None
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Name:
    """The part of ``cluster.json`` that is the same in all formats."""

    name: str
    token: str
    created: float
    version: str = __version__
    system: str = ""
    queue: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.created < 1e11 or not self.token:
            raise ValueError(f"'created' is {self.created!r}, 'token' is {self.token!r}")


@dataclass(frozen=True, kw_only=True)
class About(Name):
    """``cluster.json``."""

    format: int
    encrypted: bool = True
    authenticated: bool = False


class Identity(Files):
    """What ``cluster.json`` of one directory says."""

    @property
    def found_as(self) -> str:
        """How ``hpcgpu.connect`` finds the cluster: by its name, or by its path where the configuration has others."""
        from hpcgpu.configuration.resolve import cluster_directories

        with contextlib.suppress(HpcgpuError, OSError):
            there = [
                root for root in cluster_directories() if root == self.path.parent or (root / self.path.name).exists()
            ]
            if there == [self.path.parent]:
                return self.path.name
        return str(self.path)

    @property
    def in_shell(self) -> str:
        """The same as a word of a command."""
        return shlex.quote(self.found_as)

    def other_format(self) -> str:
        """Return why this version cannot read the directory, and what to do.

        Empty if it can, or if the format is not known.
        """
        try:
            written = records.read(self.path / "cluster.json", _Format)
        except (OSError, Damaged):  # what reads the file for its content says that
            return ""
        if written.format == FORMAT or (written.format is None and written.version):  # the latter is damaged
            return ""
        version = f"hpcgpu {printable(written.version, 40)}" if written.version else "another version of hpcgpu"
        return (
            f"{version} made cluster {self.path.name!r}, and this is hpcgpu {__version__}, which cannot read its "
            f"files in {self.path} (format {written.format or 0}, not {FORMAT}): use that version, or cancel its "
            f"jobs with: hpcgpu stop {self.in_shell}"
        )

    def check_format(self) -> None:
        """Refuse a directory whose files another version of hpcgpu has written in another way.

        Raises
        ------
        OtherFormat
            It is one.
        """
        if why := self.other_format():
            raise OtherFormat(why)

    def token(self) -> str:
        """Return the token that ties the contact to this cluster."""
        return self.name().token

    def has(self, token: str) -> bool:
        """Whether this is certainly the directory of the cluster with that token."""
        try:
            return self.token() == token
        except (OSError, ValueError):
            return False

    def is_of(self, token: str) -> bool:
        """Whether this is still the directory of the cluster with that token.

        A later cluster of the name has another token. True if it cannot be read.
        """
        try:
            return self.token() == token
        except (OSError, ValueError):
            return True

    @property
    def encrypted(self) -> bool:
        """Whether nothing of the cluster may run without its credentials. With `authenticated` they do not encrypt."""
        return self.about().encrypted

    @property
    def authenticated(self) -> bool:
        """Whether Dask's TCP connections are authenticated, and not encrypted (``security="authenticated"``)."""
        return self.about().authenticated

    @property
    def stream(self) -> str:
        """Scheme of the addresses of Dask's TCP connections."""
        if not self.encrypted:
            return "tcp"
        return "authenticated" if self.authenticated else "tls"

    @property
    def system(self) -> str:
        """Name of the batch system of its jobs."""
        return self.name().system

    @property
    def queue(self) -> str:
        """Which queue of that batch system its jobs are in; empty where that is not known."""
        return self.name().queue

    @property
    def created(self) -> float:
        """Epoch seconds."""
        return self.name().created

    @property
    def modified(self) -> float:
        """When a file was last made or removed in it, epoch seconds; 0 if it is not there."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def about(self) -> About:
        """Return all of it."""
        return records.read(self.path / "cluster.json", About)

    def name(self) -> Name:
        """Return what can be read of any format."""
        return records.read(self.path / "cluster.json", Name)
