"""The cluster directory: what clients and jobs of one cluster share through the filesystem.

Every file is written under another name and then renamed, which is atomic on NFS too. There are no locks. This module
uses neither Dask nor a batch system. Each file is checked when it is read: a file that holds something else raises
`hpcgpu.posix.json_records.Damaged`, or counts as missing if that is safe.

Each part is a class in a module of its own: the cluster that the directory belongs to (`cluster_json`), the journal of
submits (`journal`), the contact of the scheduler (`contact`), the manager (`managers`). `create_directory`
explains how a cluster gets its directory and its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked_files, json_records, ownership
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.store.cluster_json import About
from hpcgpu.store.contact import Contact, Contacts
from hpcgpu.store.journal import Journal
from hpcgpu.store.managers import ManagerRecord, Managers

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
    def existing(cls, path: Path, *, any_format: bool = False) -> Self:
        """Return the directory of an existing cluster.

        Only this user may have made it: its content is executed, and gives access.

        Parameters
        ----------
        path : Path
        any_format : bool, default False
            Whether another version of hpcgpu may have made it. Then only the submits in its journal are reliable.

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
        """Yield the files that must belong to this user. The batch system writes the logs; hpcgpu only shows them."""
        yield from (file for file in self.path.iterdir() if file != self.logs)
        if self.tls.is_dir():
            yield from self.tls.iterdir()

    # What the user wants. `wanted.json` has all of it except `Wanted.closing`, which is a line of the journal. Programs
    # that do not manage the cluster also close it. In a file that the manager replaces, their close could be lost.

    def want(self, wanted: Wanted) -> None:
        """Record what the user wants. If a manager lives, only it may call this. `begin_close` records a close."""
        kept = {name: value for name, value in asdict(wanted).items() if name != "closing"}
        self.write("wanted.json", json.dumps(kept))

    def wanted(self) -> Wanted:
        """Return what the user wants.

        If `wanted.json` cannot be read, the cluster counts as detached, so that no job ends by mistake.
        """
        return replace(self._kept(), closing=self.closing)

    @property
    def detached(self) -> bool:
        """Whether the cluster outlives its managers; True if `wanted.json` cannot be read."""
        return self._kept().detached

    def _kept(self) -> Wanted:
        self.refresh()
        try:
            return json_records.read(self.path / "wanted.json", Wanted)
        except (FileNotFoundError, NotADirectoryError):
            return Wanted()
        except (OSError, Damaged):
            return Wanted(detached=True)

    def dashboard_token(self) -> str:
        """Return the secret that the dashboard requires; empty if there is none (any more)."""
        try:
            return checked_files.read(self.path / DASHBOARD_TOKEN).decode().strip()
        except (OSError, ValueError):
            return ""

    @property
    def only_scripts(self) -> bool:
        """Whether it holds undamaged scripts of ``hpcgpu render`` that nobody has launched."""
        return (
            (self.path / "launch.sh").exists()
            and not self.other_format()
            and not self.damage()
            and not self.submits()
            and self.contact() is None
            and not any(self.logs.glob("*"))
        )

    def damage(self) -> list[str]:
        """Return one sentence for each damage to the files that this module writes."""
        found = [f"{self.path / 'journal.jsonl'}: {problem}" for problem in self.journal_damage()]
        shapes: dict[str, Any] = {
            "cluster.json": About,
            "contact.json": Contact,
            "wanted.json": Wanted,
        }
        shapes |= {path.name: ManagerRecord for path in sorted(self.path.glob("manager-*.json"))}
        for name, shape in shapes.items():
            try:
                json_records.read(self.path / name, shape)
            except Damaged as error:
                found.append(str(error))
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or name == "cluster.json":
                    found.append(f"{self.path / name} cannot be read: {error.strerror}")
        return found

    def how_it_ended(self) -> str:
        """Return the sentence that the cluster has ended, and why."""
        if why := self.why_ended():
            return f"cluster {self.path.name} has ended: {why}"
        return f"cluster {self.path.name} was closed; its logs are in {self.logs}"

    def claim_notice(self, event: str) -> bool:
        """Record that a notice of an event is sent; return True if it is the first one, or if that is not known."""
        try:
            os.close(os.open(self.path / f"notified-{event}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except OSError:  # a full disk, or the directory is removed: two notices are better than none
            return True
        return True

    def remove_secrets(self) -> None:
        """Remove what gives access to the cluster; logs, scripts and journal stay."""
        self.withdraw()
        shutil.rmtree(self.tls, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.path / DASHBOARD_TOKEN).unlink()
