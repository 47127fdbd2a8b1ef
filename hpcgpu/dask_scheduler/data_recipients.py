"""Chooses the workers that may receive the data of another one: data of a GPU worker goes to GPU workers.

distributed gives data to the running worker that uses least memory. It does not consider GPUs, so objects in GPU memory
would go to workers that cannot hold them.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from distributed.active_memory_manager import ActiveMemoryManagerExtension

from hpcgpu.checkpoints import pieces
from hpcgpu.dask_worker.gpu_metrics import GPUS

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: Types of results that a worker without a GPU cannot hold, as distributed names them: "cupy.ndarray".
_ON_GPU = re.compile(r"(cupyx?|cudf|dask_cudf|pylibcudf|cuml|cugraph|cuspatial|rmm|numba\.cuda|torch|cuda)\.")


def install() -> None:
    """Let the active memory manager choose among suitable workers.

    Upstream has no hook for this, so this wraps a private method.
    """
    upstream = ActiveMemoryManagerExtension._find_recipient
    if getattr(upstream, "knows_gpus", False):
        return

    def _find_recipient(self: Any, ts: Any, candidates: Set[Any] | None, pending_repl: Set[Any]) -> Any:
        running = self.scheduler.running if candidates is None else candidates & self.scheduler.running
        holders = ts.who_has or set()
        return upstream(self, ts, suitable(running - holders - pending_repl, holders, ts.type), pending_repl)

    _find_recipient.knows_gpus = True  # type: ignore[attr-defined]
    ActiveMemoryManagerExtension._find_recipient = _find_recipient


def save_where_results_are(scheduler: Scheduler) -> None:
    """Let a worker save the results that it has; while those that have a result are paused, one that can have it.

    distributed lets any other worker run the task then, and moves it to any idle worker.
    """
    upstream = scheduler.valid_workers

    def valid_workers(ts: TaskState) -> set[WorkerState] | None:
        found: set[WorkerState] | None = upstream(ts)
        if found is None and ts.prefix is not None and ts.prefix.name == pieces.WRITES:
            for result in ts.dependencies:
                holders = result.who_has or set()
                found = (found or set()) | (holders & scheduler.running)
                if not holders & scheduler.running:
                    return suitable(scheduler.running, holders, result.type)
        return found

    scheduler.valid_workers = valid_workers


def suitable(candidates: Set[Any], holders: Set[Any], kind: str | None) -> set[Any]:
    """Return the workers that may receive a result.

    Parameters
    ----------
    candidates : set of WorkerState
        The workers that have free memory.
    holders : set of WorkerState
        The workers that have the result.
    kind : str, optional
        Type of the result.

    Returns
    -------
    set of WorkerState
        The workers with GPUs, if a worker with a GPU has the result. If there are none, all candidates, unless the
        result is known to be in GPU memory.
    """
    if not any(_has_gpu(holder) for holder in holders):
        return set(candidates)
    with_gpu = {worker for worker in candidates if _has_gpu(worker)}
    return with_gpu if with_gpu or _ON_GPU.match(kind or "") else set(candidates)


def _has_gpu(worker: Any) -> bool:
    return bool(worker.extra.get(GPUS))
