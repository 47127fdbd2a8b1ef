"""The advice of the report: what would have cost less. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dask.utils import format_bytes

from hpcgpu.report.bill import JobBill, Share, share, total
from hpcgpu.store.usage_file import JobUsage

#: GPU hours below which there is no advice: a short test does not show how later work will run.
_WORTH = 1.0
#: Share of the workers' GPU hours from which idle time gets a sentence.
_MUCH = 0.25
#: Share of the memory below which a GPU with half the memory would suffice.
_LITTLE_MEMORY = 0.4
#: Per cent of time in which GPUs with tasks compute; a lower value gets a sentence.
_LITTLE_USE = 20.0
#: Most sentences.
_SENTENCES = 2


def advice(jobs: Sequence[JobBill], used: Iterable[JobUsage] = ()) -> list[str]:
    """Return what would have cost less, in two sentences at most, the largest cost first.

    Parameters
    ----------
    jobs : sequence of JobBill
    used : iterable of JobUsage
        The scheduler's records of these jobs.
    """
    workers = [job for job in jobs if job.kind == "worker"]
    paid = total(job.gpu_hours for job in jobs)
    if paid < _WORTH:
        return []
    before, after = share(workers, "before", paid), share(workers, "after", paid)
    own = Share(total(job.gpu_hours for job in jobs if job.kind == "scheduler"), paid)
    found: list[tuple[float, str]] = []
    if before.hours >= _MUCH * paid:
        text = f"{before.per_cent:.0f} % of the GPU hours were before the first task: start with fewer jobs, or adapt"
        found.append((before.hours, f"{text} the number of jobs to the work."))
    if after.hours >= _MUCH * paid:
        text = f"{after.per_cent:.0f} % of the GPU hours were idle after the first task: adapt the number of jobs"
        found.append((after.hours, f"{text} to the work, or close the cluster earlier."))
    if own.hours >= _MUCH * paid:
        text = f"The GPU of the scheduler job took {own.per_cent:.0f} % of the GPU hours: over TCP it needs none"
        found.append((own.hours, f"{text} unless the task graph holds GPU objects (scheduler={{'gpus_per_node': 0}})."))
    found += _too_large(workers)
    kept = list(used)
    busy, computed = sum(job.working.seconds for job in kept), sum(job.working.total for job in kept)
    if busy / 3600 >= _WORTH and computed / busy < _LITTLE_USE:
        text = f"While they had tasks, the GPUs computed {computed / busy:.0f} % of the time: larger partitions, more"
        found.append((busy / 3600 * 0.5, f"{text} threads for each worker, or CPU workers may do the same for less."))
    return [text for _, text in sorted(found, key=lambda one: -one[0])[:_SENTENCES]]


def _too_large(workers: Sequence[JobBill]) -> list[tuple[float, str]]:
    """Return a sentence if no GPU ever used much of its memory, though it worked."""
    known = [job for job in workers if job.memory_peak is not None and job.memory_total]
    busy = total(job.busy for job in known)
    if not known or busy < _WORTH:
        return []
    peak, size = max(job.memory_peak or 0.0 for job in known), min(job.memory_total or 0 for job in known)
    if peak >= _LITTLE_MEMORY * size:
        return []
    text = f"GPU memory was never above {format_bytes(round(peak))} of {format_bytes(size)}: a smaller GPU would do."
    return [(busy * 0.5, text)]
