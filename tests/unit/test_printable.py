"""What others wrote is shown as text and as nothing else."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.display.progress import Progress
from hpcgpu.display.text_columns import columns
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.jobs.submit_and_cancel import Ending
from hpcgpu.manager.closing import Closing
from hpcgpu.posix.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Résumé of job 7: [/red] 漢字 $HOME", "Résumé of job 7: [/red] 漢字 $HOME"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m\x00\x7f", r"\x9b31m\x00\x7f"),
        ("job \u202egnp.exe\u2066", r"job \u202egnp.exe\u2066"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        ("a\nb\tc\rd\u2028e", r"a\nb\tc\rd\u2028e"),
        ("\udc80\U000e0041", r"\udc80\U000e0041"),
        ("", ""),
    ],
)
def test_what_could_deceive_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_and_tabs_stay_where_lines_are_wanted() -> None:
    assert printable("a\r\n\tb\rc\x1b[1m\n", lines=True) == "a\n\tb\\rc\\x1b[1m\n"


def test_the_middle_of_a_long_text_is_left_out() -> None:
    shown = printable("begin" + "x" * 10_000_000 + "end")
    assert (
        shown.startswith("beginx")
        and shown.endswith("xend")
        and " … (9998048 characters left out) … " in shown
        and len(shown) <= 2000
    )
    assert len(printable("\x1b" * 1500)) <= 2000 and len(printable("\U000e0041" * 10**6, 100)) <= 100
    assert printable("x" * 10_000, None) == "x" * 10_000


def test_whatever_it_is_given_it_returns_printable_text_and_leaves_that_alone() -> None:
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(chr(generator.randrange(sys.maxunicode + 1)) for _ in range(generator.randrange(3000)))
        shown = printable(text)
        assert shown.isprintable() and len(shown) <= 2000 and printable(shown) == shown
        shown.encode("utf-8")


def test_what_a_queue_reports_of_a_job_is_printable_whoever_wrote_the_batch_system() -> None:
    status = JobStatus(job_id="1", state=JobState.PENDING, name="a\x1b", reason="r\x00" * 10_000, node="n\n")
    for shown in (status, replace(status, state=JobState.RUNNING)):
        assert (
            (shown.name, shown.node) == (r"a\x1b", r"n\n") and shown.reason.isprintable() and len(shown.reason) <= 2000
        )


def test_tables_read_no_markup() -> None:
    shown = columns(("[red]id[/red]", "\x1b[2J"), [("[/red]", "[link=x]\x07"), ("a\nb", "c")])
    assert "[red]id[/red]" in shown and "[/red]" in shown and r"[link=x]\x07" in shown and r"\x1b[2J" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_progress_neither_reads_markup_nor_obeys_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=False) as progress:
        progress.update("waiting [/red]", "\x1b[2J\rgone")
    assert r"hpcgpu: waiting [/red]: \x1b[2J\rgone" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    ("left", "last"),
    [("", "closing: done, after 0 s"), ("jobs 12 13", "closing: not done, jobs 12 13 left, after 0 s")],
)
def test_the_line_that_stays_in_a_cell_reports_what_is_left(
    left: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("hpcgpu.display.progress._cell", lambda: SimpleNamespace(show=lines.append))
    with Progress(quiet=False, clock=lambda: 5.0) as progress:
        progress.update("closing", "jobs 12 13")
        progress.left = left
    assert lines == ["closing: jobs 12 13", last]


@pytest.mark.parametrize(("ends", "words"), [(True, ": done, after"), (False, ": not done, jobs 12 13 left, after")])
def test_the_end_of_a_cluster_is_not_called_done_while_jobs_are_left(
    ends: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("hpcgpu.display.progress._cell", lambda: SimpleNamespace(show=lines.append))
    jobs = ["12", "13"]
    registry = SimpleNamespace(jobs={}, observe=lambda now: None)

    async def poll(left: list[str]) -> None:
        jobs.clear() if ends else setattr(closing, "problem", "the queue does not answer")

    state: Any = SimpleNamespace(
        name="demo",
        now=0.0,
        poll=poll,
        registry=registry,
        dispatcher=SimpleNamespace(
            left=lambda: list(jobs), ending=Ending.REQUESTED, to_look_up=lambda: [], monitor=SimpleNamespace(views={})
        ),
    )
    reconciler: Any = SimpleNamespace(state=state)
    closing = Closing(reconciler, quiet=False)
    asyncio.run(closing.wait())
    assert words in lines[-1] and closing.left == jobs


def test_the_end_of_a_log_is_bounded_and_what_is_before_it_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with open(log, "wb") as file:
        file.truncate(2**36)  # a hole: nobody can read all of it
        file.seek(0, 2)
        file.write(b"\nlast but one \xff\x1b[2J\n" + b"x" * 100_000 + b"\nlast\n")
    job = SchedulerJob.__new__(SchedulerJob)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchedulerJob, "log", log)
        tail = job.log_tail()
    assert tail.endswith("\nlast") and "characters left out" in tail and len(tail) <= 8000
    assert all(line.isprintable() for line in tail.split("\n"))
