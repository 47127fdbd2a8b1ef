"""What the manager asks again and again: only what has changed since its last question crosses the network.

The scheduler gives each answer a version, and the manager names the last one that it has. A scheduler that does not
know this version answers with everything: it, or the manager, has started again, or another program has asked
meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from hpcgpu.runtime.wire import Changes

__all__ = ["Known", "Told"]


class Told:
    """What the scheduler has told last."""

    def __init__(self) -> None:
        self._values: Mapping[str, Any] = {}
        self._version = ""

    def changes(self, values: Mapping[str, Any], known: str) -> Changes:
        """Return how these values differ from the version that the caller knows, and remember them.

        Parameters
        ----------
        values : mapping
            As they are now. They must not be changed later.
        known : str
            The version that the caller has; empty for none.
        """
        before, whole = self._values, not known or known != self._version
        if whole:
            before = {}
        changed = {name: value for name, value in values.items() if name not in before or before[name] != value}
        gone = [name for name in before if name not in values]
        if whole or changed or gone:
            self._values, self._version = values, uuid.uuid4().hex
        return Changes(version=self._version, whole=whole, changed=changed, gone=gone)


class Known:
    """The same values where the answers arrive.

    Attributes
    ----------
    version : str
        Of the last answer.
    values : dict
    """

    def __init__(self) -> None:
        self.version = ""
        self.values: dict[str, Any] = {}

    def update(self, changes: Changes) -> bool:
        """Take in an answer; return whether anything has changed."""
        self.version = changes["version"]
        if changes["whole"]:
            self.values = dict(changes["changed"])
            return True
        for name in changes["gone"]:
            self.values.pop(name, None)
        self.values |= changes["changed"]
        return bool(changes["changed"] or changes["gone"])
