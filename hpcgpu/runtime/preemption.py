"""Uses the time between Slurm's warning that a job will end and its end, such as GraceTime at preemption.

Slurm warns with SIGTERM, and sends it to all processes of a job step. It sends the same signal when the job is
cancelled or its time is over, so the job queries the queue for the cause. Slurm does not warn the processes of a batch
script: they are no step. The manager reads the new end of such a job from the queue.

Without this module, that signal would end the workers at once, and the first process of the job would end them too.
This still happens with dask-cuda before 26.8, which waits for signals in another way.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
from types import ModuleType
from typing import Any

from hpcgpu.runtime.before_walltime import Retirement

#: Set in the environment of processes that stay when Slurm warns them.
_STAY = "HPCGPU_WARNED"


def expect(program: ModuleType | None) -> None:
    """Let the fork server and the workers of this process stay if Slurm warns them.

    Parameters
    ----------
    program : module or None
        Dask's program. None if Slurm does not warn this job.
    """
    if hasattr(program, "wait_for_signals"):
        os.environ[_STAY] = "1"
    else:
        os.environ.pop(_STAY, None)


def stay() -> None:
    """Let this process, but not its children, ignore SIGTERM if `expect` says so: the job's first process ends it."""
    if _STAY in os.environ:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.siginterrupt(signal.SIGTERM, False)  # for libraries that do not expect to be interrupted
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def listen(module: str, retirement: Retirement | None) -> None:
    """Let the workers of this process retire after a warning, and end at once after any other SIGTERM.

    Parameters
    ----------
    module : str
        Dask's program. Its function that waits for signals is replaced.
    retirement : Retirement or None
        None for workers that end with their scheduler's job.
    """
    program: Any = importlib.import_module(module)
    if not hasattr(program, "wait_for_signals"):
        return
    wait_for_signals = program.wait_for_signals

    async def waits() -> int:
        number: int = await wait_for_signals()
        if number == signal.SIGTERM and retirement is not None:
            again = asyncio.ensure_future(wait_for_signals())
            if (end := await asyncio.to_thread(retirement.warned)) is not None:
                retirement.begin_at_once(end)
                number = await again
            again.cancel()
        for process in multiprocessing.active_children():
            process.kill()
        return number

    program.wait_for_signals = waits
