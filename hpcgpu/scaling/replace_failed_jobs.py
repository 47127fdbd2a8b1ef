"""When a failed job is replaced, and when replacement stops: the kind of failure, and the time to wait. No I/O.

How many jobs may fail in a row is the option `worker_restarts`, see `hpcgpu.options.shared_options_and_defaults`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcgpu.batch.base import JobState, JobStatus, Outlook
from hpcgpu.batch.reasons import outlook

#: A job whose workers stayed for this number of seconds ran well: after it, failures are counted from zero.
STABLE = 600.0
#: A job that ended by itself within these seconds after its first worker connected did not end by its walltime.
_LASTING = 20.0
#: A job counts as unschedulable when this number of polls in a row found a reason that never passes.
_POLLS_TO_BELIEVE = 2
#: Seconds until the next submit after this number of failures in a row.
_BACKOFF = (0.0, 10.0, 30.0, 60.0, 300.0)
#: When a pause ends, for a fixed size and for adaptive scaling.
_AGAIN = "until you scale or adapt the group again, or run `hpcgpu resume`"
_AGAIN_ADAPTIVE = "until you scale or adapt the group again, call cluster.adaptive.resume(), or run `hpcgpu resume`"
#: Refused submissions in a row after which nothing more is submitted: at first, and if the queue has accepted such a
#: job before. Then nothing is wrong with the job: Slurm refuses it while its nodes are down, for example.
_REFUSALS, _LATER_REFUSALS = 5, 30
#: Most nodes that are avoided, the oldest is removed first; and for how many seconds.
_EXCLUDED, _EXCLUDED_FOR = 8, 3600.0
#: Seconds after which a submit is tried again although a site's limit on jobs was reached, if no job ended before.
_FULL_FOR = 300.0


class Outcome(enum.Enum):
    """How a job that was not drained ended."""

    EXPECTED = "its walltime ended"
    PREEMPTED = "it was preempted"
    CANCELLED = "it was cancelled by somebody else"
    NEVER_CONNECTED = "it ended before its workers had connected"
    NODE_FAIL = "its node failed"
    OUT_OF_MEMORY = "it used more memory than it requested"
    FAILED = "it failed"

    @property
    def counts(self) -> bool:
        """Whether the program in the job failed. A replacement may fail in the same way."""
        return self in {Outcome.CANCELLED, Outcome.NEVER_CONNECTED, Outcome.OUT_OF_MEMORY, Outcome.FAILED}

    @property
    def crashed(self) -> bool:
        """Whether the tasks that its workers ran may be the cause."""
        return self in {Outcome.NEVER_CONNECTED, Outcome.OUT_OF_MEMORY, Outcome.FAILED}


def classify(state: JobState, *, lasted: float | None, worked: bool = False) -> Outcome:
    """Classify the end of a job that we did not cancel.

    Parameters
    ----------
    state : JobState
    lasted : float or None
        Seconds since its first worker connected; None if no worker ever did. COMPLETED is expected after a while:
        workers retire before the walltime ends.
    worked : bool, default False
        Whether its workers had tasks or data. Then COMPLETED is expected at any time: somebody retired or closed the
        workers.
    """
    special = {
        JobState.PREEMPTED: Outcome.PREEMPTED,
        JobState.NODE_FAIL: Outcome.NODE_FAIL,
        JobState.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
        JobState.CANCELLED: Outcome.CANCELLED,
    }
    if state in special:
        return special[state]
    if lasted is None:
        return Outcome.NEVER_CONNECTED
    expected = state is JobState.TIMEOUT or (state is JobState.COMPLETED and (worked or lasted >= _LASTING))
    return Outcome.EXPECTED if expected else Outcome.FAILED


@dataclass
class Failures:
    """The failures of one group of workers, in a row.

    Attributes
    ----------
    restarts : int
        Jobs that may fail in a row and be replaced.
    failed, refused, short : int
        Jobs that failed, submits that were refused, and times that running jobs lost workers, in a row.
    accepted : bool
        Whether the queue has accepted a job of the group.
    next_try : float
        Epoch seconds before which nothing is submitted.
    paused : str
        Why nothing is submitted until the user requests it; empty if jobs are submitted.
    full : str
        The site's own message while it accepts no more jobs; empty otherwise.
    excluded : dict of str to float
        Nodes on which jobs were lost, and until when the next jobs avoid them, epoch seconds.
    adaptive : bool
        Whether adaptive scaling determines the size of the group.
    last : str
        What happened to the last job that failed in this row; empty if none did.
    """

    restarts: int
    failed: int = 0
    refused: int = 0
    short: int = 0
    accepted: bool = False
    next_try: float = 0.0
    paused: str = ""
    full: str = ""
    excluded: dict[str, float] = field(default_factory=dict)
    adaptive: bool = False
    last: str = ""
    _full_until: float = 0.0
    _same_loss_until: float = 0.0

    def job_ended(self, outcome: Outcome, node: str, *, now: float, words: str = "") -> None:
        """Record a job that ended without being drained; `words` report what happened to it."""
        self.full = ""
        if outcome in {Outcome.NODE_FAIL, Outcome.NEVER_CONNECTED} and node:
            self._exclude(node, now)
        if outcome is Outcome.NODE_FAIL:
            self.next_try = max(self.next_try, now + _BACKOFF[1])
        if outcome.counts:
            self.last = words or self.last
            self._job_failed(now)

    def workers_lost(self, node: str, *, within: float, now: float) -> None:
        """Record a running job that has lost workers for good.

        The first such job in a row does not count as a failure. The next ones do.

        Several jobs that lose workers within this number of seconds count once: a network that fails for a moment is
        one event. A job and its replacement always count separately, because the wait for workers lasts that long.
        """
        if now < self._same_loss_until:
            return
        self._same_loss_until = now + within
        self.short += 1
        if self.short > 1:
            if node:
                self._exclude(node, now)
            self._job_failed(now)

    def _job_failed(self, now: float) -> None:
        self.failed += 1
        self._back_off(self.failed, now)
        if self.failed > self.restarts:
            failed = (
                f"{self.failed} worker jobs failed in a row; they are not replaced"
                if self.failed > 1
                else "a worker job failed; it is not replaced"
            )
            self.paused = f"{failed} {self.pause_ends} (worker_restarts={self.restarts})"

    def submit_refused(self, words: str, *, for_good: bool, now: float) -> None:
        """Record a submission that was refused.

        If it avoided nodes, the next one is tried at once, and avoids none: perhaps no other node is left.
        """
        if self.excluded:
            self.excluded = {}
            return
        self.refused += 1
        self._back_off(self.refused, now)
        if for_good or self.refused >= (_LATER_REFUSALS if self.accepted else _REFUSALS):
            several = self.refused > 1
            times = f"{self.refused} submissions in a row were refused" if several else "a submission was refused"
            self.paused = f"{times}, so nothing more is submitted {self.pause_ends}. The last one: {words}"

    def site_is_full(self, words: str, *, now: float) -> None:
        """Record that a limit of the site on the number of jobs is reached."""
        self.full, self._full_until = words, now + _FULL_FOR

    @property
    def pause_ends(self) -> str:
        """When a pause ends."""
        return _AGAIN_ADAPTIVE if self.adaptive else _AGAIN

    def may_submit(self, *, now: float) -> bool:
        """Whether no known reason prevents a submit."""
        return not self.paused and not self.full and now >= self.next_try

    def submitted(self) -> None:
        """Record an accepted submit."""
        self.refused, self.accepted = 0, True

    def time_passed(self, *, now: float) -> None:
        """Try a full site again after a while, and nodes on which jobs were lost."""
        self.excluded = {node: until for node, until in self.excluded.items() if now < until}
        if self.full and now >= self._full_until:
            self.full = ""

    def start_anew(self) -> None:
        """Reset the failures: the user requested jobs again, or jobs run well."""
        self.failed, self.refused, self.short, self.next_try, self.paused, self.full = 0, 0, 0, 0.0, "", ""
        self.last = ""
        self._same_loss_until = 0.0

    def jobs_run_well(self) -> None:
        """Count failures of jobs from zero again."""
        self.failed, self.short, self.last = 0, 0, ""

    def _back_off(self, count: int, now: float) -> None:
        self.next_try = max(self.next_try, now + _BACKOFF[min(count, len(_BACKOFF)) - 1])

    def _exclude(self, node: str, now: float) -> None:
        others = {other: until for other, until in self.excluded.items() if other != node}
        self.excluded = dict([*others.items(), (node, now + _EXCLUDED_FOR)][-_EXCLUDED:])


@dataclass
class ClusterFailures:
    """The failures of a whole cluster that no exception has reported yet."""

    _unreported: list[tuple[str, str]] = field(default_factory=list)
    _never: dict[str, int] = field(default_factory=dict)

    @property
    def unreported(self) -> list[str]:
        """The messages for the user's next call."""
        return [text for _, text in self._unreported]

    def add(self, text: str, group: str = "") -> None:
        """Record a message for the user, and the worker group that failed, if it is a failure of one."""
        self._unreported.append((group, text))

    def requested_anew(self, group: str) -> None:
        """Forget the failures of a group. The user has just set another size, so they belong to an earlier request."""
        self._unreported = [(of, text) for of, text in self._unreported if of != group]

    def observe(self, statuses: Mapping[str, JobStatus]) -> bool:
        """Record one poll: jobs by name. Return whether another poll soon may confirm that a job can never start."""
        for name, status in statuses.items():
            never = status.state is JobState.PENDING and outlook(status) is Outlook.NEVER
            self._never[name] = self._never.get(name, 0) + 1 if never else 0
        return any(0 < polls < _POLLS_TO_BELIEVE for polls in self._never.values())

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        self._never.pop(name, None)

    def unschedulable(self, names: Iterable[str]) -> str | None:
        """Return the first of these jobs that waits for a reason that never passes."""
        return next((name for name in names if self._never.get(name, 0) >= _POLLS_TO_BELIEVE), None)

    def report(self) -> str:
        """Return the message of an exception for the user, only once; empty if there is none."""
        text = "\n".join(self.unreported)
        self._unreported.clear()
        return text
