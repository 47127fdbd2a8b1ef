"""What the command line takes as the name of a cluster, or of a batch system. The names are read when one is given, not
for every command.
"""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from hpcgpu.store.directory import ClusterDirectory

#: In place of the name of a batch system: the system of this machine.
AUTO = "auto"


class ClusterName(click.ParamType[Any]):
    """The name of a cluster, or the path of its directory; completed in the shell."""

    name = "cluster"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from hpcgpu.configuration.resolve import cluster_directories
        from hpcgpu.existing_clusters.lookup import directories

        names = {one.path.name for root in cluster_directories() for one in directories(root)}
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and "~" not in name]


class _Located(ClusterName):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ClusterDirectory:
        """Return the directory of the cluster."""
        from hpcgpu.existing_clusters.lookup import locate

        return locate(value)


cluster_name = click.argument("name", type=ClusterName())
#: The command gets the directory of the cluster that is named.
cluster_directory = click.argument("directory", metavar="NAME", type=_Located())


class SystemName(click.ParamType[str]):
    """Name of a batch system that is installed.

    Parameters
    ----------
    auto : bool, default False
        Whether `AUTO` may be given too.
    """

    name = "system"

    def __init__(self, *, auto: bool = False) -> None:
        self.auto = auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, or fail with a list of the valid names."""
        from hpcgpu.batch.plugins_to_install import advice
        from hpcgpu.batch.system_registry import incomplete

        if value not in self._names():
            listed = f"{value!r} is not one of {', '.join(map(repr, self._names()))}."
            more = f" {hint[0].upper()}{hint[1:]}" if (hint := advice(value)) else ""
            self.fail(incomplete(value) or f"{listed}{more}", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return what ``--help`` shows for the value."""
        names = "|".join(self._names())
        return f"{{{names}}}" if param.param_type_name == "argument" else f"[{names}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a name."""
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def _names(self) -> list[str]:
        from hpcgpu.batch.system_registry import names

        return [AUTO] * self.auto + names()
