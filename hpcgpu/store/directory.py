"""The cluster directory: what clients and jobs of one cluster share through the filesystem.

Everything is written under another name and renamed, which is atomic on NFS too; no locks. Nothing here knows Dask or a batch system.
What is read is checked: a file that holds something else raises `hpcgpu.posix.records.Damaged`, or counts as not there where that is safe.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hpcgpu.errors import ClusterExists, Damaged
from hpcgpu.posix import ownership, processes, records
from hpcgpu.posix.ownership import private_directory
from hpcgpu.posix.printable import printable

__all__ = ["ClusterDirectory", "Contact", "ManagerRecord", "Submit"]

_DASHBOARD_TOKEN = "dashboard.token"


#: Seconds for which a start on another machine may do nothing that is seen, before its name is free again; also the age of a directory
#: that was never completed, after which it is removed.
_STARTING = 600.0
#: Times that a name is tried for. More than two are only needed when others start and end clusters of that name meanwhile.
_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class _About:
    """``cluster.json``."""

    name: str
    token: str
    created: float
    encrypted: bool = True
    system: str = ""
    queue: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.created < 1e11 or not self.token:
            raise ValueError(f"'created' is {self.created!r}, 'token' is {self.token!r}")


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
        `hpcgpu.fabric.choice.TransportChoice`.
    """

    token: str
    job_id: str
    workers: str
    client: str
    dashboard: str = ""
    fabric: str = ""
    network: str = ""
    interface: str = ""


