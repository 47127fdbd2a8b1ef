"""The picture of a cluster, the thread that takes snapshots, and what a page may ask of a widget."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import drawing
import pytest
from distributed.core import Status
from distributed.utils import sync
from tornado.ioloop import IOLoop

from hpcgpu.cluster import notebook
from hpcgpu.cluster.notebook import show, show_live, widget_of
from hpcgpu.errors import OptionError
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.widget.replace_saved_picture import SavedPicture
from hpcgpu.widget.snapshot_as_html import picture
from hpcgpu.widget.snapshot_feed import Feed
from tests.conftest import wait_until

MARKUP = "<script>alert(1)</script>"


class Screen:
    """Notes what it is to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.finished = threading.Event()

    def draw(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot.state)

    def show_problem(self, problem: str) -> None:
        self.shown.append(problem)

    def finish(self) -> None:
        self.finished.set()


def test_the_picture_shows_the_cluster_and_why_jobs_wait() -> None:
    page = picture(drawing.snapshot(warnings=["job 4174 failed"], problem="the queue does not answer"))
    for text in (
        "<b>flights</b>: running",
        "Workers: 4; GPUs: 4; Time left: 1 h 47 min; GPU hours: 1.02",
        "http://n00:8787/status",
        "<td>waits behind jobs with a higher priority [Priority]</td>",
        "default: 4 jobs, adapts from 0 to 8; 240 tasks wait",
        "4 GPUs, 1 idle, mean utilisation 56 %",
        "idle for 4 min",
        "<b>job 4174 failed</b>",
        "<b>the queue does not answer</b>",
    ):
        assert text in page, text


def test_the_picture_has_text_of_others_as_text() -> None:
    job = drawing.job(1, name=MARKUP, reason=MARKUP, node=MARKUP)
    device = dataclasses.replace(drawing.gpu(1, 0), worker=MARKUP, node=MARKUP)
    page = picture(
        drawing.snapshot(
            name=MARKUP,
            problem=MARKUP,
            warnings=[MARKUP],
            jobs=[job],
            devices=[device],
            groups=[drawing.group(name=MARKUP, reason=MARKUP, paused=MARKUP)],
        )
    )
    assert "<script" not in page and page.count("&lt;script&gt;") == 12


def test_the_picture_of_a_thousand_jobs_is_short() -> None:
    page = picture(drawing.thousand())
    assert "1000 jobs: 800 running; 200 pending: Priority (200)" in page
    assert "1,600 GPUs, 178 idle" in page and len(page) < 6000


def test_snapshots_are_taken_until_the_cluster_has_ended_and_the_last_one_shows_that() -> None:
    screen, state = Screen(), "running"
    feed = Feed(lambda: drawing.snapshot(state=state), lambda: state == "closed", screen, interval=0.01)
    feed.start()
    wait_until(lambda: len(screen.shown) > 2, "snapshots are taken")
    state = "closed"
    assert screen.finished.wait(150)
    assert screen.shown[-1] == "closed" and set(screen.shown[:-1]) <= {"running", "closed"}


def test_a_snapshot_that_fails_is_reported_and_the_next_one_is_shown() -> None:
    screen, answers = Screen(), iter([OSError("no such file"), drawing.snapshot()])

    def source() -> Snapshot:
        answer = next(answers, drawing.snapshot())
        if isinstance(answer, Exception):
            raise answer
        return answer

    feed = Feed(source, lambda: False, screen, interval=0.01)
    feed.start()
    wait_until(lambda: "running" in screen.shown, "the next one is shown")
    feed.stop()
    assert screen.shown[0] == "The cluster cannot be queried: no such file"


def test_no_snapshot_is_taken_while_nobody_watches() -> None:
    screen = Screen()
    feed = Feed(drawing.snapshot, lambda: False, screen, interval=0.01)
    feed.start()
    feed.start()  # a second view
    assert feed.wait_first(150) is not None
    feed.stop()
    threads = [thread for thread in threading.enumerate() if thread.name == "hpcgpu-widget"]
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "the thread ends")
    taken = len(screen.shown)
    feed.start()
    wait_until(lambda: len(screen.shown) > taken, "snapshots are taken again")
    feed.stop()
    assert not screen.finished.is_set()


