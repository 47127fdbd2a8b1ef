"""Whether client, scheduler and workers have the same environment.

Each difference is reported once. This module reads only the present process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcgpu.software.compare_environments import Difference, Grade, collect, compare, table


class EnvironmentCheck:
    """Compares the environments of one cluster.

    Parameters
    ----------
    mode : str
        The option `environment_check`: ``"error"`` makes fatal differences errors, ``"warn"`` warnings, ``"off"``
        reports nothing.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.scheduler: Mapping[str, str] | None = None
        self._client = collect() if mode != "off" else {}
        self._reported: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._kinds: set[frozenset[tuple[str, str]]] = set()

    def check(
        self,
        workers: Mapping[str, Mapping[str, str]],
        everybody: Callable[[], Mapping[str, Mapping[str, str]]] | None = None,
    ) -> tuple[str, str]:
        """Compare again.

        Parameters
        ----------
        workers : mapping
            What the workers have, by name; see `environments`. Workers that were compared before may be left out.
        everybody : callable, optional
            Returns the environments of all workers, if `workers` has only the new ones.

        Returns
        -------
        tuple of str
            The errors and the warnings, each as a table; empty if there is nothing new.
        """
        if self.mode == "off" or self.scheduler is None or not self._has_new(workers):
            return "", ""
        new = [
            difference
            for difference in compare(self._client, self.scheduler, everybody() if everybody is not None else workers)
            if _key(difference) not in self._reported
        ]
        self._reported |= {_key(difference) for difference in new}
        fatal = [d for d in new if d.grade is Grade.FATAL]
        if fatal and self.mode == "error":
            return (
                "client, scheduler and workers are incompatible (environment_check='warn' makes this a "
                f"warning):\n{table(new)}",
                "",
            )
        serious = [d for d in new if d.grade is not Grade.NOTE]
        return "", f"client, scheduler and workers have different software or GPUs:\n{table(new)}" if serious else ""

    def _has_new(self, workers: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether there is an environment that was not compared yet.

        In a large cluster, most new workers have an environment that was compared before.
        """
        kinds = {frozenset(worker.items()) for worker in workers.values()}
        new = not self._kinds or not kinds <= self._kinds
        self._kinds |= kinds | {frozenset((self.scheduler or {}).items())}
        return new


def _key(difference: Difference) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return the key of a difference, to recognise it again; the key does not depend on which worker has it."""
    return difference.what, frozenset(
        (name if name in ("client", "scheduler") else "", value) for name, value in difference.values.items()
    )


def environments(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the environments of workers by name, from the scheduler's list of them by address.

    Workers without our preload report nothing.
    """
    return {str(worker["name"]): worker["hpcgpu"] for worker in workers.values() if "hpcgpu" in worker}
