"""Clusters on a real HTCondor: the class in a program, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import htcondor_bed
import pytest
from htcondor_bed import HTCondorBed, Run, wait_for

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gpu_stub"))
import build

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")

HEAD = """
import subprocess, sys
from hpcgpu_htcondor import HTCondorGPUCluster

SMALL = {"gpus_per_node": 0, "cores": 1, "protocol": "tcp", "poll_interval": 0.5, "quiet": True, "walltime": "10m"}


def running(cluster):
    cluster.settle()
    return {job.id for job in cluster.jobs if job.kind == "worker" and job.state == "running"}


"""
SMALL = "--gpus-per-node 0 --cores 1 --scheduler gpus-per-node=0 --protocol tcp --poll-interval 0.5 --walltime 10m"


@pytest.fixture
def program(run: Run, tmp_path: Path, bed: HTCondorBed) -> Run:
    """Run a program that uses the class; its output."""

    def call(body: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        path.write_text(f'{HEAD}if __name__ == "__main__":\n{lines}')
        return run(str(path))

    return call


@pytest.fixture
def stopped(bed: HTCondorBed, cli: Run) -> Iterator[None]:
    yield
    cli("stop", "demo")


def test_a_cluster_on_htcondor_computes_grows_replaces_a_lost_job_shrinks_and_closes(
    program: Run, bed: HTCondorBed
) -> None:
    done = program("""
