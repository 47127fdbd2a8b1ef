"""The network interface of libraries that open their own connections between workers: NCCL and Gloo.

By themselves they may choose an interface that other nodes do not reach, and then a training hangs (xgboost issues 7982
and 7019). UCX chooses well by itself, and ucxx's documentation advises against ``UCX_NET_DEVICES``: it would exclude
the InfiniBand device of the same network.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcgpu.fabric import interface_addresses

#: The variables, and how each writes the name of exactly one interface (NCCL's takes prefixes of names otherwise).
_VARIABLES = {"NCCL_SOCKET_IFNAME": "={}", "GLOO_SOCKET_IFNAME": "{}"}


def variables(environ: Mapping[str, str], interface: str | None, scheduler: str) -> dict[str, str]:
    """Return the variables that are missing in the environment of a worker.

    Parameters
    ----------
    environ : mapping
        What the user has set stays.
    interface : str or None
        The interface of the workers' connections, if it was chosen.
    scheduler : str
        The address of the scheduler, without a port: otherwise the interface of that network is taken.
    """
    name = interface or min(interface_addresses.reaching(scheduler), default="")
    if not name or name == "lo":
        return {}
    return {variable: form.format(name) for variable, form in _VARIABLES.items() if variable not in environ}


def effective(environ: Mapping[str, str], interface: str | None, scheduler: str) -> str:
    """Return the values that workers would have, in words; empty if there are none."""
    found = {name: environ[name] for name in _VARIABLES if name in environ} | variables(environ, interface, scheduler)
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items()))
