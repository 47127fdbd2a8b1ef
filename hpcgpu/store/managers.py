"""Who manages a cluster.

The manager is the program with the highest number, ``manager-NUMBER.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hpcgpu.errors import ClusterError, Damaged
from hpcgpu.posix import json_records, process_identity
from hpcgpu.posix.printable import printable
from hpcgpu.store.atomic_files import Files


@dataclass(frozen=True, kw_only=True)
class ManagerRecord:
    """A program that manages, or managed, the cluster; ``manager-NUMBER.json``. The highest number counts.

    Attributes
    ----------
    number : int
    program : str
        A description for people: the program, its host and its start.
    host : str
    process : list of int
        Its identity on that host; see `hpcgpu.posix.process_identity`.
    left : bool
        Whether it has stopped managing the cluster, although it may still run.
    in_scheduler_job : bool
        Whether it runs in the scheduler job, and ends with it.
    """

    number: int = 0
    program: str = ""
    host: str = ""
    process: list[int] = field(default_factory=list)
    left: bool = False
    in_scheduler_job: bool = False

    @property
    def lives(self) -> bool | None:
        """Whether that program runs and manages the cluster; None if it is on another machine, and so not known."""
        if self.left:
            return False
        if self.host != socket.gethostname() or len(self.process) != 2:
            return None
        return process_identity.alive(self.process)

    def __str__(self) -> str:
        return self.program or f"manager number {self.number}"


class Managers(Files):
    """The managers of the cluster of one directory."""

    def take_over(self, program: str, *, in_scheduler_job: bool = False, after: int | None = None) -> ManagerRecord:
        """Become the cluster's manager: no earlier one submits or cancels from now on.

        Parameters
        ----------
        program : str
            A description of the new manager, for people.
        in_scheduler_job : bool, default False
            Whether it runs in the scheduler job.
        after : int, optional
            The number of the manager that it follows. Default: the latest, whichever that is.

        Raises
        ------
        ClusterError
            Another program has followed that one.
        """
        process = process_identity.identity(os.getpid())
        record = ManagerRecord(
            program=program, host=socket.gethostname(), process=process, in_scheduler_job=in_scheduler_job
        )
        # Written before a number is taken: on a full disk the present manager must remain.
        draft = self.write(f".manager-{secrets.token_hex(4)}", json.dumps(asdict(record)))
        try:
            while True:
                latest = self.manager()
                number = latest.number + 1 if latest is not None else 1
                if after is not None and number != after + 1:
                    raise ClusterError(f"{latest} manages cluster {self.path.name} already")
                try:  # creation is exclusive on NFS too; the second program takes the next number
                    os.close(os.open(self._manager_file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                except FileExistsError:
                    continue
                draft.rename(self._manager_file(number))
                return replace(record, number=number)
        finally:
            draft.unlink(missing_ok=True)

    def leave(self, number: int) -> None:
        """Record that this manager no longer manages the cluster."""
        record = self.manager()
        if record is not None and record.number == number:
            text = json.dumps(asdict(replace(record, left=True)))
            self.write(self._manager_file(number).name, text)

    def manager(self) -> ManagerRecord | None:
        """Return the cluster's manager; None before the first."""
        self.refresh()
        names = (re.fullmatch("manager-([0-9]{1,9})[.]json", path.name) for path in self.path.glob("manager-*.json"))
        numbers = [int(match[1]) for match in names if match]
        if not numbers:
            return None
        number, record = max(numbers), ManagerRecord()
        with contextlib.suppress(OSError, Damaged):  # its number alone counts
            record = json_records.read(self._manager_file(number), ManagerRecord)
        return replace(record, number=number, program=printable(record.program, 300))

    def _manager_file(self, number: int) -> Path:
        return self.path / f"manager-{number:06}.json"
