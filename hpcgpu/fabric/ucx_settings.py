"""UCX settings that must be the same on scheduler and workers, as environment variables of their jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import dask

if TYPE_CHECKING:
    from hpcgpu.options.shared_options_and_defaults import WorkerOptions


#: Options, which are dask-cuda's flags of the worker, and the keys of distributed-ucxx that do the same.
_KEYS = {
    "enable_tcp_over_ucx": "TCP",
    "enable_infiniband": "INFINIBAND",
    "enable_nvlink": "NVLINK",
    "enable_rdmacm": "RDMACM",
}
_PREFIX = "DASK_DISTRIBUTED_UCXX__"


def environment(worker: WorkerOptions, ucx_env: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the variables of a job. The scheduler has none of dask-cuda's flags, so it needs them (dask-cuda's
    documentation, "Enabling UCX communication").

    Parameters
    ----------
    worker : WorkerOptions
        The options that choose the transports.
    ucx_env : iterable of pairs of str
        Further variables of the job.
    """
    transports = worker.ucx_transports()
    chosen = transports | {"enable_rdmacm": worker.enable_rdmacm}
    variables = {_PREFIX + _KEYS[name]: str(value) for name, value in chosen.items() if value is not None}
    if any(transports.values()):
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


def warnings(worker: WorkerOptions) -> list[str]:
    """Return warnings about combinations of options whose effect a user may not expect."""
    transports = worker.ucx_transports()
    named = [name for name in ("enable_tcp_over_ucx", "enable_infiniband") if transports[name]]
    result = []
    if named and transports["enable_nvlink"] is None:
        result.append(
            f"{' and '.join(named)} without enable_nvlink: NVLink is not used, because UCX then uses only the "
            "transports that are set. Set enable_nvlink=True or False, or set none of these options, so that UCX "
            "chooses"
        )
    if worker.enable_rdmacm and not any(transports.values()):
        result.append("enable_rdmacm alone has no effect: set a transport too, such as enable_infiniband")
    return result
