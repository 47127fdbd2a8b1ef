"""The cluster directory: what clients and jobs of one cluster share through the filesystem.

Everything is written under another name and renamed, which is atomic on NFS too; no locks. Nothing here knows Dask or a batch system.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hpcgpu import ownership
from hpcgpu.ownership import private_directory
from hpcgpu.printable import printable

__all__ = ["ClusterDirectory", "ClusterExists", "Contact", "ManagerRecord", "Submit"]

_DASHBOARD_TOKEN = "dashboard.token"


class ClusterExists(RuntimeError):
    """A cluster of that name exists and is not known to have ended."""


@dataclass(frozen=True, kw_only=True)
class Contact:
    """Where a cluster's scheduler is reached; ``contact.json``.

    Attributes
    ----------
    token : str
        Ties it to the cluster; no secret.
    job_id : str
        The scheduler job, empty when the scheduler runs in the client's process.
    workers, client : str
        Addresses for workers and for clients, as Dask writes them.
    dashboard : str
        Port and host of the dashboard, as ``host:port``.
    fabric : str
        Why workers talk over this protocol.
    network, interface : str
        What was found for them on the scheduler's node: ``"infiniband"``, ``"slingshot"`` or nothing, and the interface of it; see
        `hpcgpu.fabric.choice.Verdict`.
    """

    token: str
    job_id: str
    workers: str
    client: str
    dashboard: str = ""
    fabric: str = ""
    network: str = ""
    interface: str = ""


@dataclass
class Submit:
    """What the journal says of one job: the intent, and what became of it.

    Attributes
    ----------
    name, kind, group : str
    time : float
        Epoch seconds of the intent.
    job_id : str or None
        None while it is not known.
    refused : bool
        It certainly does not exist.
    ended : bool
        It was seen to have ended.
    cancelled : bool
        A manager decided that it ends, and did not take that back: it is not wanted any more.
    """

    name: str
    kind: str
    group: str = "default"
    time: float = 0.0
    job_id: str | None = None
    refused: bool = False
    ended: bool = False
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class ManagerRecord:
    """A program that manages, or managed, the cluster; ``manager-NUMBER.json``. The highest number counts.

    Attributes
    ----------
    number : int
    program : str
        What it is, where, and since when: for people.
    """

    number: int
    program: str

    def __str__(self) -> str:
        return self.program or f"manager number {self.number}"


class ClusterDirectory:
    """The directory of one cluster.

    Parameters
    ----------
    path : Path
        Its absolute path; the last part is the cluster's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.tls = path / "tls"

    @classmethod
    def there(cls, path: Path) -> Self:
        """Return the directory of a cluster that is there: what it holds is executed and gives access, so others must not have made it.

        Raises
        ------
        NotTrusted
            Others can change it, or something in it.
        """
        self = cls(path)
        ownership.check(path)
        for file in (*path.iterdir(), *(self.tls.iterdir() if self.tls.is_dir() else ())):
            if file != self.logs:  # the batch system's, and only shown
                with contextlib.suppress(FileNotFoundError):  # written under another name, and renamed
                    ownership.check(file)
        return self

    @classmethod
    def claim(
        cls,
        path: Path,
        alive: Callable[[list[Submit]], list[str]],
        *,
        system: str = "",
        encrypted: bool = True,
        complete: Callable[[ClusterDirectory], None] = lambda directory: None,
    ) -> ClusterDirectory:
        """Create the directory of a new cluster, exclusively.

        The directory of an earlier cluster of that name is kept, renamed ``NAME~DATE``, if that cluster was closed or none of its
        jobs is alive.

        Parameters
        ----------
        path : Path
        alive : callable
            Given the journal of an earlier cluster, returns the ids of those of its jobs that have not ended.
        system : str, optional
            Name of the batch system.
        encrypted : bool, default True
            Whether nothing of the cluster may ever run without its credentials.
        complete : callable, optional
            Writes more, before others see the directory as a cluster's.

        Raises
        ------
        ClusterExists
            A cluster of that name may be alive.
        NotTrusted
            Others could put a directory of theirs in its place.
        OSError
            The directory cannot be written.
        """
        private_directory(path.parent)
        ownership.check_place(path.parent)
        self = cls(path)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            self._move_aside(alive)
            try:
                path.mkdir(mode=0o700)
            except FileExistsError as error:
                raise ClusterExists(f"a cluster named {path.name!r} was just started by somebody else, in {path}") from error
        self.logs.mkdir(mode=0o700)
        about = {"name": path.name, "token": secrets.token_hex(16), "created": time.time(), "encrypted": encrypted, "system": system}
        self.write(_DASHBOARD_TOKEN, secrets.token_urlsafe(32))
        complete(self)
        self.write("cluster.json", json.dumps(about))
        return self

    def _move_aside(self, alive: Callable[[list[Submit]], list[str]]) -> None:
        ownership.check(self.path)
        submits = self.submits()
        if not self.closed:
            if not submits:
                raise ClusterExists(
                    f"a cluster named {self.path.name!r} is starting, or died before it submitted a job, in {self.path}. "
                    f"Choose another name, or remove that directory if nobody uses it"
                )
            if live := alive(submits):
                raise ClusterExists(
                    f"a cluster named {self.path.name!r} exists: its jobs {', '.join(live)} are in the queue (see {self.path}). "
                    f"Close it or cancel them, or choose another name"
                )
        self._remove_keys()
        self.path.rename(self.path.with_name(f"{self.path.name}~{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"))

    def abandon(self) -> None:
        """Free the name again: nothing was submitted."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, text: str) -> Path:
        """Write a file, mode 0600, so that readers see all of it or nothing."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def token(self) -> str:
        """Return the token that ties the contact to this cluster."""
        return str(self._about()["token"])

    def dashboard_token(self) -> str:
        """Return the secret that the dashboard asks for; empty where there is none (any more)."""
        try:
            return (self.path / _DASHBOARD_TOKEN).read_text().strip()
        except OSError:
            return ""

    def is_of(self, token: str) -> bool:
        """Whether this is still the directory of the cluster with that token, not a later one of its name; true if it cannot be read."""
        try:
            return self.token() == token
        except (OSError, ValueError, KeyError):
            return True

    @property
    def encrypted(self) -> bool:
        """Whether nothing of the cluster may run without its credentials."""
        return bool(self._about().get("encrypted", True))

    @property
    def system(self) -> str:
        """Name of the batch system of its jobs."""
        return str(self._about()["system"])

    @property
    def created(self) -> float:
        """Epoch seconds."""
        return float(self._about()["created"])

    def _about(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "cluster.json").read_text()))

    # The manager: whoever took the highest number

    def take_over(self, program: str) -> ManagerRecord:
        """Become the cluster's manager: no earlier one submits or cancels from now on.

        Parameters
        ----------
        program : str
            Who this is, for people.
        """
        while True:
            latest = self.manager()
            number = latest.number + 1 if latest is not None else 1
            try:  # creation is exclusive on NFS too; who comes second takes the next number
                descriptor = os.open(self._manager_file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps({"program": program}))
            return ManagerRecord(number=number, program=program)

    def manager(self) -> ManagerRecord | None:
        """Return the cluster's manager; None before the first."""
        self.refresh()
        numbers = [int(path.stem.removeprefix("manager-")) for path in self.path.glob("manager-*.json")]
        if not numbers:
            return None
        number, program = max(numbers), ""
        with contextlib.suppress(OSError, ValueError):  # its number alone counts
            program = printable(str(json.loads(self._manager_file(number).read_text())["program"]), 300)
        return ManagerRecord(number=number, program=program)

    def _manager_file(self, number: int) -> Path:
        return self.path / f"manager-{number:06}.json"

    # Scaling without a living client

    def request_adapt(self, limits: Mapping[str, Mapping[str, Any]]) -> None:
        """Record how the manager in the scheduler job shall scale: the arguments of ``adapt``, by worker group."""
        self.write("adapt.json", json.dumps(limits))

    def adapt(self) -> dict[str, dict[str, Any]] | None:
        """Return what was asked of the manager in the scheduler job; None if nothing was."""
        self.refresh()
        try:
            return dict(json.loads((self.path / "adapt.json").read_text()))
        except (OSError, ValueError):
            return None

    def forget_adapt(self) -> None:
        """Ask nothing of the manager in the scheduler job any more."""
        (self.path / "adapt.json").unlink(missing_ok=True)

    def refresh(self) -> None:
        """Make the NFS client ask the server what is in the directory, by a changed mode, instead of trusting what it was."""
        with contextlib.suppress(OSError):
            self.path.chmod(0o700)

    # The contact

    def publish(self, contact: Contact) -> None:
        """Write ``contact.json``."""
        self.write("contact.json", json.dumps(asdict(contact), indent=1))

    def contact(self) -> Contact | None:
        """Return the contact, or None while there is none of this cluster's."""
        self.refresh()
        try:
            content = json.loads((self.path / "contact.json").read_text())
            contact = Contact(**{field: printable(str(value)) for field, value in content.items()})
            return contact if contact.token == self.token() else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not there yet, half-written, or a stale handle of NFS
            return None

    def withdraw(self) -> None:
        """Take the contact away, in both its forms."""
        for name in ("contact.json", "scheduler.json"):
            (self.path / name).unlink(missing_ok=True)

    def remove_secrets(self) -> None:
        """Remove what gives access to the cluster; logs, scripts and journal stay."""
        self.withdraw()
        self._remove_keys()

    def _remove_keys(self) -> None:
        shutil.rmtree(self.tls, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.path / _DASHBOARD_TOKEN).unlink()

    # The journal of submits: the intent is on disk before the submit, the id after it

    def intend(self, name: str, kind: str, group: str = "default") -> None:
        """Record that a job of this name is about to be submitted."""
        self._append({"event": "intent", "name": name, "kind": kind, "group": group})

    def submitted(self, name: str, job_id: str) -> None:
        """Record the id of a submitted job."""
        self._append({"event": "submitted", "name": name, "id": job_id})

    def refused(self, name: str) -> None:
        """Record that a job certainly does not exist."""
        self._append({"event": "refused", "name": name})

    def ended(self, name: str) -> None:
        """Record that a job was seen to have ended."""
        self._append({"event": "ended", "name": name})

    def cancel(self, names: Iterable[str]) -> None:
        """Record that these jobs are not wanted any more; written before their workers retire, and before they are cancelled."""
        self._append({"event": "cancel", "names": list(names)})

    def keep(self, names: Iterable[str]) -> None:
        """Record that these jobs stay after all: they had started already, or their data fits nowhere else."""
        self._append({"event": "keep", "names": list(names)})

    def resize(self, group: str, jobs: int | None) -> None:
        """Record how many worker jobs the user wants in a group; None where the work decides."""
        self._append({"event": "size", "group": group, "jobs": jobs})

    def sizes(self) -> dict[str, int | None]:
        """Return by group how many worker jobs the user wants, as far as that was said."""
        sizes = [(str(record.get("group")), record.get("jobs")) for record in self._journal() if record["event"] == "size"]
        return {group: jobs if isinstance(jobs, int) else None for group, jobs in sizes}

    def detach(self) -> None:
        """Record that the cluster shall outlive the program that made it."""
        self._append({"event": "detached"})

    @property
    def detached(self) -> bool:
        """Whether the cluster shall outlive its managers."""
        return any(record["event"] == "detached" for record in self._journal())

    def close(self) -> None:
        """Record that none of the cluster's jobs is alive."""
        self._append({"event": "closed"})

    @property
    def closed(self) -> bool:
        """Whether the cluster was closed."""
        return any(record["event"] == "closed" for record in self._journal())

    def submits(self) -> list[Submit]:
        """Return what the journal says of each job, in order."""
        jobs: dict[str, Submit] = {}
        earlier: list[Submit] = []
        for record in self._journal():
            if record["event"] == "intent":
                group, time_ = record.get("group", "default"), record.get("time", 0.0)
                if record["name"] in jobs and jobs[record["name"]].job_id is not None:  # of a manager that had been taken over already
                    earlier.append(jobs.pop(record["name"]))
                jobs[record["name"]] = Submit(record["name"], record["kind"], group, time_)
            elif record["event"] in ("cancel", "keep"):
                names = record.get("names")
                for submit in jobs.values():
                    if isinstance(names, list) and submit.name in names:
                        submit.cancelled = record["event"] == "cancel"
            elif record.get("name") not in jobs:
                continue
            elif record["event"] == "submitted":
                jobs[record["name"]].job_id = record["id"]
            elif record["event"] == "refused":
                jobs[record["name"]].refused = jobs[record["name"]].job_id is None
            elif record["event"] == "ended":
                jobs[record["name"]].ended = True
        return [*earlier, *jobs.values()]

    def _append(self, record: dict[str, Any]) -> None:
        line = (json.dumps({"time": round(time.time(), 3), **record}) + "\n").encode()
        descriptor = os.open(self.path / "journal.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk cut the last line short
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / "journal.jsonl"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _journal(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "journal.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that a crash cut short
                    yield json.loads(line)
