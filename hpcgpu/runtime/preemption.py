"""Uses the time between Slurm's warning that a job will end and its end, such as GraceTime at preemption.

Slurm warns with SIGTERM, and sends it to all processes of a job step. It sends the same signal when the job is
cancelled or its time is over, so the job queries the queue for the cause. Slurm does not warn the processes of a batch
script: they are no step. The manager reads the new end of such a job from the queue.

Without this module, that signal would end the workers at once, and the first process of the job would end them too.
This still happens with dask-cuda before 26.8, which waits for signals in another way.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

from hpcgpu.runtime import dask_signals
from hpcgpu.runtime.before_walltime import Retirement

#: Set in the environment of processes that Slurm may warn, and that continue then.
_WARNED = "HPCGPU_WARNED"


def expect(*, warned: bool) -> None:
    """Let the fork server and the workers of this process continue if Slurm warns them."""
    if warned:
        os.environ[_WARNED] = "1"
    else:
        os.environ.pop(_WARNED, None)


def ignore_warning() -> None:
    """Let this process, but not its children, ignore SIGTERM if `expect` says so: the job's first process ends it."""
    if _WARNED in os.environ:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.siginterrupt(signal.SIGTERM, False)  # for libraries that do not expect to be interrupted
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def listen(retirement: Retirement | None) -> None:
    """Let the workers of this process retire after a warning, and end at once after any other SIGTERM.

    Parameters
    ----------
    retirement : Retirement or None
        None for workers that end with their scheduler's job.
    """

    def retires(wait_for_signals: dask_signals.Wait) -> dask_signals.Wait:
        async def waits() -> int:
            number = await wait_for_signals()
            if number == signal.SIGTERM and retirement is not None:
                again = asyncio.ensure_future(wait_for_signals())
                if (end := await asyncio.to_thread(retirement.warned)) is not None:
                    retirement.begin_at_once(end)
                    number = await again
                again.cancel()
            for process in multiprocessing.active_children():
                process.kill()
            return number

        return waits

    dask_signals.add(retires)
