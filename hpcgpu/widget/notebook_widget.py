"""The widget that anywidget shows in a notebook. Needs the extra ``jupyter``.

What it draws, with the texts of its buttons, is in ``static/panel.js``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from hpcgpu.errors import OptionError
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.posix.printable import printable
from hpcgpu.widget.busy_kernel_inbox import opened
from hpcgpu.widget.replace_saved_picture import SavedPicture
from hpcgpu.widget.snapshot_feed import Feed

_STATIC = Path(__file__).parent / "static"
#: The requests that a page may send, and their arguments.
_REQUESTS: dict[str, frozenset[str]] = {
    "scale": frozenset({"jobs", "gpus", "worker_group"}),
    "adapt": frozenset(
        {"minimum_jobs", "maximum_jobs", "minimum_gpus", "maximum_gpus", "idle_timeout", "worker_group"}
    ),
    "stop": frozenset(),
    "detach": frozenset(),
    "log": frozenset({"job"}),
}


def module() -> str:
    """Return the single module that anywidget needs: panel.js, and notebook.js without the import of panel.js."""
    first, _, rest = (_STATIC / "notebook.js").read_text().partition("\n")
    assert first.startswith("import ")
    return f"{(_STATIC / 'panel.js').read_text()}\n{rest}"


class ClusterWidget(anywidget.AnyWidget):
    """A cluster that is shown live.

    Parameters
    ----------
    source : callable
        Takes a snapshot; called in a thread.
    is_final : callable
        Whether this program no longer follows the cluster.
    control : object
        Has a method for each request of `_REQUESTS`. A call may block, and runs in its own thread.
    dashboard : callable, optional
        Returns the link to the dashboard with its token, which is shown and not kept. Default: that of the snapshot.
    """

    _esm = module()
    _css = (_STATIC / "widget.css").read_text()
    #: `Snapshot`; empty before the first.
    snapshot = traitlets.Dict().tag(sync=True)
    #: Why there is no new snapshot, or that no further one comes.
    problem = traitlets.Unicode().tag(sync=True)
    #: By this name the Jupyter server passes messages on while a cell runs; empty if it cannot.
    inbox = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        source: Callable[[], Snapshot],
        is_final: Callable[[], bool],
        control: object,
        dashboard: Callable[[], str] | None = None,
    ) -> None:
        self._inbox = opened(lambda message: self._received(None, message, []))
        super().__init__(inbox=self._inbox.name if self._inbox is not None else "")
        self._dashboard = dashboard
        self.feed = Feed(source, is_final, self)
        self._control = control
        self._views = 0
        #: A page sends a request a second time, by the other way, if it is unknown whether the first one has come.
        self._begun = set[str]()
        self.saved_picture: SavedPicture | None = None
        self.on_msg(self._received)

    # Methods that the feed calls, in its thread

    def draw(self, snapshot: Snapshot) -> None:
        """Show a new snapshot."""
        shown = dict(snapshot.as_json())
        if self._dashboard is not None and snapshot.dashboard:
            shown["dashboard"] = self._dashboard()
        self.snapshot = shown
        self.problem = ""
        if self.saved_picture is not None:
            self.saved_picture.update(snapshot)

    def show_problem(self, problem: str) -> None:
        """Show why there is no new snapshot."""
        self.problem = printable(problem, None, lines=True)

    def finish(self) -> None:
        """Show the last snapshot; if the cluster continues, show that it is the last one."""
        if self.saved_picture is not None and self.feed.latest is not None:
            self.saved_picture.update(self.feed.latest, last=True)
        if self.snapshot.get("state") not in ("closed", "ended"):
            self.problem = "This program no longer follows the cluster. This view is no longer updated."

    # Messages from a page

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
        elif what in _REQUESTS and content.get("id") not in self._begun:
            self._begun.add(content.get("id"))
            self.send({"id": content.get("id"), "begun": True})
            threading.Thread(target=self._answer, args=(content,), name=f"hpcgpu-widget-{what}", daemon=True).start()

    def _answer(self, content: dict[str, Any]) -> None:
        what, body = content["do"], content.get("body")
        answer: dict[str, Any] = {"id": content.get("id")}
        try:
            if not isinstance(body, dict) or not body.keys() <= _REQUESTS[what]:
                raise OptionError(f"the widget cannot {what} with {body!r}")
            answer["result"] = getattr(self._control, what)(**body)
        except Exception as error:  # the user sees any error
            answer["error"] = printable(str(error) or type(error).__name__, None, lines=True)
        self.feed.start()  # also for a cluster that this program has left: the page shows its present state
        self.send(answer)

    def close(self) -> None:
        """Stop showing the cluster."""
        self.feed.stop()
        if self._inbox is not None:
            self._inbox.close()
        super().close()
