"""Results that are lost because their workers end and no new workers follow.

Dask would compute them again as soon as there are workers. Until then, a program that gathers them would wait without a
message.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import ClusterError

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState


async def lose(scheduler: Scheduler, workers: Set[WorkerState], why: str) -> None:
    """Remove workers, and report to clients which results are lost.

    The futures of results that Dask can compute again raise `ClusterError`; ``client.retry`` computes them again.
    Futures of data that a client has sent are cancelled, and so are the futures of tasks that need this data. A client
    that loses results also gets the error for its other futures that no worker computes: a ``gather`` of both would
    still wait.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    workers : set of WorkerState
    why : str
    """
    stimulus = f"hpcgpu-lose-{time.time()}"
    lost = {ts for ws in workers for ts in ws.has_what if set(ts.who_has or ()) <= workers}
    data = {ts for ts in lost if not ts.run_spec}
    losers = {client for ts in lost for client in ts.who_wants or ()}
    _cancel(scheduler, data | _tasks_that_need(data), f"{why}. It was sent to the workers: send it again", stimulus)
    for ws in workers:
        await scheduler.remove_worker(ws.address, stimulus_id=stimulus, expected=True, close=True)
    error = ClusterError(f"{why}. Then client.retry(futures) computes it again")
    for ts in {ts for client in losers for ts in client.wants_what or ()}:
        if ts.state in ("waiting", "no-worker", "queued"):  # in any other state, a remaining worker computes it
            fail(scheduler, ts, error)


def fail(scheduler: Scheduler, task: TaskState, error: Exception) -> None:
    """Let a task that no worker has computed fail, in whatever state it is."""
    task.exception_blame, task.exception = task, pickle.dumps(error)
    scheduler.transitions({task.key: "erred"}, f"hpcgpu-fail-{time.time()}")


def _tasks_that_need(data: Iterable[TaskState]) -> set[TaskState]:
    """Return the tasks that cannot be computed without these results."""
    found, left = set[Any](), list(data)
    while left:
        new = {ts for ts in left.pop().dependents if not ts.who_has} - found
        found |= new
        left += new
    return found


def _cancel(scheduler: Scheduler, tasks: Iterable[TaskState], why: str, stimulus: str) -> None:
    """Cancel the futures of these tasks, with the reason."""
    keys = defaultdict[str, list[Any]](list)
    for ts in tasks:
        for client in ts.who_wants or ():
            keys[client.client_key].append(ts.key)
    for client, own in keys.items():
        message = {"op": "cancelled-keys", "keys": own, "reason": "hpcgpu-lost", "msg": why}
        scheduler.report(message, client=client)
        scheduler.client_releases_keys(keys=own, client=client, stimulus_id=stimulus)
