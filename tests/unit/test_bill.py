"""The bill of a cluster: nothing is made up, and everything that was paid is accounted for."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.cli.json_types import ReportJSON
from hpcgpu.configuration.resolve import resolve
from hpcgpu.report import cluster_report as report_module
from hpcgpu.report.advice import advice
from hpcgpu.report.bill import JobBill, bill, without_scheduler
from hpcgpu.report.cluster_report import Report
from hpcgpu.store import saved_options
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End, Submit
from hpcgpu.store.usage_file import FILE, JobUsage, Quantity, line
from tests.helpers import keeps_to

HOUR = 3600.0
GB = 2**30


def submit(**changes: Any) -> Submit:
    return dataclasses.replace(Submit("demo-0", "worker", time=0.0, job_id="7"), **changes)


def used(**changes: Any) -> JobUsage:
    return dataclasses.replace(JobUsage(id="7", began=HOUR, last=5 * HOUR, firsts=[2 * HOUR], busy=2 * HOUR), **changes)


def status(state: JobState, **changes: Any) -> JobStatus:
    return JobStatus(job_id="7", name="demo-0", state=state, **changes)


ENDED = status(JobState.COMPLETED, start=HOUR, end=5 * HOUR)


def parts(job: JobBill) -> tuple[float | None, ...]:
    return job.gpu_hours, job.before, job.busy, job.after


def test_what_was_paid_is_before_the_first_task_with_tasks_or_idle_later() -> None:
    assert parts(bill(submit(), used(), ENDED, 1, now=9 * HOUR)) == (4, 1, 2, 1)
    two = bill(submit(), used(), ENDED, 2, now=9 * HOUR)
    assert parts(two) == (8, 5, 2, 1), "the second GPU never had a task"
    both = bill(submit(), used(firsts=[2 * HOUR, 3 * HOUR], busy=4 * HOUR), ENDED, 2, now=9 * HOUR)
    assert parts(both) == (8, 3, 4, 1)


def test_what_a_job_costs_while_it_waits_for_the_next_scheduler_is_a_part_of_its_own() -> None:
    later = bill(submit(), used(busy=HOUR), ENDED, 1, now=9 * HOUR, gaps=[(3 * HOUR, 4 * HOUR), (5 * HOUR, 6 * HOUR)])
    assert (*parts(later), later.waiting) == (4, 1, 1, 1, 1)
    early = bill(submit(), used(busy=HOUR), ENDED, 2, now=9 * HOUR, gaps=[(0.0, 1.5 * HOUR)])
    assert (*parts(early), early.waiting) == (8, 0.5 + 3.5, 1, 2, 1), "the second GPU never had a task"
    silent = bill(submit(), None, ENDED, 2, now=9 * HOUR, gaps=[(3 * HOUR, 9 * HOUR)])
    assert (*parts(silent), silent.waiting) == (8, None, None, None, 4)
    assert bill(submit(), used(), ENDED, 1, now=9 * HOUR).waiting == 0
    assert bill(submit(kind="scheduler"), None, ENDED, 1, now=9 * HOUR, gaps=[(2 * HOUR, 3 * HOUR)]).waiting is None


def test_a_cluster_has_no_scheduler_from_the_end_of_one_to_the_start_of_the_next_that_serves() -> None:
    def scheduler(number: int, state: JobState, start: float | None = None, end: float | None = None) -> JobBill:
        name = submit(name=f"demo-scheduler{number}", kind="scheduler", job_id=str(number))
        return bill(name, None, dataclasses.replace(status(state), start=start, end=end), 1, now=9 * HOUR)

    first = scheduler(1, JobState.TIMEOUT, 60.0, 2 * HOUR)
    never = scheduler(2, JobState.FAILED, 3 * HOUR, 3.1 * HOUR)
    serves = scheduler(3, JobState.RUNNING, 4 * HOUR)
    assert without_scheduler([first], {}, now=9 * HOUR) == [(2 * HOUR, 9 * HOUR)]
    assert without_scheduler([first, scheduler(2, JobState.PENDING)], {}, now=9 * HOUR) == [(2 * HOUR, 9 * HOUR)]
    assert without_scheduler([first, never, serves], {"3": None}, now=9 * HOUR) == [(2 * HOUR, 4 * HOUR)]
    assert without_scheduler([first, serves], {"3": 5 * HOUR}, now=9 * HOUR) == [(2 * HOUR, 5 * HOUR)]
    assert without_scheduler([first, never, serves], {"1": None}, now=9 * HOUR) == [(2 * HOUR, 9 * HOUR)], (
        "it starts yet"
    )
    assert without_scheduler([first], {}, now=9 * HOUR, closed=2 * HOUR - 1) == [], "it was closed"
    early = scheduler(2, JobState.RUNNING, HOUR)
    assert without_scheduler([first, early], {"2": None}, now=9 * HOUR) == [], "it was there before the first one ended"
    assert without_scheduler([], {}, now=9 * HOUR) == []
    cancelled = scheduler(1, JobState.CANCELLED, 60.0, 2 * HOUR)
    assert without_scheduler([cancelled], {}, now=9 * HOUR) == [], "no other one follows"
    assert without_scheduler([cancelled, serves], {"3": None}, now=9 * HOUR) == [(2 * HOUR, 4 * HOUR)], "one followed"


@pytest.mark.parametrize("firsts", [[], [0.0], [9 * HOUR], [2 * HOUR] * 9])
@pytest.mark.parametrize("busy", [0.0, 99 * HOUR])
def test_whatever_was_sampled_the_parts_are_never_negative_and_never_more_than_was_paid(
    firsts: list[float], busy: float
) -> None:
    paid, *rest = parts(bill(submit(), used(firsts=firsts, busy=busy), ENDED, 2, now=9 * HOUR))
    assert all(part is not None and part >= 0 for part in rest) and sum(part or 0 for part in rest) == paid == 8


def test_what_the_queue_reported_when_the_job_ended_counts_more_than_what_was_reported_of_it() -> None:
    how = End(state="timeout", start=HOUR, end=4 * HOUR)
    job = bill(submit(ended=True, how=how), used(), None, 1, now=9 * HOUR)
    assert (job.state, job.reason, job.ran, job.waited) == (
        "timeout",
        "it reached the end of its walltime",
        3 * HOUR,
        HOUR,
    )
    assert not job.ended_later


def test_the_job_itself_records_when_it_began_after_the_queue_has_forgotten_it() -> None:
    job = bill(submit(ended=True), used(), None, 1, now=99 * HOUR)
    assert (job.started, job.ended, job.ended_later, job.gpu_hours) == (HOUR, 5 * HOUR, True, 4)
    assert (job.state, job.reason) == ("ended", "the queue has forgotten how it ended")


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_that_the_queue_has_run_again_is_billed_from_its_first_run(ended: bool) -> None:
    again = (
        status(JobState.COMPLETED, start=3 * HOUR, end=6 * HOUR) if ended else status(JobState.RUNNING, start=3 * HOUR)
    )
    job = bill(submit(), used(), again, 1, now=6 * HOUR)
    assert (job.started, job.ran, job.gpu_hours) == (HOUR, 5 * HOUR, 5), "its first workers were heard of at one hour"
    how = End(state="completed", start=3 * HOUR, end=6 * HOUR)
    assert bill(submit(ended=True, how=how), used(), None, 1, now=9 * HOUR).ran == 5 * HOUR


def test_what_nobody_records_is_none_and_not_zero() -> None:
    job = bill(submit(ended=True), None, None, 4, now=99 * HOUR)
    assert (job.started, job.ended, job.ran, job.waited) == (None,) * 4
    assert parts(job) == (None,) * 4
    assert (job.tasks_done, job.sent, job.spilled, job.memory_peak, job.utilization_mean) == (None,) * 5
    assert bill(submit(), None, None, 4, now=99 * HOUR).state == "unknown"
    assert parts(bill(submit(), used(), ENDED, None, now=9 * HOUR)) == (None,) * 4, "how many GPUs is not known"
    without = bill(submit(), None, ENDED, 1, now=9 * HOUR)
    assert parts(without) == (4, None, None, None), "the scheduler kept nothing"


def test_a_job_that_never_started_cost_nothing() -> None:
    for job in (
        bill(submit(), None, status(JobState.CANCELLED, end=2 * HOUR), 4, now=9 * HOUR),
        bill(submit(), None, status(JobState.PENDING), 4, now=9 * HOUR),
    ):
        assert (job.ran, job.gpu_hours, job.started) == (0, 0, None)
    assert job.waited == 9 * HOUR


def test_a_job_of_which_the_scheduler_s_file_is_silent_had_no_worker_if_the_file_is_whole() -> None:
    assert parts(bill(submit(), None, ENDED, 2, now=9 * HOUR, written=6 * HOUR)) == (8, 8, 0, 0)
    fresh = status(JobState.RUNNING, start=HOUR)
    assert bill(submit(), None, fresh, 2, now=HOUR + 30, written=HOUR + 20).before is None, "it may have some by now"


def test_a_running_job_is_billed_until_now() -> None:
    job = bill(submit(), used(), status(JobState.RUNNING, start=HOUR, end=99 * HOUR), 1, now=6 * HOUR)
    assert (job.state, job.ended, job.ran, job.gpu_hours) == ("running", None, 5 * HOUR, 5)


@pytest.mark.parametrize(
    ("changes", "closed", "reason"),
    [
        ({}, None, "a user or the batch system cancelled it"),
        ({}, 5 * HOUR - 2, "with the cluster"),
        ({}, 9 * HOUR, "a user or the batch system cancelled it"),
        ({"unwanted": True}, None, "the cluster no longer needed it"),
    ],
)
def test_it_reports_who_cancelled_a_job(changes: dict[str, Any], closed: float | None, reason: str) -> None:
    job = bill(
        submit(**changes), used(), status(JobState.CANCELLED, start=HOUR, end=5 * HOUR), 1, now=9e9, closed=closed
    )
    assert (job.state, job.reason) == ("cancelled", reason)


@pytest.mark.parametrize("called", [JobState.FAILED, JobState.COMPLETED])
def test_a_cancel_of_our_own_is_no_failure_whatever_the_queue_calls_it(called: JobState) -> None:
    end = status(called, start=HOUR, end=5 * HOUR)
    job = bill(submit(unwanted=True), used(), end, 1, now=9e9)
    assert (job.state, job.reason) == ("cancelled", "the cluster no longer needed it")
    job = bill(submit(), used(), end, 1, now=9e9, closed=4 * HOUR)
    assert (job.state, job.reason) == ("cancelled", "with the cluster")
    assert bill(submit(), used(), end, 1, now=9e9).state == called.value
    assert (
        bill(submit(), used(), status(JobState.TIMEOUT, start=HOUR, end=5 * HOUR), 1, now=9e9, closed=HOUR * 4).state
        == "timeout"
    )


def test_a_job_without_gpus_costs_no_gpu_hours_and_reports_what_it_did() -> None:
    job = bill(submit(), used(done=5, sent=6, spilled=7), ENDED, 0, now=9 * HOUR)
    assert parts(job) == (0, 0, 0, 0) and (job.tasks_done, job.sent, job.spilled) == (5, 6, 7)


def worker(**changes: Any) -> JobBill:
    job = bill(submit(), used(), ENDED, 1, now=9 * HOUR)
    return dataclasses.replace(job, **changes)


def quantity(peak: float) -> dict[str, Any]:
    return {"memory_mean": peak, "memory_peak": peak, "memory_total": 40 * GB}


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([worker(gpu_hours=10, before=3.8, busy=6.2, after=0)], "38 % of the GPU hours were before the first task"),
        ([worker(gpu_hours=10, before=0, busy=5.9, after=4.1)], "41 % of the GPU hours were idle after the first task"),
        ([worker(gpu_hours=4, before=0, busy=4, after=0, **quantity(9 * GB))], "never above 9.00 GiB of 40.00 GiB"),
        (
            [worker(gpu_hours=4, before=0, busy=4, after=0), worker(gpu_hours=4, kind="scheduler", before=None)],
            "The GPU of the scheduler job took 50 % of the GPU hours",
        ),
    ],
)
def test_it_reports_what_would_have_cost_less(jobs: list[JobBill], expected: str) -> None:
    assert [text for text in advice(jobs) if expected in text] and len(advice(jobs)) == 1


def test_gpus_that_compute_little_while_they_have_tasks_are_named() -> None:
    kept = JobUsage(id="7", working=Quantity(total=7 * 4 * HOUR, seconds=4 * HOUR, peak=90))
    [text] = advice([worker(gpu_hours=4, before=0, busy=4, after=0)], [kept])
    assert text.startswith("While they had tasks, the GPUs computed 7 % of the time")


@pytest.mark.parametrize(
    "job",
    [
        worker(gpu_hours=0.9, before=0.9, busy=0, after=0),
        worker(gpu_hours=10, before=2.4, busy=5.2, after=2.4),
        worker(gpu_hours=4, before=0, busy=4, after=0, **quantity(17 * GB)),
        worker(gpu_hours=4, before=0, busy=0.5, after=0.9, **quantity(1 * GB)),
        worker(gpu_hours=None, before=None, busy=None, after=None),
    ],
)
def test_it_is_silent_where_little_is_lost_or_little_is_known(job: JobBill) -> None:
    assert advice([job]) == []


def test_it_reports_two_sentences_at_most_and_what_costs_most_first() -> None:
    texts = advice([worker(gpu_hours=10, before=4, busy=1, after=5, **quantity(GB))])
    assert [text.split(" %")[0] for text in texts] == ["50", "40"]


def report(jobs: list[JobBill], **more: Any) -> Report:
    return Report(name="demo", system="slurm", directory="/d", time=9 * HOUR, ended=True, jobs=jobs, **more)


def test_the_report_shows_itself_as_text_as_html_and_as_json() -> None:
    scheduler = worker(
        id="6", kind="scheduler", name="demo-scheduler", gpu_hours=1.0, before=None, busy=None, after=None
    )
    found = report([scheduler, worker(state="<script>")], advice=["Buy & wait."], problems=["Nothing\x1b[2J."])
    text = found.text(200)
    assert "5.00 of 1 worker job and the scheduler job" in text and "2.00 (40 %) with tasks" in text
    assert "advice     Buy & wait." in text and "\x1b" not in text
    shown = found._repr_html_()
    assert "&lt;script&gt;" in shown and "<script>" not in found.page() and "Buy &amp; wait." in shown
    assert found.page().startswith("<!doctype html>") and "<title>Report of cluster demo</title>" in found.page()
    assert keeps_to(found.as_json(), ReportJSON)
    assert (found.as_json()["gpu_hours"], found.as_json()["scheduler_gpu_hours"]) == (5, 1)


def test_a_sum_that_no_job_records_is_null_and_what_does_not_exist_is_zero() -> None:
    unknown = worker(gpu_hours=None, before=None, busy=None, after=None, tasks_done=None, tasks_lost=None)
    told = report([unknown]).as_json()
    assert keeps_to(told, ReportJSON)
    names = ("gpu_hours", "before", "busy", "after", "tasks_done", "tasks_lost")
    assert [told[name] for name in names] == [None] * 6
    assert told["scheduler_gpu_hours"] == 0, "it has no scheduler job"
    both = report([unknown, worker(gpu_hours=2.0, tasks_done=3)]).as_json()
    assert (both["gpu_hours"], both["tasks_done"]) == (2, 3)
    assert report([]).as_json()["gpu_hours"] == 0


def test_gpus_that_were_connected_count_where_the_options_request_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = resolve("slurm", {"name": "demo", "gpus_per_node": 2})
    directory = ClusterDirectory(tmp_path)
    about = {"name": "demo", "token": "t", "created": 1, "format": FORMAT, "system": "slurm"}
    directory.write("cluster.json", json.dumps(about))
    saved_options.write(directory, options)
    for number in (7, 8):
        directory.intend(f"demo-{number}", "worker")
        directory.submitted(f"demo-{number}", str(number))
    kept = [JobUsage(id="7", gpus=4, began=1.0, last=2.0), JobUsage(id="8", gpus=1, began=1.0, last=2.0)]
    directory.write(FILE, "".join(line(job) for job in kept))
    monkeypatch.setattr(report_module, "jobs_without_end", lambda *arguments: {})
    found = report_module.report(directory)
    assert [job.gpus for job in found.jobs] == [4, 2]
    assert [text for text in found.problems if "connected" in text] == [
        "How many GPUs 1 job requested: more were connected than the options of the cluster say. The report "
        "counts the connected ones."
    ]


def test_a_job_whose_usage_was_dropped_has_no_record_of_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ClusterDirectory(tmp_path)
    about = {"name": "demo", "token": "t", "created": 1, "format": FORMAT, "system": "slurm"}
    directory.write("cluster.json", json.dumps(about))
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 2}))
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "7")
    monkeypatch.setattr(report_module, "jobs_without_end", lambda *arguments: {"7": ENDED})
    later = line(JobUsage(id="9", gpus=2, began=20 * HOUR, last=21 * HOUR))
    before = []
    for content in (later, line(JobUsage(id="")) + later):
        directory.write(FILE, content)
        [job] = [one for one in report_module.report(directory).jobs if one.id == "7"]
        before.append(job.before)
    assert before == [8, None], "it had no worker; it may have had some"


def test_hours_that_nobody_can_explain_are_shown_as_such() -> None:
    text = report([worker(before=None, busy=None, after=None)]).text(200)
    assert "4.00 (100 %) of jobs without usage data" in text


def test_of_many_jobs_it_shows_a_summary_and_a_few() -> None:
    jobs = [worker(id=str(number), state="timeout" if number % 3 else "failed", reason="") for number in range(1000)]
    found = report(jobs)
    lines = found.text(200).splitlines()
    assert len(lines) < 30 and found.shortened
    assert any("1000: 666 timeout, 334 failed; a few of them:" in line for line in lines)
    assert len(found.text(200, every=True).splitlines()) > 1000
    assert found._repr_html_().count("<tr>") < 40
    assert len(found.as_json()["jobs"]) == 1000


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_where_there_is_no_room_for_all_columns_a_job_has_two_lines_and_no_word_is_cut(width: int) -> None:
    long = "a-name-of-a-cluster-that-has-all-of-the-fifty-chars-0"
    told = {"reason": "its node failed", "state": "node_fail", "spilled": 2**30}
    lines = report([worker(**quantity(9 * GB) | told), worker(name=long, id="13")]).text(width).splitlines()
    assert all(len(line) <= width for line in lines)
    head = next(line for line in lines if line.startswith("name"))
    assert head.split() == ["name", "ran", "GPU", "hours", "busy", "before", "after"]
    figures = lines[lines.index(head) + 1]
    assert figures.index("4.00") == head.index("GPU hours") and figures.index("2.00") == head.index("busy")
    text = " ".join(line.strip() for line in lines)
    for known in ("id 7; waited", "memory, peak, all ", "; spilled 1.00 GiB; node_fail: its node failed", f"{long} "):
        assert known in text, text


def test_a_row_has_mean_and_peak_of_the_memory_and_the_whole() -> None:
    assert "3/9/40 GiB" in report([worker(**quantity(9 * GB) | {"memory_mean": 3 * GB})]).text(200)


def example(
    job_id: str, first: float, last: float, *, busy: float, use: float, memory: tuple[float, float]
) -> JobUsage:
    """What the scheduler kept of a job of the cluster that docs/report.rst shows."""
    seconds = 8 * HOUR
    return JobUsage(
        id=job_id,
        began=HOUR,
        last=last,
        firsts=[HOUR + first * HOUR] * 4,
        busy=busy * HOUR,
        utilization=Quantity(use * seconds, seconds, 97.0),
        memory=Quantity(memory[0] * GB * seconds, seconds, memory[1] * GB),
        memory_total=40 * GB,
        done=round(busy * 2500),
        lost=12 * (last < 3 * HOUR),
        sent=round(10 * busy) * GB,
    )


def test_the_page_shows_what_the_report_prints() -> None:
    closed, failed = 3 * HOUR, 2.7 * HOUR
    early = End(state="cancelled", start=HOUR - 480, end=closed)
    scheduler = Submit("demo-scheduler", "scheduler", time=HOUR - 600, job_id="4711", ended=True, how=early)
    first, second = (submit(name=f"demo-{n}", job_id=str(4712 + n), time=HOUR - 590) for n in range(2))
    by_cancel = End(state="cancelled", start=HOUR, end=closed)
    jobs = [
        bill(scheduler, None, None, 1, now=9e9, closed=closed),
        bill(
            dataclasses.replace(first, how=by_cancel),
            example("4712", 0.75, closed, busy=4.1, use=58, memory=(5.1, 9.2)),
            None,
            4,
            now=9e9,
            closed=closed,
        ),
        bill(
            dataclasses.replace(second, how=End(state="node_fail", start=HOUR, end=failed)),
            example("4713", 0.7, failed, busy=3.2, use=55, memory=(4.9, 8.8)),
            None,
            4,
            now=9e9,
            closed=closed,
        ),
    ]
    printed = report(jobs, advice=advice(jobs)).text(1000)
    page = (Path(__file__).parents[2] / "docs" / "report.rst").read_text()
    assert textwrap.indent(printed, "    ") in page, f"docs/report.rst must show:\n{printed}"


def test_a_job_that_the_manager_cancelled_is_shown_as_such_after_the_queue_has_forgotten_it() -> None:
    job = bill(submit(unwanted=True, ended=True), used(), None, 1, now=9e9)
    assert (job.state, job.reason) == ("ended", "the cluster no longer needed it")
