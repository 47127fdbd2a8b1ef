"""What HTCondor prints, recorded from HTCondor 23.9.6, and what hpcgpu writes for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcgpu_htcondor.answers import parse_ads, parse_job_id, statuses
from hpcgpu_htcondor.client import HTCondor
from hpcgpu_htcondor.directives import argument, command, description, literal, string
from hpcgpu_htcondor.machines import parse_machines, shortage
from hpcgpu_htcondor.reasons import REASONS, ending

from hpcgpu.batch.base import JobState, JobStatus, Outlook
from hpcgpu.batch.reasons import advice, explain, outlook, why_it_stays
from hpcgpu.errors import BatchUnavailable, OptionError

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_the_states_of_jobs_in_condor_q_are_read() -> None:
    jobs = statuses(parse_ads(recorded("condor_q.json")))
    assert {job_id: (job.state, job.reason) for job_id, job in jobs.items()} == {
        "7": (JobState.TIMEOUT, "hold 46: The job exceeded allowed job duration of 00:03"),
        "8": (JobState.RUNNING, ""),
        "9": (JobState.PENDING, "hold 15: submitted on hold at user's request"),
        "10": (JobState.PENDING, "no match found"),
        "11": (JobState.RUNNING, ""),
        "12": (JobState.PENDING, "concurrency limit licence reached"),
    }
    running = jobs["8"]
    assert running.start is not None and running.end == running.start + 3600
    assert (running.node, running.name) == ("vm.bed", "demo-1")


@pytest.fixture
def utc() -> Iterator[None]:
    """The time zone UTC, for this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_a_job_without_contact_to_its_machine_reports_since_when_and_until_when(utc: None) -> None:
    ad = {  # recorded when the machine was switched off
        "ClusterId": 1,
        "JobDisconnectedDate": 1795875373,
        "JobLeaseDuration": 2400,
        "JobStatus": 2,
        "NumShadowStarts": 1,
        "RemoteHost": "slot1_1@small.bed",
    }
    since = "no contact with its machine since 2026-11-28 14:16:13"
    until = "; HTCondor waits for it until 2026-11-28 14:56:13 (job_lease_duration)"
    [job] = statuses([ad]).values()
    assert (job.state, job.out_of_reach, job.reason) == (JobState.RUNNING, True, since + until)
    assert explain(job) == f"the batch system has lost contact with its node [{since}{until}]"
    assert "wait until the node is back, or stop the cluster" in explain(job, kind="scheduler")
    [removed] = statuses([ad | {"JobStatus": 3}]).values()
    assert removed.state is JobState.COMPLETING and until in why_it_stays(removed)
    assert why_it_stays(removed).endswith("If its machine is off, `condor_rm -forcex 1` removes it at once")
    assert statuses([ad | {"JobLeaseDuration": "/Expr(x)/"}])["1"].reason == since
    [back] = statuses([ad | {"JobDisconnectedDate": None}]).values()
    assert (back.out_of_reach, back.reason) == (False, "")
    assert statuses([ad | {"JobStatus": 1}])["1"].state.ended, "HTCondor has given it up"


def test_the_history_reports_how_jobs_ended() -> None:
    jobs = statuses(parse_ads(recorded("condor_history.json")), over=True)
    assert {job_id: (job.state, job.exit_code) for job_id, job in jobs.items()} == {
        "1": (JobState.COMPLETED, 0),
        "2": (JobState.FAILED, 7),
        "3": (JobState.TIMEOUT, None),
        "4": (JobState.CANCELLED, None),
        "5": (JobState.PREEMPTED, None),
        "6": (JobState.FAILED, None),
    }
    assert "via condor_rm (by user daemon)" in explain(jobs["4"])
    assert "must share the filesystem" in explain(jobs["6"]) and "/proc/nowhere/log" in explain(jobs["6"])
    assert all(job.start is not None and job.end is not None for job in jobs.values())


