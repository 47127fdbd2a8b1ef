"""Which GPUs of its node a job may use."""

from __future__ import annotations

from collections.abc import Mapping

from hpcgpu.batch.cuda_visible_devices import VARIABLE, visible_devices
from hpcgpu.display.counts_and_durations import counted
from hpcgpu.errors import LaunchError


def visible_gpus(
    wanted: int, environ: Mapping[str, str], on_node: int | None, *, whole_nodes: bool = False, kind: str = "worker"
) -> str | None:
    """Return the value that CUDA_VISIBLE_DEVICES must have for a job that requested `wanted` GPUs.

    None means: keep the present value. The entries may be indices, UUIDs or MIG UUIDs; they are only counted.

    Parameters
    ----------
    wanted : int
    environ : mapping
    on_node : int or None
        GPUs that NVML reports on this node; None if it reports none. Only needed if the batch system leaves
        CUDA_VISIBLE_DEVICES unset.
    whole_nodes : bool, default False
        Whether all GPUs of the node belong to the job, which requested none (``gpu_request="none"``).
    kind : str, default "worker"
        Kind of the job: a scheduler job uses one GPU, however many its node has.

    Raises
    ------
    LaunchError
        The job does not see as many GPUs as it requested, or it is not clear which GPUs are its own.
    """
    if wanted == 0:
        return None
    advice = "Check `gpu_request` and `gpu_type`, and that this queue has GPUs"
    entries = visible_devices(environ.get(VARIABLE))
    if entries is None:
        if not on_node:
            raise LaunchError(
                f"this job requested {counted(wanted, 'GPU')} and sees none: no CUDA_VISIBLE_DEVICES, no driver. "
                f"{advice}"
            )
        if on_node != wanted and not (whole_nodes and on_node > wanted):
            whole = "scheduler={'gpu_request': 'none'}" if kind == "scheduler" else f"gpus_per_node={on_node}"
            raise LaunchError(
                "the batch system does not say which GPUs are this job's (no CUDA_VISIBLE_DEVICES). The job "
                f"requested {wanted} and the node has {on_node}. If jobs get whole nodes, set {whole}. If not, set "
                "CUDA_VISIBLE_DEVICES in job_script_prologue"
            )
        return ",".join(map(str, range(wanted)))
    if len(entries) < wanted:
        raise LaunchError(
            f"this job requested {counted(wanted, 'GPU')} and sees {len(entries)} "
            f"(CUDA_VISIBLE_DEVICES={environ[VARIABLE]!r}). {advice}"
        )
    return ",".join(entries[:wanted])