def test_importing_hpcgpu_and_showing_a_picture_load_no_widget_library() -> None:
    code = "import sys, hpcgpu; hpcgpu.LocalGPUCluster; import hpcgpu.cluster.notebook"
    code += "; import hpcgpu.widget.snapshot_as_html"
    code += "; print(*sorted({'anywidget', 'ipywidgets', 'traitlets', 'IPython'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the notebook is to show, by MIME type."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(notebook, "publish", lambda data, widget, update=False: seen.append(data))
    return seen


def test_outside_of_a_kernel_a_cluster_shows_a_picture_and_text(published: list[dict[str, Any]]) -> None:
    class Cluster:
        def _repr_html_(self) -> str:
            return picture(drawing.snapshot())

        def __repr__(self) -> str:
            return "a cluster"

    assert widget_of(Cluster()) is None  # type: ignore[arg-type]
    show(Cluster(), None)  # type: ignore[arg-type]
    [shown] = published
    assert shown == {"text/plain": "a cluster", "text/html": picture(drawing.snapshot())}


def test_where_no_page_reports_that_somebody_watches_pictures_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcgpu.widget.snapshot_feed._ALONE", -1.0)
    screen = Screen()
    feed = Feed(drawing.snapshot, lambda: False, screen, interval=0.01)
    feed.start()
    wait_until(lambda: screen.shown, "the first picture")
    assert feed._thread is not None
    feed._thread.join(0.5)  # fifty intervals
    assert len(screen.shown) == 1
    feed.stop()


def test_in_a_kernel_a_cluster_shows_the_widget_and_the_picture_for_where_none_runs(
    answers: tuple[Any, Control, list[Any]], published: list[dict[str, Any]]
) -> None:
    widget, *_ = answers
    model = widget.model_id
    show(SimpleNamespace(asynchronous=False), widget)  # type: ignore[arg-type]
    widget.close()
    [shown] = published
    assert shown["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert shown["text/html"] == picture(drawing.snapshot()) and "The last known state, of 20" in shown["text/html"]
    about = shown["application/vnd.hpcgpu.cluster+json"]
    assert about["name"] == "flights" and about["jobs"] and about["model_id"] == model


def test_a_first_picture_that_comes_late_comes_into_the_file_too(
    answers: tuple[Any, Control, list[Any]], published: list[dict[str, Any]]
) -> None:
    widget, *_ = answers
    notebook.keep_picture("flights", widget)
    widget.draw(drawing.snapshot())
    assert published == [], "no output shows it"
    show_live("flights", widget, None)
    widget.draw(drawing.snapshot())
    widget.draw(drawing.snapshot())
    widget.close()
    assert ["text/html" in shown for shown in published] == [False, True]


def test_the_picture_in_the_file_is_replaced_when_the_state_changes_and_at_the_end() -> None:
    replaced: list[Snapshot] = []
    kept = SavedPicture(replaced.append)
    kept.update(drawing.snapshot(state="waiting"))
    assert replaced == [], "no output shows it"
    first = drawing.snapshot(state="waiting")
    kept.shown(first)
    kept.update(dataclasses.replace(first, time=first.time + 2))
    assert replaced == []
    running = dataclasses.replace(first, state="running")
    kept.update(running)
    assert [one.state for one in replaced] == ["running"]
    later = dataclasses.replace(running, workers=running.workers + 1, time=running.time + 20)
    kept.update(later)
    assert len(replaced) == 1, "each changes the file"
    kept.update(dataclasses.replace(later, state="unreachable", time=later.time + 600))
    assert len(replaced) == 1, "the last known state is the one before"
    kept.update(dataclasses.replace(later, time=later.time + 600))
    assert len(replaced) == 2
    kept.update(later, last=True)
    assert len(replaced) == 2, "the last one is the same"
    kept.update(dataclasses.replace(later, problem="it was detached"), last=True)
    assert len(replaced) == 3
    kept.shown(dataclasses.replace(first, jobs=[]))
    kept.update(first)
    assert len(replaced) == 4, "its jobs tell the cluster from a later one of its name"


class Control:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def scale(self, **size: Any) -> None:
        self.asked.append(("scale", size))

    def adapt(self, **limits: Any) -> None:
        raise OptionError("adapt: the maximum must be positive, and not '\x1b[31m0'")

    def log(self, job: str) -> str:
        return f"the log of {job}"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Control, list[Any]]]:
    """A widget, the control that it has, and what it sends to its page."""
    pytest.importorskip("anywidget", reason="the extra `jupyter` is not installed")
    from hpcgpu.widget.notebook_widget import ClusterWidget

    control, sent = Control(), list[Any]()
    widget = ClusterWidget(drawing.snapshot, lambda: False, control)  # type: ignore[arg-type]
    monkeypatch.setattr(widget, "send", sent.append)
    yield widget, control, sent
    widget.feed.stop()