@pytest.mark.parametrize(
    ("ad", "expected"),
    [
        ({"JobStatus": 4, "ExitBySignal": True, "ExitSignal": 9}, JobState.FAILED),
        ({"JobStatus": 3, "RemoveReason": "via condor_rm"}, JobState.CANCELLED),
        ({"JobStatus": 3, "RemoveReason": "The system macro SYSTEM_PERIODIC_REMOVE ..."}, JobState.CANCELLED),
        ({"JobStatus": 5, "HoldReasonCode": 34, "HoldReason": "memory"}, JobState.OUT_OF_MEMORY),
        ({"JobStatus": 5, "HoldReasonCode": 1, "HoldReason": "by user"}, JobState.CANCELLED),
        (
            {"JobStatus": 3, "RemoveReason": "via condor_rm -forcex (by user ada)", "JobDisconnectedDate": 1795896314},
            JobState.NODE_FAIL,
        ),
        ({"JobStatus": 3, "RemoveReason": "via condor_rm -forcex (by user ada)"}, JobState.CANCELLED),
        ({"JobStatus": 1}, JobState.PREEMPTED),
        (
            {"JobStatus": 1, "VacateReason": "Job disconnected too long: JobLeaseDuration (20 seconds) expired"},
            JobState.NODE_FAIL,
        ),
    ],
)
def test_how_a_job_of_htcondor_ended(ad: dict[str, object], expected: JobState) -> None:
    assert ending(ad)[0] is expected


def test_the_words_of_a_hold_cannot_control_the_terminal() -> None:
    ad = {"ClusterId": 1, "JobStatus": 5, "HoldReasonCode": 1, "HoldReason": "first\x1b[2J\n\x1b[1;31msecond\x9b\x00"}
    assert explain(statuses([ad])["1"]).endswith("[hold 1: first second]")
    ended = ad | {"NumShadowStarts": 1, "JobStatus": 3, "HoldReasonCode": None, "RemoveReason": "by\tada\r\n"}
    assert statuses([ended], over=True)["1"].reason == "by ada"


@pytest.mark.parametrize("words", ["", " \n", None])
def test_a_hold_without_words_reports_that_it_has_none(words: str | None) -> None:
    ad = {"ClusterId": 1, "JobStatus": 5, "HoldReasonCode": 1, "HoldReason": words}
    assert explain(statuses([ad])["1"]).endswith("ask who holds it [hold 1: no reason was given]")


@pytest.mark.parametrize("prefix", ["", "Last"])
def test_a_log_on_a_full_disk_is_not_blamed_on_the_filesystem_of_the_machine(prefix: str) -> None:
    words = (
        "Error from slot1_1@vm.bed: Failed to open '/d/x.log' as standard output: No space left on device (errno 28)"
    )
    ad: dict[str, object] = {"ClusterId": 1, "NumShadowStarts": 1, "JobStatus": 3 if prefix else 5}
    ad |= {"RemoveReason": "PeriodicRemove"} if prefix else {}
    ad |= {f"{prefix}HoldReason": words, f"{prefix}HoldReasonCode": 7, f"{prefix}HoldReasonSubCode": 28}  # recorded
    said = explain(statuses([ad], over=bool(prefix))["1"])
    assert "make room there" in said and words in said and "share" not in said


@pytest.mark.parametrize("status", [6, 7, 3, 99, None, "2"])
def test_every_status_has_a_state(status: object) -> None:
    [job] = statuses([{"ClusterId": 1, "JobStatus": status}]).values()
    known = {6: JobState.COMPLETING, 7: JobState.RUNNING, 3: JobState.COMPLETING}
    assert job.state is (known.get(status, JobState.UNKNOWN) if isinstance(status, int) else JobState.UNKNOWN)
    assert job.suspended == (status == 7)


