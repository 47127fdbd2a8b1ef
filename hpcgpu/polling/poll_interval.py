"""How often the queue is polled: one rule for all programs that poll.

The manager, programs that wait for a cluster, and jobs that wait for a scheduler use it.

Pure: time and chance are arguments. A batch system is a service that many users share, so

- a poll comes after `poll_interval` seconds while somebody waits for a change, and the pause grows while nothing
  changes;
- it comes after four times `poll_interval` while nobody waits for a change;
- after an event, such as a submit, a click or a worker that left, a poll comes after 1 s, then after 2 and 6 s more,
  and then every `poll_interval` until forty seconds are over (with a `poll_interval` of ten);
- each poll that fails doubles the pause, up to eight times `poll_interval`;
- a job that changes its state, or a new job, resets the pause to `poll_interval`;
- a tenth of the pause is chance: programs that begin together do not always poll together.

Use::

    cadence = Cadence(poll_interval)
    while True:
        sleep until cadence.next_poll, or until something happened: then cadence.soon(now=now)
        try:
            answer = batch.poll(job_ids)
        except BatchError:
            cadence.failed(now=now)
        else:
            cadence.answered({job_id: status.state for job_id, status in answer.items()}, now=now, waiting=some job is
            pending)

`hpcgpu.polling.queue_monitor.Monitor` does that: ``monitor.poll_if_due(now=now)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

#: Seconds between two polls of a program that has not read the options of the cluster. The default of the option
#: `poll_interval` is the same; it is set in `hpcgpu.options.shared_options_and_defaults`.
POLL_INTERVAL = 10.0
#: The longest pause between two polls, in units of `poll_interval`: if all polls succeed, and after polls that failed.
_SLOWEST, _SLOWEST_AFTER_FAILURES = 4.0, 8.0
#: The pause is this part of the time for which nothing has changed.
_PART = 0.1
#: The part of the pause that is chance, in both directions.
_JITTER = 0.1
#: Seconds until the queue shows a submit or a cancelled job.
_SOON = 1.0


def pause(
    poll_interval: float,
    *,
    waiting: bool,
    unchanged: float,
    failures: int,
    expected: float | None = None,
    chance: float = 0.5,
) -> float:
    """Return the seconds until the next poll.

    Parameters
    ----------
    poll_interval : float
        Seconds between two polls, as the user sets them.
    waiting : bool
        Whether somebody waits for a change: a job is pending, or the queue does not show it.
    unchanged : float
        Seconds since a job last changed its state.
    failures : int
        Polls in a row that failed.
    expected : float, optional
        Seconds since an event that the queue should soon show.
    chance : float, default 0.5
        A random number from 0 to 1.
    """
    fastest, slowest = poll_interval, poll_interval * _SLOWEST
    seconds = min(max(unchanged * _PART, fastest), slowest) if waiting else slowest
    if expected is not None and expected < slowest:
        seconds = min(max(2 * expected, _SOON), fastest)
    if failures:
        seconds = max(seconds, poll_interval * min(2.0 ** min(failures, 10), _SLOWEST_AFTER_FAILURES))
    return seconds * (1 - _JITTER + 2 * _JITTER * chance)


@dataclass
class Cadence:
    """When the queue is polled next.

    Parameters
    ----------
    poll_interval : float, default 10
        Seconds.
    next_poll : float, default minus infinity
        When the next poll is due, by the clock of the caller. Default: now.
    chance : callable, optional
        Returns a number from 0 to 1.
    """

    poll_interval: float = POLL_INTERVAL
    next_poll: float = float("-inf")
    chance: Callable[[], float] = random.random
    failures: int = field(default=0, init=False)
    _states: Mapping[str, Hashable] = field(default_factory=dict, init=False)
    _changed: float | None = field(default=None, init=False)
    _waiting: bool = field(default=True, init=False)
    _expected: float | None = field(default=None, init=False)

    def due(self, *, now: float) -> bool:
        """Whether it is time to poll."""
        return now >= self.next_poll

    def answered(self, states: Mapping[str, Hashable], *, now: float, waiting: bool) -> None:
        """Record an answer of the queue.

        Parameters
        ----------
        states : mapping of job id to state
            States of all jobs in the query, including those that the queue does not show.
        now : float
        waiting : bool
            Whether somebody waits for a change.
        """
        if self._changed is None or states != self._states:
            self._changed = now
        self._states, self._waiting, self.failures = dict(states), waiting, 0
        self._plan(now)

    def failed(self, *, now: float) -> None:
        """Record that the queue did not answer."""
        self.failures += 1
        self._plan(now)

    def soon(self, *, now: float) -> None:
        """Poll soon, and again until the queue shows the event: a job was submitted, cancelled, has connected or left.

        A further event within `poll_interval` adds no polls. While a queue does not answer, an event adds no polls
        either.
        """
        if self.failures or (self._expected is not None and now - self._expected < self.poll_interval):
            return
        self._changed = self._expected = now
        self.next_poll = min(self.next_poll, now + min(_SOON, self.poll_interval))

    def _plan(self, now: float) -> None:
        unchanged = now - self._changed if self._changed is not None else 0.0
        seconds = pause(
            self.poll_interval,
            waiting=self._waiting,
            unchanged=unchanged,
            failures=self.failures,
            expected=now - self._expected if self._expected is not None else None,
            chance=self.chance(),
        )
        self.next_poll = now + seconds
