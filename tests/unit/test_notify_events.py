"""What a user who does not watch receives of a cluster, when, and by whom it is delivered."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.notify import Callbacks, Events, Notice, Notices, Notifier, Seen
from hpcgpu.scaling.walltime_margin import ends_soon
from hpcgpu.store import saved_options
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import wait_until

HOUR = 3600.0
RUNS = Seen(workers=0, wanted=2, scheduler="7", start=0.0, end=4 * HOUR)


def kinds(events: Events, seen: Seen, now: float = 0.0) -> list[str]:
    return [event for event, _ in events.due(seen, now=now)]


def test_ready_is_reported_once_when_all_requested_workers_are_connected() -> None:
    events = Events("demo", 900)
    assert kinds(events, replace(RUNS, wanted=0)) == [], "nothing is requested yet"
    assert kinds(events, replace(RUNS, workers=1)) == []
    assert events.due(replace(RUNS, workers=2), now=0) == [("ready", "cluster demo is ready: 2 workers connected")]
    assert kinds(events, replace(RUNS, workers=2)) == []
    assert kinds(events, replace(RUNS, workers=1)) == kinds(events, replace(RUNS, workers=4, wanted=4)) == []


def test_a_pause_is_reported_again_only_after_it_was_over_or_for_another_reason() -> None:
    events, paused = Events("demo", 900), replace(RUNS, paused={"default": "3 failures", "big": ""})
    assert events.due(paused, now=0) == [("paused", "cluster demo gets no more jobs: 3 failures")]
    assert kinds(events, paused) == []
    assert kinds(events, replace(paused, paused={"default": "no quota", "big": ""})) == ["paused"]
    assert kinds(events, RUNS) == []
    both = events.due(replace(paused, paused={"default": "no quota", "big": "refused"}), now=0)
    assert [message for _, message in both] == [
        "cluster demo gets no more jobs: no quota",
        "worker group big of cluster demo gets no more jobs: refused",
    ]


def test_the_end_is_reported_once_and_in_time() -> None:
    events = Events("demo", 900)
    assert kinds(events, RUNS, now=4 * HOUR - 901) == []
    due = events.due(RUNS, now=4 * HOUR - 900)
    assert due == [
        ("ending", "the walltime of the scheduler job 7 ends in 15 min, and cluster demo with it: save your results")
    ]
    assert kinds(events, RUNS, now=4 * HOUR - 1) == []
    assert kinds(events, replace(RUNS, end=9 * HOUR), now=9 * HOUR - 1) == [], "somebody has extended it: still once"


@pytest.mark.parametrize(
    ("seen", "now", "due"),
    [
        (replace(RUNS, end=None), 9 * HOUR, False),  # a queue that does not report the end
        (replace(RUNS, scheduler=""), 4 * HOUR, False),  # it waits
        (RUNS, 5 * HOUR, True),  # the clocks differ: better late than never
        (replace(RUNS, start=None), 4 * HOUR - 900, True),
        (replace(RUNS, start=9 * HOUR), 4 * HOUR - 900, False),  # an end before the start: a queue that lies
        (replace(RUNS, start=9 * HOUR), 4 * HOUR, True),
    ],
)
def test_a_queue_that_reports_odd_things_of_the_end(seen: Seen, now: float, due: bool) -> None:
    assert ("ending" in kinds(Events("demo", 900), seen, now)) is due


def test_a_short_walltime_ends_soon_in_its_second_half() -> None:
    assert not ends_soon(0.0, 600.0, 900.0, now=299.0)
    assert ends_soon(0.0, 600.0, 900.0, now=300.0)


# The command


def deliver(notify: Any, message: str = "m", *, limit: float = 30.0, count: int = 1) -> list[str]:
    """Return the warnings of a notifier that delivers a notice."""
    warned: list[str] = []
    notifier = Notifier(notify, warned.append, limit)
    for _ in range(count):
        notifier.send(Notice(event="ready", cluster="demo", message=message, time=0.0))
    notifier.finish(120.0)
    return warned


ATTACK = 'it\'s "$(touch hacked)" `touch hacked`; touch hacked\n\x00\x1b[2J \udce4 ünï; rm *'


def test_a_command_gets_the_event_as_text_that_no_shell_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = (
        'printf "%s|%s|%s" "$HPCGPU_EVENT" "$HPCGPU_CLUSTER" "$HPCGPU_MESSAGE" > told; cat > stdin; : $HPCGPU_MESSAGE'
    )
    assert deliver(command, ATTACK) == []
    told, stdin = (tmp_path / "told").read_text(), (tmp_path / "stdin").read_text()
    assert told.startswith('ready|demo|it\'s "$(touch hacked)" `touch hacked`') and "\x1b" not in told
    assert stdin.strip() == told.split("|", 2)[2].strip()
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 3", "ended with exit code 3"),
        ("echo no such user >&2; exit 1", "ended with exit code 1: no such user"),
        ("nosuchprogram", "ended with exit code 127"),
        ("head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 1", "ended with exit code 1: x"),
        ("exec <&-; exec >&- 2>&-; exit 2", "ended with exit code 2"),
    ],
)
def test_a_command_that_fails_is_a_warning_of_bounded_length(command: str, words: str) -> None:
    (warning,) = deliver(command, "m" * 100_000)
    assert warning.startswith("notify for the event 'ready' ") and words in warning
    assert len(warning) < 1000


@pytest.mark.parametrize("command", ["sleep {}", "yes >&2; : {}", "sleep {} & exit 0", "trap '' TERM; sleep {}"])
def test_a_command_that_hangs_is_killed_with_all_that_it_started(command: str, tmp_path: Path) -> None:
    mark = f"{time.time_ns() % 10**9 + 10**9}"
    warned = deliver(command.format(mark), limit=0.5)
    assert len(warned) == ("& exit 0" not in command), warned
    wait_until(
        lambda: not any(mark in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])), "it is dead"
    )


def test_what_a_command_started_in_the_background_may_finish(tmp_path: Path) -> None:
    assert deliver(f"(sleep 0.3; echo sent > {tmp_path}/sent) & exit 0") == []
    assert (tmp_path / "sent").exists()


def test_the_end_of_a_program_waits_for_a_command_for_some_seconds_only() -> None:
    warned: list[str] = []
    notifier = Notifier("sleep 1000", warned.append)
    notifier.send(Notice(event="ended", cluster="demo", message="", time=0.0))
    notifier.finish(0.2)
    assert "was killed" in warned[0]


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_what_happens_when_no_thread_can_start_any_more_is_reported_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert deliver(f"echo $HPCGPU_EVENT >> {tmp_path}/told", count=2) == []
    assert (tmp_path / "told").read_text() == "ready\nready\n"


def test_a_command_that_hangs_then_has_only_the_seconds_that_the_end_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    warned: list[str] = []
    notifier = Notifier("sleep 1000", warned.append)
    for _ in range(3):
        notifier.send(Notice(event="ended", cluster="demo", message="", time=0.0))
    notifier.finish(0.2)
    assert len(warned) == 1 and "was killed" in warned[0]


def test_of_too_many_notices_the_newest_are_delivered() -> None:
    delivered: list[str] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(notice: Notice) -> None:
        begun.set()
        assert may_go_on.wait(60)
        delivered.append(notice.message)

    notifier = Notifier(slow, delivered.append)
    for number in range(200):
        notifier.send(Notice(event="job_lost", cluster="demo", message=str(number), time=0.0))
        assert begun.wait(60)
    may_go_on.set()
    notifier.finish(60)
    assert delivered == ["0", *map(str, range(100, 200))]


def test_a_notice_after_all_others_were_delivered_is_delivered_too() -> None:
    delivered: list[str] = []
    notifier = Notifier(lambda notice: delivered.append(notice.message), pytest.fail)
    for message in ("first", "much later"):
        notifier.send(Notice(event="ready", cluster="demo", message=message, time=0.0))
        notifier.finish(120.0)
    assert delivered == ["first", "much later"]


def test_a_function_that_raises_is_a_warning_and_others_are_still_delivered() -> None:
    told: list[Notice] = []

    def function(notice: Notice) -> None:
        told.append(notice)
        raise ValueError("no\x1b[2J")

    warned = deliver(function, count=3)
    assert len(told) == len(warned) == 3
    assert "\x1b" not in warned[0] and "ValueError" in warned[0]
    assert told[0] == Notice(event="ready", cluster="demo", message="m", time=0.0)


def test_a_function_that_hangs_holds_up_nobody() -> None:
    gate, began = threading.Event(), threading.Event()
    notifier = Notifier(lambda notice: (began.set(), gate.wait(60)), pytest.fail)
    for _ in range(1000):
        notifier.send(Notice(event="job_lost", cluster="demo", message="m", time=0.0))
    assert began.wait(60)
    notifier.finish(0.01)
    gate.set()


# The option


def test_a_command_is_saved_with_the_cluster_and_a_function_is_not_an_option(tmp_path: Path) -> None:
    options = resolve("slurm", {"notify": "mail me", "ending_notice": "10m", "name": "demo"})
    directory = ClusterDirectory(tmp_path)
    saved_options.write(directory, options)
    assert saved_options.read(directory).options == options
    with pytest.raises(OptionError, match="only the cluster classes take a function"):
        resolve("slurm", {"notify": print})
    with pytest.raises(OptionError, match="notify is empty"):
        resolve("slurm", {"notify": " "})


def test_functions_are_taken_out_of_the_options() -> None:
    options: dict[str, Any] = {"notify": print, "jobs": 1}
    callbacks = Callbacks.from_options(options, len)
    assert (callbacks.notify, callbacks.on_ending, options) == (print, len, {"jobs": 1})
    with pytest.raises(OptionError, match="on_ending must be a function, not 'save'"):
        Callbacks.from_options({}, "save")


def test_the_first_report_is_recorded_for_all_managers(tmp_path: Path) -> None:
    directory = ClusterDirectory(tmp_path)
    assert [directory.claim_notice("ready") for _ in range(2)] == [True, False]
    assert directory.claim_notice("ended")
    assert ClusterDirectory(tmp_path / "gone").claim_notice("ended"), "twice is better than never"


@pytest.mark.parametrize(("token", "marked"), [("mine", True), ("another", False)])
def test_a_manager_that_lost_the_name_reports_it_and_leaves_no_mark_in_the_later_cluster(
    token: str, marked: bool, tmp_path: Path
) -> None:
    directory, told = ClusterDirectory(tmp_path), list[Notice]()
    about = {"name": "demo", "token": token, "created": 1, "format": FORMAT}
    directory.write("cluster.json", json.dumps(about))
    state: Any = SimpleNamespace(
        name="demo",
        now=0.0,
        messages=SimpleNamespace(warn=pytest.fail),
        dispatcher=SimpleNamespace(directory=directory, token="mine"),
    )
    notices = Notices(state, resolve("slurm", {"name": "demo"}).cluster, Callbacks(told.append), None)
    notices.notify("ended", "m")
    notices.notifier.finish(60.0)
    assert [notice.event for notice in told] == ["ended"]
    assert (tmp_path / "notified-ended").exists() == marked
