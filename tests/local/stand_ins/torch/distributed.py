"""The ranks as the variables of torchrun name them. They meet at MASTER_ADDR and MASTER_PORT, where the first one
listens; NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import meeting

import torch


class _World:
    group: meeting.Group | None = None
    #: Whether the communicator of the backend has been made.
    formed = False


def init_process_group(backend: str, device_id: Any = None) -> None:
    if _World.group is not None:
        raise ValueError("trying to initialize the default process group twice!")
    place, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
    if rank == 0:
        meeting.listen(*place)
    group = meeting.Group("torch", place, rank, int(os.environ["WORLD_SIZE"]))
    if device_id is not None:
        _form(group, device_id)
    _World.group, _World.formed = group, backend != "nccl" or device_id is not None


def _form(group: meeting.Group, device: Any) -> None:
    """Make NCCL's communicator: with `device_id` at once, else with the first tensor."""
    if device.type != "cuda":
        raise RuntimeError("No backend type associated with device type cpu")
    used = group.exchange((socket.gethostname(), meeting.gpu(device.index)))
    if len({*used}) < len(used):
        raise RuntimeError(f"NCCL error: Duplicate GPU detected: {used}")


def exchange(values: Any, device: str) -> list[Any]:
    """What all ranks have on their devices."""
    if _World.group is None:
        raise ValueError("Default process group has not been initialized")
    if not _World.formed:
        _form(_World.group, torch.device(device))
        _World.formed = True
    return _World.group.exchange(values)


def destroy_process_group() -> None:
    if _World.group is not None:
        _World.group.close()
    _World.group = None
