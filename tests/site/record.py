"""Records what a real Slurm prints of jobs in each situation: sbatch, squeue and sacct, with exactly the arguments of
`hpcgpu.batch.slurm`. The fast test `tests/queue/test_recorded.py` reads the recordings.

    python tests/site/record.py one-machine [SITUATION ...]    # as root: it starts the Slurm of tests/slurm/bed.py
    python tests/site/record.py site [SITUATION ...]           # on the site of ci/slurm-docker, which runs

Without a situation it records all that the place can show. Jobs belong to an ordinary user.
"""

from __future__ import annotations

import fcntl
import re
import shlex
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "slurm")]

import bed  # noqa: E402

from tests.site.site_bed import NAME  # noqa: E402

RECORDED = ROOT / "tests" / "recorded"
SQUEUE = ["squeue", "--noheader", "--format=%i|%T|%N|%S|%e|%j|%r", "--jobs={}", "--states=all"]
SACCT = ["sacct", "-X", "-n", "-P", "-o", "JobIDRaw,State,ExitCode,NodeList,Start,End,JobName", "-j", "{}"]
QUERY = ["env", "LC_ALL=C", "SLURM_TIME_FORMAT=%s"]
SLEEP = "sleep 600"
GREEDY = "exec python3 -c 'import time; x = bytearray(2**30); time.sleep(60)'"


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


class Place(ABC):
    """Where a Slurm runs. `cheap` is a partition and a node of it with one GPU; `accounting`: there is a slurmdbd."""

    words: str
    accounting: bool
    partition: str
    node: str
    cheap: tuple[str, str]
    longest: str

    @abstractmethod
    def run(self, *argv: str, stdin: str = "", root: bool = False) -> Done:
        """Run a command on a host from which users submit."""

    def ask(self, *argv: str, root: bool = True) -> str:
        """The output of a command that must work."""
        done = self.run(*argv, root=root)
        if done.status:
            raise RuntimeError(f"{shlex.join(argv)}: {done.err or done.out}")
        return done.out

    def until(self, *argv: str, shows: str, timeout: float = 120) -> None:
        """Wait until a command prints what the pattern matches."""
        deadline = time.monotonic() + timeout
        while not re.search(shows, said := self.run(*argv, root=True).out):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(argv)} never printed {shows!r}, but {said!r}")
            time.sleep(0.2)


class OneMachine(Place):
    """The Slurm of tests/slurm/bed.py."""

    words = "one machine"
    accounting = False
    partition = "gpu"
    node = "n1"
    cheap = ("shared", "s0")
    longest = "INFINITE"

    def __init__(self, slurm: bed.SlurmBed) -> None:
        self.slurm = slurm

    def run(self, *argv: str, stdin: str = "", root: bool = False) -> Done:
        user = [] if root else ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **self.slurm.environment()}
        done = subprocess.run([*user, *argv], input=stdin, capture_output=True, text=True, env=path, cwd="/")
        return Done(done.returncode, done.stdout, done.stderr)


class Hosts(Place):
    """The site of ci/slurm-docker, from a login node."""

    words = "hosts in containers"
    accounting = True
    partition = "gpu"
    node = "n1"
    cheap = ("shared", "s0")
    longest = "1-00:00:00"

    def run(self, *argv: str, stdin: str = "", root: bool = False) -> Done:
        who = ["--user=root", f"{NAME}-ctl"] if root else ["--user=ada", "--workdir=/home/ada", f"{NAME}-login1"]
        done = subprocess.run(["docker", "exec", "-i", *who, *argv], input=stdin, capture_output=True, text=True)
        return Done(done.returncode, done.stdout, done.stderr)


