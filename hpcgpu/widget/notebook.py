"""The widget: what anywidget shows in a notebook. Needs the extra ``jupyter``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from hpcgpu.errors import OptionError
from hpcgpu.posix.printable import printable
from hpcgpu.remote.snapshot import Snapshot
from hpcgpu.widget.feed import Feed
from hpcgpu.widget.kept import Kept

__all__ = ["ClusterWidget", "Control"]

_STATIC = Path(__file__).parent / "static"
#: What a page may ask for, and with which arguments.
_REQUESTS: dict[str, frozenset[str]] = {
    "scale": frozenset({"jobs", "gpus", "worker_group"}),
    "adapt": frozenset(
        {"minimum_jobs", "maximum_jobs", "minimum_gpus", "maximum_gpus", "idle_timeout", "worker_group"}
    ),
    "stop": frozenset(),
    "detach": frozenset(),
    "log": frozenset({"job"}),
}


class Control(Protocol):
    """Does what the user asks for. Each call may block, and runs in a thread of its own."""

    def scale(self, **size: Any) -> None:
        """Set the size of a group, as `GPUCluster.scale` does."""

    def adapt(self, **limits: Any) -> None:
        """Let the work decide the size, as `GPUCluster.adapt` does."""

    def stop(self) -> None:
        """End the cluster."""

    def detach(self) -> None:
        """Leave it."""

    def log(self, job: str) -> str:
        """Return the end of a job's log."""


def module() -> str:
    """Return the one module that anywidget takes: draw.js, and widget.js without the line that imports it."""
    first, _, rest = (_STATIC / "widget.js").read_text().partition("\n")
    assert first.startswith("import ")
    return f"{(_STATIC / 'draw.js').read_text()}\n{rest}"


class ClusterWidget(anywidget.AnyWidget):
    """A cluster that is shown live.

    Parameters
    ----------
    source : callable
        Takes a snapshot; called in a thread.
    over : callable
        Whether this program no longer follows the cluster.
    control : Control
    """

    _esm = module()
    _css = (_STATIC / "widget.css").read_text()
    #: `SnapshotJSON`; empty before the first.
    snapshot = traitlets.Dict().tag(sync=True)
    #: Why there is no new one, or that no other one comes.
    problem = traitlets.Unicode().tag(sync=True)

    def __init__(self, source: Callable[[], Snapshot], over: Callable[[], bool], control: Control) -> None:
        super().__init__()
        self.feed = Feed(source, over, self)
        self._control = control
        self._views = 0
        self.kept: Kept | None = None
        self.on_msg(self._received)

    # What the feed calls, in its thread

    def draw(self, snapshot: Snapshot) -> None:
        """Show a new snapshot."""
        self.snapshot = dict(snapshot.as_json())
        self.problem = ""
        if self.kept is not None:
            self.kept.keep(snapshot)

    def say(self, problem: str) -> None:
        """Show why there is no new one."""
        self.problem = printable(problem, None, lines=True)

    def finish(self) -> None:
        """Say that this is the last one, where the cluster continues."""
        if self.kept is not None and self.feed.latest is not None:
            self.kept.keep(self.feed.latest, last=True)
        if self.snapshot.get("state") not in ("closed", "ended"):
            self.problem = "This program no longer follows the cluster. This view is no longer updated."

    # What a page sends

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        what = content.get("do") if isinstance(content, dict) else None
        self.feed.seen()
        if what == "shown":
            self._views += 1
            self.feed.start()
        elif what == "hidden":
            self._views = max(0, self._views - 1)
            if not self._views:
                self.feed.stop()
        elif what in _REQUESTS:
            self.send({"id": content.get("id"), "begun": True})
            threading.Thread(target=self._answer, args=(content,), name=f"hpcgpu-widget-{what}", daemon=True).start()

    def _answer(self, content: dict[str, Any]) -> None:
        what, body = content["do"], content.get("body")
        answer: dict[str, Any] = {"id": content.get("id")}
        try:
            if not isinstance(body, dict) or not body.keys() <= _REQUESTS[what]:
                raise OptionError(f"the widget cannot {what} with {body!r}")
            answer["result"] = getattr(self._control, what)(**body)
        except Exception as error:  # whatever it is, the user sees it
            answer["error"] = printable(str(error) or type(error).__name__, None, lines=True)
        self.feed.start()  # also of a cluster that this program has left: what became of it is shown
        self.send(answer)

    def close(self) -> None:
        """Show it no more."""
        self.feed.stop()
        super().close()
