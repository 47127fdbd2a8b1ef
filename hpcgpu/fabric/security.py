"""distributed's Security with the cluster's key for UCX beside the TLS files."""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from distributed.security import Security

from hpcgpu.fabric import authenticated_tcp, tls_connections, ucx_authentication
from hpcgpu.fabric.authenticating_listener import HAS_GPU
from hpcgpu.fabric.node_gpus import gpus_on_node


@functools.cache
def _holds_gpu_objects() -> bool:
    """Whether this process has a GPU and a library for arrays or frames on it."""
    return any(importlib.util.find_spec(name) is not None for name in ("cupy", "cudf")) and bool(gpus_on_node())


class ClusterSecurity(Security):  # type: ignore[misc]
    """Security that also authenticates UCX connections.

    Its TCP connections are those of `tls_connections`; without `files`, those of `authenticated_tcp`.

    Parameters
    ----------
    ucx_key : bytes
        See `hpcgpu.fabric.ucx_authentication`.
    **files
        Arguments of `distributed.security.Security`.
    """

    def __init__(self, ucx_key: bytes, **files: Any) -> None:
        super().__init__(**(files and {"require_encryption": True}), **files)
        self._ucx_key = ucx_key
        ucx_authentication.install()
        authenticated_tcp.install()
        tls_connections.install()

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of a connection in this role.

        A client's arguments say whether it can hold GPU objects.
        """
        arguments = {**self._read(super().get_connection_args, role), ucx_authentication.ARGUMENT: self._ucx_key}
        return {**arguments, HAS_GPU: _holds_gpu_objects()} if role == "client" else arguments

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of a listener in this role."""
        return {**self._read(super().get_listen_args, role), ucx_authentication.ARGUMENT: self._ucx_key}

    def _read(self, arguments: Callable[[str], dict[str, Any]], role: str) -> dict[str, Any]:
        """Return the arguments that distributed makes from the files. Python's ssl does not name a missing file."""
        try:
            return arguments(role)
        except FileNotFoundError as error:
            missing = self.tls_ca_file
            text = "the credentials of the cluster were removed, or its whole directory"
            raise FileNotFoundError(errno.ENOENT, text, os.fspath(missing)) from error
