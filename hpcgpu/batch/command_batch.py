"""A batch system that is used through its commands: their common code, and retries of queries."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import ClassVar

from hpcgpu.batch.run_command import Result, backoff, run
from hpcgpu.batch.submit_retry import SubmitRetry
from hpcgpu.errors import BatchError, BatchUnavailable

#: Seconds for the command that tests whether the batch system answers.
_PROBE_TIMEOUT = 20.0
#: Seconds for the command that identifies the queue; a start waits for it.
_IDENTITY_TIMEOUT = 5.0


class CommandBatch(SubmitRetry):
    """A batch system that is used through its commands. `SubmitRetry` has further attributes.

    Attributes
    ----------
    query : mapping
        Environment of commands whose answer is parsed; not of the submit, which may pass its environment on to the job.
    version_command : tuple of str
        Command that prints the release.
    identity_command : tuple of str
        Command whose answer identifies the queue ...
    identifies : re.Pattern
        ... and the line of the answer that identifies it.
    """

    query: ClassVar[Mapping[str, str]]
    version_command: ClassVar[tuple[str, ...]]
    identity_command: ClassVar[tuple[str, ...]]
    identifies: ClassVar[re.Pattern[str]]
    _identity: str | None = None

    def version(self) -> str:
        """Return the release that the batch system reports."""
        result = run(list(self.version_command), timeout=self.timeout, extra_env=self.query)
        if result.returncode != 0:
            raise BatchUnavailable(f"`{' '.join(self.version_command)}` failed: {result.words}")
        return result.words

    def identity(self) -> str:
        """Return an identifier of this queue; see `BatchSystem.identity`."""
        if self._identity is None:
            match = None
            with contextlib.suppress(BatchError):
                result = run(
                    list(self.identity_command), timeout=min(self.timeout, _IDENTITY_TIMEOUT), extra_env=self.query
                )
                match = self.identifies.search(result.stdout) if result.returncode == 0 else None
            self._identity = match[1] if match else ""
        return self._identity

    def probe(self) -> None:
        """Raise `BatchError` unless the commands are installed and the batch system answers."""
        once = type(self)(timeout=_PROBE_TIMEOUT, attempts=1)
        once.check()
        once.find("hpcgpu-probe")

    def call(self, argv: list[str], *, answered: Callable[[Result], bool], attempts: int | None = None) -> Result:
        """Run a command that may be repeated without harm until it succeeds.

        Parameters
        ----------
        argv : list of str
        answered : callable
            Returns whether a result with an exit code other than 0 is an answer too, as for unknown ids.
        attempts : int, optional
        """
        problem = ""
        for _ in backoff(attempts or self.attempts, self.sleep):
            try:
                result = run(argv, timeout=self.timeout, extra_env=self.query)
            except BatchUnavailable as error:
                problem = str(error)
                continue
            problem = result.words or f"exit code {result.returncode}"
            passing = self.transient.search(problem) or self.ambiguous.search(problem)
            if result.returncode == 0 or (not passing and answered(result)):
                return result
            if not passing:
                break
        raise BatchUnavailable(f"`{argv[0]}` failed: {problem}")
