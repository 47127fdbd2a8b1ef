"""What went wrong with a cluster and its user has not been told by an exception yet, and when to stop replacing jobs. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import Outlook, outlook

__all__ = ["Troubles", "ended_as_expected"]

#: A job whose workers stayed so many seconds was no failure to start: failures are counted anew after it.
STABLE = 600.0
#: Polls in a row that must find a reason that never passes, before it is believed.
_POLLS_TO_BELIEVE = 2


def ended_as_expected(state: JobState, *, joined: bool) -> bool:
    """Whether the end of a job that nobody cancelled is no failure: its workers were there, and its time was over.

    COMPLETED counts too: workers retire shortly before the walltime ends.
    """
    return joined and state in {JobState.TIMEOUT, JobState.PREEMPTED, JobState.COMPLETED}


@dataclass
class Troubles:
    """The troubles of one cluster.

    Attributes
    ----------
    restarts : int
        Jobs that may fail in a row and be replaced.
    failure : str
        Why the cluster is lost; empty while it is not.
    stopped : str
        Why jobs are not replaced any more.
    problems : list of str
        What the user must learn at the next call.
    """

    restarts: int
    failure: str = ""
    stopped: str = ""
    problems: list[str] = field(default_factory=list)
    failed_in_a_row: int = 0
    _hopeless: dict[str, int] = field(default_factory=dict)

    def job_failed(self) -> bool:
        """Count a failed job; return whether to replace it."""
        self.failed_in_a_row += 1
        if self.failed_in_a_row <= self.restarts:
            return True
        self.stopped = (
            f"{self.failed_in_a_row} worker jobs failed in a row; they are not replaced any more (worker_restarts={self.restarts})"
        )
        return False

    def start_anew(self) -> None:
        """Forget the failures: the user asked for jobs again, or jobs run well."""
        self.failed_in_a_row, self.stopped = 0, ""

    def take(self, statuses: Mapping[str, JobStatus]) -> None:
        """Take note of one poll: jobs by name."""
        for name, status in statuses.items():
            never = status.state is JobState.PENDING and outlook(status) is Outlook.NEVER
            self._hopeless[name] = self._hopeless.get(name, 0) + 1 if never else 0

    def hopeless(self, names: Iterable[str]) -> str | None:
        """Return the first of these jobs that waits for a reason which never passes."""
        return next((name for name in names if self._hopeless.get(name, 0) >= _POLLS_TO_BELIEVE), None)

    def untold(self) -> str:
        """Return what the user must learn by an exception now, once; empty if nothing. A lost cluster stays lost."""
        if self.failure:
            return self.failure
        text = "\n".join(self.problems)
        self.problems.clear()
        return text

    def summary(self) -> list[str]:
        """Return all there is to say, for a repr."""
        return [text for text in (self.failure, self.stopped, *self.problems) if text]
