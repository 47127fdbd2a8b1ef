"""What the program that manages a cluster does for other programs; `hpcgpu.cluster.requests` is their side."""

from __future__ import annotations

from typing import Any

from hpcgpu.errors import HpcgpuError
from hpcgpu.runtime.wire import ScalingRequest

__all__ = ["serve"]


def serve(cluster: Any, request: ScalingRequest) -> str:
    """Do what another program requests of a `hpcgpu.GPUCluster`; return what is wrong with it, or nothing."""
    try:
        if request["what"] == "scale":
            cluster.scale(**request["arguments"])
        elif request["what"] == "adapt":
            cluster.adapt(**request["arguments"])
        else:
            return f"the program that manages the cluster does not know the request {request['what'][:40]!r}"
    except (HpcgpuError, TypeError, ValueError) as error:
        return str(error)
    return ""
