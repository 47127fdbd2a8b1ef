"""What a notebook shows of a cluster, and what its buttons do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from distributed.core import Status
from distributed.utils import sync

from hpcgpu.batch.base import JobState
from hpcgpu.dask_scheduler.rpc_types import GPUState
from hpcgpu.display.progress import ipython
from hpcgpu.existing_clusters.logs import end_of
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.existing_clusters.stop import stop_all
from hpcgpu.orders import change_size
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.widget.replace_saved_picture import SavedPicture
from hpcgpu.widget.snapshot_as_html import picture

if TYPE_CHECKING:
    from hpcgpu.widget.notebook_widget import ClusterWidget


#: Seconds for which a cell waits for the first picture.
FIRST = 5.0
#: Seconds after which an event loop that takes no turn is blocked by a cell.
_TURN = 5.0
_ENDS = (Status.closing, Status.closed)
#: The MIME type that our extension of JupyterLab shows: jupyter-data/labextensions/hpcgpu/static/remoteEntry.js.
_CLUSTER = "application/vnd.hpcgpu.cluster+json"


class Pictured(Protocol):
    """A cluster that can be shown without a widget."""

    def _repr_html_(self) -> str: ...


class Shown(Protocol):
    """The part of a cluster that a notebook shows and controls."""

    asynchronous: bool
    directory: ClusterDirectory
    loop: Any
    status: Status
    same_directory: bool
    reads_only: bool
    left: bool

    def scale(self, **size: Any) -> Any: ...
    def adapt(self, **limits: Any) -> Any: ...
    def close(self) -> Any: ...
    def detach(self) -> Any: ...
    def _repr_html_(self) -> str: ...
    def _snapshot(self, gpus: Iterable[GPUState]) -> Snapshot: ...
    def _now(self, own: Snapshot) -> Snapshot: ...
    async def _query_snapshot(self) -> Snapshot: ...
    async def _end(self) -> None: ...
    async def _detach(self) -> None: ...


def take_snapshot(cluster: Shown) -> Snapshot:
    """Take a snapshot in a thread other than the cluster's; also of a cluster that this program has left."""
    own: Snapshot | None = None
    if cluster.status not in _ENDS:
        try:
            # a cell may block the event loop of an asynchronous cluster
            timeout = FIRST if cluster.asynchronous else None
            own = sync(cluster.loop, cluster._query_snapshot, callback_timeout=timeout)
        except Exception:  # the cluster may end meanwhile
            if cluster.status not in _ENDS:
                raise
    return cluster._now(own or cluster._snapshot([]))


