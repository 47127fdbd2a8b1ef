"""Submits a job by a command. If the outcome is not known, it tries again, but never leaves two jobs of one name."""

from __future__ import annotations

import contextlib
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hpcgpu.batch.base import After, BatchSystem, Reasons
from hpcgpu.batch.reasons import advice
from hpcgpu.batch.run_command import TIMEOUT, backoff, run
from hpcgpu.errors import AmbiguousSubmit, BatchError, BatchUnavailable, Cancelled, SubmitLimited, SubmitRefused

_NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The outcome of one attempt to submit a job.

    An attempt without an id that is neither uncertain nor refused has failed for a temporary reason.
    """

    words: str
    job_id: str | None = None
    uncertain: bool = False
    refused: bool = False


class SubmitRetry(BatchSystem):
    """The submits of a batch system that is used through its commands.

    Parameters
    ----------
    timeout : float, default 60
        Seconds that one command may take. A busy controller answers late; a submit that times out is looked up by its
        name.
    attempts : int, default 4
        How often a call that fails for a temporary reason is tried.
    sleep : callable, default time.sleep
        Waits between the attempts.

    Attributes
    ----------
    title : str
        Its name, for people.
    ambiguous : re.Pattern
        Errors of a submit after which the job may nevertheless have been accepted.
    transient : re.Pattern
        Temporary errors after which the job was certainly not accepted.
    limited : re.Pattern
        Errors that report that this user has as many jobs as allowed ...
    per_job : re.Pattern
        ... unless they name a limit that the job itself exceeds.
    reasons : Reasons
        What the words of the batch system mean.
    unsure : set of str
        Names of jobs for which one attempt got no answer. The batch system may accept it even after `submit` has
        returned the id of another attempt.
    """

    title: ClassVar[str]
    ambiguous: ClassVar[re.Pattern[str]]
    transient: ClassVar[re.Pattern[str]]
    limited: ClassVar[re.Pattern[str]]
    per_job: ClassVar[re.Pattern[str]] = _NOTHING
    reasons: ClassVar[Reasons]

    def __init__(
        self, *, timeout: float = TIMEOUT, attempts: int = 4, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.timeout = timeout
        self.attempts = attempts
        self.sleep = sleep
        self.unsure: set[str] = set()

    @abstractmethod
    def submit_command(
        self, script: Path, job_name: str, logs: Path | None, after: After | None, exclude: Collection[str]
    ) -> list[str]:
        """Return the command that submits a job."""

    @abstractmethod
    def read_job_id(self, stdout: str) -> str | None:
        """Return the id from the output of a submit, even if site wrappers print other text around it."""

    @abstractmethod
    def find(self, job_name: str, *, attempts: int | None = None) -> list[str]:
        """Return the ids of the live jobs of that name, newest last.

        A job that has ended may belong to an earlier cluster of the same name.
        """

    def submit(
        self,
        script: Path,
        *,
        job_name: str,
        logs: Path | None = None,
        after: After | None = None,
        exclude: Collection[str] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> str:
        """Submit a script; see `BatchSystem.submit`.

        If the outcome of an attempt is not known, the job is looked up by its name before the next attempt.
        """
        argv = self.submit_command(script, job_name, logs, after, exclude)
        uncertain = False  # no answer yet on whether the last attempt was accepted
        again = False  # an attempt without an answer, whose job was not found, has been repeated
        problem = ""
        for _ in backoff(self.attempts, self.sleep):
            if uncertain:
                try:
                    found = self.find(job_name, attempts=1)  # this loop repeats it
                except BatchError as error:  # an odd answer, too, does not prove that the job is not there
                    problem = str(error)
                    continue
                if found:
                    return self._only(found[-1], job_name) if again else found[-1]
                uncertain, again = False, True
                self.unsure.add(job_name)
            if not wanted():
                if again:
                    uncertain = True  # the queue may still accept the attempt that it did not answer
                    break
                raise Cancelled(f"job {job_name!r} was not submitted: it is no longer needed")
            answer = self._attempt(argv)
            if answer.job_id is not None:
                return self._only(answer.job_id, job_name) if again else answer.job_id
            uncertain, problem = answer.uncertain, answer.words
            if answer.refused:
                # the previous attempt may have been accepted meanwhile, and may have filled the limit for which this
                # attempt was refused
                if again:
                    break
                raise self._refusal(problem, job_name)
        if not (uncertain or again):
            raise BatchUnavailable(f"{self.title} did not accept job {job_name!r}: {problem}")
        jobs: list[str] | None = None
        with contextlib.suppress(BatchError):
            jobs = self.find(job_name)
        if jobs:
            return self._only(jobs[-1], job_name) if again else jobs[-1]
        if jobs is not None and not uncertain and not self.transient.search(problem):
            raise self._refusal(problem, job_name)
        self.unsure.add(job_name)
        raise AmbiguousSubmit(
            f"{self.title} did not say whether it accepted job {job_name!r}: {problem}. hpcgpu looks for a job of "
            "this name when the queue answers"
        )

    def _attempt(self, argv: list[str]) -> _Answer:
        """Run the command that submits a job, once."""
        try:
            result = run(argv, timeout=self.timeout)
        except BatchUnavailable as error:
            return _Answer(words=str(error), uncertain=True)
        if result.returncode == 0:
            job_id = self.read_job_id(result.stdout)
            self.unread = result.stdout if job_id is None else None
            return _Answer(words=result.words, job_id=job_id, uncertain=job_id is None)
        uncertain = self.ambiguous.search(result.words) is not None
        refused = not uncertain and self.transient.search(result.words) is None
        return _Answer(words=result.words or f"exit code {result.returncode}", uncertain=uncertain, refused=refused)

    def _refusal(self, words: str, job_name: str) -> BatchError:
        """Return the error for a submit that was refused with these words."""
        if self.limited.search(words) and not self.per_job.search(words):
            return SubmitLimited(words)
        return SubmitRefused(f"{self.title} refused job {job_name!r}: {words}{advice(words, self.reasons)}")

    def _only(self, job_id: str, job_name: str) -> str:
        """Cancel other jobs of that name, and return the id.

        A busy controller may accept an attempt after its command has timed out.
        """
        with contextlib.suppress(BatchError):
            self.cancel(i for i in self.find(job_name) if i != job_id)
        return job_id
