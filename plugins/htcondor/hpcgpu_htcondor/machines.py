"""The machines of a pool, from condor_status: what they have, and whether any has what a job requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcgpu.batch.queues import Queue, Queues, answer
from hpcgpu.errors import BatchError
from hpcgpu_htcondor.answers import parse_ads

#: Each machine once: a dynamic slot is a part of a partitionable one.
COMMAND = (
    "condor_status",
    "-json",
    "-constraint",
    'SlotType =!= "Dynamic"',
    "-attributes",
    "TotalSlotCpus,TotalSlotMemory,TotalSlotGPUs,GPUs_DeviceName",
)


def queues() -> Queues:
    """Query the kinds of machines; HTCondor has one queue, without a name."""
    try:
        found = parse_machines(answer(COMMAND))
    except ValueError as error:
        raise BatchError(f"the answer of `condor_status` cannot be read: {error}") from error
    return Queues(
        gpus=[kind for kind in found if kind.gpus],
        without=[kind for kind in found if not kind.gpus],
        by_default=any(kind.gpus for kind in found),
    )


def parse_machines(stdout: str) -> list[Queue]:
    """Return the kinds of machines, each once."""
    kinds = (
        Queue(
            "",
            _whole(ad.get("TotalSlotGPUs")),
            _whole(ad.get("TotalSlotCpus")),
            _whole(ad.get("TotalSlotMemory")),
            gpu_type=str(ad.get("GPUs_DeviceName") or ""),
        )
        for ad in parse_ads(stdout)
    )
    return list(dict.fromkeys(kinds))


def shortage(job: Mapping[str, Any], machines: Iterable[Queue]) -> str:
    """Return what a job requests and no machine has; empty if one has it, and if that is not known."""
    wanted = {
        "GPUs": _whole(job.get("RequestGPUs")),
        "cores": _whole(job.get("RequestCpus")),
        "MiB of memory": _whole(job.get("RequestMemory")),
    }
    having = [{"GPUs": kind.gpus, "cores": kind.cores, "MiB of memory": kind.memory} for kind in machines]
    if not having or any(all(kind[what] >= amount for what, amount in wanted.items()) for kind in having):
        return ""
    most = {what: max(kind[what] for kind in having) for what in wanted}
    beyond = [f"{amount} {what} (at most {most[what]})" for what, amount in wanted.items() if amount > most[what]]
    asked = ", ".join(beyond or (f"{amount} {what}" for what, amount in wanted.items() if amount))
    return f"no machine of the pool has {asked}"


def _whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