class _Control:
    """The cluster as the widget controls it."""

    def __init__(self, cluster: Shown) -> None:
        self._cluster = cluster

    def scale(self, **size: Any) -> None:
        self._resize("scale", size)

    def adapt(self, **limits: Any) -> None:
        self._resize("adapt", {"interactive": True, **limits})  # a person clicks

    def _resize(self, what: str, arguments: dict[str, Any]) -> None:
        """Resize the cluster. If this program has left it, do it as ``hpcgpu scale`` and ``hpcgpu adapt`` do."""
        cluster = self._cluster
        if cluster.left and cluster.same_directory and not cluster.directory.closing:
            getattr(change_size, what)(cluster.directory, **arguments)
        else:
            getattr(cluster, what)(**arguments)

    def stop(self) -> None:
        """End the jobs, also if this program has left the cluster, or if `close` would leave the jobs."""
        if self._cluster.status in _ENDS or not _blocked(self._cluster.loop):
            self._end(self._cluster.close, self._cluster._end)
        directory = self._cluster.directory
        if not self._cluster.same_directory:  # a later cluster has the name, so this cluster has ended
            return
        if not directory.closed:
            stop_all(directory)

    def detach(self) -> None:
        self._end(self._cluster.detach, self._cluster._detach)

    def _end(self, blocking: Callable[[], Any], coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._cluster.asynchronous:
            sync(self._cluster.loop, coroutine)
        else:
            blocking()

    def log(self, job: str) -> str:
        return end_of(self._cluster.directory, job)


def _blocked(loop: Any) -> bool:
    """Whether a cell blocks this event loop: that of an asynchronous cluster is the kernel's."""

    async def turn() -> None: ...

    try:
        with suppress(RuntimeError):  # it has ended
            sync(loop, turn, callback_timeout=_TURN)
    except TimeoutError:
        return True
    return False


def _shell() -> Any:
    """Return IPython in a Jupyter kernel; None elsewhere."""
    shell = ipython()
    return None if getattr(shell, "kernel", None) is None else shell


def interactive() -> bool:
    """Whether a person works in this Python: a notebook, IPython or a prompt. False for a program."""
    return ipython() is not None or hasattr(sys, "ps1") or bool(sys.flags.interactive)


def has_widgets() -> bool:
    """Whether this is a Jupyter kernel, and anywidget is installed."""
    return _shell() is not None and importlib.util.find_spec("anywidget") is not None


def widget_of(cluster: Shown) -> ClusterWidget | None:
    """Return a new widget of a cluster; None where there are none."""
    if not has_widgets():
        return None
    from hpcgpu.widget.notebook_widget import ClusterWidget

    widget = ClusterWidget(
        lambda: take_snapshot(cluster), lambda: _is_final(cluster, widget.feed.latest), _Control(cluster)
    )
    keep_picture(cluster, widget)
    return widget


def keep_picture(cluster: object, widget: ClusterWidget) -> None:
    """Let the file of the notebook have a picture of the cluster that is not too old."""
    widget.saved_picture = SavedPicture(
        lambda snapshot: publish(_stored(cluster, widget, snapshot), widget, update=True)
    )


def _is_final(cluster: Shown, latest: Snapshot | None) -> bool:
    """Whether nothing can change any more. A cluster that was left continues; a lost cluster's jobs end later."""
    if cluster.status not in (Status.closed, Status.failed):
        return False
    if not cluster.reads_only or latest is None:
        return not cluster.reads_only
    return nothing_runs(latest)


def nothing_runs(snapshot: Snapshot) -> bool:
    """Whether the cluster has ended, and its jobs too."""
    ends = {JobState.PENDING.value, JobState.RUNNING.value, JobState.COMPLETING.value}
    return snapshot.state == "closed" or (
        snapshot.state == "ended" and not any(job.state in ends for job in snapshot.jobs)
    )


def show(cluster: Shown, widget: ClusterWidget | None, *, now: bool = False) -> int | None:
    """Show the cluster in the cell that runs; return the number of that cell.

    Parameters
    ----------
    now : bool, default False
        Do not wait for a picture: the cluster starts.
    """
    if widget is None:
        show_picture(cluster)
    else:
        widget.feed.start()
        # an asynchronous cluster may run in this event loop, so do not block
        still = now or cluster.asynchronous
        show_live(cluster, widget, cluster._snapshot([]) if still else widget.feed.wait_first(FIRST))
    return cell()


def show_picture(cluster: Pictured) -> None:
    """Show the present state, where no widget runs."""
    publish({"text/plain": repr(cluster), "text/html": cluster._repr_html_()}, None)


def show_live(cluster: object, widget: ClusterWidget, snapshot: Snapshot | None) -> None:
    """Show the widget, with a picture for where it does not run. Without a snapshot yet, the picture comes later."""
    publish(_fixed(cluster, widget) if snapshot is None else _stored(cluster, widget, snapshot), widget)
    if widget.saved_picture is not None:
        widget.saved_picture.shown(snapshot)


def cell() -> int | None:
    """Return the number of the cell that runs."""
    return getattr(_shell(), "execution_count", None)


def publish(data: dict[str, Any], widget: ClusterWidget | None, *, update: bool = False) -> None:
    """Show what a notebook may show, by MIME type, in the cell that runs; or put it in the place of what was shown."""
    from IPython.display import display

    display(data, raw=True, update=update, **({} if widget is None else {"display_id": f"hpcgpu-{widget.model_id}"}))


def _fixed(cluster: object, widget: ClusterWidget) -> dict[str, Any]:
    data, _ = widget._repr_mimebundle_() or ({}, {})
    return {**data, "text/plain": repr(cluster)}


def _stored(cluster: object, widget: ClusterWidget, snapshot: Snapshot) -> dict[str, Any]:
    """Return the widget and what the notebook file keeps: a picture, and data by which JupyterLab finds the cluster."""
    jobs = [job.id for job in snapshot.jobs if job.id]
    about = {"name": snapshot.name, "directory": snapshot.directory, "jobs": jobs, "model_id": widget.model_id}
    return {**_fixed(cluster, widget), _CLUSTER: about, "text/html": picture(snapshot)}