@pytest.mark.parametrize(
    ("reason", "expected", "words"),
    [
        ("hold 1: via condor_hold (by user ada)", Outlook.NEVER, "condor_release"),
        ("hold 26: too long", Outlook.NEVER, "policy of the site"),
        ("hold 13: transfer", Outlook.NEVER, "condor_rm"),
        ("no match found", Outlook.WAIT, "-better-analyze"),
        ("no machine of the pool has 9 GPUs (at most 4)", Outlook.NEVER, "never start"),
        ("concurrency limit licence reached", Outlook.LIMIT, "other jobs must end"),
        ("insufficient priority", Outlook.WAIT, "condor_userprio"),
        ("something new", Outlook.WAIT, "does not run it yet"),
    ],
)
def test_why_a_job_of_htcondor_waits(reason: str, expected: Outlook, words: str) -> None:
    job = JobStatus(job_id="1", state=JobState.PENDING, reason=reason, words=REASONS)
    assert outlook(job) is expected and words in explain(job)


def test_an_answer_that_is_cut_off_proves_nothing_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "condor_q"
    fake.write_text('#!/bin/sh\necho "[ { \\"ClusterId\\": 1,"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(BatchUnavailable, match="cannot be read"):
        HTCondor(attempts=1).poll(["1"])
    assert parse_ads("") == [] == parse_ads("\n[\n]\n")


def test_the_id_is_found_among_other_words() -> None:
    assert parse_job_id("Welcome to the pool\n12.0 - 12.0\n") == "12"
    assert parse_job_id("12.0 - 12.4\n") is None and parse_job_id("") is None


def test_what_no_machine_has_is_named() -> None:
    machines = parse_machines(recorded("condor_status.json"))
    assert [(kind.gpus, kind.cores, kind.memory) for kind in machines] == [(4, 16, 64000)]
    assert shortage({"RequestGPUs": 4, "RequestCpus": 16, "RequestMemory": 64000}, machines) == ""
    assert shortage({"RequestGPUs": 5, "RequestCpus": 1}, machines) == "no machine of the pool has 5 GPUs (at most 4)"
    assert shortage({"RequestMemory": "/Expr(ImageSize)/"}, machines) == "" == shortage({"RequestCpus": 99}, [])
    two = [*machines, *parse_machines('[{"TotalSlotCpus": 128, "TotalSlotMemory": 64000}]')]
    assert shortage({"RequestGPUs": 4, "RequestCpus": 64}, two) == "no machine of the pool has 4 GPUs, 64 cores"


def test_a_refused_submit_of_htcondor_names_what_to_check() -> None:
    assert "Check `requirements`" in advice("ERROR: Parse error in expression: Requirements = (", REASONS)
    assert "Check `gpus_per_node`" in advice("ERROR: Parse error in expression: RequestGPUs = x y", REASONS)


def test_values_stay_in_their_place() -> None:
    assert literal("/a$(ClusterId)") == "/a$(DOLLAR)(ClusterId)" and literal(None) is None
    assert string('a"b\\c') == '"a\\"b\\c"' and argument('it\'s "x"') == '"\'it\'\'s ""x""\'"'
    for refused in ("a\nb", "a\\"):
        with pytest.raises(OptionError):
            command(refused)
    with pytest.raises(OptionError, match="always expands"):
        literal("$$(Cpus)")


def test_the_description_is_the_head_of_the_script_alone() -> None:
    script = "#!/bin/bash\n# words\n#HTCONDOR request_cpus = 1\n\n#HTCONDORx = 2\nset -u\n#HTCONDOR hold = true\n"
    assert list(description(script)) == ["request_cpus = 1"]


def test_own_job_is_known_inside_a_job_of_htcondor_alone() -> None:
    inside = {"_CONDOR_SLOT": "slot1_1", "HPCGPU_JOB_ID": "7", "HPCGPU_JOB_NAME": "demo-2"}
    own = HTCondor().own_job(inside)
    assert own is not None and (own.job_id, own.name) == ("7", "demo-2")
    assert HTCondor().own_job({"_CONDOR_SLOT": "slot1_1"}) is None
    assert HTCondor().own_job({"HPCGPU_JOB_ID": "7"}) is None
