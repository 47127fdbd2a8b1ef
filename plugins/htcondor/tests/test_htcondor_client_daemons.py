"""The client on a real HTCondor: one job at a time, how it waits, runs and ends, and what goes wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import htcondor_bed
import pytest
from hpcgpu_htcondor.client import HTCondor
from hpcgpu_htcondor.directives import argument, literal, string
from hpcgpu_htcondor.machines import queues
from htcondor_bed import HTCondorBed, wait_for

from hpcgpu.batch.base import After, JobState, JobStatus, Outlook
from hpcgpu.batch.reasons import explain, outlook
from hpcgpu.errors import BatchUnavailable, SubmitLimited, SubmitRefused

pytestmark = pytest.mark.shows("The client of a batch system: one job at a time, its states, reasons and limits")

Submit = Callable[..., str]
#: Runs until somebody ends it.
FOREVER = "exec sleep 1000"
FIRST = "(NumShadowStarts ?: 0) == 0"


@pytest.fixture
def submit(bed: HTCondorBed, tmp_path: Path) -> Submit:
    """Submit a small script with these commands of a submit description."""

    def call(command: str, *commands: str, name: str = "demo-1", exclude: tuple[str, ...] = ()) -> str:
        script = tmp_path / f"worker-{len(list(tmp_path.iterdir()))}.condor"
        given = {
            "executable": "/bin/bash",
            "arguments": argument(script),
            "+hpcgpuscript": string(script),
            "output": f"{tmp_path}/$(batch_name)-$(ClusterId).log",
            "error": f"{tmp_path}/$(batch_name)-$(ClusterId).log",
            "should_transfer_files": "NO",
            "environment": '"HPCGPU_JOB_ID=$(ClusterId) HPCGPU_JOB_NAME=$(batch_name)"',
            "request_memory": "10",
            "requirements": FIRST,
            "periodic_remove": "(NumShadowStarts ?: 0) > 0 && (JobStatus == 1 || JobStatus == 5)",
        }
        given |= {line.partition(" = ")[0]: line.partition(" = ")[2] for line in commands}
        lines = (f"#HTCONDOR {name} = {value}" for name, value in given.items())
        script.write_text("\n".join(["#!/bin/bash", *lines, command, ""]))
        return HTCondor(attempts=1).submit(script, job_name=name, exclude=exclude)

    return call


def until(job_id: str, met: Callable[[JobStatus], bool]) -> JobStatus:
    """The status of a job once it is as it shall be."""
    seen: dict[str, JobStatus] = {}

    def reached() -> bool:
        seen.update(HTCondor().poll([job_id]) or HTCondor().ended([job_id]))
        return job_id in seen and met(seen[job_id])

    try:
        wait_for(reached, "the job is as it shall be")
    except Exception as error:
        raise AssertionError(f"{error}: {seen}") from error
    return seen[job_id]


def ended(job_id: str) -> JobStatus:
    return until(job_id, lambda job: job.state.ended)


def remembered(job_id: str) -> JobStatus:
    """How a job ended, from the history."""
    found: dict[str, JobStatus] = {}
    wait_for(lambda: not HTCondor().poll([job_id]), "the job has left the queue")
    wait_for(lambda: bool(found.update(HTCondor().ended([job_id])) or found), "the job is in the history")
    return found[job_id]


def runs(job_id: str) -> JobStatus:
    return until(job_id, lambda job: job.state is JobState.RUNNING)


def test_a_job_of_htcondor_ends_as_its_script_does(submit: Submit) -> None:
    assert ended(submit("exit 0")).state is JobState.COMPLETED
    failed = ended(submit("exit 7"))
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 7)
    assert failed.start is not None and failed.end is not None and failed.node
    killed = ended(submit("kill -9 $$"))
    assert (killed.state, killed.exit_code) == (JobState.FAILED, 137)


def test_a_job_of_htcondor_identifies_itself(submit: Submit, tmp_path: Path) -> None:
    job_id = submit("env; echo error >&2", name="1x-2")
    assert ended(job_id).name == "1x-2"
    text = (tmp_path / HTCondor().log_name("1x-2", job_id)).read_text()
    environment: Mapping[str, str] = dict(line.partition("=")[::2] for line in text.splitlines())
    own = HTCondor().own_job(environment)
    assert own is not None and (own.job_id, own.name) == (job_id, "1x-2")
    assert HTCondor().own_job(os.environ) is None and "error" in text


@pytest.mark.shows("A job that reaches its walltime")
def test_a_job_of_htcondor_that_reaches_its_walltime_reports_it(submit: Submit) -> None:
    job_id = submit(FOREVER, "allowed_job_duration = 15")  # it is seen while it runs
    running = runs(job_id)
    assert running.end is not None and running.start is not None and running.end == running.start + 15
    late = ended(job_id)
    assert late.state is JobState.TIMEOUT and "end of its walltime" in explain(late)
    assert remembered(job_id).state is JobState.TIMEOUT


def test_a_job_that_somebody_removes_is_cancelled(submit: Submit, bed: HTCondorBed) -> None:
    job_id = submit(FOREVER)
    runs(job_id)
    bed.call("rm", job_id)
    removed = remembered(job_id)
    assert removed.state is JobState.CANCELLED and "via condor_rm" in removed.reason


def test_a_running_job_that_somebody_holds_has_ended(submit: Submit, bed: HTCondorBed) -> None:
    job_id = submit(FOREVER)
    runs(job_id)
    bed.call("hold", job_id, "-reason", "not today")
    assert ended(job_id).state is JobState.CANCELLED
    last = remembered(job_id)
    assert last.state is JobState.CANCELLED and "not today" in explain(last)


def test_a_job_whose_machine_is_taken_away_does_not_start_again(submit: Submit, bed: HTCondorBed) -> None:
    job_id = submit(FOREVER)
    runs(job_id)
    bed.call("vacate_job", job_id)
    assert remembered(job_id).state is JobState.PREEMPTED


def test_a_job_that_is_held_reports_why(submit: Submit, bed: HTCondorBed) -> None:
    job_id = submit("exit 0", "hold = true")
    job = until(job_id, lambda job: job.reason.startswith("hold "))
    assert outlook(job) is Outlook.NEVER and "submitted on hold" in explain(job) and "condor_release" in explain(job)
    bed.call("release", job_id)
    assert ended(job_id).state is JobState.COMPLETED


def test_a_job_whose_log_cannot_be_written_reports_why(submit: Submit) -> None:
    failed = remembered(submit("true", "output = /proc/nowhere/log", "error = /proc/nowhere/log"))
    assert failed.state is JobState.FAILED and "/proc/nowhere/log" in explain(failed), explain(failed)
    assert "must share the filesystem" in explain(failed)


def test_a_job_that_waits_for_gpus_of_others_reports_it(submit: Submit) -> None:
    first = submit(FOREVER, "request_gpus = 4")
    runs(first)
    second = submit(FOREVER, "request_gpus = 1", name="demo-2")
    job = until(second, lambda job: "no free slot" in explain(job))
    assert outlook(job) is Outlook.WAIT
    HTCondor().cancel([first])
    runs(second)
    HTCondor().cancel([second])


def test_a_job_that_no_machine_can_run_reports_it(submit: Submit) -> None:
    job_id = submit("true", "request_gpus = 9", "request_cpus = 17")
    job = until(job_id, lambda job: job.reason.startswith("no machine"))
    assert outlook(job) is Outlook.NEVER
    assert "no machine of the pool has 9 GPUs (at most 4), 17 cores (at most 16)" in explain(job)
    HTCondor().cancel([job_id])
    assert HTCondor().find("demo-1") == []


def test_gpus_may_be_chosen_by_what_they_can(submit: Submit, tmp_path: Path) -> None:
    good = submit(
        "true", "request_gpus = 2", "gpus_minimum_capability = 8.0", 'require_gpus = regexp("A100", DeviceName, "i")'
    )
    assert ended(good).state is JobState.COMPLETED
    poor = submit("true", "request_gpus = 1", "gpus_minimum_capability = 9.0")
    until(poor, lambda job: bool(job.reason))
    HTCondor().cancel([poor])


def test_a_concurrency_limit_is_named_as_a_limit(submit: Submit, bed: HTCondorBed) -> None:
    bed.configure(LICENCE_LIMIT="1")
    try:
        first = submit(FOREVER, "concurrency_limits = licence")
        runs(first)
        second = submit(FOREVER, "concurrency_limits = licence", name="demo-2")
        job = until(second, lambda job: "licence" in explain(job))
        assert outlook(job) is Outlook.LIMIT
        HTCondor().cancel([first, second])
    finally:
        bed.configure()


def test_only_jobs_of_htcondor_that_wait_are_cancelled(submit: Submit) -> None:
    first = submit(FOREVER)
    runs(first)
    second = submit(FOREVER, "hold = true", name="demo-2")
    HTCondor().cancel([first, second, "99999"], only_pending=True)
    assert remembered(second).state is JobState.CANCELLED
    assert runs(first).state is JobState.RUNNING
    HTCondor().cancel([first, second, "99999"])
    HTCondor().cancel(["99999"])
    assert remembered(first).state is JobState.CANCELLED


def test_more_jobs_than_the_schedd_allows_are_a_limit_for_now(submit: Submit, bed: HTCondorBed) -> None:
    bed.configure(MAX_JOBS_PER_OWNER="1")
    first: list[str] = []

    def accepted() -> bool:  # for a moment, the schedd counts jobs that have ended
        with suppress(SubmitLimited):
            first.append(submit(FOREVER))
        return bool(first)

    try:
        wait_for(accepted, "one job is accepted")
        with pytest.raises(SubmitLimited, match="MAX_JOBS_PER_OWNER"):
            submit(FOREVER, name="demo-2")
        HTCondor().cancel(first)
    finally:
        bed.configure()


def test_a_site_s_rule_refuses_a_job_in_its_own_words(submit: Submit, bed: HTCondorBed) -> None:
    bed.configure(
        SUBMIT_REQUIREMENT_NAMES="Small",
        SUBMIT_REQUIREMENT_Small="RequestCpus < 8",
        SUBMIT_REQUIREMENT_Small_REASON='"Jobs of 8 cores need a permission"',
    )
    try:
        with pytest.raises(SubmitRefused, match="Jobs of 8 cores need a permission"):
            submit("true", "request_cpus = 9")
    finally:
        bed.configure()


@pytest.mark.parametrize(
    ("command", "words"),
    [("requirements = GPUs >= 3 && (", "Check `requirements`"), ("request_gpus = x y", "Check `gpus_per_node`")],
)
def test_a_description_that_htcondor_refuses_names_what_to_check(submit: Submit, command: str, words: str) -> None:
    with pytest.raises(SubmitRefused, match=words):
        submit("true", command)


def test_a_machine_to_avoid_is_avoided(submit: Submit, bed: HTCondorBed) -> None:
    machine = bed.call("status", "-af", "Machine").split()[0]
    job_id = submit("true", "requirements = true || false", exclude=(machine, "other.node"))
    until(job_id, lambda job: job.reason.startswith("no match"))
    long_ago = bed.call("q", job_id, "-format", "%d", "QDate - 1300")
    bed.call("qedit", job_id, "QDate", long_ago)
    assert ended(job_id).state is JobState.COMPLETED, "the machine may be on again, and others busy for days"
    assert ended(submit("true", exclude=("other.node",))).state is JobState.COMPLETED


def test_a_description_is_tested_before_it_is_submitted(bed: HTCondorBed, tmp_path: Path) -> None:
    script = tmp_path / "worker.condor"
    script.write_text("#!/bin/bash\n#HTCONDOR executable = /bin/bash\n#HTCONDOR request_gpus = 4\ntrue\n")
    assert HTCondor().estimate(script).tested
    script.write_text("#!/bin/bash\n#HTCONDOR executable = /bin/bash\n#HTCONDOR request_gpus = 5\ntrue\n")
    [limit] = HTCondor().estimate(script).limits
    assert "5 GPUs (at most 4)" in limit
    script.write_text("#!/bin/bash\n#HTCONDOR executable = /bin/bash\n#HTCONDOR requirements = (\ntrue\n")
    [limit] = HTCondor().estimate(script).limits
    assert "Check `requirements`" in limit


def test_jobs_without_a_cluster_directory_are_found_by_their_attribute(submit: Submit, tmp_path: Path) -> None:
    job_id = submit(FOREVER)
    assert HTCondor().marked(lambda path: path.parent == tmp_path) == {job_id: tmp_path / "worker-0.condor"}
    assert HTCondor().marked(lambda path: False) == {}
    assert HTCondor().find("demo-1") == [job_id] and HTCondor().find("demo") == []
    HTCondor().cancel([job_id])


@pytest.mark.skipif(not htcondor_bed.NAMESPACE, reason="only root can submit as another user")
@pytest.mark.parametrize("authentication", ["REQUIRED", "OPTIONAL"])
def test_jobs_of_others_that_have_the_names_of_ours_are_not_ours(
    submit: Submit, bed: HTCondorBed, tmp_path: Path, authentication: str
) -> None:
    bed.configure(CONDOR_Q_ONLY_MY_JOBS="False", SEC_DEFAULT_AUTHENTICATION=authentication)
    try:
        own = submit(FOREVER)
        name, script = "batch_name = demo-1", f"+HpcgpuScript = {string(tmp_path / 'worker-7.condor')}"
        foreign = bed.submit_as_another(name, script)
        assert foreign in bed.jobs()
        assert HTCondor().find("demo-1") == [own]
        assert list(HTCondor().marked(lambda path: True)) == [own]
        HTCondor().cancel([own])
        bed.call("rm", foreign)
    finally:
        bed.configure()


def test_it_reports_which_htcondor_it_is(bed: HTCondorBed) -> None:
    client = HTCondor()
    client.probe()
    assert client.version() == "HTCondor 23.9.6" and client.identity()


def test_the_machines_of_the_pool_are_known(bed: HTCondorBed) -> None:
    [kind] = queues().gpus
    assert (kind.gpus, kind.cores, kind.memory, kind.gpu_type) == (4, 16, 64000, "NVIDIA A100-SXM4-40GB")


def test_without_its_schedd_nothing_is_reported_of_jobs(submit: Submit, bed: HTCondorBed, tmp_path: Path) -> None:
    job_id = submit(f"touch {tmp_path}/begun; {FOREVER}")
    runs(job_id)
    # The queue says "running" before the machine has the job. A schedd that ends in between does not find it again.
    wait_for((tmp_path / "begun").exists, "the script runs")
    bed.stop_schedd()
    try:
        client = HTCondor(attempts=1)
        for call in (lambda: client.poll([job_id]), lambda: client.cancel([job_id]), lambda: client.find("demo-1")):
            with pytest.raises(BatchUnavailable, match="Can't find address"):
                call()
        with pytest.raises(BatchUnavailable, match="did not accept"):
            submit("true", name="demo-2")
    finally:
        bed.start_schedd()
    until(job_id, lambda job: job.state in (JobState.RUNNING, JobState.PREEMPTED))
    bed.wait_for_a_schedule()
    assert runs(job_id).state is JobState.RUNNING
    HTCondor().cancel([job_id])
    assert remembered(job_id).state is JobState.CANCELLED


def test_a_job_whose_machine_fails_has_ended_after_its_lease(
    submit: Submit, bed: HTCondorBed, small: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    on_small = f'requirements = Machine == "{small}" && {FIRST}'
    job_id = submit(f"touch {begun}; {FOREVER}", "job_lease_duration = 20", on_small)
    assert runs(job_id).node == small
    wait_for(begun.exists, "it has more than a place: without a starter there is no lease")
    bed.switch_off("small")
    assert ended(job_id).state is JobState.NODE_FAIL
    assert remembered(job_id).state is JobState.NODE_FAIL


def test_a_job_cannot_wait_for_the_end_of_another(bed: HTCondorBed, tmp_path: Path) -> None:
    assert not HTCondor.waits_for_end
    script = tmp_path / "scheduler.condor"
    script.write_text("#!/bin/bash\n#HTCONDOR executable = /bin/bash\ntrue\n")
    with pytest.raises(SubmitRefused, match="cannot let a job wait"):
        HTCondor().submit(script, job_name="demo-2", after=After("7", ended=True))


#: What has a meaning somewhere in a submit description.
PIECES = (
    "'",
    '"',
    "\\",
    "$",
    "$(",
    ")",
    "$ENV(HOME)",
    "$(ClusterId)",
    "@=",
    "#",
    "=",
    ",",
    ";",
    " ",
    "a",
    "µ",
    "`",
    "%",
    "~",
    "&",
)


def test_no_text_gets_out_of_its_place_in_a_description(bed: HTCondorBed, tmp_path: Path) -> None:
    """Jobs run scripts in folders with random names, which are a path, an argument and a string of the description."""
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    names = {"".join(chance.choices(PIECES, k=chance.randrange(2, 12))) for _ in range(24)}
    scripts: dict[str, Path] = {}
    for name in sorted(name for name in names if "$$" not in name):
        folder = tmp_path / f"{name}-x"
        folder.mkdir()
        script = folder / "worker.condor"
        lines = [
            "executable = /bin/bash",
            f"arguments = {argument(script)}",
            f"output = {literal(folder)}/$(batch_name).log",
            f"+HpcgpuScript = {string(script)}",
            "should_transfer_files = NO",
            "request_memory = 10",
        ]
        script.write_text("".join(f"#HTCONDOR {line}\n" for line in lines) + 'echo "$0"; sleep 1000\n')
        scripts[HTCondor().submit(script, job_name="odd-1")] = script
    assert HTCondor().marked(lambda path: True) == scripts, seed
    for job_id, script in scripts.items():
        log = script.with_name("odd-1.log")
        try:
            runs(job_id)
            wait_for(lambda log=log: bool(log.exists() and log.read_text()), f"{script} runs")  # type: ignore[misc]
        finally:
            HTCondor().cancel([job_id])
        assert log.read_text() == f"{script}\n", seed