@dataclass
class Recorder:
    """One recording. What `say` runs is kept; what `place` runs is not."""

    place: Place
    lines: list[str] = field(default_factory=list)

    def say(self, *argv: str, stdin: str = "", env: list[str] | None = None) -> Done:
        """Run a command as the user and keep it, with what it printed."""
        done = self.place.run(*(env or []), *argv, stdin=stdin)
        self.lines += [f"$ {shlex.join(argv)}"]
        self.lines += [f"< {line}" for line in stdin.splitlines()]
        self.lines += [f"> {line}" for line in done.out.splitlines()] + [f"! {line}" for line in done.err.splitlines()]
        self.lines += [f"= {done.status}"]
        return done

    def submit(self, *directives: str, body: str = SLEEP, record: bool = True, output: str = "/dev/null") -> str:
        """Submit a job and return its id; empty if it is refused."""
        given = {directive.split("=")[0] for directive in directives}
        usual = {
            "--partition": self.place.partition,
            "--time": "30",
            "--ntasks": "1",
            "--mem": "100",
            "--output": output,
        }
        lines = [f"#SBATCH {name}={value}" for name, value in usual.items() if name not in given]
        script = "\n".join(["#!/bin/bash", *lines, *(f"#SBATCH {directive}" for directive in directives), body, ""])
        argv = ["sbatch", "--parsable", "--job-name=ada-1"]
        done = self.say(*argv, stdin=script) if record else self.place.run(*argv, stdin=script)
        return done.out.strip().split(";")[0]

    def status(self, job: str) -> None:
        """Keep what squeue and sacct print of a job."""
        self.say(*(word.format(job) for word in SQUEUE), env=QUERY)
        if self.place.accounting:  # it learns from the controller a moment later
            state = self.place.ask("squeue", "-h", f"--jobs={job}", "--states=all", "--format=%T").strip()
            self.place.until("sacct", "-X", "-n", "-P", "-o", "State", "-j", job, shows=f"^{state}")
        self.say(*(word.format(job) for word in SACCT), env=QUERY)

    def reaches(self, job: str, state: str, reason: str = "") -> None:
        """Wait for a state and a reason, then keep what is printed of the job."""
        shown = ("squeue", "-h", f"--jobs={job}", "--states=all", "--format=%T|%r")
        self.place.until(*shown, shows=rf"^({state})\|.*{reason}")
        self.status(job)

    def change(self, *argv: str) -> None:
        """Do something as root, which is not kept."""
        self.place.ask(*argv)


Situation = Callable[[Recorder], None]
EVERYWHERE: dict[str, Situation] = {}


def everywhere(situation: Situation) -> Situation:
    """A situation that any Slurm can show."""
    EVERYWHERE[situation.__name__] = situation
    return situation


def taken(r: Recorder, queue: str, node: str, *directives: str) -> None:
    """Fill a node with a job that runs."""
    job = r.submit(f"--partition={queue}", f"--nodelist={node}", *directives, record=False)
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")


# -- jobs that wait ----------------------------------------------------------------------------------------------------


@everywhere
def resources(r: Recorder) -> None:
    queue, node = r.place.cheap
    taken(r, queue, node, "--gres=gpu:1")
    r.reaches(r.submit(f"--partition={queue}", f"--nodelist={node}", "--gres=gpu:1"), "PENDING", "Resources")


@everywhere
def priority(r: Recorder) -> None:
    queue, node = r.place.cheap
    for _ in range(2):
        r.submit(f"--partition={queue}", f"--nodelist={node}", "--gres=gpu:1", record=False)
    r.reaches(r.submit(f"--partition={queue}", f"--nodelist={node}", "--gres=gpu:1"), "PENDING", "Priority")


@everywhere
def dependency(r: Recorder) -> None:
    first = r.submit("--hold", record=False)
    r.reaches(r.submit(f"--dependency=after:{first}"), "PENDING", "Dependency")


@everywhere
def dependency_never_satisfied(r: Recorder) -> None:
    first = r.submit(body="exit 3", record=False)
    r.reaches(r.submit(f"--dependency=afterok:{first}"), "PENDING", "DependencyNeverSatisfied")


@everywhere
def begin_time(r: Recorder) -> None:
    r.reaches(r.submit("--begin=now+1hour"), "PENDING", "BeginTime")


@everywhere
def held_by_the_user(r: Recorder) -> None:
    r.reaches(r.submit("--hold"), "PENDING", "JobHeldUser")


@everywhere
def held_by_the_administrator(r: Recorder) -> None:
    job = r.submit("--begin=now+1hour")
    r.change("scontrol", "hold", job)
    r.reaches(job, "PENDING", "JobHeldAdmin")


@everywhere
def requeued(r: Recorder) -> None:
    job = r.submit("--requeue")
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.change("scontrol", "requeue", job)
    r.reaches(job, "PENDING", "BeginTime")


@everywhere
def requeued_and_held(r: Recorder) -> None:
    job = r.submit("--requeue")
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.change("scontrol", "requeuehold", job)
    r.reaches(job, "PENDING|REQUEUE_HOLD", "[hH]eld")


def with_partition(r: Recorder, change: str, undo: str, *directives: str, reason: str) -> None:
    """What is printed of a job while its partition is changed."""
    r.change("scontrol", "update", f"PartitionName={r.place.partition}", change)
    try:
        r.reaches(r.submit(*directives), "PENDING", reason)
    finally:
        r.change("scontrol", "update", f"PartitionName={r.place.partition}", undo)


