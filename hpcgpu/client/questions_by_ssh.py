"""What a program asks a login node about a cluster again and again. It starts no ssh for a question."""

from __future__ import annotations

import json
from typing import Any

from hpcgpu.client.reached_by_ssh import tunnel_of
from hpcgpu.errors import ClusterError, Damaged
from hpcgpu.existing_clusters.printed_snapshot import from_printed
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.ssh.login import Login
from hpcgpu.ssh.tunnel import Tunnel

_COMMAND = "answers"


class Questions:
    """Questions about one cluster.

    Parameters
    ----------
    login : Login
    directory : str
        Its directory on the login node.
    """

    def __init__(self, login: Login, directory: str) -> None:
        self._login, self._directory = login, directory
        self._tunnel: Tunnel | None = None

    def snapshot(self) -> Snapshot:
        """Return the cluster as it is now.

        Raises
        ------
        HostError
            The login node does not answer.
        ClusterError
            Its answer.
        """
        return from_printed(json.dumps(self._ask("snapshot")).encode(), f"the answer of {self._login.host}")

    def soon(self) -> None:
        """Let the next snapshot query the queue, because something has just changed. The exceptions are the same."""
        self._ask("soon", soon="now")

    def log(self, job: str) -> str:
        """Return the end of the log of a job. The exceptions are those of `snapshot`."""
        return str(self._ask("log", log=job))

    def manage(self) -> str:
        """Let a process of the login node manage the cluster if its scheduler job should, and cannot.

        Returns
        -------
        str
            What happens from now on; empty if nothing had to be done. The exceptions are those of `snapshot`.
        """
        return str(self._ask("manage", alone=True, manage="if needed"))

    def _ask(self, what: str, *, alone: bool = False, **more: str) -> Any:
        if self._tunnel is None:
            self._tunnel = tunnel_of(self._login)
        question = json.dumps({"directory": self._directory, **more}).encode()
        answer = json.loads((self._tunnel.ask_alone if alone else self._tunnel.ask)(_COMMAND, question))
        if "error" in answer:
            raise ClusterError(answer["error"])
        if what not in answer:
            raise Damaged(f"the answer of {self._login.host} is damaged")
        return answer[what]
