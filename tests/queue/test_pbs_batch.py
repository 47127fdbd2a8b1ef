"""`PBS` against a PBS that pretends, against commands that misbehave, and against what a real OpenPBS 23.06.06 printed.

``openpbs-qstat.txt`` and ``openpbs-pbsnodes.txt`` are recordings. Of jobs 7, 26, 27, 28 and 40 attributes were recorded
as JSON, and are written here as ``qstat -f`` writes them; 41 is job 0 while it ran.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from fake_pbs import Site

from hpcgpu.batch.base import After, JobState, JobStatus, Outlook
from hpcgpu.batch.pbs.client import PBS, parse_attributes, parse_job_id, statuses
from hpcgpu.batch.pbs.names import pbs_name
from hpcgpu.batch.pbs.nodes import Shortage, parse_pbsnodes
from hpcgpu.batch.reasons import explain, outlook
from hpcgpu.errors import AmbiguousSubmit, BatchError, BatchUnavailable, Cancelled, SubmitLimited, SubmitRefused
from hpcgpu.polling.queue_monitor import Monitor
from hpcgpu.runtime.before_walltime import end_of_walltime
from hpcgpu.scaling.replace_failed_jobs import Failures, classify

RECORDED = (Path(__file__).parent / "openpbs-qstat.txt").read_text()
NODES = (Path(__file__).parent / "openpbs-pbsnodes.txt").read_text()


def parsed(stdout: str) -> dict[str, JobStatus]:
    """Parse ``qstat -f``, or ``qstat -x -f`` with ended jobs."""
    return statuses(parse_attributes(stdout))


@pytest.fixture
def naps() -> list[float]:
    """How long `batch` waited before it tried again; nobody really waits."""
    return []


@pytest.fixture
def batch(pbs: Site, naps: list[float]) -> PBS:
    return PBS(timeout=60, sleep=naps.append)


def script(site: Site, body: str = "exec sleep 600", *directives: str) -> Path:
    """A job script; its log is requested in `logs/`."""
    (site.folder / "logs").mkdir(exist_ok=True)
    path = site.folder / "job.pbs"
    lines = [f"#PBS {directive}" for directive in ("-l walltime=01:00:00", f"-o {site.folder}/logs/", *directives)]
    path.write_text("\n".join(["#!/bin/bash", *lines, body, ""]))
    return path


def submit(batch: PBS, site: Site, name: str = "ada-1", body: str = "exec sleep 600", **more: After) -> str:
    return batch.submit(script(site, body), job_name=name, logs=site.folder / "logs", **more)


def states(batch: PBS, *ids: str) -> dict[str, JobState]:
    return {job_id: status.state for job_id, status in batch.poll(ids).items()}


def finish(batch: PBS, job_id: str) -> JobStatus:
    """Wait for the end of a job."""
    deadline = time.monotonic() + 60
    while job_id in batch.poll([job_id]):
        assert time.monotonic() < deadline, f"job {job_id} did not end"
        time.sleep(0.05)
    return batch.ended([job_id])[job_id]


# what was recorded


def test_what_a_real_openpbs_printed() -> None:
    jobs = parsed(RECORDED)
    found = {i.split(".")[0]: (s.state, s.exit_code, s.node) for i, s in jobs.items()}
    assert found == {
        "41": (JobState.RUNNING, None, "pbs01"),
        "4": (JobState.PENDING, None, ""),
        "16": (JobState.PENDING, None, ""),
        "22": (JobState.PENDING, None, ""),
        "17[]": (JobState.RUNNING, None, ""),
        "25": (JobState.COMPLETED, 0, "pbs01"),
        "0": (JobState.FAILED, 3, "pbs01"),
        "18": (JobState.TIMEOUT, None, "pbs01"),
        "19": (JobState.CANCELLED, 143, "pbs01"),
        "7": (JobState.CANCELLED, None, ""),
        "40": (JobState.CANCELLED, None, ""),
        "26": (JobState.FAILED, 139, "n0"),
        "27": (JobState.CANCELLED, 137, "n0"),
        "28": (JobState.COMPLETED, 0, "n0,n1"),
    }
    ended = jobs["0.pbs01"]
    assert ended.reason == "Job run at Fri Nov 20 at 21:10 on (pbs01[0]:ncpus=4:ngpus=2:mem=102400kb) and failed"
    assert ended.start is not None and ended.end == ended.start + 8
    running = jobs["41.pbs01"]
    assert running.start is not None and running.end == running.start + 120, "stime and walltime"
    assert (
        parse_attributes(RECORDED)["0.pbs01"]["Resource_List.select"]
        == "1:ncpus=4:mpiprocs=1:ngpus=2:mem=100mb:gpu_type=a100"
    )


@pytest.mark.parametrize(
    ("job", "prospect", "words"),
    [
        ("4", Outlook.NEVER, "no node can satisfy it"),
        ("16", Outlook.NEVER, "you hold it: release it with `qrls` [Hold_Types = u]"),
        (
            "22",
            Outlook.WAIT,
            "it starts once the scheduler job has started [Hold_Types = s, depend = after:21.pbs01@pbs01]",
        ),
        ("18", Outlook.WAIT, "it reached the end of its walltime"),
        ("19", Outlook.WAIT, "a user or the batch system cancelled it, exit code 143 [Job run at"),
        ("0", Outlook.WAIT, "it ended with an error, exit code 3 [Job run at"),
    ],
)
def test_recorded_states_in_words(job: str, prospect: Outlook, words: str) -> None:
    status = parsed(RECORDED)[f"{job}.pbs01"]
    assert words in explain(status)
    if status.state is JobState.PENDING:
        assert outlook(status) is prospect


@pytest.mark.parametrize(
    ("comment", "prospect", "words"),
    [
        ("Not Running: Insufficient amount of resource: ngpus (R: 2 A: 0 T: 16)", Outlook.WAIT, "no free node"),
        (
            "Not Running: Insufficient amount of resource: ngpus (R: 1 A: 0 T: 0)",
            Outlook.NEVER,
            "no node can satisfy it",
        ),
        (
            f"Not Running: Not enough free nodes available; {Shortage(9, 'ncpus=1', 4)}",
            Outlook.NEVER,
            "large enough",
        ),
        (
            "Not Running: Insufficient amount of resource: ncpus (R: 64 A: 63 T: 64); no node has ncpus=64",
            Outlook.NEVER,
            "large enough",
        ),
        ("Can Never Run: Not enough total nodes available", Outlook.NEVER, "check `nodes_per_job`"),
        ("Not Running: Not enough free nodes available", Outlook.WAIT, "no free node"),
        ("Not Running: No available resources on nodes", Outlook.WAIT, "no free node"),
        ("Not Running: Queue gpu job limit reached for user ada", Outlook.LIMIT, "limit on running jobs"),
        (
            "Not Running: would exceed user ada's limit on resource ngpus in complex",
            Outlook.LIMIT,
            "limit on running jobs",
        ),
        ("Not Running: Job would conflict with reservation or top job", Outlook.SITE, "shorter `walltime`"),
        ("Not Running: Job would cross dedicated time boundary", Outlook.SITE, "shorter `walltime`"),
        ("Not Running: Job would break strict sorted order", Outlook.WAIT, "higher priority"),
        ("Not Running: Queue not started.", Outlook.SITE, "out of service"),
        ("Can Never Run: can't fit in the largest placement set, and can't span psets", Outlook.NEVER, "can never run"),
        ("Not Running: something new", Outlook.WAIT, "does not run it yet"),
        ("job held, too many failed attempts to run", Outlook.NEVER, "site's support"),
        ("Hold_Types = o", Outlook.SITE, "until the site releases it"),
        ("Hold_Types = uo", Outlook.NEVER, "release it with `qrls`"),
        ("Hold_Types = p", Outlook.NEVER, "password"),
        ("", Outlook.WAIT, "has not considered it yet"),
    ],
)
def test_comments_in_words(comment: str, prospect: Outlook, words: str) -> None:
    status = JobStatus(job_id="1.pbs01", state=JobState.PENDING, reason=comment, words=PBS.reasons)
    assert outlook(status) is prospect
    assert words in explain(status)
    assert comment in explain(status)


@pytest.mark.parametrize(
    ("attributes", "state", "exit_code"),
    [
        ({"Exit_status": "0", "substate": "92", "stime": "x"}, JobState.COMPLETED, 0),
        ({"substate": "92"}, JobState.CANCELLED, None),  # trap 2: it never ran
        ({"substate": "92", "stime": "x"}, JobState.FAILED, None),
        ({"Exit_status": "-29", "substate": "93"}, JobState.TIMEOUT, None),
        ({"Exit_status": "-27", "substate": "93"}, JobState.OUT_OF_MEMORY, None),
        ({"Exit_status": "-4", "substate": "93"}, JobState.NODE_FAIL, None),
        ({"Exit_status": "-14", "substate": "93"}, JobState.NODE_FAIL, None),
        ({"Exit_status": "-20", "substate": "93", "comment": "Job run at ... and failed"}, JobState.NODE_FAIL, None),
        ({"Exit_status": "-99", "substate": "93"}, JobState.FAILED, None),
        ({"Exit_status": "-3", "substate": "93"}, JobState.FAILED, None),
        ({"Exit_status": "265", "substate": "93"}, JobState.FAILED, 137),
        ({"Exit_status": "271", "substate": "91"}, JobState.CANCELLED, 143),
        ({"Exit_status": "0", "substate": "91"}, JobState.CANCELLED, 0),
        (
            {"Exit_status": "271", "substate": "93", "comment": "... and exceeded resource mem"},
            JobState.OUT_OF_MEMORY,
            143,
        ),
        ({"Exit_status": "271", "substate": "91", "comment": "Job preempted by deletion"}, JobState.PREEMPTED, 143),
        ({"substate": "91", "comment": "execution node n7 down"}, JobState.NODE_FAIL, None),
    ],
)
def test_how_a_job_ended(attributes: dict[str, str], state: JobState, exit_code: int | None) -> None:
    text = "Job Id: 5.pbs01\n    job_state = F\n" + "".join(f"    {k} = {v}\n" for k, v in attributes.items()) + "\n"
    status = parsed(text)["5.pbs01"]
    assert (status.state, status.exit_code) == (state, exit_code)


def test_jobs_of_a_dead_node_do_not_end_the_scaling() -> None:
    text = (
        "Job Id: 5.pbs01\n    job_state = F\n    substate = 93\n    Exit_status = -20\n"
        "    comment = Job run at Mon Nov 23 at 09:00 on (n3:ncpus=1) and failed\n\n"
    )
    status = parsed(text)["5.pbs01"]
    assert "its node failed [" in explain(status) and "(Exit_status = -20: PBS lost its first node)" in explain(status)
    failures = Failures(restarts=0)
    for _ in range(5):
        failures.job_ended(classify(status.state, lasted=None), "n3", now=0.0)
    assert not failures.paused


@pytest.mark.parametrize("letter", ["S", "U"])
def test_a_suspended_job_runs_and_is_reported_as_suspended(letter: str) -> None:
    comment = "Job run at Mon Nov 23 at 14:40 on (n0:ncpus=1)"
    status = parsed(f"Job Id: 5.pbs01\n    job_state = {letter}\n    comment = {comment}\n\n")["5.pbs01"]
    assert status.state is JobState.RUNNING and status.suspended
    assert explain(status).startswith("the batch system has suspended it: nothing in it runs until")


@pytest.mark.parametrize("letter", ["M", "", "?", "QUANTUM"])
def test_a_state_never_seen_before_is_unknown_and_alive(letter: str) -> None:
    status = parsed(f"Job Id: 5.pbs01\n    job_state = {letter}\n\n")["5.pbs01"]
    assert status.state is JobState.UNKNOWN
    assert not status.state.ended


@pytest.mark.parametrize(("letter", "expected"), [("Q", True), ("R", False)])
@pytest.mark.parametrize("text", ["Fri Nov 20 21:10:43 2026", "1795209043"])
def test_the_start_that_pbs_expects_is_known_of_a_job_that_waits(letter: str, expected: bool, text: str) -> None:
    answer = f"Job Id: 5.pbs01\n    job_state = {letter}\n    estimated.start_time = {text}\n\n"
    job = parsed(answer)["5.pbs01"]
    assert (job.expected_start is not None) is expected and job.start is None
    assert not expected or time.localtime(job.expected_start).tm_year == 2026


@pytest.mark.parametrize("cut", range(0, len(RECORDED), 457))
def test_of_a_truncated_answer_only_whole_jobs_are_believed(cut: int) -> None:
    whole = parsed(RECORDED)
    assert all(whole[job_id] == status for job_id, status in parsed(RECORDED[:cut]).items())


# nodes that are large enough

BIGMEM = {"big": {"resources_available.host": "big", "resources_available.bigmem": "True"}}


@pytest.mark.parametrize(
    ("select", "place", "words"),
    [
        ("1:ncpus=16:mpiprocs=1:ngpus=4:mem=4gb:gpu_type=a100", "free", None),
        ("1:ncpus=68:ngpus=17", "free", None),  # a chunk may be spread over the vnodes of a host
        ("1:ncpus=69", "free", "no node has ncpus=69"),
        ("1:ngpus=18", "free", "no node has ngpus=18"),
        ("1:ncpus=1:gpu_type=h100", "free", "no node has ncpus=1 gpu_type=h100"),
        ("1:ncpus=1:gpu_type=A100", "free", None),
        ("2:ncpus=1", "scatter", "the job requests 2 chunks of ncpus=1, and the nodes can hold only 1"),
        ("4:ngpus=4", "vscatter", None),
        ("5:ngpus=4", "vscatter", "the job requests 5 chunks of ngpus=4, and the nodes can hold only 4"),
        ("1:ncpus=1:mem=17gb", "free", "no node has ncpus=1 mem=17gb"),
        ("1:ncpus=1:bigmem=False", "free", None),  # a boolean that a node does not have is False
        ("1:ncpus=1:bigmem=True", "free", "no node has ncpus=1 bigmem=True"),
        ("1:ncpus=1:licence=3", "free", None),  # perhaps the server's own
    ],
)
def test_what_no_node_can_ever_fill(select: str, place: str, words: str | None) -> None:
    job = {"queue": "workq", "Resource_List.select": select, "Resource_List.place": place}
    shortage = Shortage.of(job, parse_pbsnodes(NODES) | BIGMEM)
    assert (str(shortage) if shortage else None) == words


def test_of_nodes_that_belong_to_queues_only_those_of_the_queue_count() -> None:
    nodes = parse_pbsnodes(
        "n0\n     queue = gpu\n     resources_available.ncpus = 8\n\nn1\n     resources_available.ncpus = 64\n"
    )
    job = {"queue": "gpu", "Resource_List.select": "1:ncpus=64"}
    assert str(Shortage.of(job, nodes)) == "no node has ncpus=64"
    assert Shortage.of(job | {"queue": "workq"}, nodes) is None
    assert Shortage.of(job, {}) is None


# the name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ada-1", "ada-1"),
        ("ada-3f2a8b91-12", "ada-3f2a8b91-12"),
        ("adalovelace-3f2a8b91-12", "adalovelace-12"),
        ("adalovelace-3f2a8b91-scheduler", "adalo-scheduler"),
        ("my.cluster-1", "my_cluster-1"),
        ("2nd-1", "j2nd-1"),
        ("x" * 50, "x" * 15),
    ],
)
def test_the_name_for_qsub(name: str, short: str) -> None:
    assert pbs_name(name) == short
    assert len(pbs_name(name)) <= 15


# check


def test_a_real_pbs_is_accepted(batch: PBS) -> None:
    batch.check()


@pytest.mark.parametrize(
    ("answer", "sbatch", "words"),
    [
        ("echo 'Version: 6.1.2' >&2", False, "look like Torque's.*Version: 6.1.2"),
        ("echo 'Unknown option: version' >&2; exit 1", True, "look like Slurm's.*use SlurmGPUCluster"),
        ("exit 1", False, "nothing, exit code 1"),
    ],
)
def test_the_imitations_of_others_are_reported(
    batch: PBS, pbs: Site, answer: str, sbatch: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{pbs.bin}:/usr/bin:/bin" if not sbatch else str(pbs.bin))
    pbs.replace("qstat", f"#!/bin/sh\n{answer}\n")
    if sbatch:
        pbs.replace("sbatch", "#!/bin/sh\n")
    elif Path("/usr/bin/sbatch").exists():
        monkeypatch.setenv("PATH", str(pbs.bin))
    with pytest.raises(BatchError, match=f"not those of OpenPBS or PBS Pro: .*{words}"):
        batch.check()


def test_a_qsub_of_a_batch_system_that_has_a_package_names_what_to_install(
    batch: PBS, pbs: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.batch.pbs.client.names", lambda: ["local", "pbs", "slurm"])
    pbs.replace("qstat", "#!/bin/sh\necho 'SGE 8.1.9'\n")
    pbs.replace("qconf", "#!/bin/sh\n")
    with pytest.raises(BatchError, match=r"`qconf` is here, .* for gridengine, run: pip install hpcgpu-gridengine"):
        batch.check()


def test_the_server_reports_which_queue_it_is(batch: PBS, pbs: Site) -> None:
    assert batch.identity() == "pbs01"
    pbs.set(down=True)
    assert (batch.identity(), PBS().identity()) == ("pbs01", "")


def test_a_missing_command_is_named_with_what_to_do(batch: PBS, pbs: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(pbs.bin))
    (pbs.bin / "qsub").unlink()
    with pytest.raises(BatchError, match=r"`qsub` was not found.*login node"):
        batch.check()


# submit


def test_submit_passes_name_dependency_and_log(batch: PBS, pbs: Site) -> None:
    first = submit(batch, pbs, "a-cluster-of-mine-7")
    second = submit(batch, pbs, "a-cluster-of-mine-8", after=After(first))
    assert pbs.calls("qsub")[1] == [
        *("-N", "a-cluster-of-8", "-v", "HPCGPU_PBS_JOB=a-cluster-of-mine-8"),
        *(
            "-o",
            f"{pbs.folder}/logs/a-cluster-of-mine-8.log",
            "-W",
            f"depend=after:{first}",
            str(pbs.folder / "job.pbs"),
        ),
    ]
    assert batch.poll([second])[second].name == "a-cluster-of-mine-8"
    third = submit(batch, pbs, "a-cluster-of-mine-9", after=After(first, ended=True))
    assert f"depend=afterany:{first}" in pbs.calls("qsub")[-1]
    held = batch.poll([third])[third]
    assert "the present scheduler job has ended" in explain(held, kind="scheduler"), "it waits for the end of the first"
    batch.cancel([first, second])
    until_it_runs = states(batch, third)
    while until_it_runs[third] is not JobState.RUNNING:
        until_it_runs = states(batch, third)
    batch.cancel([third])


def test_jobs_of_two_clusters_with_the_same_short_name_are_distinguished(batch: PBS, pbs: Site) -> None:
    names = ["a-cluster-of-mine-7", "a-cluster-of-yours-7"]
    assert pbs_name(names[0]) == pbs_name(names[1]) == "a-cluster-of-7"
    jobs = [submit(batch, pbs, name) for name in names]
    assert [batch.find(name) for name in names] == [[job] for job in jobs]
    assert [batch.poll([job])[job].name for job in jobs] == names
    batch.cancel(jobs)


@pytest.mark.parametrize(
    "fault",
    [
        {"before": "Welcome to project 4242\n"},
        {"after": "Charged to project 4242.50\n"},
        {"before": "4242.17\n"},
        {"stdout": "  {answer}  \r\n"},
        {"stderr": "qsub: this queue is busy\n"},
    ],
)
def test_noise_around_the_id_is_tolerated(batch: PBS, pbs: Site, fault: dict[str, str]) -> None:
    pbs.fault("qsub", **fault)
    assert submit(batch, pbs) == "0.pbs01"
    batch.cancel(["0.pbs01"])


def test_long_server_names_and_no_ids() -> None:
    assert (
        parse_job_id("1234.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov\n")
        == "1234.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov"
    )
    assert parse_job_id("no job here\n12\n3.5\n") is None


def test_an_accepted_job_whose_id_was_swallowed_is_found_by_its_name(batch: PBS, pbs: Site) -> None:
    pbs.fault("qsub", stdout="have a nice day\n")
    assert submit(batch, pbs, "a-cluster-of-mine-7") == "0.pbs01"
    assert len(pbs.calls("qsub")) == 1
    batch.cancel(["0.pbs01"])


def test_an_answer_that_was_lost_is_looked_up_before_the_job_is_submitted_again(batch: PBS, pbs: Site) -> None:
    pbs.fault("qsub", stdout="", stderr="qsub: End of File\n", rc=1, lost=True)
    assert submit(batch, pbs) == "0.pbs01"
    assert len(pbs.calls("qsub")) == 2
    pbs.fault("qsub", stdout="", stderr="qsub: End of File\n", rc=1)
    assert submit(batch, pbs, "ada-2") == "1.pbs01"
    assert len(pbs.calls("qsub")) == 3
    batch.cancel(["0.pbs01", "1.pbs01"])


def test_without_a_look_up_no_second_job_is_risked(batch: PBS, pbs: Site) -> None:
    pbs.fault("qsub", stdout="", stderr="qsub: End of File\n", rc=1, lost=True)
    pbs.fault(
        "qselect", stdout="", stderr="qselect: cannot connect to server pbs01 (errno=15010)\n", rc=255, always=True
    )
    with pytest.raises(AmbiguousSubmit, match=r"ada-1.*cannot connect"):
        submit(batch, pbs)
    assert len(pbs.calls("qsub")) == 1


def test_a_server_that_is_away_is_waited_for_and_is_no_refusal(batch: PBS, pbs: Site, naps: list[float]) -> None:
    pbs.set(down=True)
    with pytest.raises(
        BatchUnavailable, match=r"Connection refused qsub: cannot connect to server pbs01 \(errno=15010\)"
    ) as caught:
        submit(batch, pbs)
    assert type(caught.value) is BatchUnavailable
    assert len(pbs.calls("qsub")) == batch.attempts == len(naps) + 1


@pytest.mark.parametrize(
    "words",
    [
        "Unknown Host.\nqsub: cannot connect to server pbs01 (errno=15008)\n",
        "pbsconf error: pbs conf variables not found: PBS_HOME PBS_EXEC\n",
        "munge_encode failed: Munge encode failed: Failed to access /run/munge/munge.socket.2\n",
    ],
    ids=["host", "configuration", "munge"],
)
def test_a_server_that_cannot_be_reached_has_not_refused_the_job(batch: PBS, pbs: Site, words: str) -> None:
    pbs.fault("qsub", stdout="", stderr=words, rc=1, lost=True, always=True)
    with pytest.raises(BatchUnavailable, match="PBS did not accept job 'ada-1'"):
        submit(batch, pbs)


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("-q nosuch", "qsub: Unknown queue"),
        ("-q off", "qsub: Queue is not enabled"),
        ("-l nosuchres=1", "Unknown resource Resource_List.nosuchres"),
        ("-q gpu -l walltime=100:00:00", "Job violates queue and/or server resource limits"),
    ],
)
def test_a_refusal_is_final_and_in_pbs_s_own_words(batch: PBS, pbs: Site, directive: str, words: str) -> None:
    path = script(pbs)
    path.write_text(f"#!/bin/bash\n#PBS {directive}\n")
    with pytest.raises(SubmitRefused, match=f"PBS refused job 'ada-1': .*{words}"):
        batch.submit(path, job_name="ada-1")
    assert len(pbs.calls("qsub")) == 1


def test_a_host_whose_jobs_pbs_refuses_is_shown_what_may_manage_the_cluster(batch: PBS, pbs: Site) -> None:
    """As PBS does on a compute node, where its server has no `flatuid`."""
    pbs.fault("qsub", lost=True, stdout="", stderr="qsub: Bad UID for job execution\n", rc=175)
    with pytest.raises(SubmitRefused, match=r"Bad UID .*from this host.*run on a login node: hpcgpu manage NAME"):
        submit(batch, pbs)


def test_a_limit_on_how_many_jobs_one_may_have_is_no_failure(batch: PBS, pbs: Site) -> None:
    words = "qsub: Maximum number of jobs for user ada already in queue gpu\n"
    pbs.fault("qsub", lost=True, stdout="", stderr=words, rc=1)
    with pytest.raises(SubmitLimited, match="Maximum number of jobs"):
        submit(batch, pbs)


def test_what_is_not_wanted_any_more_is_not_submitted(batch: PBS, pbs: Site) -> None:
    with pytest.raises(Cancelled):
        batch.submit(script(pbs), job_name="ada-1", wanted=lambda: False)
    assert pbs.calls("qsub") == []


# poll, ended, cancel


def test_all_jobs_are_polled_by_one_command(batch: PBS, pbs: Site) -> None:
    ids = [submit(batch, pbs, f"ada-{i}") for i in range(3)]
    before = len(pbs.calls("qstat"))
    assert states(batch, *ids, "999.pbs01") == dict.fromkeys(ids, JobState.RUNNING)
    assert pbs.calls("qstat")[before:] == [["-E", "-f", *ids, "999.pbs01"]]
    status = batch.poll(ids[:1])[ids[0]]
    assert status.start is not None and status.end == status.start + 3600
    batch.cancel(ids)


def test_no_jobs_are_polled_by_no_command(batch: PBS, pbs: Site) -> None:
    assert batch.poll([]) == batch.ended([]) == {}
    batch.cancel([])
    batch.cancel([], only_pending=True)
    assert pbs.calls("qstat") == pbs.calls("qdel") == pbs.calls("qhold") == []


def test_an_ended_job_is_found_in_the_history(batch: PBS, pbs: Site) -> None:
    job_id = submit(batch, pbs, body="exit 3")
    status = finish(batch, job_id)
    assert (status.state, status.exit_code, status.node) == (JobState.FAILED, 3, "n0")
    assert explain(status).startswith("it ended with an error, exit code 3 [Job run at")
    ids = [job_id, *(f"{number}.pbs01" for number in range(900, 957))]
    for ask in (batch.poll, batch.ended):
        before = pbs.ports()
        ask(ids)
        assert pbs.ports() == before + 1, "one connection for all"
    pbs.set(history=False)
    assert batch.ended([job_id]) == {}, "a server without a history knows nothing of it"


def test_success_and_the_log(batch: PBS, pbs: Site) -> None:
    status = finish(batch, submit(batch, pbs, "a-cluster-of-mine-7", "echo $PWD $HPCGPU_PBS_JOB; printenv DASK_CONFIG"))
    assert (status.state, status.exit_code) == (JobState.FAILED, 1), "the user's environment is not passed on"
    log = pbs.folder / "logs" / batch.log_name("a-cluster-of-mine-7", status.job_id)
    assert log.read_text() == f"{pbs.home} a-cluster-of-mine-7\n"
    assert finish(batch, submit(batch, pbs, body="true")).state is JobState.COMPLETED


def test_a_job_over_its_walltime(batch: PBS, pbs: Site) -> None:
    path = script(pbs)
    path.write_text(path.read_text().replace("01:00:00", "00:00:01"))
    status = finish(batch, batch.submit(path, job_name="ada-1"))
    assert status.state is JobState.TIMEOUT
    assert "exceeded resource walltime (Exit_status = -29: its walltime is over)" in explain(status)


def test_a_server_that_is_away_is_reported_and_nothing_is_concluded(batch: PBS, pbs: Site, naps: list[float]) -> None:
    job_id = submit(batch, pbs)
    pbs.set(down=True)
    for ask in (lambda: batch.poll([job_id]), lambda: batch.cancel([job_id]), lambda: batch.find("ada-1")):
        with pytest.raises(BatchUnavailable, match="Connection refused"):
            ask()
    assert batch.ended([job_id]) == {}
    pbs.set(down=False)
    batch.cancel([job_id])


def test_cancel_is_one_command_and_minds_no_id_that_is_unknown_or_over(batch: PBS, pbs: Site) -> None:
    over = submit(batch, pbs, body="true")
    finish(batch, over)
    running = submit(batch, pbs, "ada-2")
    batch.cancel([over, "999.pbs01", running])
    assert pbs.calls("qdel") == [[over, running, "999.pbs01"]]
    status = finish(batch, running)
    assert (status.state, status.exit_code) == (JobState.CANCELLED, 143)


def test_an_unknown_id_does_not_hide_that_another_could_not_be_cancelled(batch: PBS, pbs: Site) -> None:
    words = "qdel: Unknown Job Id 4.pbs01\nqdel: Unauthorized Request  5.pbs01\n"
    pbs.fault("qdel", lost=True, stderr=words, rc=153)
    with pytest.raises(BatchUnavailable, match="Unauthorized Request"):
        batch.cancel(["4.pbs01", "5.pbs01"])


def test_only_pending_spares_what_runs(batch: PBS, pbs: Site) -> None:
    running = submit(batch, pbs)
    blocker = submit(batch, pbs, "ada-big")
    path = script(pbs, "exec sleep 600", "-l select=2:ngpus=2")
    full = [batch.submit(path, job_name=f"ada-{i}") for i in (2, 3)]
    held = submit(batch, pbs, "ada-4", after=After(full[1]))
    assert [states(batch, i)[i] for i in (running, full[0], full[1], held)] == [JobState.RUNNING] * 2 + [
        JobState.PENDING
    ] * 2
    pbs.fault("qstat", after=f"Job Id: {running}\n    job_state = Q\n\n")  # it starts just after this answer
    batch.cancel([running, full[1], held], only_pending=True)
    assert running in pbs.calls("qhold")[0]
    assert set(batch.poll([running, blocker, *full, held])) == {running, blocker, full[0]}
    assert pbs.run("qstat", "-f", running).stdout.count("Hold_Types = n") == 1, "the hold was taken off again"
    assert batch.ended([full[1]])[full[1]].state is JobState.CANCELLED
    batch.cancel([running, blocker, full[0]])


def test_many_jobs_that_wait_are_cancelled_in_parts(batch: PBS, pbs: Site, naps: list[float]) -> None:
    pbs.replace("qhold", "#!/bin/sh\nexit 0\n")
    waits = "Job Id: {0}.pbs01\n    job_state = Q\n\n"
    pbs.replace("qstat", f"#!/bin/sh\nshift 2\nfor id; do printf '{waits}' ${{id%.*}}; done\n".replace("{0}", "%s"))
    pbs.replace("qrls", "#!/bin/sh\nexit 1\n")
    batch.cancel([f"{number}.pbs01" for number in range(250)], only_pending=True)
    assert [len(call) for call in pbs.calls("qdel")] == [100, 100, 50]
    assert len(naps) == 2 and min(naps) >= 20, "each hold takes a port of the host for a minute"


@pytest.mark.parametrize("command", ["qstat", "qdel"])
def test_a_server_that_goes_away_half_way_leaves_no_job_held(batch: PBS, pbs: Site, command: str) -> None:
    blocker = submit(batch, pbs, "ada-big")
    path = script(pbs, "exec sleep 600", "-l select=2:ngpus=2")
    jobs = [batch.submit(path, job_name=f"ada-{i}") for i in (2, 3)]
    [waiting] = [i for i in jobs if states(batch, i)[i] is JobState.PENDING]
    for _ in range(batch.attempts):
        pbs.fault(command, lost=True, stderr=f"{command}: cannot connect to server pbs01 (errno=15010)\n", rc=255)
    with pytest.raises(BatchUnavailable):
        batch.cancel([waiting], only_pending=True)
    assert "Hold_Types = n" in pbs.run("qstat", "-f", waiting).stdout, "it would have waited for ever"
    batch.cancel([blocker, *jobs])


def test_a_job_that_its_user_holds(batch: PBS, pbs: Site) -> None:
    job_id = batch.submit(script(pbs, "exec sleep 600", "-l select=1:ncpus=999"), job_name="ada-1")
    pbs.run("qhold", "-h", "u", job_id)
    status = batch.poll([job_id])[job_id]
    assert outlook(status) is Outlook.NEVER
    assert "you hold it: release it with `qrls` [Hold_Types = u, Job held by" in explain(status)
    batch.cancel([job_id])


def test_a_job_that_is_just_ending_is_no_error_to_cancel(batch: PBS, pbs: Site) -> None:
    pbs.fault("qdel", lost=True, stderr="qdel: Request invalid for state of job 4.pbs01\n", rc=170)
    batch.cancel(["4.pbs01"])
    assert len(pbs.calls("qdel")) == 1


def test_a_job_that_waits_for_a_deleted_one_stays_held_until_it_is_cancelled(batch: PBS, pbs: Site) -> None:
    path = script(pbs, "exec sleep 600", "-l select=1:ncpus=999")
    scheduler = batch.submit(path, job_name="ada-scheduler")
    worker = submit(batch, pbs, after=After(scheduler))
    batch.cancel([scheduler])
    assert states(batch, scheduler, worker) == {worker: JobState.PENDING}
    assert outlook(batch.poll([worker])[worker]) is Outlook.WAIT
    batch.cancel([worker])
    assert pbs.alive() == {}


def test_what_no_node_can_fill_is_reported(batch: PBS, pbs: Site) -> None:
    ids = []
    for select, words in [
        ("1:ncpus=999", r"Can Never Run"),
        ("1:ncpus=17", "; no node has ncpus=17"),
        ("1:ngpus=3", "; no node has ngpus=3"),
    ]:
        ids.append(batch.submit(script(pbs, "true", f"-l select={select}"), job_name="ada-1"))
        status = batch.poll(ids)[ids[-1]]
        assert words in status.reason and outlook(status) is Outlook.NEVER
    assert len(pbs.calls("pbsnodes")) == 1, "the nodes are asked for once"
    batch.cancel(ids)


def test_without_pbsnodes_nothing_is_reported_of_nodes(batch: PBS, pbs: Site) -> None:
    pbs.fault("pbsnodes", stdout="", rc=1)
    job_id = batch.submit(script(pbs, "true", "-l select=1:ncpus=17"), job_name="ada-1")
    assert outlook(batch.poll([job_id])[job_id]) is Outlook.WAIT
    batch.cancel([job_id])


def test_a_history_that_fails_does_not_take_away_what_the_queue_reported(batch: PBS, pbs: Site) -> None:
    job_id = submit(batch, pbs)
    monitor = Monitor(batch, grace=0)
    for known in (job_id, "999.pbs01"):
        monitor.watch(known, "w", now=0)
    for now in (1, 2):  # one answer may leave out what lives
        monitor.record(monitor.query(monitor.alive()), now=now)
    assert {i: view.status.state for i, view in monitor.views.items()} == {
        job_id: JobState.RUNNING,
        "999.pbs01": JobState.FAILED,
    }
    batch.cancel([job_id])


def test_a_job_that_waits_for_its_reservation_reports_it_and_when_it_begins(batch: PBS, pbs: Site) -> None:
    begins, ends = (float(time.time() // 60 * 60 + seconds) for seconds in (3600, 7200))
    pbs.change(lambda state: state["queues"].update(R7={}))
    pbs.set(reservations={"R7": (begins, ends)})
    path = script(pbs, "true", "-q R7")
    job_id = batch.submit(path, job_name="ada-1")
    for _ in range(2):
        status = batch.poll([job_id])[job_id]
        times = [time.strftime("%a %F %H:%M", time.localtime(moment)) for moment in (begins, ends)]
        own = f"Not Running: Queue not started; reservation R7 from {times[0]} to {times[1]}"
        assert explain(status) == f"it waits for the start of its reservation [{own}]"
        assert status.expected_start == begins and outlook(status) is Outlook.WAIT
    assert len(pbs.calls("pbs_rstat")) == 1, "it is asked once a minute"
    batch.cancel([job_id])


def test_a_job_that_a_route_drops_is_reported_with_what_to_check(batch: PBS, pbs: Site) -> None:
    pbs.change(lambda state: state["queues"].update(rt={"route": "gpu"}))
    path = script(pbs, "true", "-q rt")
    path.write_text(path.read_text().replace("01:00:00", "02:00:00"))
    dropped, known = batch.submit(path, job_name="ada-1"), submit(batch, pbs, "ada-2")
    monitor = Monitor(batch)
    for job_id in (dropped, known):
        monitor.watch(job_id, "w", now=0)
    monitor.record(monitor.query(monitor.alive()), now=1)
    batch.cancel([known])
    finish(batch, known)
    pbs.set(history=False)
    for now in (2, 3, 70):
        monitor.record(monitor.query(monitor.alive()), now=now)
    words = {job_id: view.status.reason for job_id, view in monitor.views.items()}
    assert "the queue has not known it for 69 s, nor ever since its submit: it ended at once, or" in words[dropped]
    assert "no queue behind it takes it. Check its log, `queue`, and the limits" in words[dropped]
    assert words[known] == "the queue has not known it for 68 s", "it was there"


# the job around us


def test_outside_of_a_job_there_is_no_own_job(batch: PBS) -> None:
    assert batch.own_job({"SLURM_JOB_ID": "5"}) is None


@pytest.mark.parametrize(
    ("environ", "name", "node"),
    [
        ({"PBS_JOBNAME": "short"}, "short", 0),
        ({"PBS_JOBNAME": "short", "HPCGPU_PBS_JOB": "the-whole-name-1", "PBS_NODENUM": "0"}, "the-whole-name-1", 0),
        ({"PBS_JOBNAME": "s", "HPCGPU_NODE": "1", "PBS_NODENUM": "0"}, "s", 1),
        ({"PBS_JOBNAME": "s", "PMI_RANK": "3", "PBS_NODENUM": "0"}, "s", 3),
    ],
)
def test_the_own_job_is_read_from_the_environment(batch: PBS, environ: dict[str, str], name: str, node: int) -> None:
    own = batch.own_job({"PBS_JOBID": "5.pbs01", **environ})
    assert own is not None
    assert (own.job_id, own.name, own.node, own.end) == ("5.pbs01", name, node, None)


def test_the_queue_is_asked_for_the_end_of_the_walltime(batch: PBS, pbs: Site) -> None:
    job_id = submit(batch, pbs)
    own = batch.own_job({"PBS_JOBID": job_id})
    assert own is not None
    assert end_of_walltime(own, batch) == batch.poll([job_id])[job_id].end
    batch.cancel([job_id])
    gone = batch.own_job({"PBS_JOBID": "999.pbs01"})
    assert gone is not None
    assert end_of_walltime(gone, batch) is None


def test_no_variable_of_the_user_changes_what_qsub_reads(
    batch: PBS, pbs: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pbs.folder / "environment"
    pbs.replace("qsub", f"#!/bin/sh\nenv > {seen}\necho 5.pbs01\n")
    monkeypatch.setenv("PBS_DPREFIX", "#evil")
    monkeypatch.setenv("PBS_SHELL", "/evil")
    monkeypatch.setenv("PBS_DEFAULT", "pbs01")
    assert submit(batch, pbs) == "5.pbs01"
    assert "evil" not in seen.read_text() and "PBS_DEFAULT=pbs01" in seen.read_text()


def test_the_fake_folds_as_the_real_one(pbs: Site, batch: PBS) -> None:
    job_id = submit(batch, pbs, "a-name-that-is-so-long-that-it-must-be-folded-somewhere-1")
    text = subprocess.run([pbs.bin / "qstat", "-f", job_id], capture_output=True, text=True, check=True).stdout
    assert "\n\t" in text and max(map(len, text.splitlines())) <= 80
    assert parsed(text)[job_id].name == "a-name-that-is-so-long-that-it-must-be-folded-somewhere-1"
    batch.cancel([job_id])


def test_a_thousand_jobs_are_polled_and_cancelled_by_one_command_each(batch: PBS, pbs: Site) -> None:
    ids = [f"{number}.pbs01" for number in range(10**7, 10**7 + 1000)]
    assert batch.poll(ids) == {}
    batch.cancel(ids)
    batch.cancel(ids, only_pending=True)
    counts = {command: len(pbs.calls(command)) for command in ("qstat", "qhold", "qrls", "qdel")}
    assert counts == {"qstat": 2, "qhold": 0, "qrls": 0, "qdel": 1}, "the queue knows none of them: none is pending"
    assert pbs.ports() == 3, "a host has less than a thousand ports below 1024, for all its users together"
    longest = max(sum(len(argument) + 1 for argument in call) for call in pbs.calls("qstat"))
    assert longest < 131072


def test_jobs_of_hpcgpu_are_known_by_their_variable_and_the_arguments_of_qsub(batch: PBS, pbs: Site) -> None:
    def job_script(directory: str, name: str = "worker.pbs") -> Path:
        path = pbs.folder / directory / name
        path.parent.mkdir(exist_ok=True)
        return script(pbs).rename(path)

    place, spaces, renamed = job_script("demo"), job_script("my own clusters"), job_script("demo", "other.pbs")
    ids = {path: batch.submit(path, job_name="a-1", logs=pbs.folder / "logs") for path in (place, spaces, renamed)}
    place.unlink()
    place.parent.joinpath("other.pbs").unlink()
    place.parent.rmdir()
    assert batch.marked(lambda path: True) == {ids[place]: place, ids[spaces]: spaces}
    assert batch.marked(lambda path: not path.parent.exists()) == {ids[place]: place}
    batch.cancel(ids.values())
    assert batch.marked(lambda path: True) == {}
