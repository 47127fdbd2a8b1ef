"""UCX settings that must be the same on scheduler and workers, as environment variables of their jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import dask

if TYPE_CHECKING:
    from hpcgpu.options.options_and_defaults import WorkerOptions


#: dask-cuda's flags, and the keys of distributed-ucxx that they set (``dask_cuda.initialize``).
_KEYS = {
    "enable_tcp_over_ucx": "TCP",
    "enable_infiniband": "INFINIBAND",
    "enable_nvlink": "NVLINK",
    "enable_rdmacm": "RDMACM",
}
_PREFIX = "DASK_DISTRIBUTED_UCXX__"


def environment(worker: WorkerOptions, ucx_env: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the variables of a job. dask-cuda sets them from its flags, but only for workers.

    Parameters
    ----------
    worker : WorkerOptions
        The options that choose the transports.
    ucx_env : iterable of pairs of str
        Further variables of the job.
    """
    chosen = {_KEYS[name]: value for name, value in _chosen(worker).items() if value is not None}
    variables = {_PREFIX + key: str(value) for key, value in chosen.items()}
    if any(value for key, value in chosen.items() if key != "RDMACM"):
        variables[f"{_PREFIX}CUDA_COPY"] = "True"
    multi_buffer = dask.config.get("distributed-ucxx.multi-buffer", None)
    if multi_buffer is not None:  # it changes the format of messages
        variables[f"{_PREFIX}MULTI_BUFFER"] = str(bool(multi_buffer))
    return variables | dict(ucx_env)


def private_transports(environ: Mapping[str, str], config: Mapping[str, object]) -> dict[str, str]:
    """Return the variable that keeps UCX from shared memory which members of the user's group can attach to.

    UCX creates System V segments with mode 0660, whatever the umask is (seen with UCX 1.21). Its other uses of shared
    memory are private.

    Parameters
    ----------
    environ : mapping
        The environment of the job. If a site or user has set ``UCX_TLS``, that value stays.
    config : mapping
        The section ``distributed-ucxx`` of Dask's configuration. If it names transports, System V memory is not among
        them.
    """
    section = _section(config)
    chosen = any(section.get(key) for key in ("tcp", "infiniband", "nvlink"))
    return {} if "UCX_TLS" in environ or _named(section, "tls") or chosen else {"UCX_TLS": "^sysv"}


def memory_type_cache(environ: Mapping[str, str], config: Mapping[str, object]) -> dict[str, str]:
    """Return the variable that switches off UCX's cache of memory types, as ucxx intends.

    ucxx 0.52 sets it after it has loaded the library of a wheel. That has no effect, and UCX 1.21 prints a warning
    about it.

    Parameters
    ----------
    environ : mapping
        The environment of the process. If a site or user has set ``UCX_MEMTYPE_CACHE``, that value stays.
    config : mapping
        The section ``distributed-ucxx`` of Dask's configuration. Its ``environment`` may set the variable too.
    """
    variable = "UCX_MEMTYPE_CACHE"
    return {} if variable in environ or _named(_section(config), "memtype-cache") else {variable: "n"}


def _section(config: Mapping[str, object]) -> dict[str, object]:
    return {key.replace("_", "-").lower(): value for key, value in config.items()}


def _named(section: Mapping[str, object], name: str) -> bool:
    """Whether the configuration sets this variable of UCX. distributed-ucxx writes its name without the prefix."""
    variables = section.get("environment") or {}
    return isinstance(variables, Mapping) and any(str(key).replace("_", "-").lower() == name for key in variables)


def _chosen(worker: WorkerOptions) -> dict[str, bool | None]:
    """Return the flags as dask-cuda completes them (``get_ucx_config`` there).

    If a user only switches transports off, dask-cuda enables all others.
    """
    flags = {name: getattr(worker, name) for name in _KEYS}
    transports = [flags[name] for name in _KEYS if name != "enable_rdmacm"]
    if False in transports and True not in transports:
        return {name: True if value is None and name != "enable_rdmacm" else value for name, value in flags.items()}
    return flags


def warnings(worker: WorkerOptions) -> list[str]:
    """Return warnings about combinations of options whose effect a user may not expect."""
    chosen = _chosen(worker)
    named = [name for name in ("enable_tcp_over_ucx", "enable_infiniband") if chosen[name]]
    result = []
    if named and chosen["enable_nvlink"] is None:
        result.append(
            f"{' and '.join(named)} without enable_nvlink: NVLink is not used, because UCX then uses only the "
            "transports that are set. Set enable_nvlink=True or False, or set none of these options, so that UCX "
            "chooses"
        )
    if worker.enable_rdmacm and not any(value for name, value in chosen.items() if name != "enable_rdmacm"):
        result.append("enable_rdmacm alone has no effect: set a transport too, such as enable_infiniband")
    return result
