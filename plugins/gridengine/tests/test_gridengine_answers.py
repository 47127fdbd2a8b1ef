"""What Grid Engine prints, recorded from Son of Grid Engine 8.1.9, and the scripts that it gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hpcgpu_gridengine.answers import parse_job_id, parse_qacct, parse_qstat, parse_reasons, parse_scripts, state
from hpcgpu_gridengine.client import GridEngine
from hpcgpu_gridengine.directives import full_name, gridengine_name, per_slot, seconds
from hpcgpu_gridengine.queues import parse_hosts, parse_limits
from hpcgpu_gridengine.reasons import REASONS, ending

from hpcgpu.batch.base import After, JobState, JobStatus, Outlook
from hpcgpu.batch.reasons import advice, explain, outlook
from hpcgpu.errors import AmbiguousSubmit, SubmitRefused

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_the_states_of_jobs_are_read() -> None:
    jobs = parse_qstat(recorded("qstat_r.xml"))
    states = {job.name: (job.state, job.reason) for job in jobs.values()}
    assert states == {
        "demo-2": (JobState.RUNNING, ""),
        "eqw": (JobState.PENDING, "Eqw"),
        "demo-3": (JobState.PENDING, "qw"),
        "demo-4": (JobState.PENDING, "hqw"),
        "h-1": (JobState.PENDING, "hqw"),
    }
    running = jobs["2"]
    assert running.start is not None and running.end == running.start + 40 and running.node == "localhost"


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("t", JobState.RUNNING),
        ("Rr", JobState.RUNNING),
        ("dr", JobState.COMPLETING),
        ("Rq", JobState.PENDING),
        ("S", JobState.RUNNING),
        ("?", JobState.UNKNOWN),
    ],
)
def test_the_letters_of_a_state_are_known(letters: str, expected: JobState) -> None:
    assert state(letters) is expected


def test_the_scheduler_s_messages_report_why_a_job_waits() -> None:
    reasons = parse_reasons(recorded("qstat_j.xml"))
    assert reasons["3"].startswith("cannot run in PE")
    assert reasons["4"] == "job dropped because of job dependencies"
    assert reasons["5"] == "error: can't chdir to /nowhere: No such file or directory"
    assert reasons["6"] == "Job is in hold state"


@pytest.mark.parametrize(
    ("reason", "expected", "words"),
    [
        ("Eqw: error: can't chdir to /nowhere: No such file", Outlook.NEVER, "could not start it"),
        ("hqw: job dropped because of job dependencies", Outlook.WAIT, "scheduler job has ended"),
        ("hqw: Job is in hold state", Outlook.NEVER, "qrls"),
        ('qw: cannot run in queue "n1" because it offers only hc:gpu=0.000000', Outlook.WAIT, "no free node"),
        ('qw: cannot run because it exceeds limit "ada/////" in rule "gpus/1"', Outlook.LIMIT, "quota"),
        ('qw: has no permission for cluster queue "gpu.q"', Outlook.NEVER, "`queue`"),
        ('qw: queue instance "gpu.q@n1" dropped because it is disabled', Outlook.SITE, "out of service"),
        ("qw", Outlook.WAIT, "does not run it yet"),
    ],
)
def test_why_a_job_waits_is_reported_in_words(reason: str, expected: Outlook, words: str) -> None:
    job = JobStatus(job_id="1", state=JobState.PENDING, reason=reason, words=REASONS)
    assert outlook(job) is expected
    assert words in explain(job) and reason in explain(job)


def test_how_jobs_ended_is_read_from_the_accounting() -> None:
    jobs = {job.name: job for job in parse_qacct(recorded("qacct.txt")).values()}
    assert {name: (job.state, job.exit_code) for name, job in jobs.items()} == {
        "demo-1": (JobState.COMPLETED, 0),
        "late": (JobState.TIMEOUT, 137),
        "demo-2": (JobState.CANCELLED, 137),
        "fail": (JobState.FAILED, 7),
    }
    assert jobs["late"].end == (jobs["late"].start or 0) + 3
    assert jobs["late"].reason == "failed 37 : qmaster enforced h_rt, h_cpu, or h_vmem limit"


def test_memory_and_lost_hosts_are_ends_of_their_own() -> None:
    assert ending(37, 137, wallclock=5, limit=60) is JobState.OUT_OF_MEMORY
    assert ending(21, 0, wallclock=0, limit=60) is JobState.NODE_FAIL
    assert ending(100, 139, wallclock=5, limit=60) is JobState.FAILED


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ('Job was rejected because job requests unknown queue "nope.q"', "`queue`"),
        ('job rejected: the requested parallel environment "nope" does not exist', "`parallel_environment`"),
        ('unknown resource "nope"', "`gpu_resource`"),
        ('job rejected: the requested project "nope" does not exist', "`account`"),
        ("error: no suitable queues", "`walltime`"),
    ],
)
def test_a_refusal_names_the_option_to_check(words: str, option: str) -> None:
    assert option in advice(f"Unable to run job: {words} Exiting.", REASONS)


def test_no_qmaster_is_no_refusal() -> None:
    words = "error: commlib error: got select error (Connection refused) unable to send message to qmaster"
    assert GridEngine.transient.search(words) and not GridEngine.ambiguous.search(words)


def test_a_broken_answer_shows_no_job() -> None:
    assert parse_qstat(recorded("qstat_r.xml")[:500]) == {}
    assert parse_reasons("") == {} and parse_qacct("error: job id 99 not found") == {}


def test_an_id_is_found_among_the_words_of_a_wrapper() -> None:
    assert parse_job_id("Your project has 12 hours\n4711\n") == "4711"
    assert parse_job_id("no id") is None


@pytest.mark.parametrize("name", ["demo-1", "1x-2", "j.1x-2", "j.demo"])
def test_a_name_comes_back_whole(name: str) -> None:
    assert not gridengine_name(name)[0].isdigit()
    assert full_name(gridengine_name(name)) == name
    assert len({gridengine_name(other) for other in ("1x", "j.1x", "j.j.1x")}) == 3


def test_only_the_end_of_a_job_can_be_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "worker.sge"
    script.write_text("#!/bin/bash\n")

    def submitted(after: After | None) -> list[str]:
        return GridEngine().submit_command(script, "demo-1", None, after, ())

    assert submitted(After("7", ended=True))[4:6] == ["-hold_jid", "7"]
    assert "-hold_jid" not in submitted(After("7"))
    script.write_text("#!/bin/bash\n#qsub -g tga-demo\n")
    assert submitted(None)[-3:] == ["-g", "tga-demo", str(script)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_qsub_takes_no_options_from_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "worker.sge").write_text("#!/bin/bash\n")
    (planted := tmp_path / ".sge_request").write_text("-jsv /tmp/program\n")
    monkeypatch.chdir(tmp_path)
    assert GridEngine().submit_command(script, "demo-0", None, None, ())[-1] == str(script), "it is the user's own"
    os.chown(planted, 65534, 65534)
    with pytest.raises(SubmitRefused, match=r"\.sge_request belongs to another user"):
        GridEngine().submit_command(script, "demo-0", None, None, ())


def test_hpcgpu_s_own_scripts_are_recognised() -> None:
    assert parse_scripts(recorded("qstat_j.xml"))["2"] == "/home/ada/.hpcgpu/clusters/demo/worker.sge"


def test_queues_have_gpus_and_limits() -> None:
    kinds = parse_hosts(recorded("qhost.xml"))
    assert [(kind.name, kind.gpus, kind.cores) for kind in kinds] == [("gpu.q", 4, 2), ("short.q", 4, 2)]
    limits = parse_limits("qname a.q\nh_rt 24:0:0,[n1=1:0:0]\nqname b.q\nh_rt INFINITY\n")
    assert limits == {"a.q": "24:0:0", "b.q": "INFINITY"}


def test_amounts_are_in_its_notation() -> None:
    assert seconds("24:0:0") == 86400 and seconds("40") == 40 and seconds("INFINITY") is None
    assert per_slot(64 * 2**30, 8) == "8192M" and per_slot(None, 8) is None


def test_own_job_is_known_inside_a_job_alone() -> None:
    inside = {"SGE_ROOT": "/sge", "JOB_ID": "7", "JOB_NAME": "j.1x-2", "HPCGPU_NODE": "1"}
    own = GridEngine().own_job(inside)
    assert own is not None and (own.job_id, own.name, own.node) == ("7", "1x-2", 1)
    assert GridEngine().own_job({"JOB_ID": "7"}) is None


@pytest.mark.parametrize("listing", ["", "no such option"])
def test_a_listing_that_cannot_be_read_does_not_prove_that_a_job_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    commands = {"qsub": f"echo submitted >> {tmp_path}/log; echo 'timed out' >&2; exit 1", "qstat": f"echo '{listing}'"}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "worker.sge").write_text("#!/bin/bash\n#$ -S /bin/bash\nsleep 1\n")
    with pytest.raises(AmbiguousSubmit, match="looks for a job of this name"):
        GridEngine(attempts=2, sleep=lambda seconds: None).submit(tmp_path / "worker.sge", job_name="demo-1")
    assert (tmp_path / "log").read_text() == "submitted\n"
