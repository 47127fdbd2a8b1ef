"""The cluster directory: what clients and jobs of one cluster share through the filesystem.

Everything is written under another name and renamed, which is atomic on NFS too; no locks. Nothing here knows Dask or a
batch system. What is read is checked: a file that holds something else raises `hpcgpu.posix.records.Damaged`, or counts
as not there where that is safe.

Each part is a class of its own, in a module of its own: who the directory belongs to (`identity`), the journal of
submits (`journal`), the contact of the scheduler (`contact`), the manager (`managers`). How a cluster gets its
directory, and its name, is in `claims`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked, ownership, records
from hpcgpu.scaling.wanted import Wanted
from hpcgpu.store.contact import Contact, Contacts
from hpcgpu.store.identity import About
from hpcgpu.store.journal import Journal, Submit
from hpcgpu.store.managers import ManagerRecord, Managers

__all__ = ["DASHBOARD_TOKEN", "ClusterDirectory", "Contact", "ManagerRecord", "Submit"]

#: The file with the secret that the dashboard requires.
DASHBOARD_TOKEN = "dashboard.token"


class ClusterDirectory(Contacts, Journal, Managers):
    """The directory of one cluster.

    Parameters
    ----------
    path : Path
        Its absolute path; the last part is the cluster's name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.logs = path / "logs"
        self.tls = path / "tls"

    @classmethod
    def there(cls, path: Path, *, any_format: bool = False) -> Self:
        """Return the directory of an existing cluster.

        Only this user may have made it: its content is executed, and gives access.

        Parameters
        ----------
        path : Path
        any_format : bool, default False
            Whether it may be of another version of hpcgpu. Only its journal's submits can be relied on then.

        Raises
        ------
        NotTrusted
            Others can change it, or something in it.
        OtherFormat
            Another version of hpcgpu made it, and this one cannot read it.
        """
        self = cls(path)
        ownership.check_tree(path, self._files())
        if not any_format:
            self.check_format()
        return self

    def _files(self) -> Iterator[Path]:
        """Yield what must be this user's. Logs are the batch system's, and only shown."""
        yield from (file for file in self.path.iterdir() if file != self.logs)
        if self.tls.is_dir():
            yield from self.tls.iterdir()

    def dashboard_token(self) -> str:
        """Return the secret that the dashboard requires; empty if there is none (any more)."""
        try:
            return checked.read(self.path / DASHBOARD_TOKEN).decode().strip()
        except (OSError, ValueError):
            return ""

    @property
    def only_scripts(self) -> bool:
        """Whether it holds scripts of ``hpcgpu render`` that nobody has launched, and nothing is wrong with it."""
        return (
            (self.path / "launch.sh").exists()
            and not self.other_format()
            and not self.damage()
            and not self.submits()
            and self.contact() is None
            and not any(self.logs.glob("*"))
        )

    def damage(self) -> list[str]:
        """Return what is wrong with the files that this module writes, one sentence each."""
        found = [f"{self.path / 'journal.jsonl'}: {problem}" for problem in self.journal_damage()]
        shapes: dict[str, Any] = {
            "cluster.json": About,
            "contact.json": Contact,
            "wanted.json": Wanted,
        }
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

    def first(self, event: str) -> bool:
        """Record that somebody is told of an event; return whether nobody was before, also if that is not known."""
        try:
            os.close(os.open(self.path / f"told-{event}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except OSError:  # a full disk, or no directory any more: twice is better than never
            return True
        return True

    def remove_secrets(self) -> None:
        """Remove what gives access to the cluster; logs, scripts and journal stay."""
        self.withdraw()
        self._remove_keys()

    def _remove_keys(self) -> None:
        shutil.rmtree(self.tls, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.path / DASHBOARD_TOKEN).unlink()
