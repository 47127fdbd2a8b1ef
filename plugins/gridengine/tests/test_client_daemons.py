"""The client on a real Grid Engine: one job at a time, how it waits, runs and ends, and what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from gridengine_bed import GridEngineBed, wait_for
from hpcgpu_gridengine.client import GridEngine
from hpcgpu_gridengine.queues import queues

from hpcgpu.batch.base import After, JobState, JobStatus, Outlook
from hpcgpu.batch.reasons import explain, outlook
from hpcgpu.errors import BatchError, BatchUnavailable, SubmitLimited, SubmitRefused

pytestmark = pytest.mark.shows("The client of a batch system: one job at a time, its states, reasons and limits")

Submit = Callable[..., str]
#: Runs until somebody ends it.
FOREVER = "exec sleep 1000"


@pytest.fixture
def submit(bed: GridEngineBed, tmp_path: Path) -> Submit:
    """Submit a small script with these directives."""

    def call(command: str, *directives: str, name: str = "demo-1", after: After | None = None) -> str:
        script = tmp_path / f"worker-{len(list(tmp_path.iterdir()))}.sge"
        given = ("-S /bin/bash", "-j y", f"-o {tmp_path}/$JOB_NAME-$JOB_ID.log", *directives)
        script.write_text("\n".join(["#!/bin/bash", *(f"#$ {line}" for line in given), command, ""]))
        return GridEngine(attempts=1).submit(script, job_name=name, after=after)

    return call


def until(job_id: str, met: Callable[[JobStatus], bool]) -> JobStatus:
    """The status of a job once it is as it shall be."""
    seen: dict[str, JobStatus] = {}

    def reached() -> bool:
        seen.update(GridEngine().poll([job_id]) or GridEngine().ended([job_id]))
        return job_id in seen and met(seen[job_id])

    try:
        wait_for(reached, "the job is as it shall be")
    except Exception as error:
        raise AssertionError(f"{error}: {seen}") from error
    return seen[job_id]


def ended(job_id: str) -> JobStatus:
    return until(job_id, lambda job: job.state.ended)


def runs(job_id: str) -> JobStatus:
    return until(job_id, lambda job: job.state is JobState.RUNNING)


def test_a_job_ends_as_its_script_does(submit: Submit) -> None:
    assert ended(submit("exit 0")).state is JobState.COMPLETED
    failed = ended(submit("exit 7"))
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 7)
    assert failed.start is not None and failed.end is not None and failed.node


def test_a_job_identifies_itself(submit: Submit, tmp_path: Path) -> None:
    job_id = submit("env", name="1x-2")
    assert ended(job_id).name == "1x-2"
    log = tmp_path / GridEngine().log_name("1x-2", job_id)
    wait_for(lambda: log.exists() and "SGE_ROOT" in log.read_text(), "the log is there")
    environment: Mapping[str, str] = dict(line.partition("=")[::2] for line in log.read_text().splitlines())
    own = GridEngine().own_job(environment)
    assert own is not None and (own.job_id, own.name) == (job_id, "1x-2")
    assert GridEngine().own_job(os.environ) is None


@pytest.mark.shows("A job that reaches its walltime")
def test_a_job_that_reaches_its_walltime_reports_it(submit: Submit) -> None:
    job_id = submit(FOREVER, "-l h_rt=0:0:15")  # it is seen while it runs
    running = runs(job_id)
    assert running.end is not None and running.start is not None and running.end == running.start + 15
    late = ended(job_id)
    assert late.state is JobState.TIMEOUT and "end of its walltime" in explain(late)


@pytest.mark.shows("A job that reaches its walltime")
def test_a_job_without_a_walltime_has_that_of_its_queue(submit: Submit, bed: GridEngineBed) -> None:
    bed.call("qconf", "-mattr", "queue", "h_rt", "0:0:15", "short.q")
    try:
        job_id = submit(FOREVER, "-q short.q")
        running = runs(job_id)
        assert running.end is not None and running.start is not None and running.end == running.start + 15
        late = ended(job_id)
        assert late.state is JobState.TIMEOUT and "end of its walltime" in explain(late)
        assert GridEngine().ended([job_id])[job_id].state is JobState.TIMEOUT
        other = submit(FOREVER, "-q gpu.q")
        running = runs(other)
        assert running.end == (running.start or 0) + 86400
        GridEngine().cancel([other])
    finally:
        bed.call("qconf", "-mattr", "queue", "h_rt", "0:10:0", "short.q")


def test_a_job_that_somebody_deletes_is_cancelled(submit: Submit, bed: GridEngineBed) -> None:
    job_id = submit(FOREVER)
    runs(job_id)
    bed.call("qdel", job_id)
    assert ended(job_id).state is JobState.CANCELLED


def test_a_job_that_cannot_start_reports_why(submit: Submit) -> None:
    job_id = submit("true", "-wd /nowhere")
    job = until(job_id, lambda job: job.reason.startswith("Eqw: "))
    assert outlook(job) is Outlook.NEVER
    assert "/nowhere: No such file or directory" in explain(job)
    GridEngine().cancel([job_id])
    assert GridEngine().find("demo-1") == []


def test_a_job_that_waits_for_gpus_reports_it(submit: Submit) -> None:
    first = submit(FOREVER, "-l gpu=4")
    runs(first)
    second = submit(FOREVER, "-l gpu=1", name="demo-2")
    job = until(second, lambda job: "offers only" in job.reason)
    assert outlook(job) is Outlook.WAIT and "no free node" in explain(job)
    GridEngine().cancel([first])
    runs(second)
    GridEngine().cancel([second])


def test_a_job_can_wait_for_the_end_of_another(submit: Submit) -> None:
    first = submit(FOREVER)
    second = submit("exit 0", name="demo-2", after=After(first, ended=True))
    job = until(second, lambda job: "dependencies" in job.reason)
    assert outlook(job) is Outlook.WAIT
    GridEngine().cancel([first])
    assert ended(second).state is JobState.COMPLETED


def test_only_jobs_that_wait_are_cancelled(submit: Submit) -> None:
    first = submit(FOREVER)
    runs(first)
    second = submit(FOREVER, "-h", name="demo-2")
    GridEngine().cancel([first, second, "99999"], only_pending=True)
    wait_for(lambda: second not in GridEngine().poll([second]), "the job that waits is gone")
    assert runs(first).state is JobState.RUNNING
    GridEngine().cancel([first, second])
    assert ended(first).state is JobState.CANCELLED


def test_a_quota_of_the_site_is_named_as_a_limit(submit: Submit, bed: GridEngineBed) -> None:
    bed.set_quota("users {*} to gpu=1")
    try:
        first = submit(FOREVER, "-l gpu=1")
        runs(first)
        second = submit(FOREVER, "-l gpu=1", name="demo-2")
        job = until(second, lambda job: "exceeds limit" in job.reason)
        assert outlook(job) is Outlook.LIMIT and "quota" in explain(job)
        with pytest.raises(SubmitRefused, match="No node can ever satisfy it"):
            submit("true", "-w e", "-l gpu=2", name="demo-3")
        GridEngine().cancel([first, second])
    finally:
        bed.set_quota("")


@pytest.mark.parametrize("limit", ["max_u_jobs", "max_jobs"])
def test_too_many_jobs_are_a_limit_for_now(submit: Submit, bed: GridEngineBed, limit: str) -> None:
    bed.set_global(**{limit: "1"})
    try:
        first = submit(FOREVER)
        with pytest.raises(SubmitLimited, match="only 1 jobs are allowed per"):
            submit(FOREVER, name="demo-2")
        GridEngine().cancel([first])
        ended(first)
    finally:
        bed.set_global(**{limit: "0"})


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("-q nope.q", "Check `queue`"),
        ("-P nope", "Check `account`"),
        ("-pe nope 2", "Check `parallel_environment`"),
        ("-l nope=1", "Check `gpu_resource`"),
        ("-w e -l gpu=9", "No node can ever satisfy it"),
        ("-w e -q short.q -l h_rt=9:0:0", "No node can ever satisfy it"),
    ],
)
def test_a_refused_job_names_what_to_check(submit: Submit, directive: str, words: str) -> None:
    with pytest.raises(SubmitRefused, match=words):
        submit("true", *(f"-{part}" for part in directive.removeprefix("-").split(" -")))


def test_a_job_is_tested_before_it_is_submitted(bed: GridEngineBed, tmp_path: Path) -> None:
    script = tmp_path / "worker.sge"
    script.write_text("#!/bin/bash\n#$ -l gpu=4\n#$ -pe smp 2\ntrue\n")
    assert GridEngine().estimate(script).tested
    script.write_text("#!/bin/bash\n#$ -l gpu=5\ntrue\n")
    [limit] = GridEngine().estimate(script).limits
    assert "gpu=4" in limit and "No node can ever satisfy it" in limit


def test_jobs_without_a_cluster_directory_are_found_by_their_scripts(submit: Submit, tmp_path: Path) -> None:
    job_id = submit(FOREVER)
    assert GridEngine().marked(lambda path: path.parent == tmp_path) == {job_id: tmp_path / "worker-0.sge"}
    assert GridEngine().marked(lambda path: False) == {}
    GridEngine().cancel([job_id])


def test_it_reports_which_grid_engine_it_is(bed: GridEngineBed) -> None:
    client = GridEngine()
    client.probe()
    assert client.version() == "SGE 8.1.9" and client.identity()


def test_its_queues_are_known(bed: GridEngineBed) -> None:
    found = queues()
    assert {kind.name: kind.gpus for kind in found.gpus} == {"gpu.q": 4, "short.q": 4}
    assert {name: rule.limit for name, rule in found.rules.items()} == {"gpu.q": 86400, "short.q": 600}


def test_without_its_master_nothing_is_reported_of_jobs(submit: Submit, bed: GridEngineBed) -> None:
    job_id = submit(FOREVER)
    runs(job_id)
    bed.stop_master()
    try:
        client = GridEngine(attempts=1)
        for call in (lambda: client.poll([job_id]), lambda: client.cancel([job_id]), lambda: client.find("demo-1")):
            with pytest.raises(BatchUnavailable, match="Connection refused"):
                call()
        with pytest.raises(BatchUnavailable, match="did not accept"):
            submit("true", name="demo-2")
    finally:
        bed.start_master()
    runs(job_id)
    # The qmaster sends the end of a job to its host at once, and then only much later: the host must have found it.
    wait_for(lambda: not bed.away(), "the host has found the qmaster")
    GridEngine().cancel([job_id])
    assert ended(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo 'qstat: unknown option \"-xml\"' >&2; exit 1", 'unknown option "-xml"'),
        ("exec REAL ${@/-xml/}", "job-ID"),
        ("REAL -help; exit 1", "usage: qstat"),
    ],
)
def test_a_qstat_without_xml_reports_what_is_needed_before_anything_is_submitted(
    submit: Submit, bed: GridEngineBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, words: str
) -> None:
    job_id = submit(FOREVER)
    real = bed.directory / "commands" / "qstat"
    place = tmp_path / "other"
    place.mkdir()
    with monkeypatch.context() as patch:
        (place / "qstat").write_text(
            f'#!/bin/bash\ncase $1 in -xml) {answer.replace("REAL", str(real))} ;; esac\nexec {real} "$@"\n'
        )
        (place / "qstat").chmod(0o755)
        patch.setenv("PATH", str(place), prepend=os.pathsep)
        for call in (lambda: GridEngine().check(), lambda: GridEngine().poll([job_id])):
            with pytest.raises(BatchError, match="does not list jobs as XML") as error:
                call()
            assert words in str(error.value) and "Ask your site for Grid Engine's own qstat" in str(error.value)
    GridEngine().cancel([job_id])


def test_an_answer_that_is_cut_off_is_no_answer(
    submit: Submit, bed: GridEngineBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(FOREVER)
    with monkeypatch.context() as patch:
        (tmp_path / "other").mkdir()
        cut = tmp_path / "other" / "qstat"
        cut.write_text(f'#!/bin/sh\n{bed.directory}/commands/qstat "$@" | head -c 300\n')
        cut.chmod(0o755)
        patch.setenv("PATH", str(cut.parent), prepend=os.pathsep)
        with pytest.raises(BatchUnavailable, match="is cut off"):
            GridEngine().poll([job_id])
    GridEngine().cancel([job_id])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_options_of_another_user_are_not_taken(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """qsub reads `.sge_request` where it is started: it may name a program, which then runs as the user."""
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / ".sge_request").write_text(f"-jsv {program}\n")
    monkeypatch.chdir(shared)
    with pytest.raises(SubmitRefused, match="JSV"):
        submit("true")
    assert ran.exists()
    ran.unlink()
    os.chown(shared / ".sge_request", 65534, 65534)
    with pytest.raises(SubmitRefused, match=r"shared/\.sge_request belongs to another user"):
        submit("true")
    assert not ran.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_script_of_a_job_can_be_read_by_others(submit: Submit, bed: GridEngineBed) -> None:
    """So the page states that no secret may be in it. If this changes, the page can warn less."""
    job_id = submit(FOREVER)
    runs(job_id)
    [script] = (bed.cell / "spool" / "execd").glob(f"*/job_scripts/{job_id}")
    assert script.stat().st_mode & 0o004
    GridEngine().cancel([job_id])
