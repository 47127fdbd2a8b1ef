"""The configuration of dask-labextension: it makes our clusters, and the code that it writes connects to them.

dask-labextension makes a cluster in the Jupyter server: the button "New" must not wait until the scheduler job runs.
The code that it writes into a notebook is ``Client("tls://...")``. Dask then calls the function in the option
``distributed.client.security-loader`` for the credentials. Our function finds them by the address.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask
import yaml

from hpcgpu.batch import system_registry
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import ClusterError

#: Dask reads the files of a directory in the order of their names; this name comes after dask-labextension's own.
_FILE = "labextension_hpcgpu.yaml"
_KEY, _LOADER = "distributed.client.security-loader", "hpcgpu.client.connect.security_for"


def configuration(system: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for clusters of a batch system with these options.

    Raises
    ------
    OptionError
        An option is not valid.
    """
    given = {**arguments, "wait": False, "quiet": True}
    resolve(system, given)
    module, _, name = system_registry.system(system).cluster_class.partition(":")
    factory = {"module": module, "class": name, "args": [], "kwargs": given}
    return {
        "labextension": {"factory": factory, "default": {"workers": None, "adapt": None}},
        "distributed": {"client": {"security-loader": _LOADER}},
    }


def write(content: Mapping[str, Any], directory: Path | None = None) -> Path:
    """Write a configuration where Dask reads it; return the file.

    Raises
    ------
    ClusterError
        Another file or variable sets something else.
    """
    path = (directory or Path(dask.config.PATH)) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# Written by `hpcgpu jupyter-config`. Remove it to undo that.\n" + yaml.safe_dump(dict(content)))
    read = dask.config.collect([*dask.config.paths, str(path.parent)], env=os.environ)
    for key, wanted in (("labextension.factory", content["labextension"]["factory"]), (_KEY, _LOADER)):
        if (found := dask.config.get(key, None, config=read)) != wanted:
            raise ClusterError(
                f"{path} is written, but another file or a variable of the environment sets {key} to {found!r}. "
                f"Remove that; Dask reads: {', '.join(map(str, dask.config.paths))}"
            )
    return path
