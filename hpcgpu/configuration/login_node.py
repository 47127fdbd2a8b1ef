"""Which login node a cluster is on, and which options of this machine go there.

The configuration of the login node applies there. That of this machine applies only where it names the host: its
other options are about that host.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import dask.config

from hpcgpu.batch import system_registry
from hpcgpu.configuration.config_sections import configured, layered, plain
from hpcgpu.errors import OptionError
from hpcgpu.profiles import site_profiles


def on_login_node(system: str, host: str | None, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the login node of a cluster, and the options to send there; None for a cluster of this machine.

    Parameters
    ----------
    system : str
        Name of the batch system.
    host : str or None
        As the user gave it. Empty: this machine, whatever is configured.
    arguments : mapping
        Options as the user gave them.

    Raises
    ------
    OptionError
        The configuration or the profile is not valid.
    """
    config, _ = configured(system)
    about = config.pop("host", None)
    if host == "":
        _check_this_machine()
        return None
    given = {name: value for name, value in arguments.items() if value is not None}
    name = given.get("profile", config.get("profile"))
    profile = _profile(name)
    of_profile = profile.host if profile is not None else ""
    host = host or about or of_profile
    if not host:
        _check_this_machine()
        return None
    layers = [plain(profile.options)] if profile is not None and host == of_profile else []
    layers += [config] if host == about else []
    layers.append(given)
    options = {key: value for layer in layers for key, value in layer.items()}
    if any("scheduler" in layer for layer in layers):
        options["scheduler"] = layered(*(layer.get("scheduler") for layer in layers))
    if profile is not None and host == of_profile:
        profile.check(options)
        options.pop("profile", None)
    return host, options


def _check_this_machine() -> None:
    if sys.platform == "win32":
        raise OptionError("host: on Windows hpcgpu only uses login nodes, by ssh. Write for example host='login1'")


def _profile(name: Any) -> site_profiles.Profile | None:
    """Return a profile of this machine; None if it has none of that name: the login node may have it."""
    try:
        return site_profiles.load(name) if name is not None else None
    except OptionError:
        return None


def configured_host() -> str | None:
    """Return the login node that the configuration names for all commands; None if it names none.

    Raises
    ------
    OptionError
        The sections of several batch systems name several hosts.
    """
    sections = ["hpcgpu", *(f"hpcgpu.{name}" for name in system_registry.names())]
    hosts = {host: section for section in sections if (host := dask.config.get(f"{section}.host", None))}
    if len(hosts) > 1:
        named = ", ".join(f"{section} {host!r}" for host, section in hosts.items())
        raise OptionError(f"dask's configuration names several hosts ({named}): choose one with --host")
    return next(iter(hosts), None)