def test_the_stop_button_of_an_ended_cluster_ends_no_later_cluster_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[object] = []
    monkeypatch.setattr(notebook, "stop_all", stopped.append)
    directory = SimpleNamespace(closed=False)
    cluster: Any = SimpleNamespace(
        asynchronous=False,
        close=lambda: None,
        _end=None,
        directory=directory,
        same_directory=False,
        status=Status.closed,
    )
    notebook._Control(cluster).stop()
    assert stopped == []
    cluster.same_directory = True
    notebook._Control(cluster).stop()
    assert stopped == [directory]


def test_the_stop_button_acts_while_a_cell_blocks_the_event_loop_of_an_asynchronous_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(notebook, "FIRST", 0.1)
    monkeypatch.setattr(notebook, "stop_all", lambda _: stopped.set())

    async def cell() -> bool:
        cluster: Any = SimpleNamespace(
            asynchronous=False,  # as seen by another thread than that of its event loop
            loop=IOLoop.current(),
            status=Status.running,
            directory=SimpleNamespace(closed=False),
            same_directory=True,
        )
        cluster.close = cluster._end = lambda: sync(cluster.loop, asyncio.sleep, 0)
        threading.Thread(target=notebook._Control(cluster).stop).start()
        return stopped.wait(150)

    assert asyncio.run(cell())


def test_a_view_that_is_closed_stops_no_other_view(answers: tuple[Any, Control, list[Any]]) -> None:
    widget, *_ = answers
    for what in ("shown", "shown", "hidden"):
        widget._received(None, {"do": what}, [])
    assert not widget.feed._off.is_set(), "the other view still shows the cluster"
    widget._received(None, {"do": "hidden"}, [])
    assert widget.feed._off.is_set()


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ({"do": "scale", "body": {"jobs": 2, "worker_group": "default"}}, {"result": None}),
        ({"do": "log", "body": {"job": "flights-1"}}, {"result": "the log of flights-1"}),
        ({"do": "adapt", "body": {}}, {"error": r"adapt: the maximum must be positive, and not '\x1b[31m0'"}),
        ({"do": "scale", "body": {"directory": "/"}}, {"error": "the widget cannot scale with {'directory': '/'}"}),
        ({"do": "scale", "body": [1]}, {"error": "the widget cannot scale with [1]"}),
        ({"do": "stop", "body": {}}, {"error": "'Control' object has no attribute 'stop'"}),
    ],
)
def test_a_page_gets_the_answer_to_what_it_asks_for_or_the_error_as_text(
    answers: tuple[Any, Control, list[Any]], request_: Any, answer: Any
) -> None:
    widget, _, sent = answers
    widget._received(widget, {"id": "a-1", **request_}, [])
    wait_until(lambda: len(sent) > 1, "the answer comes")
    assert sent == [{"id": "a-1", "begun": True}, {"id": "a-1", **answer}]


def test_a_request_that_comes_by_two_ways_is_done_once(answers: tuple[Any, Control, list[Any]]) -> None:
    widget, control, sent = answers
    for number in ("a-1", "a-1", "a-2"):
        widget._received(widget, {"id": number, "do": "scale", "body": {"jobs": 2}}, [])
    wait_until(lambda: len(sent) == 4, "both are answered")
    assert len(control.asked) == 2


@pytest.mark.parametrize("content", [None, [], {"do": "close"}, {"do": "__init__"}, {"id": 1}])
def test_what_a_page_may_not_ask_for_is_nothing(answers: tuple[Any, Control, list[Any]], content: Any) -> None:
    widget, control, sent = answers
    widget._received(widget, content, [])
    assert sent == control.asked == []


def test_the_widget_shows_the_snapshot_that_all_displays_have(answers: tuple[Any, Control, list[Any]]) -> None:
    widget, *_ = answers
    widget.draw(drawing.snapshot())
    assert widget.snapshot == json.loads(json.dumps(drawing.snapshot().as_json()))
    assert "export default { render }" in widget._esm and "./panel.js" not in widget._esm
