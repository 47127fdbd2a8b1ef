"""The argument of commands that names a cluster."""

from __future__ import annotations

from typing import Any

import click


class ClusterName(click.ParamType[str]):
    """The name of a cluster, or the path of its directory; completed in the shell."""

    name = "cluster"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from hpcgpu.configuration.resolve import cluster_directories
        from hpcgpu.existing_clusters.lookup import directories

        names = {one.path.name for root in cluster_directories() for one in directories(root)}
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and "~" not in name]


cluster_name = click.argument("name", type=ClusterName())
