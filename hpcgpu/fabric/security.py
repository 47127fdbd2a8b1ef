"""distributed's Security with the cluster's key for UCX beside the TLS files."""

from __future__ import annotations

from typing import Any

from distributed.security import Security

from hpcgpu.fabric import authentication

__all__ = ["ClusterSecurity"]


class ClusterSecurity(Security):  # type: ignore[misc]
    """Security that also authenticates UCX connections.

    Parameters
    ----------
    ucx_key : bytes
        See `hpcgpu.fabric.authentication`.
    **files
        Of `distributed.security.Security`.
    """

    def __init__(self, ucx_key: bytes, **files: Any) -> None:
        super().__init__(require_encryption=True, **files)
        self._ucx_key = ucx_key
        authentication.install()

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of a connection in this role."""
        return {**super().get_connection_args(role), authentication.ARGUMENT: self._ucx_key}

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of a listener in this role."""
        return {**super().get_listen_args(role), authentication.ARGUMENT: self._ucx_key}
