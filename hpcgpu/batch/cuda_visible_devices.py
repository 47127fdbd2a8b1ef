"""``CUDA_VISIBLE_DEVICES``, in which a batch system names the GPUs of a job; read as CUDA reads it."""

from __future__ import annotations

import itertools

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(value: str | None) -> list[str] | None:
    """Return the GPUs of a value: indices, UUIDs or MIG UUIDs; None if it is not set.

    The first entry that names no GPU ends the list.

    Examples
    --------
    >>> visible_devices("2,3"), visible_devices("0,-1,1"), visible_devices("NoDevFiles"), visible_devices(None)
    (['2', '3'], ['0'], [], None)
    """
    if value is None:
        return None
    entries = (entry.strip() for entry in value.split(","))
    return list(
        itertools.takewhile(lambda entry: entry and entry != "NoDevFiles" and not entry.startswith("-"), entries)
    )
