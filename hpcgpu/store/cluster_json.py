"""Which cluster a directory belongs to, ``cluster.json``; and in which format its files are.

All readers read this file first. Its number `FORMAT` applies to all files of the directory, and to the answers of the
scheduler's own calls (`hpcgpu.dask_scheduler.rpc_types`). The number increases whenever a change to one of them would
make another version of hpcgpu misread it. hpcgpu refuses a cluster of another format, with a sentence. `hpcgpu stop`
can nevertheless cancel its jobs: the fields of `Name`, and the lines of the journal that record submits, are the same
in all formats.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass

from hpcgpu import __version__
from hpcgpu.errors import Damaged, HpcgpuError, OtherFormat
from hpcgpu.posix import json_records
from hpcgpu.posix.printable import printable
from hpcgpu.store.atomic_files import Files

#: The format of the files that this version writes and reads. 2: the answer of ``hpcgpu_load`` has `at_once`. 3: the
#: scheduler answers with what has changed since its last answer. 4: a manager reports its worker groups with its
#: heartbeats. 5: the load of a worker has its calls. 6: the proof of a dashboard signs the address that was reached. 7:
#: the user's wishes for the worker groups are in ``wanted.json``, and a request to the manager is a command. 8:
#: ``wanted.json`` also has whether the cluster is detached. 9: the load has the sets of workers that programs request.
#: 10: the load of a worker has whether a program holds it, and a drain waits for the answer of ``hpcgpu_will_leave``.
#: 11: a client that goes on with the next scheduler keeps results by ``hpcgpu_keep``.
#: 12: a worker that is given to a program has the calls that still run on it. 13: ``wanted.json`` has another word for
#: whether the scheduler job runs a manager. 14: the report on a worker group has its GPUs and resources.
FORMAT = 14


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The format, which is read before all else; versions before format 1 write none."""

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
    """The content of ``cluster.json`` in one directory."""

    @property
    def found_as(self) -> str:
        """How ``hpcgpu.connect`` finds the cluster: by name, or by path if the configuration has another directory."""
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
        """The same, quoted for the shell."""
        return shlex.quote(self.found_as)

    def other_format(self) -> str:
        """Return why this version cannot read the directory, and what to do.

        Empty if it can, or if the format is not known.
        """
        try:
            written = json_records.read(self.path / "cluster.json", _Format)
        except (OSError, Damaged):  # the reader of the whole file reports this error
            return ""
        if written.format == FORMAT or (written.format is None and written.version):  # without a format, it is damaged
            return ""
        version = f"hpcgpu {printable(written.version, 40)}" if written.version else "another version of hpcgpu"
        return (
            f"{version} made cluster {self.path.name!r}, and this is hpcgpu {__version__}, which cannot read its "
            f"files in {self.path} (format {written.format or 0}, not {FORMAT}): use that version, or cancel its "
            f"jobs with: hpcgpu stop {self.in_shell}"
        )

    def check_format(self) -> None:
        """Refuse a directory if another version of hpcgpu has written its files in another format.

        Raises
        ------
        OtherFormat
            The files have another format.
        """
        if why := self.other_format():
            raise OtherFormat(why)

    def token(self) -> str:
        """Return the token that ties the contact to this cluster."""
        return self.name().token

    def has_token(self, token: str) -> bool:
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
        """Whether no process may run without the cluster's credentials. With `authenticated` they do not encrypt."""
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
        """The identity of the queue that has its jobs; empty if it is not known."""
        return self.name().queue

    @property
    def created(self) -> float:
        """When the cluster was created, epoch seconds."""
        return self.name().created

    @property
    def modified(self) -> float:
        """When a file was last made or removed in it, epoch seconds; 0 if it is not there."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def about(self) -> About:
        """Return all fields."""
        return json_records.read(self.path / "cluster.json", About)

    def name(self) -> Name:
        """Return the fields that are the same in every format."""
        return json_records.read(self.path / "cluster.json", Name)
