"""Ends the jobs of a cluster.

It cancels them, waits until the queue is empty, and marks the directory with the result.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from hpcgpu.batch.reasons import why_it_stays
from hpcgpu.display.counts_and_durations import duration, listed
from hpcgpu.display.progress import Progress, ending
from hpcgpu.errors import BatchError, NameLost, Superseded
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.jobs.program_exit import keep_at_exit
from hpcgpu.jobs.submit_and_cancel import Ending
from hpcgpu.manager.cancel_all import CLOSE_TIMEOUT
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.scaling.decide_actions import Drain
from hpcgpu.store import create_directory


class Closing:
    """The end of one cluster's jobs.

    Parameters
    ----------
    reconciler : Reconciler
        Its cluster is in the phase closing.
    quiet : bool
        Show no progress.
    """

    def __init__(self, reconciler: Reconciler, *, quiet: bool) -> None:
        self.reconciler = reconciler
        self.state = reconciler.state
        self.quiet = quiet
        self.problem = ""
        self.left: list[str] = []
        self._deadline = time.monotonic() + CLOSE_TIMEOUT

    async def cancel(self) -> None:
        """Cancel every job. If the queue does not cancel them, let the scheduler and its workers end."""
        try:
            await asyncio.wait_for(self.reconciler.end_all(), CLOSE_TIMEOUT)
            self.problem = self.reconciler.cancel_all.problem
        except TimeoutError:
            self.problem = "the queue did not answer"
        if self.problem and self.state.client is not None:
            with suppress(OSError, TimeoutError):  # jobs that run need no queue to end
                await self.state.client.end(self.state.dispatcher.manager)

    async def wait(self) -> None:
        """Wait until the queue has none of the jobs, or until the time is over."""
        dispatcher = self.state.dispatcher
        if dispatcher.ending is Ending.OVERTAKEN:
            return
        with Progress(self.quiet) as progress:
            # a job needs a second to end, and each poll is a command to the queue
            for pause in (1.0, 1.0, *[2.0] * 30):
                left = dispatcher.left()
                if self.problem or time.monotonic() + pause > self._deadline or len(self._stuck()) == len(left):
                    break
                what = f"cluster {self.state.name}: waiting for its jobs to end"
                progress.update(what, f"{ending(left)}, for {duration(self._deadline - time.monotonic())} at most")
                await asyncio.sleep(pause)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look_up(left), max(1.0, self._deadline - time.monotonic()))
            self.left = dispatcher.left()
            progress.left = ending(self.left) if self.left else ""
        self._record_ids()

    async def _look_up(self, left: list[str]) -> None:
        await self.state.poll(left)
        with suppress(BatchError, OSError):
            for name in self.state.dispatcher.to_look_up():
                await self.state.dispatcher.look_up(name)

    def _record_ids(self) -> None:
        """Record the result of submits that were under way: each ends in its own thread, without the event loop."""
        state = self.state
        for job in [job for job in state.registry.jobs.values() if job.job_id is None]:
            if (job_id := state.dispatcher.id_of(job.name)) is not None:
                job.record_id(job_id)
            elif job.name not in self.left:
                state.registry.remove(job)
        state.registry.observe(now=state.now)

    def finish(self) -> None:
        """Mark the directory with the result, and report the jobs that are left."""
        state = self.state
        directory, dispatcher = state.dispatcher.directory, state.dispatcher
        with suppress(OSError, Superseded, NameLost):
            dispatcher.check_manager()  # another cluster may have the name by now
            gone = dispatcher.gone()
            new = [
                job for job in state.registry.jobs.values() if not (isinstance(job.phase, Ended) and job.phase.noted)
            ]
            # A job that the queue had only forgotten was cancelled with the others, so it has certainly ended.
            surely_ended = {
                job for job in new if not self.problem and isinstance(job.phase, Ended) and not job.phase.drained
            }
            dispatcher.note_ends({job.name: job.job_id for job in new if job.job_id in gone or job in surely_ended})
            if self._nothing_submitted():
                create_directory.abandon(directory, dispatcher.token)
            else:
                directory.remove_secrets()
                if not self.left and not self.problem:
                    directory.close()
        self._warn_of_remaining()
        if (
            unreported := ""
            if state.phase.failed
            else "\n".join(text.split("\n", 1)[0] for text in state.failures.unreported)
        ):
            state.messages.warn(unreported)
        for job in state.registry.active.values():
            job.drain(Drain.UNWANTED)
        for job in state.registry.draining if not self.problem else ():
            job.workers.clear()
        if state.scheduler is not None:
            state.scheduler.record_answer(False)
        if not self.left and not self.problem:
            keep_at_exit(dispatcher)

    def _stuck(self) -> dict[str, str]:
        """Return why cancelled jobs stay in the queue for long, by id."""
        views = self.state.dispatcher.monitor.views
        return {i: why for i in self.state.dispatcher.left() if i in views and (why := why_it_stays(views[i].status))}

    def _warn_of_remaining(self) -> None:
        state, stuck = self.state, {} if self.problem else self._stuck()
        for why in stuck.values():
            state.messages.warn(f"cluster {state.name}: {why}")
        left = [job for job in self.left if job not in stuck]
        if left or self.problem:
            state.messages.warn(
                f"these jobs of cluster {state.name} may still be in the queue: {listed(left)} "
                f"({self.problem or 'they are ending'}). {state.dispatcher.advice()}"
            )

    def _nothing_submitted(self) -> bool:
        """Whether the cluster failed to start before any job was in the queue.

        Then its directory holds no useful information.
        """
        submits = self.state.dispatcher.directory.submits()
        return (
            bool(self.state.phase.lost)
            and not self.state.ownership.attached
            and all(submit.refused for submit in submits)
        )