@everywhere
def partition_time_limit(r: Recorder) -> None:
    job = r.submit("--hold", "--time=60")
    with_partition_after(r, job, "MaxTime=5", f"MaxTime={r.place.longest}", "PartitionTimeLimit")


@everywhere
def partition_down(r: Recorder) -> None:
    with_partition(r, "State=DOWN", "State=UP", reason="PartitionDown")


@everywhere
def partition_inactive(r: Recorder) -> None:
    taken(r, r.place.partition, r.place.node, "--exclusive")
    job = r.submit(f"--nodelist={r.place.node}")
    with_partition_after(r, job, "State=INACTIVE", "State=UP", "PartitionInactive")


def with_partition_after(r: Recorder, job: str, change: str, undo: str, reason: str) -> None:
    """What is printed of a job that was submitted before its partition was changed."""
    r.change("scontrol", "update", f"PartitionName={r.place.partition}", change)
    try:
        r.place.run("scontrol", "release", job, root=True)
        r.reaches(job, "PENDING", reason)
    finally:
        r.change("scontrol", "update", f"PartitionName={r.place.partition}", undo)


def with_node(r: Recorder, state: str, *directives: str, reason: str) -> None:
    """What is printed of a job that wants a node which is in this state."""
    r.change("scontrol", "update", f"NodeName={r.place.node}", f"State={state}", "Reason=test")
    try:
        r.reaches(r.submit(f"--nodelist={r.place.node}", *directives), "PENDING", reason)
    finally:
        resume(r)


def resume(r: Recorder) -> None:
    """Give the node back, which may have come back by itself."""
    r.place.run("scontrol", "update", f"NodeName={r.place.node}", "State=RESUME", root=True)
    r.place.until("sinfo", "-h", f"--nodes={r.place.node}", "--format=%T", shows="^(idle|mixed|allocated|completing)")


@everywhere
def node_drained(r: Recorder) -> None:
    with_node(r, "DRAIN", reason="ReqNodeNotAvail")


@everywhere
def node_down(r: Recorder) -> None:
    with_node(r, "DOWN", reason="ReqNodeNotAvail")


@everywhere
def maintenance_ahead(r: Recorder) -> None:
    nodes = f"Nodes={r.place.node}"
    r.change("scontrol", "create", "reservation", "ReservationName=service", "StartTime=now+10minutes",
             "Duration=60", "Users=root", "Flags=MAINT", nodes)  # fmt: skip
    try:
        r.reaches(r.submit(f"--nodelist={r.place.node}"), "PENDING", "ReqNodeNotAvail")
    finally:
        r.change("scontrol", "delete", "ReservationName=service")


# -- jobs that run -----------------------------------------------------------------------------------------------------


@everywhere
def running(r: Recorder) -> None:
    r.reaches(r.submit(), "RUNNING")


@everywhere
def suspended(r: Recorder) -> None:
    job = r.submit()
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.change("scontrol", "suspend", job)
    r.reaches(job, "SUSPENDED")


# -- jobs that ended ---------------------------------------------------------------------------------------------------


@everywhere
def completed(r: Recorder) -> None:
    r.reaches(r.submit(body="true"), "COMPLETED")


@everywhere
def failed(r: Recorder) -> None:
    r.reaches(r.submit(body="exit 3"), "FAILED")


@everywhere
def ended_by_a_signal(r: Recorder) -> None:
    r.reaches(r.submit(body="kill -9 $$"), "FAILED")


@everywhere
def log_cannot_be_written(r: Recorder) -> None:
    r.reaches(r.submit("--output=/no/such/directory/log"), "FAILED")


@everywhere
def cancelled_while_pending(r: Recorder) -> None:
    job = r.submit("--hold")
    r.place.ask("scancel", job, root=False)
    r.reaches(job, "CANCELLED")


@everywhere
def cancelled_while_running(r: Recorder) -> None:
    job = r.submit()
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.place.ask("scancel", job, root=False)
    r.reaches(job, "CANCELLED")


@everywhere
def walltime(r: Recorder) -> None:
    job = r.submit("--time=1")
    r.reaches(job, "TIMEOUT")


@everywhere
def deadline(r: Recorder) -> None:
    queue, node = r.place.cheap
    taken(r, queue, node, "--gres=gpu:1")
    job = r.submit(f"--partition={queue}", f"--nodelist={node}", "--gres=gpu:1", "--time=1", "--deadline=now+61seconds")
    r.reaches(job, "DEADLINE")


