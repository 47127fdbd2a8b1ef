"""Runs one command of a batch system: argument vector, scrubbed environment, timeout, what to retry."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcgpu.batch.scrub_environment import clean_environment
from hpcgpu.errors import BatchError, BatchUnavailable
from hpcgpu.posix.printable import printable

#: Seconds for the answer of a command of the batch system.
TIMEOUT = 60.0


@dataclass(frozen=True)
class Result:
    """The answer of a command."""

    argv: Sequence[str]
    returncode: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """The command's own words, to be shown: its stderr, else its stdout, on one line of bounded length."""
        return printable(" ".join((self.stderr.strip() or self.stdout.strip()).split()))


def require(command: str, hint: str) -> None:
    """Raise `BatchError` when a command is not on the PATH."""
    if shutil.which(command) is None:
        raise BatchError(f"`{command}` was not found on the PATH. {hint}")


def run(argv: Sequence[str], *, timeout: float = TIMEOUT, extra_env: Mapping[str, str] | None = None) -> Result:
    """Run a queue command and return its answer, whatever its exit code.

    It runs in a session of its own, so that a Ctrl-C in the user's terminal cannot kill it half-way: the interrupt
    takes effect once the command has ended. A command that hangs is killed with all processes that it started, such as
    those of a site's wrapper around it.

    Raises
    ------
    BatchError
        The command does not exist.
    BatchUnavailable
        It did not answer within `timeout` seconds.
    """
    env = clean_environment(os.environ) | dict(extra_env or {})
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except (FileNotFoundError, PermissionError) as error:
        hint = "Run this on a machine that has the batch system's commands, such as a login node"
        raise BatchError(f"`{argv[0]}` was not found on the PATH, or cannot be executed. {hint}") from error
    except OSError as error:  # no process or memory left for this user, for now
        raise BatchUnavailable(f"`{argv[0]}` cannot be started: {error.strerror}") from error
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise BatchUnavailable(f"`{argv[0]}` did not answer within {timeout:g} s") from error
    except BaseException:  # an interrupt: half a submit is worse than a late one; a second interrupt does not wait
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=timeout)
        raise
    finally:
        if process.returncode is None:
            _kill(process)
    return Result(argv, process.returncode, stdout, stderr)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the whole session of a command.

    Its pipes are not read to the end, because a process that left the session may keep them open.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in a dead filesystem
        process.wait(timeout=5)


def backoff(attempts: int, sleep: Callable[[float], None]) -> Iterator[int]:
    """Yield attempt numbers from 0 and sleep between them.

    The first pause is a second, and each further pause is three times longer, with a jitter of a quarter.
    """
    for attempt in range(attempts):
        if attempt:
            sleep(3.0 ** (attempt - 1) * random.uniform(0.75, 1.25))
        yield attempt
