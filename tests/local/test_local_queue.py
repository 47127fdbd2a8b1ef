"""The local queue, with real processes. GPUs are ids without a device behind them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpcgpu.batch.base import After, JobState, JobStatus
from hpcgpu.batch.local.jobs import JobRecord, read_directives, startable
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.batch.reasons import explain
from hpcgpu.errors import BatchError, SubmitRefused

ROOT = Path(__file__).parents[2]
FOREVER = "sleep 1000"


def wait_for(condition: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def job_processes(directory: Path) -> list[psutil.Process]:
    """Supervisors and scripts of a queue, with all that a script has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get("HPCGPU_QUEUE_DIRECTORY") == str(directory)
            if process.status() != psutil.STATUS_ZOMBIE and (marked or str(directory) in process.cmdline()):
                found.append(process)
    return found


class Site:
    """A queue, and what a test does with it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.queue = LocalQueue(home / "queue", gpus=2, slots=4)

    def submit(self, body: str, *directives: str, name: str = "job", after: After | None = None) -> str:
        script = self.home / "script.sh"
        head = "".join(f"#HPCGPU {directive}\n" for directive in (f"--output={self.home}/%j.log", *directives))
        script.write_text(f"#!/bin/bash\n{head}{body}\n")
        return self.queue.submit(script, job_name=name, after=after)

    def status(self, job_id: str) -> JobStatus:
        return self.queue.poll([job_id])[job_id]

    def state(self, job_id: str) -> JobState:
        return self.status(job_id).state

    def ended(self, job_id: str) -> JobStatus:
        wait_for(lambda: self.state(job_id).ended)
        return self.status(job_id)

    def log(self, job_id: str) -> str:
        path = self.home / f"{job_id}.log"
        return path.read_text() if path.exists() else ""

    def record(self, job_id: str) -> JobRecord:
        record = self.queue._read(job_id)
        assert record is not None
        return record

    def quiet(self) -> bool:
        return not job_processes(self.queue.directory)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.chdir(tmp_path)
    site = Site(tmp_path)
    yield site
    with contextlib.suppress(AssertionError):  # a supervisor ends a little after its record shows it
        wait_for(site.quiet)
    left = job_processes(site.queue.directory)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not left


def test_success_is_recorded_with_its_log(site: Site) -> None:
    site.queue.check()
    job = site.submit("echo out; echo err >&2; echo $HPCGPU_JOB_ID $HPCGPU_JOB_NAME $PWD", name="a name")
    status = site.ended(job)
    assert (status.state, status.exit_code, status.name) == (JobState.COMPLETED, 0, "a name")
    assert status.start is not None and status.end is not None and status.start <= status.end
    assert status.node == os.uname().nodename
    assert site.log(job) == f"out\nerr\n{job} a name {site.home}\n"
    assert stat.S_IMODE((site.home / f"{job}.log").stat().st_mode) == 0o600


def test_each_directory_is_a_queue_of_its_own(tmp_path: Path) -> None:
    here, there = (LocalQueue(tmp_path / name).identity() for name in ("here", "there"))
    assert here != there and here == LocalQueue(tmp_path / "there" / ".." / "here").identity()


def test_everything_on_disk_is_private(site: Site) -> None:
    job = site.submit(FOREVER)
    wait_for(lambda: bool(site.record(job).leader))  # the last that a supervisor writes before the end
    assert stat.S_IMODE(site.queue.directory.stat().st_mode) == 0o700
    files = [path for path in site.queue.directory.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    site.queue.cancel([job])
    site.ended(job)
    assert [path.name for path in (site.queue.directory / "jobs").iterdir()] == [
        f"{job}.json"
    ]  # no environment left behind


@pytest.mark.parametrize(("body", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_failure_is_recorded(site: Site, body: str, code: int) -> None:
    status = site.ended(site.submit(body))
    assert (status.state, status.exit_code, status.reason) == (JobState.FAILED, code, "NonZeroExitCode")


def test_script_is_copied_and_environment_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "ä\udcff b")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("HPCGPU_JOB_END", "7")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    blocker = site.submit(FOREVER, "--gpus=2")
    job = site.submit('echo "$MINE|$SLURM_JOB_ID|$HPCGPU_JOB_END|$LC_ALL|$CUDA_VISIBLE_DEVICES"', "--gpus=1")
    (site.home / "script.sh").write_text("exit 1\n")
    monkeypatch.setenv("MINE", "later")
    site.queue.cancel([blocker])
    assert site.ended(job).state is JobState.COMPLETED
    assert os.fsencode("ä\udcff b|||C.UTF-8|0\n") == (site.home / f"{job}.log").read_bytes()


def test_first_come_first_served_over_gpus(site: Site) -> None:
    tell = "echo gpus=$CUDA_VISIBLE_DEVICES;"
    one, two = (site.submit(tell + FOREVER, "--gpus=1") for _ in range(2))
    both = site.submit(tell, "--gpus=2")
    small = site.submit(tell)  # could run at once, but may not pass the one before
    wait_for(lambda: "\n" in site.log(one) and "\n" in site.log(two))
    assert {site.log(one), site.log(two)} == {"gpus=0\n", "gpus=1\n"}
    assert [(site.state(job), site.status(job).reason) for job in (both, small)] == [
        (JobState.PENDING, "Resources"),
        (JobState.PENDING, "Priority"),
    ]
    site.queue.cancel([one])
    site.ended(one)
    assert site.state(both) is JobState.PENDING
    site.queue.cancel([two])
    assert site.ended(both).state is site.ended(small).state is JobState.COMPLETED
    assert (site.log(both), site.log(small)) == ("gpus=0,1\n", "gpus=\n")


def test_slots_limit_jobs(site: Site) -> None:
    jobs = [site.submit(FOREVER) for _ in range(5)]
    assert [site.state(job) for job in jobs] == 4 * [JobState.RUNNING] + [JobState.PENDING]
    site.queue.cancel(jobs)
    assert {site.ended(job).state for job in jobs} == {JobState.CANCELLED}


def test_dependency_waits_and_lets_others_pass(site: Site) -> None:
    blocker = site.submit(FOREVER, "--gpus=2")
    first = site.submit(FOREVER, "--gpus=1")
    second = site.submit("true", after=After(first))
    assert site.status(second).reason == "Dependency"
    site.queue.cancel([blocker])
    wait_for(lambda: site.state(first) is JobState.RUNNING)
    assert site.ended(second).state is JobState.COMPLETED  # while `first` still runs
    site.queue.cancel([first])
    site.ended(first)
    assert site.ended(site.submit("true", after=After(first))).state is JobState.COMPLETED
    with pytest.raises(SubmitRefused, match="job 99"):
        site.submit("true", after=After("99"))


def test_a_job_that_waits_for_the_end_of_another_one_lets_others_pass(site: Site) -> None:
    first = site.submit(FOREVER)
    second = site.submit("true", after=After(first, ended=True))
    assert site.ended(site.submit("true")).state is JobState.COMPLETED
    assert site.status(second).reason == "Dependency"
    assert "the present scheduler job has ended" in explain(site.status(second), kind="scheduler")
    site.queue.cancel([first])
    assert site.ended(second).state is JobState.COMPLETED


def test_dependent_of_a_cancelled_job_runs(site: Site) -> None:
    blocker = site.submit(FOREVER, "--gpus=2")
    first = site.submit(FOREVER, "--gpus=1")
    second = site.submit("true", after=After(first))
    site.queue.cancel([first])
    assert site.state(first) is JobState.CANCELLED
    assert site.ended(second).state is JobState.COMPLETED
    site.queue.cancel([blocker])
    site.ended(blocker)


def test_walltime_ends_a_script_that_ignores_term(site: Site) -> None:
    job = site.submit("trap '' TERM; echo $HPCGPU_JOB_END; while :; do sleep 1; done", "--time=10")
    running = site.status(job)
    assert running.start is not None and running.end == running.start + 10
    status = site.ended(job)
    assert (status.state, status.reason, status.exit_code) == (JobState.TIMEOUT, "TimeLimit", 137)
    own = site.queue.own_job(
        {"HPCGPU_JOB_ID": job, "HPCGPU_JOB_NAME": "job", "HPCGPU_JOB_END": site.log(job).split()[0]}
    )
    assert own is not None and own.end == pytest.approx(running.end, abs=0.01)
    assert site.queue.own_job({}) is None


def test_cancel_ends_children_in_their_own_groups_and_sessions(site: Site) -> None:
    stubborn = "trap '' TERM; echo $$; while :; do sleep 1; done"
    job = site.submit(f"set -m\nbash -c \"{FOREVER}\" &\nsetsid bash -c '{stubborn}' &\n(setsid {FOREVER} &)\nwait")
    wait_for(lambda: "\n" in site.log(job) and len(job_processes(site.queue.directory)) >= 5)
    site.queue.cancel([job])
    assert site.state(job) is JobState.COMPLETING
    assert site.queue.find("job") == [job]
    assert site.ended(job).state is JobState.CANCELLED
    wait_for(site.quiet)


def test_what_a_script_leaves_behind_is_ended(site: Site) -> None:
    job = site.submit(f"({FOREVER} &) ; (setsid {FOREVER} &) ; exit 0")
    assert site.ended(job).state is JobState.COMPLETED


def test_a_process_in_a_container_does_not_take_the_jobs_for_lost(site: Site) -> None:
    """A container may have process ids of its own: the supervisors are not among them."""
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a PID namespace")
    program = "import sys; from hpcgpu.batch.local.queue import LocalQueue; print(LocalQueue().poll(sys.argv[1:]))"
    poll = f'echo begun; exec {" ".join(alone)} {sys.executable} -P -c "$0" "$@"'
    other = site.submit(FOREVER)
    job = site.submit(f"cd {ROOT} && bash -c '{poll}' '{program}' {other} $HPCGPU_JOB_ID\necho polled\n{FOREVER}")
    wait_for(lambda: "polled" in site.log(job))
    assert "begun" in site.log(job) and "RUNNING" in site.log(job)
    assert (site.state(other), site.state(job)) == (JobState.RUNNING, JobState.RUNNING)
    site.queue.cancel([other, job])
    assert {site.ended(one).state for one in (other, job)} == {JobState.CANCELLED}


def test_a_cancelled_job_has_time_to_save_what_it_has(site: Site) -> None:
    job = site.submit("trap 'sleep 5 && echo saved; exit' TERM; echo started; while :; do sleep 0.1; done")
    wait_for(lambda: "started" in site.log(job))
    site.queue.cancel([job])
    assert site.ended(job).state is JobState.CANCELLED and "saved" in site.log(job)


def test_cancel_right_after_the_start(site: Site) -> None:
    jobs = [site.submit(FOREVER) for _ in range(4)]
    site.queue.cancel(jobs)
    assert {site.ended(job).state for job in jobs} == {JobState.CANCELLED}


@pytest.mark.parametrize("killed_in", ["os.kill", "LocalQueue._write"])
def test_who_is_killed_while_he_cancels_leaves_no_job_that_nobody_can_end(site: Site, killed_in: str) -> None:
    job = site.submit(f"echo started\n{FOREVER}")
    wait_for(lambda: "started" in site.log(job))
    program = (
        "import os; from pathlib import Path; from hpcgpu.batch.local.queue import LocalQueue; "
        f"{killed_in} = lambda *_: os._exit(9); LocalQueue(Path({str(site.queue.directory)!r})).cancel([{job!r}])"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], cwd=ROOT).returncode == 9
    site.queue.cancel([job])
    assert site.ended(job).state is JobState.CANCELLED


def test_only_pending_spares_running_jobs(site: Site) -> None:
    running, pending = (site.submit(FOREVER, "--gpus=2") for _ in range(2))
    site.queue.cancel([running, pending, "99", "no-id"], only_pending=True)
    assert (site.state(running), site.state(pending)) == (JobState.RUNNING, JobState.CANCELLED)
    site.queue.cancel([running])
    site.ended(running)
    site.queue.cancel([running])
    assert site.state(running) is JobState.CANCELLED
    assert site.queue.poll(["99", "no-id", "../queue"]) == {}


def test_find_returns_live_jobs_newest_last(site: Site) -> None:
    site.ended(site.submit("true", name="a"))
    jobs = [site.submit(FOREVER, name=name) for name in ("a", "b", "a")]
    assert site.queue.find("a") == [jobs[0], jobs[2]]
    assert site.queue.find("c") == []
    site.queue.cancel(jobs)
    for job in jobs:
        site.ended(job)
    assert site.queue.find("a") == []


def test_refused_in_plain_words(site: Site) -> None:
    for directive, words in {
        "--gpus=8": "requests 8 GPUs, but this machine has 2",
        "--partition=big": "unknown directive --partition",
        "--gpus=many": "`many` is not a valid value of the directive --gpus",
        "--time=1:2": "`1:2` is not a valid value of the directive --time",
        "-n 3": "is not a directive of the form",
    }.items():
        with pytest.raises(SubmitRefused, match=words):
            site.submit("true", directive)
    with pytest.raises(SubmitRefused, match=r"none\.sh"):
        site.queue.submit(site.home / "none.sh", job_name="job")
    assert not list((site.queue.directory / "jobs").iterdir())


def testread_directives() -> None:
    head = (
        '#!/bin/bash\n# a comment\n\n#HPCGPU --job-name="a \\"b\\" \\\\ c"\n#HPCGPU --time=1-02:03:04  \n#HPCGPU2 --x\n'
    )
    assert read_directives(head + "true\n#HPCGPU --gpus=2\n") == {"name": 'a "b" \\ c', "walltime": 93784.0}
    assert read_directives("#HPCGPU --time=00:01:00\n#HPCGPU --gpus=2")["walltime"] == 60


def test_output_with_quotes_spaces_and_patterns(site: Site) -> None:
    folder = site.home / 'with "quotes" and 100%'
    folder.mkdir()
    path = str(folder).replace('"', '\\"').replace("%", "%%")
    job = site.submit("echo here", f'--output="{path}/%x %j"', name="n")
    assert site.ended(job).state is JobState.COMPLETED
    assert (folder / f"n {job}").read_text() == "here\n"


def test_output_without_its_directory_fails(site: Site) -> None:
    job = site.submit("echo here", f"--output={site.home}/none/log")
    status = site.ended(job)
    assert status.state is JobState.FAILED
    assert "none/log" in status.reason


def test_killed_supervisor_is_noticed(site: Site) -> None:
    job = site.submit(f'echo started\nset -m\nbash -c "{FOREVER}" &\n{FOREVER}', "--gpus=2")
    follower = site.submit("true", "--gpus=2")
    wait_for(lambda: "started" in site.log(job))
    os.kill(site.record(job).supervisor[0], signal.SIGKILL)
    status = site.ended(job)
    assert status.state is JobState.FAILED
    assert "supervised" in status.reason
    assert site.ended(follower).state is JobState.COMPLETED


def test_queue_goes_on_without_a_client(site: Site) -> None:
    first = site.submit(f"until test -e {site.home}/go; do sleep 0.05; done", "--gpus=2")
    second = site.submit("echo second", "--gpus=2")
    third = site.submit(f"touch {site.home}/done", after=After(second))
    assert site.state(third) is JobState.PENDING
    (site.home / "go").touch()
    wait_for((site.home / "done").exists)  # without asking the queue
    assert {site.ended(job).state for job in (first, second, third)} == {JobState.COMPLETED}


def test_removed_queue_stays_removed(site: Site) -> None:
    job = site.submit(f"echo started; {FOREVER}")
    wait_for(lambda: "started" in site.log(job))
    wait_for(lambda: bool(site.record(job).leader))  # the last that a supervisor writes before the end
    supervisor = site.record(job).supervisor[0]
    shutil.rmtree(site.queue.directory)
    os.kill(supervisor, signal.SIGTERM)
    wait_for(site.quiet)
    assert not site.queue.directory.exists()


def test_two_clients_share_one_queue(site: Site) -> None:
    (site.home / "script.sh").write_text(
        f"#HPCGPU --output={site.home}/%j.log\n#HPCGPU --gpus=1\necho $CUDA_VISIBLE_DEVICES\n"
    )
    client = (
        "import pathlib, sys; from hpcgpu.batch.local.queue import LocalQueue\n"
        "queue = LocalQueue(pathlib.Path(sys.argv[1]))\n"
        "for _ in range(10): print(queue.submit(pathlib.Path('script.sh'), job_name='many'))"
    )
    site.queue.check()
    argv = [sys.executable, "-c", client, str(site.queue.directory)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    clients = [subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, text=True) for _ in range(2)]
    jobs = [job for process in clients for job in process.communicate()[0].split()]
    assert sorted(jobs, key=int) == [str(number) for number in range(1, 21)]
    assert {site.ended(job).state for job in jobs} == {JobState.COMPLETED}
    assert {site.log(job) for job in jobs} <= {"0\n", "1\n"}
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


def test_submit_from_inside_a_job_makes_a_job_of_its_own(site: Site) -> None:
    (site.home / "inner.sh").write_text(f"#HPCGPU --output={site.home}/inner.log\necho $HPCGPU_JOB_ID; {FOREVER}\n")
    client = (
        "from pathlib import Path as P; from hpcgpu.batch.local.queue import *; "
        "LocalQueue().submit(P('inner.sh'), job_name='inner')"
    )
    outer = site.submit(f'PYTHONPATH={ROOT} {sys.executable} -c "{client}"')
    assert site.ended(outer).state is JobState.COMPLETED, site.log(outer)
    (inner,) = site.queue.find("inner")
    wait_for(lambda: (site.home / "inner.log").exists() and (site.home / "inner.log").read_text() == f"{inner}\n")
    assert site.state(inner) is JobState.RUNNING
    site.queue.cancel([inner])
    assert site.ended(inner).state is JobState.CANCELLED


def test_machine_belongs_to_the_directory(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.queue.check()
    LocalQueue(site.queue.directory).check()
    with pytest.raises(BatchError, match="2 GPUs, not 3"):
        LocalQueue(site.queue.directory, gpus=3).check()
    with pytest.raises(BatchError, match="4 slots, not 5"):
        LocalQueue(site.queue.directory, slots=5).check()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(BatchError, match="On elsewhere, set HPCGPU_QUEUE_DIRECTORY"):
        site.queue.check()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,-1,3")
    monkeypatch.setenv("HPCGPU_QUEUE_DIRECTORY", str(site.home / "other"))
    with LocalQueue()._locked() as machine:
        assert (machine.gpus, machine.slots >= 8) == (["GPU-a", "GPU-b"], True)
    assert (site.home / "other" / "queue.json").exists()


def test_half_written_records_are_of_failed_jobs_and_old_ones_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.batch.local.queue._RETAINED", 2)
    with site.queue._locked():
        for number in range(1, 5):
            site.queue._close(JobRecord(job_id=str(number), name="old", output="", cwd=""), JobState.COMPLETED)
    assert list(site.queue.poll("1234")) == ["3", "4"]
    for name in ("5.env", "5.json", "last-id"):
        (site.queue.directory / ("" if name == "last-id" else "jobs") / name).write_text('{"job_')
    assert {job_id: job.state for job_id, job in site.queue.poll(["4", "5"]).items()} == {
        "4": JobState.COMPLETED,
        "5": JobState.FAILED,
    }
    job = site.submit("true")
    assert job == "6"
    site.ended(job)


def test_startable_decides_by_order_alone() -> None:
    def record(job_id: str, gpus: int = 0, state: JobState = JobState.PENDING, **more: object) -> JobRecord:
        return JobRecord(job_id=job_id, name="", output="", cwd="", gpus=gpus, state=state, **more)  # type: ignore[arg-type]

    records = [
        record("1", 1, JobState.COMPLETING, devices=["b"]),
        record("2", 1),
        record("3", after="2"),
        record("4", after="6"),
        record("5", 2),
        record("6"),
        record("7", after_end="1"),
        record("8", after_end="0"),
    ]
    assert [(job.job_id, devices) for job, devices in startable(records, "abc", 9)] == [("2", ["a"]), ("3", [])]
    assert [job.job_id for job, _ in startable(records, "abc", 2)] == ["2"]
    assert [job.job_id for job, _ in startable(records, "abcd", 9)] == ["2", "3", "5", "6", "8"]