@everywhere
def node_failed(r: Recorder) -> None:
    job = r.submit(f"--nodelist={r.place.node}", "--no-requeue")
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.change("scontrol", "update", f"NodeName={r.place.node}", "State=DOWN", "Reason=test")
    try:
        r.reaches(job, "NODE_FAIL")
    finally:
        resume(r)


# -- jobs that are refused ---------------------------------------------------------------------------------------------


@everywhere
def unknown_partition(r: Recorder) -> None:
    r.submit("--partition=nope")


@everywhere
def too_many_gpus(r: Recorder) -> None:
    r.submit("--gres=gpu:9")


@everywhere
def unknown_feature(r: Recorder) -> None:
    r.submit("--constraint=nope")


@everywhere
def partition_takes_no_jobs(r: Recorder) -> None:
    r.change("scontrol", "update", f"PartitionName={r.place.partition}", "State=DRAIN")
    try:
        r.submit()
    finally:
        r.change("scontrol", "update", f"PartitionName={r.place.partition}", "State=UP")


# -- on one machine only: no cgroups, no accounting --------------------------------------------------------------------


def memory_kill_without_cgroups(r: Recorder) -> None:
    r.reaches(r.submit(body=GREEDY), "FAILED|OUT_OF_MEMORY")


def preempted_by_partition(r: Recorder) -> None:
    job = r.submit("--nodelist=n1")
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.submit("--partition=urgent", "--nodelist=n1", "--exclusive", record=False)
    r.reaches(job, "PREEMPTED")


ONE_MACHINE = {f.__name__: f for f in (memory_kill_without_cgroups, preempted_by_partition)}


# -- on the site: accounting, limits, cgroups, a filter ----------------------------------------------------------------

SITE: dict[str, Situation] = {}
GPU = ("--gres=gpu:1", "--cpus-per-task=1")


def on_the_site(situation: Situation) -> Situation:
    """A situation that needs accounting, cgroups or the site's filter."""
    SITE[situation.__name__] = situation
    return situation


def limited(r: Recorder, whose: str, limit: str, *directives: str, reason: str, before: int = 0) -> None:
    """What is printed of a job that a limit holds back, or whose submit it refuses; `before` jobs run already.

    `whose` is qos (its name is few), account (physics) or user (ada).
    """
    name, _, value = limit.partition("=")
    none = f"{name}={value.rpartition('=')[0]}=-1" if "=" in value else f"{name}=-1"
    entity = {"qos": "few", "account": "physics", "user": "ada"}[whose]
    change = ("sacctmgr", "--immediate", "--quiet", "modify", whose, "where", f"name={entity}", "set")
    qos = ("--qos=few",) if whose == "qos" else ()
    r.change(*change, limit)
    try:
        for _ in range(before):
            job = r.submit(*qos, *directives, record=False)
            r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
        job = r.submit(*qos, *directives)
        if reason:
            r.reaches(job, "PENDING", reason)
    finally:
        r.change(*change, none)


@on_the_site
def qos_max_jobs_per_user(r: Recorder) -> None:
    for _ in range(2):
        job = r.submit("--qos=few", record=False)
        r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.reaches(r.submit("--qos=few"), "PENDING", "QOS")


@on_the_site
def qos_group_gpu_minutes(r: Recorder) -> None:
    limited(r, "qos", "GrpTRESMins=gres/gpu=0", *GPU, reason="QOS")  # all of the budget is used


@on_the_site
def qos_gpus_per_user(r: Recorder) -> None:
    limited(r, "qos", "MaxTRESPU=gres/gpu=1", *GPU, reason="QOS", before=1)


@on_the_site
def qos_gpus_per_job(r: Recorder) -> None:
    limited(r, "qos", "MaxTRESPerJob=gres/gpu=1", "--gres=gpu:2", reason="QOS")


@on_the_site
def qos_walltime_per_job(r: Recorder) -> None:
    limited(r, "qos", "MaxWall=10", "--time=60", reason="QOS")


@on_the_site
def qos_group_gpus(r: Recorder) -> None:
    limited(r, "qos", "GrpTRES=gres/gpu=1", *GPU, reason="QOS", before=1)


@on_the_site
def qos_group_jobs(r: Recorder) -> None:
    limited(r, "qos", "GrpJobs=1", reason="QOS", before=1)


@on_the_site
def qos_group_running_gpu_minutes(r: Recorder) -> None:
    limited(r, "qos", "GrpTRESRunMins=gres/gpu=40", *GPU, "--time=30", reason="QOS", before=1)


@on_the_site
def account_max_jobs(r: Recorder) -> None:
    limited(r, "user", "MaxJobs=1", reason="Assoc", before=1)


