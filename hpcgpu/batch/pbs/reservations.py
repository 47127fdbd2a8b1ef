"""Reservations of a PBS: each is a queue that starts jobs from its start on, and deletes them at its end.

The queue also starts a job whose walltime is longer than the rest of the reservation (seen on OpenPBS 23.06.06).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from hpcgpu.batch.run_command import TIMEOUT, run
from hpcgpu.errors import BatchError
from hpcgpu.posix.printable import printable

#: Names of their queues: advance, standing and maintenance reservations (``man pbs_rsub``).
_QUEUE = re.compile(r"[RSM][0-9]{1,18}", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Reservation:
    """Start and end of a reservation, epoch seconds; of a standing one, those of its next or current time."""

    start: float
    end: float

    def __str__(self) -> str:
        return f"it is a reservation {self.lasts}, when PBS deletes its jobs"

    @property
    def lasts(self) -> str:
        """Start and end, as a text."""
        start, end = (time.strftime("%a %F %H:%M", time.localtime(moment)) for moment in (self.start, self.end))
        return f"from {start} to {end}"


def is_reservation(queue: str) -> bool:
    """Return whether the name of a queue is that of a reservation's queue."""
    return _QUEUE.fullmatch(queue) is not None


def reservations(queues: Iterable[str], *, timeout: float = TIMEOUT) -> dict[str, Reservation]:
    """Query pbs_rstat for the reservations among these queues; empty if it does not answer."""
    if not any(map(is_reservation, queues)):
        return {}
    try:
        result = run(["pbs_rstat", "-F"], timeout=timeout, extra_env={"LC_ALL": "C"})
    except BatchError:
        return {}
    return parse_rstat(result.stdout)


def parse_rstat(stdout: str) -> dict[str, Reservation]:
    """Return the reservations that ``pbs_rstat -F`` prints, by queue; pure."""
    found = {}
    for block in re.split(r"^Resv ID: ", printable(stdout, None, lines=True), flags=re.MULTILINE):
        attributes = dict(re.findall(r"^(\w+) = (.*)$", block, re.MULTILINE))
        start, end = (epoch(attributes.get(f"reserve_{word}", "")) for word in ("start", "end"))
        if "queue" in attributes and start is not None and end is not None:
            found[attributes["queue"].partition("@")[0]] = Reservation(start, end)
    return found


def epoch(text: str) -> float | None:
    """Parse ``Fri Nov 20 21:10:43 2026``, local time of the command, with English names as in the locale C."""
    match = re.fullmatch(r"\w{3} (\w{3}) +(\d{1,2}) (\d\d?):(\d\d?):(\d\d?) (\d{4})", text.strip(), re.ASCII)
    if match is None or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = map(int, match.group(2, 3, 4, 5, 6))
    return time.mktime((year, _MONTHS.index(match[1]) + 1, day, hour, minute, second, 0, 0, -1))