@dataclass(frozen=True, kw_only=True)
class _Event:
    """A line of the journal."""

    event: str
    time: float = 0.0
    name: str = ""
    kind: str = ""
    group: str = "default"
    id: str = ""
    names: list[str] = field(default_factory=list)
    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.event == "intent" and not (self.name.isprintable() and self.name and self.kind and self.group):
            raise ValueError("it names no job")
        if self.event == "submitted" and not (self.name.isprintable() and self.name):
            raise ValueError("it names no job")
        if self.event == "submitted" and not re.fullmatch("[A-Za-z0-9][!-~]{0,200}", self.id):
            raise ValueError("it has no job id")


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
    host : str
    process : list of int
        Its identity there; see `hpcgpu.posix.processes`.
    """

    number: int = 0
    program: str = ""
    host: str = ""
    process: list[int] = field(default_factory=list)

    @property
    def lives(self) -> bool | None:
        """Whether that program runs; None where that is not known: it is on another machine."""
        if self.host != socket.gethostname() or len(self.process) != 2:
            return None
        return processes.alive(self.process)

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
        files = (*path.iterdir(), *(self.tls.iterdir() if self.tls.is_dir() else ()))
        ownership.check_tree(path, (file for file in files if file != self.logs))  # logs are the batch system's, and only shown
        return self

    @classmethod
    def claim(
        cls,
        path: Path,
        alive: Callable[[ClusterDirectory], list[str]],
        *,
        system: str = "",
        queue: str = "",
        encrypted: bool = True,
        complete: Callable[[ClusterDirectory], None] = lambda directory: None,
    ) -> ClusterDirectory:
        """Create the directory of a new cluster, exclusively, and complete at once: nobody ever sees it half-made.

        It is made under a hidden name, ``.NAME~RANDOM``, and gets its own by rename(2), which fails with ENOTEMPTY where a directory is
        that holds something. That is atomic on NFS too, with one doubt: "if the operation failed", the man page says, the file may have
        been renamed all the same. So the name is read back. What was interrupted or met a full disk leaves a hidden directory, which a
        later start removes.

        The directory of an earlier cluster of that name is kept, renamed ``NAME~DATE-TOKEN``, if that cluster was closed or none of its
        jobs is alive. The token is its own: of several who replace it only the first succeeds, and none can move the new one away by
        mistake, as the name that it would get is taken, by a directory that holds something.

        Parameters
        ----------
        path : Path
        alive : callable
            Given the directory of an earlier cluster, returns the ids of those of its jobs that have not ended. It raises
            `ClusterExists` where that is not known.
        system : str, optional
            Name of the batch system.
        queue : str, optional
            Which of its queues the jobs are in, see `hpcgpu.batch.base.BatchSystem.identity`; empty where that is not known.
        encrypted : bool, default True
            Whether nothing of the cluster may ever run without its credentials.
        complete : callable, optional
            Writes more into the directory, before others see it.

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
        _sweep(path.parent, now=time.time())
        self, draft = cls(path), cls(_hidden(path))
        token, earlier = secrets.token_hex(16), list[ClusterDirectory]()
        about = _About(name=path.name, token=token, created=time.time(), encrypted=encrypted, system=system, queue=queue)
        try:
            draft.path.mkdir(mode=0o700)
            draft.logs.mkdir(mode=0o700)
            draft.write("cluster.json", json.dumps(asdict(about)))
            draft.write(_DASHBOARD_TOKEN, secrets.token_urlsafe(32))
            complete(draft)
            self._take_name(draft, token, alive, earlier)
        except BaseException:
            shutil.rmtree(draft.path, ignore_errors=True)
            self.abandon(token)
            raise
        finally:  # last of all, and also where somebody else got the name
            for directory in earlier:
                directory.remove_secrets()
        return self

    def _take_name(
        self, draft: ClusterDirectory, token: str, alive: Callable[[ClusterDirectory], list[str]], earlier: list[ClusterDirectory]
    ) -> None:
        """Give the draft its name; add what had that name before to `earlier`."""
        for _ in range(_TRIES):
            try:
                draft.path.rename(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and not self.has(token):
                    raise
            if self.has(token):
                return
            if (moved := self._move_aside(alive)) is not None:
                earlier.append(moved)
            self.refresh()
        raise ClusterExists(f"a cluster named {self.path.name!r} was just started by somebody else, in {self.path}")

    def _move_aside(self, alive: Callable[[ClusterDirectory], list[str]]) -> ClusterDirectory | None:
        """Rename the directory of an earlier cluster; return it, or None when somebody else was faster."""
        try:
            here = self.path.lstat()
            ownership.check(self.path)
        except FileNotFoundError:
            return None
        try:
            about = self._about()
            mark, date = about.token, time.strftime("%Y%m%d-%H%M%S", time.gmtime(about.created))
        except Damaged:
            mark, date = f"{here.st_ino:08x}", "damaged"
        except (FileNotFoundError, NotADirectoryError):
            if not self._still(here) or (self.path / "cluster.json").exists():  # somebody else moved it, or has the name by now
                return None
            raise ClusterExists(f"{self.path} is there, and is not the directory of a cluster: choose another name, or remove it") from None
        try:
            why = self._in_use(alive, now=time.time())
        except OSError:
            if self._still(here):
                raise
            return None
        if not self._still(here):  # part of what was read may be of the cluster that came in its place
            return None
        if why:
            raise ClusterExists(why)
        aside = ClusterDirectory(self.path.with_name(f"{self.path.name}~{date}-{mark[:8]}"))
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            try:
                self.path.rename(aside.path)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
        moved = aside.has(mark) if date != "damaged" else aside.path.exists() and aside.path.lstat().st_ino == here.st_ino
        return aside if moved else None

    def _in_use(self, alive: Callable[[ClusterDirectory], list[str]], *, now: float) -> str:
        """Return why the name of a cluster that is there cannot be had; empty if it can."""
        if self.closed:
            return ""
        name, submits, manager, contact = self.path.name, self.submits(), self.manager(), self.contact()
        if not submits and (self.path / "launch.sh").exists():
            return (
                f"{self.path} holds the scripts of a cluster named {name!r} that was not launched yet. Launch it, remove that directory, "
                f"or choose another name"
            )
        unknown = [s.time for s in submits if s.job_id is None and not s.refused and not s.ended]
        in_program = contact is not None and not contact.job_id  # its scheduler is in the program itself
        if not submits or unknown or in_program:
            lives = manager.lives if manager is not None else None
            began = max([self.modified, *unknown])
            if lives or (lives is None and (in_program or now - began < _STARTING)):
                what = "runs in" if in_program else "is just being started by"
                return (
                    f"a cluster named {name!r} {what} {manager or 'another program'}, in {self.path}. Choose another name, try again "
                    f"later, or end it by: hpcgpu stop {name}"
                )
        try:
            live = alive(self)
        except Damaged as error:
            return f"{error}. So it is not known whether jobs of cluster {name!r} run. Choose another name, or remove {self.path}"
        if live:
            return (
                f"a cluster named {name!r} exists: its jobs {', '.join(live)} are in the queue (see {self.path}). "
                f"Close it or cancel them, or choose another name"
            )
        return ""

    def _still(self, here: os.stat_result) -> bool:
        """Whether the path is still what it was at an earlier look."""
        try:
            now = self.path.lstat()
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (here.st_dev, here.st_ino)

    def has(self, token: str) -> bool:
        """Whether this is certainly the directory of the cluster with that token."""
        try:
            return self.token() == token
        except (OSError, ValueError):
            return False

    def abandon(self, token: str) -> None:
        """Free the name again, if it is still that of the cluster with this token: nothing was submitted."""
        if not self.has(token):
            return
        gone = ClusterDirectory(_hidden(self.path))  # at once: what is half-removed must not block the name
        try:
            self.path.rename(gone.path)
        except OSError:
            gone = self
        if gone.has(token):
            shutil.rmtree(gone.path, ignore_errors=True)
        else:
            gone.path.rename(self.path)

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
        return self._about().token

    def dashboard_token(self) -> str:
        """Return the secret that the dashboard asks for; empty where there is none (any more)."""
        try:
            return (self.path / _DASHBOARD_TOKEN).read_text().strip()
        except (OSError, ValueError):
            return ""

    def is_of(self, token: str) -> bool:
        """Whether this is still the directory of the cluster with that token, not a later one of its name; true if it cannot be read."""
        try:
            return self.token() == token
        except (OSError, ValueError):
            return True

    @property
    def encrypted(self) -> bool:
        """Whether nothing of the cluster may run without its credentials."""
        return self._about().encrypted

    @property
    def system(self) -> str:
        """Name of the batch system of its jobs."""
        return self._about().system

    @property
    def queue(self) -> str:
        """Which queue of that batch system its jobs are in; empty where that is not known."""
        return self._about().queue

    @property
    def created(self) -> float:
        """Epoch seconds."""
        return self._about().created

    @property
    def modified(self) -> float:
        """When a file was last made or removed in it, epoch seconds; 0 if it is not there."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def _about(self) -> _About:
        return records.read(self.path / "cluster.json", _About)

    def damage(self) -> list[str]:
        """Return what is wrong with the files that this module writes, one sentence each."""
        found = [f"{self.path / 'journal.jsonl'}: {trouble}" for trouble in self._journal_damage()]
        shapes: dict[str, Any] = {"cluster.json": _About, "contact.json": Contact, "adapt.json": dict[str, dict[str, Any]]}
        shapes |= {path.name: ManagerRecord for path in sorted(self.path.glob("manager-*.json"))}
        for name, shape in shapes.items():
            try:
                records.read(self.path / name, shape)
            except Damaged as error:
                found.append(str(error))
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or name == "cluster.json":
                    found.append(f"{self.path / name} cannot be read: {error.strerror}")
        return found

    # The manager: whoever took the highest number

    def take_over(self, program: str) -> ManagerRecord:
        """Become the cluster's manager: no earlier one submits or cancels from now on.

        Parameters
        ----------
        program : str
            Who this is, for people.
        """
        record = ManagerRecord(program=program, host=socket.gethostname(), process=processes.identity(os.getpid()))
        # Written before a number is taken: on a full disk the manager that is there must stay the one.
        draft = self.write(f".manager-{secrets.token_hex(4)}", json.dumps(asdict(record)))
        try:
            while True:
                latest = self.manager()
                number = latest.number + 1 if latest is not None else 1
                try:  # creation is exclusive on NFS too; who comes second takes the next number
                    os.close(os.open(self._manager_file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                except FileExistsError:
                    continue
                draft.rename(self._manager_file(number))
                return replace(record, number=number)
        finally:
            draft.unlink(missing_ok=True)

    def manager(self) -> ManagerRecord | None:
        """Return the cluster's manager; None before the first."""
        self.refresh()
        names = (re.fullmatch("manager-([0-9]{1,9})[.]json", path.name) for path in self.path.glob("manager-*.json"))
        numbers = [int(match[1]) for match in names if match]
        if not numbers:
            return None
        number, record = max(numbers), ManagerRecord()
        with contextlib.suppress(OSError, Damaged):  # its number alone counts
            record = records.read(self._manager_file(number), ManagerRecord)
        return replace(record, number=number, program=printable(record.program, 300))

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
            return records.read(self.path / "adapt.json", dict[str, dict[str, Any]])
        except (OSError, Damaged):
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
            contact = records.read(self.path / "contact.json", Contact)
            contact = Contact(**{field: printable(value) for field, value in asdict(contact).items()})
            return contact if contact.token == self.token() else None
        except (OSError, ValueError):  # not there yet, damaged, or a stale handle of NFS
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

    def ended(self, name: str, job_id: str | None = None) -> None:
        """Record that a job was seen to have ended."""
        self._append({"event": "ended", "name": name} | ({"id": job_id} if job_id is not None else {}))

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

    def begin_close(self) -> None:
        """Record that the cluster's jobs were cancelled; some may take a while to end."""
        self._append({"event": "closing"})

    @property
    def closing(self) -> bool:
        """Whether the cluster's jobs were cancelled for good; they may have ended, or not yet."""
        return any(record["event"] in ("closing", "closed") for record in self._journal())

    def times(self) -> list[float]:
        """Return when something was recorded of its jobs, epoch seconds."""
        return [float(record.get("time", 0.0)) for record in self._journal()]

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
            elif record["event"] == "submitted":
                name = record["name"]
                if name not in jobs:  # the line of its intent is damaged: the job is there all the same
                    kind = "scheduler" if name.endswith("-scheduler") else "worker"
                    jobs[name] = Submit(name, kind, time=record.get("time", 0.0))
                jobs[name].job_id, jobs[name].refused = record["id"], False
            elif record.get("name") not in jobs:
                continue
            elif record["event"] == "refused":
                jobs[record["name"]].refused = jobs[record["name"]].job_id is None
            elif record["event"] == "ended":  # a later cluster of this name may have a job of the same name
                jobs[record["name"]].ended = record.get("id") in (None, jobs[record["name"]].job_id)
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
        return (record for record in self._lines() if not isinstance(record, str))

    def _journal_damage(self) -> list[str]:
        return [record for record in self._lines() if isinstance(record, str)]

    def _lines(self) -> Iterator[dict[str, Any] | str]:
        """Yield each line of the journal, or what is wrong with it: a crash or a full disk may have cut it short."""
        try:
            lines = (self.path / "journal.jsonl").read_bytes().split(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                records.parse(line, _Event, f"line {number}")
            except Damaged as error:
                yield str(error)
            else:
                yield json.loads(line)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}~{secrets.token_hex(4)}")


def _sweep(root: Path, *, now: float) -> None:
    """Remove what starts have left there that were interrupted before their directory was complete."""
    for path in root.glob(".*~*"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            old = now - about.st_mtime > _STARTING
            if old and re.fullmatch(r"[.][A-Za-z0-9][\w.-]*~[0-9a-f]{8}", path.name) and about.st_uid == os.getuid() and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