with HTCondorGPUCluster(**SMALL, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    with cluster.get_client() as client:
        print(client.submit(sum, [1, 2, 3]).result())
        cluster.scale(jobs=2)
        client.wait_for_workers(2, timeout=120)
        [lost, kept] = sorted(running(cluster), key=int)
        subprocess.run(["condor_rm", lost], check=True, stdout=subprocess.DEVNULL)
        while len(now := running(cluster)) < 2 or lost in now:
            cluster.settle()
        client.wait_for_workers(2, timeout=120)
        print(kept in now)
        cluster.scale(jobs=1)
        while len(running(cluster)) > 1:
            pass
        print(client.submit(sum, [4, 5]).result())
    print(HTCondorGPUCluster.system)
""")
    assert done.stdout.split() == ["6", "True", "9", "htcondor"], done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.fixture
def gpus(tmp_path: Path) -> str:
    """Options of jobs with pretended GPUs."""
    if reason := build.why_not():
        pytest.skip(reason)
    stubs = build.environment(build.build(tmp_path / "stubs"))
    return f'SMALL | {{"gpus_per_node": 2, "cores": 2, "scheduler": {{"gpus_per_node": 0}}, "env": {stubs!r}}}'


def test_workers_have_the_gpus_that_htcondor_assigns(program: Run, gpus: str) -> None:
    done = program(f"""
with HTCondorGPUCluster(**{gpus}, jobs=1) as cluster:
    cluster.wait_for_workers(2, timeout=120)
    with cluster.get_client() as client:
        visible = client.run(lambda: __import__("os").environ["CUDA_VISIBLE_DEVICES"])
        print(*sorted(visible.values()))
    asked = subprocess.run(["condor_q", "-allusers", "-af", "RequestGPUs"], capture_output=True, text=True).stdout
    print("2" in asked.split())
""")
    assert done.stdout.split() == [
        "GPU-00000000-0000-0000-0000-000000000000,GPU-00000001-0000-0000-0000-000000000001",
        "GPU-00000001-0000-0000-0000-000000000001,GPU-00000000-0000-0000-0000-000000000000",
        "True",
    ], done.stderr


def test_a_cluster_outlasts_its_schedd(program: Run, bed: HTCondorBed) -> None:
    done = program(
        """
bed = lambda action: subprocess.run([sys.executable, BED, action, WHERE], check=True)
with HTCondorGPUCluster(**SMALL, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    with cluster.get_client() as client:
        bed("stop-schedd")
        cluster.scale(jobs=2)
        print(client.submit(sum, [1, 2, 3]).result())
        bed("start-schedd")
        client.wait_for_workers(2, timeout=200)
        print(client.submit(sum, [4, 5]).result())
""".replace("BED", repr(htcondor_bed.__file__)).replace("WHERE", repr(str(bed.directory)))
    )
    assert done.stdout.split() == ["6", "9"], done.stderr


def test_a_refused_job_ends_the_program_with_what_to_check(program: Run) -> None:
    done = program(
        'HTCondorGPUCluster(**SMALL | {"requirements": "Cpus >= ("}, jobs=1).wait_for_workers(1, timeout=60)'
    )
    assert done.returncode != 0
    assert "Parse error in expression" in done.stderr and "Check `requirements`" in done.stderr


def test_a_job_that_no_machine_can_run_ends_the_program_with_why(program: Run) -> None:
    done = program('HTCondorGPUCluster(**SMALL | {"cores": 99}, jobs=1).wait_for_workers(1, timeout=60)')
    assert done.returncode != 0 and "no machine of the pool has 99 cores (at most 16)" in done.stderr


def test_workers_leave_before_their_walltime(program: Run, bed: HTCondorBed) -> None:
    done = program("""
short = SMALL | {"walltime": "70s", "walltime_margin": "40s", "scheduler": {"walltime": "10m"}}
with HTCondorGPUCluster(**short, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    [first] = running(cluster)
    with cluster.get_client() as client:
        slow = client.map(lambda i: __import__("time").sleep(0.5) or i, range(100))
        while running(cluster) <= {first}:
            cluster.settle()
        print(sum(client.gather(slow)))
""")
    assert done.stdout.split() == ["4950"], done.stderr


@pytest.mark.shows("The command line; a cluster that another program takes over")
def test_the_command_line_starts_lists_shows_reports_and_stops(stopped: None, cli: Run, bed: HTCondorBed) -> None:
    started = cli("start", "demo", "--system", "htcondor", "--jobs", "1", *SMALL.split())
    assert started.returncode == 0, started.stderr
    [found] = json.loads(cli("list", "--json").stdout)
    assert (found["name"], found["system"]) == ("demo", "htcondor")
    assert "demo on htcondor" in cli("status", "demo").stdout
    assert "Scheduler at" in cli("logs", "demo").stdout
    assert cli("report", "demo").returncode == 0
    done = cli("stop", "demo")
    assert done.returncode == 0, done.stderr
    assert json.loads(cli("list", "--json").stdout) == []
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.mark.shows("`hpcgpu check`")
def test_check_and_profiles_ask_it_for_its_queues(bed: HTCondorBed, cli: Run) -> None:
    said = cli("check", "--system", "htcondor", "--gpus-per-node", "4").stdout
    assert "htcondor: HTCondor 23.9.6" in said and "4 x" in said
    drafted = cli("profiles", "new", "site", "--system", "htcondor", "-o", "-").stdout
    assert "system: htcondor\n" in drafted and "gpus-per-node: 4" in drafted


@pytest.mark.shows("`hpcgpu check`")
def test_check_warns_of_a_submit_command_whose_answer_has_no_id(
    bed: HTCondorBed, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "condor_submit"  # of the site
    wrapper.write_text(f'#!/bin/sh\n{bed.directory}/commands/condor_submit "$@" > /dev/null && echo "Thank you"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    options = [word for word in SMALL.split() if word not in ("--poll-interval", "0.5")]
    done = cli("check", "--system", "htcondor", "--in-job", "--json", *options)
    lines = [line for line in json.loads(done.stdout)["lines"] if line["what"] == "job id"]
    assert [(line["where"], line["grade"]) for line in lines] == [
        ("scheduler job", "warning"),
        ("worker job", "warning"),
    ], done.stdout + done.stderr
    assert all("no id that hpcgpu can read: 'Thank you'" in line["found"] for line in lines)


def test_a_machine_that_has_it_uses_it(bed: HTCondorBed, cli: Run) -> None:
    assert "htcondor: HTCondor 23.9.6" in cli("check").stdout


@pytest.mark.shows("Scripts that stand alone")
def test_rendered_scripts_launch_and_stop(bed: HTCondorBed, cli: Run, tmp_path: Path) -> None:
    place = tmp_path / "alone"
    options = [word for word in SMALL.split() if word not in ("--poll-interval", "0.5")]
    done = cli("render", "htcondor", *options, "-o", str(place))
    assert done.returncode == 0, done.stderr
    launched = subprocess.run([place / "launch.sh", "1"], capture_output=True, text=True, timeout=100)
    stopped = subprocess.run([place / "stop.sh"], capture_output=True, text=True, timeout=100)
    assert launched.returncode == 0 and "worker job" in launched.stdout, launched.stderr
    assert stopped.returncode == 0 and "Cancelling" in stopped.stdout, stopped.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.mark.shows("The command line; a cluster that another program takes over")
def test_a_cluster_adapts_and_another_program_takes_it_over(program: Run, bed: HTCondorBed) -> None:
    done = program("""
first = HTCondorGPUCluster(**SMALL, name="kept", jobs=1, shutdown_on_close=False)
first.wait_for_workers(1, timeout=120)
first.close()
with HTCondorGPUCluster.from_name("kept") as cluster, cluster.get_client() as client:
    print(client.submit(sum, [1, 2, 3]).result())
    cluster.adapt(minimum=1, maximum=2)
    slow = client.map(lambda i: __import__("time").sleep(0.5) or i, range(60), pure=False)
    client.wait_for_workers(2, timeout=120)
    print(sum(client.gather(slow)))
    while len(running(cluster)) > 1:
        cluster.settle()
    cluster.shutdown()
""")
    assert done.stdout.split() == ["6", "1770"], done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


def test_a_cluster_whose_job_is_held_reports_why_and_replaces_it(program: Run, bed: HTCondorBed) -> None:
    done = program("""
with HTCondorGPUCluster(**SMALL | {"quiet": False}, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    [held] = running(cluster)
    subprocess.run(["condor_hold", held, "-reason", "the disk is full"], check=True, stdout=subprocess.DEVNULL)
    while not running(cluster) or held in running(cluster):
        cluster.settle()
    cluster.wait_for_workers(1, timeout=120)
    print("replaced")
""")
    assert done.stdout.split()[-1:] == ["replaced"], done.stderr
    assert "the disk is full" in done.stderr
