"""Repeated queries of the manager: only the values that changed since its last query cross the network.

The scheduler gives each answer a version, and the manager sends the version of its last answer. If the scheduler does
not know this version, it answers with all values: the scheduler or the manager has started again, or another program
has sent a query meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from hpcgpu.dask_scheduler.rpc_types import Changes


class Sent:
    """The last answer of the scheduler."""

    def __init__(self) -> None:
        self._values: Mapping[str, Any] = {}
        self._version = ""

    def changed_since(self, values: Mapping[str, Any], version: str) -> Changes:
        """Return how these values differ from the version that the caller has, and remember them.

        Parameters
        ----------
        values : mapping
            The present values. The caller must not change them later.
        version : str
            The version that the caller has; empty if it has none.
        """
        before, whole = self._values, not version or version != self._version
        if whole:
            before = {}
        changed = {name: value for name, value in values.items() if name not in before or before[name] != value}
        gone = [name for name in before if name not in values]
        if whole or changed or gone:
            self._values, self._version = values, uuid.uuid4().hex
        return Changes(version=self._version, whole=whole, changed=changed, gone=gone)


class Received:
    """The same values on the side of the manager.

    Attributes
    ----------
    version : str
        Version of the last answer.
    values : dict
    """

    def __init__(self) -> None:
        self.version = ""
        self.values: dict[str, Any] = {}

    def update(self, changes: Changes) -> bool:
        """Apply an answer; return whether any value has changed."""
        self.version = changes["version"]
        if changes["whole"]:
            self.values = dict(changes["changed"])
            return True
        for name in changes["gone"]:
            self.values.pop(name, None)
        self.values |= changes["changed"]
        return bool(changes["changed"] or changes["gone"])
