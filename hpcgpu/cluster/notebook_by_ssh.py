"""What a notebook shows of a cluster of a login node, and what its buttons do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hpcgpu.client.questions_by_ssh import Questions
from hpcgpu.cluster import notebook
from hpcgpu.existing_clusters.snapshot import Snapshot

if TYPE_CHECKING:
    from hpcgpu.widget.notebook_widget import ClusterWidget


class Shown(Protocol):
    """The part of a cluster of a login node that a notebook shows and controls."""

    host: str
    questions: Questions

    def dashboard_here(self, *, token: bool = False) -> str: ...
    def detach(self) -> None: ...
    def _repr_html_(self) -> str: ...
    def _send(self, command: Mapping[str, Any]) -> None: ...
    def _end(self, *, jobs: bool) -> None: ...


class _Control:
    """The cluster as the widget controls it, also after this program has left it."""

    def __init__(self, cluster: Shown) -> None:
        self._cluster = cluster

    def scale(self, **size: Any) -> None:
        self._cluster._send({"command": "scale", **size})

    def adapt(self, **limits: Any) -> None:
        self._cluster._send({"command": "adapt", "interactive": True, **limits})  # a person clicks

    def stop(self) -> None:
        self._cluster._end(jobs=True)

    def detach(self) -> None:
        self._cluster.detach()

    def log(self, job: str) -> str:
        return self._cluster.questions.log(job)


def widget_of(cluster: Shown) -> ClusterWidget | None:
    """Return a new widget of a cluster; None if this is not a Jupyter kernel, or anywidget is not installed."""
    if not notebook.has_widgets():
        return None
    from hpcgpu.widget.notebook_widget import ClusterWidget

    def take() -> Snapshot:
        snapshot = cluster.questions.snapshot()
        # the Jupyter server must not take it for a cluster of this machine in a directory of the same name
        directory = f"{cluster.host}:{snapshot.directory}"
        return replace(snapshot, directory=directory, dashboard=cluster.dashboard_here() if snapshot.dashboard else "")

    def is_final() -> bool:
        return widget.feed.latest is not None and notebook.nothing_runs(widget.feed.latest)

    widget = ClusterWidget(take, is_final, _Control(cluster), lambda: cluster.dashboard_here(token=True))
    notebook.keep_picture(cluster, widget)
    return widget


def show(cluster: Shown, widget: ClusterWidget | None) -> None:
    """Show the cluster in the cell that runs."""
    if widget is None:
        notebook.show_picture(cluster)
    else:
        widget.feed.start()
        notebook.show_live(cluster, widget, widget.feed.wait_first(notebook.FIRST))
