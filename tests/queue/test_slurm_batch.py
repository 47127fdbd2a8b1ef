"""`Slurm` against commands that misbehave: what it promises of submit, poll, accounting and cancel when the site does
its worst.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_slurm import Site

from hpcgpu.batch.base import After, JobState
from hpcgpu.batch.run_command import run
from hpcgpu.batch.slurm.client import Slurm, parse_squeue
from hpcgpu.errors import AmbiguousSubmit, BatchError, BatchUnavailable, SubmitLimited, SubmitRefused
from hpcgpu.polling.queue_monitor import Monitor
from hpcgpu.runtime.before_walltime import end_of_walltime

DOWN = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"
QUEUE_DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
SOCKET = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
REFUSED = (
    "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job "
    "submission failed: Invalid partition name specified\n"
)


def submit(slurm: Slurm, site: Site, **more: Any) -> str:
    return slurm.submit(site.script, job_name="ada-w1", **more)


def impatient(timeout: float = 2.0) -> Slurm:
    """A Slurm that gives up its first command soon, but not those after it."""

    def patience(seconds: float) -> None:
        slurm.timeout = 60.0

    slurm = Slurm(timeout=timeout, sleep=patience)
    return slurm


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# the formats of the answers


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("7|RUNNING|n1|100|200|w|None", {"state": JobState.RUNNING, "node": "n1", "start": 100.0, "end": 200.0}),
        ("7|RUNNING|n1|100|200|w|None", {"expected_start": None, "reason": "", "suspended": False}),
        ("7|PENDING|(null)|100|N/A|w|(null)", {"node": "", "expected_start": 100.0, "end": None, "reason": ""}),
        ("7|SUSPENDED|n1|100|200|w|None", {"state": JobState.RUNNING, "suspended": True, "end": None}),
        ("7|STOPPED|n1|100|200|w|None", {"state": JobState.RUNNING, "suspended": True, "end": None}),
        ("7|PREEMPTED|n1|100|200|w|None", {"state": JobState.PREEMPTED}),
        ("7|DEADLINE|n1|100|200|w|None", {"state": JobState.TIMEOUT}),
        ("7|REVOKED|n1|100|200|w|None", {"state": JobState.CANCELLED}),
        ("7|REQUEUED|n1|100|200|w|None", {"state": JobState.PENDING}),
        ("7|COMPLETING+|n1|100|200|w|None", {"state": JobState.COMPLETING}),
    ],
)
def test_a_line_of_squeue_is_read(line: str, expected: dict[str, object]) -> None:
    status = parse_squeue(line)["7"]
    assert {name: getattr(status, name) for name in expected} == expected


# submit: the id


def test_submit_returns_the_id_and_passes_name_and_dependency(slurm: Slurm, site: Site) -> None:
    assert submit(slurm, site, after=After("77"), exclude=["n1", "n2"]) == "101"
    submit(slurm, site, after=After("77", ended=True))
    assert site.calls("sbatch") == [
        ["--parsable", "--job-name=ada-w1", "--dependency=after:77", "--exclude=n1,n2", str(site.script)],
        ["--parsable", "--job-name=ada-w1", "--dependency=afterany:77", str(site.script)],
    ]


@pytest.mark.parametrize(
    "fault",
    [
        {"before": "Welcome to project 4242\n"},
        {"after": "Charged to project 4242\n"},
        {"before": "4242\n"},
        {"stdout": "{answer};cluster7\n"},
        {"stdout": "Submitted batch job {answer}\n"},
        {"stdout": "Submitted batch job {answer} on cluster c7\n", "after": "4242 hours are left\n"},
        {"stdout": "  {answer}  \r\n"},
        {"stderr": "sbatch: warning: Unable to contact slurm controller, 1 retry\n"},
    ],
    ids=lambda fault: "".join(fault.values()).strip(),
)
def test_noise_around_the_id_is_tolerated(slurm: Slurm, site: Site, fault: dict[str, str]) -> None:
    site.fault("sbatch", **fault)
    assert submit(slurm, site) == "101"
    assert len(site.calls("sbatch")) == 1


@pytest.mark.parametrize("stdout", ["", "have a nice day\n", "project 4242\n"])
def test_an_accepted_job_whose_id_was_swallowed_is_found_by_its_name(slurm: Slurm, site: Site, stdout: str) -> None:
    site.fault("sbatch", stdout=stdout)
    assert submit(slurm, site) == "101"
    assert len(site.calls("sbatch")) == 1


# submit: no answer


def test_a_submit_that_timed_out_but_was_accepted_is_not_repeated(site: Site) -> None:
    site.fault("sbatch", hang=True)
    assert submit(impatient(), site) == "101"
    assert site.jobs(j="ada-w1") == ["101"]
    assert len(site.calls("sbatch")) == 1


def test_a_submit_that_timed_out_and_was_not_accepted_is_repeated_once(site: Site) -> None:
    site.fault("sbatch", hang=True, lost=True)
    assert submit(impatient(), site) == "101"
    assert site.jobs(j="ada-w1") == ["101"]
    assert len(site.calls("sbatch")) == 2


def test_socket_timed_out_may_mean_accepted(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1)
    assert submit(slurm, site) == "101"
    assert site.jobs(j="ada-w1") == ["101"]
    assert len(site.calls("sbatch")) == 1


def test_an_attempt_that_is_accepted_after_it_was_given_up_does_not_stay_beside_its_repetition(
    slurm: Slurm, site: Site
) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, late=True)
    job_id = submit(slurm, site)
    assert site.jobs(j="ada-w1", T="PENDING") == [job_id]
    assert len(site.jobs(j="ada-w1", T="CANCELLED")) == 1


def test_of_two_attempts_without_an_answer_that_are_both_accepted_one_job_stays(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, late=True)
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1)
    assert submit(slurm, site) == "102"
    assert site.jobs(j="ada-w1", T="PENDING") == ["102"] and site.jobs(j="ada-w1", T="CANCELLED") == ["101"]


def test_a_repetition_that_is_refused_because_the_first_attempt_was_accepted_after_all(
    slurm: Slurm, site: Site
) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, late=True)
    site.fault("sbatch", stdout="", stderr="sbatch: error: QOSMaxSubmitJobPerUserLimit", rc=1, lost=True)
    assert submit(slurm, site) == "101"
    assert site.jobs(j="ada-w1") == ["101"]


def test_a_repetition_that_is_refused_while_no_job_exists_is_a_refusal(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, lost=True)
    site.fault("sbatch", stdout="", stderr="sbatch: error: Invalid account", rc=1, lost=True)
    with pytest.raises(SubmitRefused, match="Invalid account"):
        submit(slurm, site)


def test_a_repetition_that_is_refused_for_a_limit_while_no_job_exists_is_a_limit(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, lost=True)
    site.fault("sbatch", stdout="", stderr="sbatch: error: QOSMaxSubmitJobPerUserLimit", rc=1, lost=True)
    with pytest.raises(SubmitLimited, match="QOSMaxSubmitJobPerUserLimit"):
        submit(slurm, site)


def test_of_two_jobs_of_the_name_the_newer_one_is_the_lost_one(slurm: Slurm, site: Site) -> None:
    site.job(9, "RUNNING", j="ada-w1")
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1)
    assert submit(slurm, site) == "101"
    assert site.jobs(j="ada-w1", T="RUNNING") == ["9"]


def test_a_job_of_another_name_is_not_taken_for_the_lost_one(slurm: Slurm, site: Site) -> None:
    site.job(50, j="ada-w10")
    site.job(51, "CANCELLED", j="ada-w1")
    site.job(52, j="ada-w1", u="bob")  # of another user
    site.job("53_1", "RUNNING", j="ada-w1")  # a script that the user submitted as an array
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, lost=True)
    assert submit(slurm, site) == "101"


def test_without_a_look_up_no_second_job_is_risked(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1)
    site.fault("squeue", stdout="", stderr=QUEUE_DOWN, rc=1, always=True)
    with pytest.raises(AmbiguousSubmit, match=r"ada-w1.*Unable to contact slurm controller"):
        submit(slurm, site)
    assert len(site.calls("sbatch")) == 1


def test_a_submit_that_never_gets_an_answer_stays_ambiguous(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, lost=True, always=True)
    with pytest.raises(AmbiguousSubmit, match="Socket timed out"):
        submit(slurm, site)


def test_a_doubt_is_not_forgotten_when_the_controller_goes_down_next(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, lost=True)
    site.fault("sbatch", stdout="", stderr=DOWN, rc=1, lost=True, always=True)
    with pytest.raises(AmbiguousSubmit):
        submit(slurm, site)


def test_a_submit_that_may_have_been_accepted_stays_ambiguous_when_its_job_is_not_wanted_any_more(
    slurm: Slurm, site: Site
) -> None:
    """A controller may accept it after the look-up: the close of the cluster must search for the job again."""
    site.fault("sbatch", stdout="", stderr=SOCKET, rc=1, lost=True, always=True)
    wanted = lambda: len(site.calls("sbatch")) < 2  # noqa: E731
    with pytest.raises(AmbiguousSubmit):
        slurm.submit(site.script, job_name="ada-w1", wanted=wanted)


# submit: a definite answer


def test_a_controller_that_comes_back_is_waited_for_ever_longer(slurm: Slurm, site: Site, naps: list[float]) -> None:
    for _ in range(2):
        site.fault("sbatch", stdout="", stderr=DOWN, rc=1, lost=True)
    assert submit(slurm, site) == "101"
    assert site.jobs() == ["101"]
    assert not site.calls("squeue")
    assert len(naps) == 2
    assert naps[0] < naps[1]


def test_a_controller_that_stays_down_is_no_refusal(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=DOWN, rc=1, lost=True, always=True)
    with pytest.raises(BatchUnavailable, match="Unable to contact slurm controller") as caught:
        submit(slurm, site)
    assert type(caught.value) is BatchUnavailable
    assert len(site.calls("sbatch")) == 4


def test_a_refusal_is_final_and_in_slurms_own_words(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", stderr=REFUSED, rc=1, lost=True, always=True)
    with pytest.raises(
        SubmitRefused, match=r"'ada-w1'.*invalid partition specified: nope.*Invalid partition name specified"
    ):
        submit(slurm, site)
    assert len(site.calls("sbatch")) == 1
    assert not site.jobs()


def test_a_host_whose_jobs_slurm_refuses_is_shown_what_may_manage_the_cluster(slurm: Slurm, site: Site) -> None:
    """As Slurm does on a host that is not among the `AllocNodes` of the partition."""
    words = "sbatch: error: Batch job submission failed: Access/permission denied\n"
    site.fault("sbatch", stdout="", stderr=words, rc=1, lost=True)
    with pytest.raises(
        SubmitRefused, match=r"permission denied\. .*from this host.*run on a login node: hpcgpu manage"
    ):
        submit(slurm, site)


def test_a_refusal_without_words_names_the_exit_code(slurm: Slurm, site: Site) -> None:
    site.fault("sbatch", stdout="", rc=3, lost=True)
    with pytest.raises(SubmitRefused, match="exit code 3"):
        submit(slurm, site)


@pytest.mark.parametrize("mode", [None, 0o644], ids=["missing", "not executable"])
def test_a_missing_sbatch_is_named_with_what_to_do(
    slurm: Slurm, site: Site, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    if mode is None:
        site.remove("sbatch", monkeypatch)
    else:
        monkeypatch.setenv("PATH", str(site.bin))
        (site.bin / "sbatch").chmod(mode)
    for ask in (slurm.check, lambda: submit(slurm, site)):
        with pytest.raises(BatchError, match=r"`sbatch` was not found.*login node") as caught:
            ask()
        assert not isinstance(caught.value, (SubmitRefused, BatchUnavailable))


# poll


def test_three_hundred_jobs_are_polled_by_one_command(slurm: Slurm, site: Site) -> None:
    job = {"T": "RUNNING", "N": "n1", "S": "1700000000", "e": "1700003600", "j": "w", "r": "None"}
    site.change(lambda state: state["jobs"].update({str(i): job for i in range(1000, 1300)}))
    answer = slurm.poll(str(i) for i in range(1000, 1300))
    assert len(answer) == 300
    status = answer["1299"]
    assert (status.state, status.node, status.start, status.end, status.reason) == (
        JobState.RUNNING,
        "n1",
        1.7e9,
        1.7e9 + 3600,
        "",
    )
    assert len(site.calls("squeue")) == 1


def test_no_jobs_are_polled_by_no_command(slurm: Slurm, site: Site) -> None:
    assert slurm.poll([]) == slurm.ended([]) == {}
    slurm.cancel([])
    assert not site.environments()


@pytest.mark.parametrize("word", ["EXPEDITING", "UPDATE_DB", "QUANTUM_ENTANGLED", "", "???"])
def test_a_state_never_seen_before_is_unknown_and_alive(slurm: Slurm, site: Site, word: str) -> None:
    job_id = site.job(5, word)
    status = slurm.poll([job_id])[job_id]
    assert status.state is JobState.UNKNOWN
    assert not status.state.ended


def test_an_unknown_job_is_left_out_alone_or_among_others(slurm: Slurm, site: Site) -> None:
    site.job(5)
    assert slurm.poll(["999"]) == {}  # squeue fails
    assert set(slurm.poll(["5", "999"])) == {"5"}  # squeue is silent
    assert len(site.calls("squeue")) == 2


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_of_a_truncated_answer_only_whole_lines_are_believed(slurm: Slurm, site: Site, cut: int) -> None:
    ids = [site.job(i, "RUNNING", N="n1", S="1700000000", e="1700003600", r="NonZeroExitCode") for i in (5, 6)]
    whole = slurm.poll(ids)
    site.fault("squeue", cut=cut)
    for job_id, status in slurm.poll(ids).items():
        assert (status.state, status.end) == (whole[job_id].state, whole[job_id].end)


def test_lines_that_are_no_jobs_are_passed_over(slurm: Slurm, site: Site) -> None:
    site.job(5, "RUNNING")
    noise = "Préavis: arrêt à 18h | entretien\n5,RUNNING,n1,1,2,x,None\n|||||||\n"
    noise += "JOBID|STATE|NODELIST|START|END|NAME|REASON\n5_3|a|b|c|d|e|f\n"
    site.fault("squeue", before=noise, after=noise)
    assert {i: status.state for i, status in slurm.poll(["5"]).items()} == {"5": JobState.RUNNING}


def test_a_name_may_hold_the_separator_and_a_reason_commas(slurm: Slurm, site: Site) -> None:
    site.job(5, j="a|b||c", r="ReqNodeNotAvail, UnavailableNodes:n1,n2")
    status = slurm.poll(["5"])["5"]
    assert (status.name, status.reason) == ("a|b||c", "ReqNodeNotAvail, UnavailableNodes:n1,n2")
    assert slurm.find("a|b||c") == ["5"]


def test_a_job_that_has_ended_is_not_found_by_its_name(slurm: Slurm, site: Site) -> None:
    line = "{}|{}|n1|1700000000|1700003600|demo-0|None\n"
    site.fault("squeue", before=line.format(5, "COMPLETED") + line.format(7, "FAILED"))
    site.job(6, "RUNNING", j="demo-0")
    assert slurm.find("demo-0") == ["6"], "the others may be of an earlier cluster of this name"


def test_times_that_are_not_known_are_none(slurm: Slurm, site: Site) -> None:
    site.job(5, S="N/A", e="2026-01-01T00:00:00", N="(null)")
    status = slurm.poll(["5"])["5"]
    assert (status.start, status.end, status.node) == (None, None, "")


def test_a_queue_that_is_down_is_asked_again_and_then_reported_as_unavailable(slurm: Slurm, site: Site) -> None:
    site.job(5)
    site.fault("squeue", stdout="", stderr=QUEUE_DOWN, rc=1)
    assert set(slurm.poll(["5"])) == {"5"}
    site.fault("squeue", stdout="", stderr=QUEUE_DOWN, rc=1, always=True)
    with pytest.raises(BatchUnavailable, match=r"`squeue` failed: .*Unable to contact"):
        slurm.poll(["5"])


def test_a_queue_that_does_not_answer_in_time_is_queried_again(site: Site) -> None:
    site.job(5, "RUNNING")
    site.fault("squeue", hang=True)
    assert impatient().poll(["5"])["5"].state is JobState.RUNNING
    assert len(site.calls("squeue")) == 2


def test_an_error_that_does_not_pass_is_not_tried_again(slurm: Slurm, site: Site) -> None:
    site.fault("squeue", stdout="", stderr="squeue: unrecognized option '--x'\n", rc=1, always=True)
    with pytest.raises(BatchUnavailable, match="unrecognized option"):
        slurm.poll(["5"])
    assert len(site.calls("squeue")) == 1


# environment


def test_no_variable_of_the_user_or_of_an_outer_job_reaches_a_command(
    slurm: Slurm, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "SBATCH_PARTITION",
        "SBATCH_GRES",
        "SLURM_JOB_ID",
        "SLURM_CLUSTERS",
        "SQUEUE_FORMAT",
        "SQUEUE_STATES",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "evil")
    for name in ("SACCT_FORMAT", "SCANCEL_STATE", "SALLOC_QOS", "SRUN_DEBUG", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "evil")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/site.conf")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    job_id = submit(slurm, site)
    slurm.poll([job_id])
    slurm.ended([job_id])
    slurm.cancel([job_id])
    environments = site.environments()
    assert len(environments) == 4
    for environment in environments:
        assert "evil" not in environment.values()
        assert environment["SLURM_CONF"] == "/etc/slurm/site.conf"
    # sbatch hands its environment on to the job; what the others print is parsed.
    assert [environment["LC_ALL"] for environment in environments] == ["de_DE.UTF-8", "C", "C", "C"]


# cancel


def test_cancel_of_350_jobs_is_one_command(slurm: Slurm, site: Site) -> None:
    job = {"T": "RUNNING", "N": "n1", "S": "N/A", "e": "N/A", "j": "w", "r": "None"}
    site.change(lambda state: state["jobs"].update({str(i): job for i in range(350)}))
    slurm.cancel(str(i) for i in range(350))
    assert len(site.jobs(T="CANCELLED")) == 350
    assert len(site.calls("scancel")) == 1


def test_only_pending_spares_what_runs(slurm: Slurm, site: Site) -> None:
    site.job(5)
    site.job(6, "RUNNING")
    slurm.cancel(["5", "6"], only_pending=True)
    assert site.calls("scancel") == [["--state=PENDING", "5", "6"]]
    assert site.jobs(T="CANCELLED") == ["5"]


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "scancel: error: Kill job error on job id 999: Invalid job id specified\n",
        "scancel: error: Kill job error on job id 999: Job/step already completing or completed\n",
    ],
)
def test_cancel_of_a_job_that_is_unknown_or_over_is_no_error(slurm: Slurm, site: Site, stderr: str) -> None:
    site.fault("scancel", stderr=stderr, rc=1 if stderr else 0)
    slurm.cancel(["999"])
    assert len(site.calls("scancel")) == 1


def test_an_unknown_id_does_not_hide_that_the_controller_went_down(slurm: Slurm, site: Site) -> None:
    site.job(5, "RUNNING")
    words = "scancel: error: Kill job error on job id 4: Invalid job id specified\n"
    words += "scancel: error: Kill job error on job id 5: Unable to contact slurm controller (connect failure)\n"
    site.fault("scancel", stderr=words, rc=1, lost=True)
    slurm.cancel(["4", "5"])
    assert site.jobs(T="CANCELLED") == ["5"]


def test_a_cancel_that_did_not_arrive_is_reported(slurm: Slurm, site: Site) -> None:
    site.fault(
        "scancel", stderr="scancel: error: Kill job error on job id 5: Access/permission denied\n", rc=1, lost=True
    )
    with pytest.raises(BatchUnavailable, match="permission denied"):
        slurm.cancel(["5"])


# accounting


def test_without_accounting_nothing_is_known_of_ended_jobs(slurm: Slurm, site: Site) -> None:
    assert slurm.ended(["5"]) == {}
    assert len(site.calls("sacct")) == 1


def test_the_accounting_reports_how_jobs_ended(slurm: Slurm, site: Site) -> None:
    records = {
        "5": "5|CANCELLED by 1000|0:15|n1|1700000000|1700000060|a|b",
        "6": "6|FAILED|3:0|n1|1700000000|1700000060|w",
        "7": "7|CANCELLED by 0|0:0|None assigned|None|Unknown|w",
        "8": "8|VANISHED|?|n1|Unknown|Unknown|w",
    }
    site.change(lambda state: state["accounting"].update(records))
    answer = slurm.ended(["5", "6", "7", "8", "9"])
    assert {i: (s.state, s.exit_code, s.end, s.name) for i, s in answer.items()} == {
        "5": (JobState.CANCELLED, 143, 1700000060.0, "a|b"),
        "6": (JobState.FAILED, 3, 1700000060.0, "w"),
        "7": (JobState.CANCELLED, 0, None, "w"),
        "8": (JobState.UNKNOWN, None, None, "w"),
    }
    assert answer["7"].node == ""
    assert len(site.calls("sacct")) == 1


@pytest.mark.parametrize("problem", ["missing", "hangs"])
def test_an_accounting_that_is_missing_or_hangs_does_not_take_away_what_the_queue_reported(
    site: Site, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    site.job(5, "RUNNING")
    monitor = Monitor(Slurm(timeout=2 if problem == "hangs" else 60), grace=0)
    for job_id in ("5", "6"):
        monitor.watch(job_id, "w", now=0)
    if problem == "missing":
        site.remove("sacct", monkeypatch)
    else:
        site.fault("sacct", hang=True)
    for now in (1, 2):  # one answer may leave out what lives
        monitor.record(monitor.query(monitor.alive()), now=now)
    assert monitor.error == ""
    assert {i: view.status.state for i, view in monitor.views.items()} == {"5": JobState.RUNNING, "6": JobState.FAILED}


# the job around us


def test_outside_of_a_job_there_is_no_own_job(slurm: Slurm, site: Site) -> None:
    assert slurm.own_job({}) is None
    assert not site.environments()


def test_the_own_job_is_read_from_the_environment(slurm: Slurm, site: Site) -> None:
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "w", "SLURM_NODEID": "1", "SLURM_JOB_END_TIME": "1700003600"}
    own = slurm.own_job(environ)
    assert own is not None
    assert (own.job_id, own.name, own.node, own.end) == ("5", "w", 1, 1700003600.0)
    assert not site.environments()


def test_the_queue_is_asked_for_the_end_where_the_environment_does_not_name_it(slurm: Slurm, site: Site) -> None:
    site.job(5, "RUNNING", e="1700003600")
    own = slurm.own_job({"SLURM_JOB_ID": "5"})
    assert own is not None
    assert (own.node, own.end) == (0, None)
    assert end_of_walltime(own, slurm) == 1700003600.0
    assert len(site.calls("squeue")) == 1


@pytest.mark.parametrize("problem", ["unknown", "down", "missing"])
def test_an_end_that_nobody_reports_is_none(
    slurm: Slurm, site: Site, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    if problem == "down":
        site.fault("squeue", stdout="", stderr=QUEUE_DOWN, rc=1, always=True)
    elif problem == "missing":
        site.remove("squeue", monkeypatch)
    own = slurm.own_job({"SLURM_JOB_ID": "5"})
    assert own is not None
    assert end_of_walltime(own, slurm) is None


def test_a_thousand_jobs_are_polled_and_cancelled_by_one_command_each(slurm: Slurm, site: Site) -> None:
    ids = [str(10**17 + number) for number in range(1000)]  # as long as an id may be
    for job_id in ids[:3]:
        site.job(job_id, "RUNNING")
    assert sorted(slurm.poll(ids)) == ids[:3]
    slurm.cancel(ids)
    assert len(site.calls("squeue")) == len(site.calls("scancel")) == 1
    assert site.jobs(T="CANCELLED") == ids[:3]
    longest = max(len(argument) for call in site.calls("squeue") for argument in call)
    assert longest < 131072, "Linux accepts no longer argument (MAX_ARG_STRLEN)"


# commands that hang, and interrupts


@pytest.mark.parametrize(
    "wrapper",
    ["sleep 1000 & echo $! > {pid}; wait", "sleep 1000 & echo $! > {pid}; exit 0"],
    ids=["which waits for its child", "which leaves its child behind"],
)
def test_a_hung_wrapper_is_killed_with_its_children(site: Site, until: Callable[..., None], wrapper: str) -> None:
    pid = site.folder / "pid"
    command = site.replace("wrapper", "#!/bin/sh\n" + wrapper.format(pid=pid) + "\n")
    begin = time.monotonic()
    with pytest.raises(BatchUnavailable, match="did not answer within 5 s"):
        run([str(command)], timeout=5)
    assert time.monotonic() - begin < 60
    until(lambda: gone(int(pid.read_text())), "the child is gone")


def test_a_child_that_left_the_session_does_not_hold_us_up(site: Site) -> None:
    pid = site.folder / "pid"
    command = site.replace("wrapper", f"#!/bin/sh\nsetsid sh -c 'echo $$ > {pid}; exec sleep 1000' & wait\n")
    begin = time.monotonic()
    with pytest.raises(BatchUnavailable):
        run([str(command)], timeout=5)
    assert time.monotonic() - begin < 60
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_child_that_does_not_hold_the_output_outlives_its_command(site: Site) -> None:
    command = site.replace("wrapper", "#!/bin/sh\nsleep 1000 >/dev/null 2>&1 & echo $!\n")
    pid = int(run([str(command)], timeout=60).stdout)
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "worker thread"])
def test_ctrl_c_in_the_terminal_does_not_kill_a_submit_half_way(
    site: Site, until: Callable[..., None], thread: bool
) -> None:
    gate, saved = site.folder / "gate", site.folder / "id"
    site.fault("sbatch", gate=str(gate))
    program = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from hpcgpu.batch.slurm.client import Slurm

def submit():
    Path({str(saved)!r}).write_text(Slurm().submit(Path({str(site.script)!r}), job_name="ada-w1"))

with ThreadPoolExecutor() as pool:
    pool.submit(submit).result() if {thread} else submit()
"""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    submitter = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: site.calls("sbatch"), "sbatch is under way")
    os.killpg(submitter.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        submitter.wait(timeout=0.7)  # longer than subprocess.run would let sbatch live
    gate.touch()
    _, stderr = submitter.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert "BrokenPipe" not in stderr
    assert submitter.returncode == -signal.SIGINT
    assert site.jobs(j="ada-w1") == ["101"]
    assert saved.exists() is thread  # in the main thread the interrupt comes first: the job is found by its name


def test_jobs_of_hpcgpu_are_known_by_their_scripts_which_slurm_keeps(slurm: Slurm, site: Site, tmp_path: Path) -> None:
    ours = 'exec "$python" -P -m hpcgpu.runtime.launch worker slurm "$directory" --gpus 1\n'
    scripts = {"demo/worker.sbatch": ours, "demo/other.sbatch": ours, "tool/worker.sbatch": "exec sleep 9\n"}
    ids = {}
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        ids[name] = slurm.submit(path, job_name="demo-0")
    path = tmp_path / "demo" / "worker.sbatch"
    again = slurm.submit(path, job_name="demo-1")
    assert slurm.marked(lambda script: True) == {ids["demo/worker.sbatch"]: path, again: path}
    assert slurm.marked(lambda script: script != path) == {}
    slurm.cancel([again])
    assert slurm.marked(lambda script: True) == {ids["demo/worker.sbatch"]: path}
    slurm.cancel(ids.values())
    tasks = [
        site.job(i, state, o=str(path), script=path.read_text())
        for i, state in (("9_1", "RUNNING"), ("9_2", "PENDING"))
    ]
    assert slurm.marked(lambda script: True) == dict.fromkeys(tasks, path), "the user may submit it as an array"
    assert {i: job.state.value for i, job in slurm.poll(tasks).items()} == {"9_1": "running", "9_2": "pending"}
    slurm.cancel(tasks)
    assert slurm.marked(lambda script: True) == {}