@on_the_site
def account_group_jobs(r: Recorder) -> None:
    limited(r, "account", "GrpJobs=1", reason="Assoc", before=1)


@on_the_site
def account_group_gpus(r: Recorder) -> None:
    limited(r, "account", "GrpTRES=gres/gpu=1", *GPU, reason="Assoc", before=1)


@on_the_site
def account_walltime_per_job(r: Recorder) -> None:
    limited(r, "user", "MaxWall=10", "--time=60", reason="Assoc")


@on_the_site
def account_gpus_per_job(r: Recorder) -> None:
    limited(r, "user", "MaxTRESPerJob=gres/gpu=1", "--gres=gpu:2", reason="Assoc")


@on_the_site
def qos_too_many_submitted(r: Recorder) -> None:
    limited(r, "qos", "MaxSubmitJobsPU=1", reason="", before=1)


@on_the_site
def account_too_many_submitted(r: Recorder) -> None:
    limited(r, "user", "MaxSubmitJobs=1", reason="", before=1)


@on_the_site
def qos_refuses_over_its_limit(r: Recorder) -> None:
    change = ["sacctmgr", "--immediate", "--quiet", "modify", "qos", "where", "name=few", "set"]
    r.change(*change, "Flags=DenyOnLimit")
    try:
        limited(r, "qos", "MaxWall=10", "--time=60", reason="")
    finally:
        r.change(*change, "Flags=-1")


@on_the_site
def unknown_account(r: Recorder) -> None:
    r.submit("--account=nope")


@on_the_site
def account_of_others(r: Recorder) -> None:
    r.submit("--account=biology")


@on_the_site
def unknown_qos(r: Recorder) -> None:
    r.submit("--qos=nope")


@on_the_site
def refused_by_the_filter(r: Recorder) -> None:
    r.submit("--constraint=p100")


@on_the_site
def memory_kill(r: Recorder) -> None:
    r.reaches(r.submit(body=GREEDY), "OUT_OF_MEMORY")


@on_the_site
def memory_kill_of_a_child(r: Recorder) -> None:
    r.reaches(r.submit(body=f"({GREEDY}); exit 0"), "OUT_OF_MEMORY|COMPLETED|FAILED")


@on_the_site
def preempted(r: Recorder) -> None:
    job = r.submit("--qos=scavenger", "--nodelist=n1", "--exclusive", "--no-requeue")
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.submit("--qos=urgent", "--nodelist=n1", "--exclusive", record=False)
    r.reaches(job, "PREEMPTED")


@on_the_site
def preempted_and_requeued(r: Recorder) -> None:
    job = r.submit("--qos=scavenger", "--nodelist=n1", "--exclusive", "--requeue")
    r.place.until("squeue", "-h", f"--jobs={job}", "--format=%T", shows="RUNNING")
    r.submit("--qos=urgent", "--nodelist=n1", "--exclusive", record=False)
    r.reaches(job, "PENDING", "BeginTime|Resources|Priority")


def record(place: Place, situations: dict[str, Situation], wanted: list[str]) -> None:
    """Record the situations of this place; what is not wanted is left as it is."""
    release = place.ask("sbatch", "--version").split()[1]
    folder = RECORDED / f"slurm-{'.'.join(release.split('.')[:2])}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, situation in situations.items():
        if wanted and name not in wanted:
            continue
        recorder = Recorder(place)
        try:
            situation(recorder)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        finally:
            jobs = place.ask("squeue", "-h", "--name=ada-1", "--format=%i").split()
            if jobs:
                place.run("scancel", *jobs, root=True)
                place.until("squeue", "-h", "--name=ada-1", "--format=%i", shows=r"^\s*$")
        head = f"# Slurm {release}, {place.words}, {time.strftime('%Y-%m-%d')}"
        path = folder / f"{name.replace('_', '-')}.txt"
        path.write_text("\n".join([head, *recorder.lines, ""]))
        print(path.relative_to(ROOT))


def main() -> None:
    """The command line."""
    where, *wanted = sys.argv[1:] or ["help"]
    if where == "one-machine":
        with tempfile.TemporaryDirectory() as directory:
            Path(directory).chmod(0o755)
            with bed.started(Path(directory) / "slurm", bed.FAST) as slurm:
                record(OneMachine(slurm), EVERYWHERE | ONE_MACHINE, wanted)
    elif where == "site":
        with open(Path(tempfile.gettempdir()) / f"{NAME}.lock", "a") as lock:  # as tests/site/conftest.py does
            fcntl.flock(lock, fcntl.LOCK_EX)
            record(Hosts(), EVERYWHERE | SITE, wanted)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
