"""Uses the time between Slurm's warning that a job will end and its end, such as GraceTime at preemption.

Slurm warns by SIGTERM, and sends it to all processes of a job step. It sends the same when the job is cancelled or its
time is over, so the queue is asked which it is. The processes of a script are not warned: they are no step. The manager
sees the new end of such a job in the queue.

Without this the workers would die of that signal at once, and the first process of the job would end them. So it is
with dask-cuda before 26.8, which waits for signals in another way.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
from types import ModuleType
from typing import Any

from hpcgpu.runtime.leaving import Leaving

__all__ = ["expect", "listen", "stay"]

#: Is in the environment of processes that stay when they are warned.
_STAY = "HPCGPU_WARNED"


def expect(program: ModuleType | None) -> None:
    """Let the fork server and the workers that this process starts stay when Slurm warns them, if it does.

    Parameters
    ----------
    program : module or None
        Dask's program. None if Slurm does not warn this job: a job that warned workers start is not warned itself.
    """
    if hasattr(program, "wait_for_signals"):
        os.environ[_STAY] = "1"
    else:
        os.environ.pop(_STAY, None)


def stay() -> None:
    """Let this process stay, if it is one of those: the job's first process ends it. What it starts is as ever."""
    if _STAY in os.environ:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.siginterrupt(signal.SIGTERM, False)  # for libraries that do not expect to be interrupted
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def listen(module: str, leaving: Leaving | None) -> None:
    """Let the workers of this process retire at a warning, and end at once at any other SIGTERM.

    Parameters
    ----------
    module : str
        Dask's program. Its function that waits for signals is replaced.
    leaving : Leaving or None
        None for workers that end with their scheduler's job.
    """
    program: Any = importlib.import_module(module)
    if not hasattr(program, "wait_for_signals"):
        return
    wait_for_signals = program.wait_for_signals

    async def waits() -> int:
        number: int = await wait_for_signals()
        if number == signal.SIGTERM and leaving is not None:
            again = asyncio.ensure_future(wait_for_signals())
            if (end := await asyncio.to_thread(leaving.warned)) is not None:
                leaving.begin_at_once(end)
                number = await again
            again.cancel()
        for process in multiprocessing.active_children():
            process.kill()
        return number

    program.wait_for_signals = waits
