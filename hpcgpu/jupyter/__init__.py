"""The extension of the Jupyter server: clusters and their dashboards behind Jupyter's own login.

The package installs ``etc/jupyter/jupyter_server_config.d/hpcgpu.json``, which names this module: a server loads it at
its start. The import is cheap. Without the extra ``jupyter`` the module does nothing.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "hpcgpu.jupyter"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the addresses below ``hpcgpu/`` to a Jupyter server."""
    try:
        from hpcgpu.jupyter.extension import load
    except ImportError as error:
        server.log.info(f"hpcgpu does not serve its pages ({error}). To get them, install hpcgpu[jupyter]")
        return
    load(server)
