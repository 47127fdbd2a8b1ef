"""Warnings that users can filter; every layer may use them.

::

    UserWarning
        ClusterWarning
"""

from __future__ import annotations

__all__ = ["ClusterWarning"]


class ClusterWarning(UserWarning):
    """Something is wrong with a cluster, with one of its jobs, or with the directories that it uses; hpcgpu goes on."""
