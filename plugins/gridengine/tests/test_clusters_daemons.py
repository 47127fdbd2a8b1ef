"""Clusters on a real Grid Engine: the class in a program, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import gridengine_bed
import pytest
from conftest import Run
from gridengine_bed import GridEngineBed, wait_for

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")

SMALL = "--gpus-per-node 0 --cores 1 --scheduler gpus-per-node=0 --protocol tcp --poll-interval 0.5 --walltime 10m"


@pytest.fixture
def stopped(bed: GridEngineBed, cli: Run) -> Iterator[None]:
    yield
    cli("stop", "demo")


def test_a_cluster_computes_grows_replaces_a_lost_job_shrinks_and_closes(program: Run, bed: GridEngineBed) -> None:
    done = program("""
with SGEGPUCluster(**SMALL, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    with cluster.get_client() as client:
        print(client.submit(sum, [1, 2, 3]).result())
        cluster.scale(jobs=2)
        client.wait_for_workers(2, timeout=120)
        [lost, kept] = sorted(running(cluster), key=int)
        subprocess.run(["qdel", lost], check=True, stdout=subprocess.DEVNULL)
        while len(now := running(cluster)) < 2 or lost in now:
            cluster.settle()
        client.wait_for_workers(2, timeout=120)
        print(kept in now)
        cluster.scale(jobs=1)
        while len(running(cluster)) > 1:
            pass
        print(client.submit(sum, [4, 5]).result())
    print(SGEGPUCluster.system)
""")
    assert done.stdout.split() == ["6", "True", "9", "gridengine"], done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


def test_the_profile_of_tsubame_4_requests_types_of_nodes_and_names_the_group_to_qsub(
    program: Run, bed: GridEngineBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qsub = tmp_path / "qsub"  # as there: it takes -g on its command line, and Grid Engine's own does not accept -g
    qsub.write_text(f"""#!/bin/bash
while [ $# -gt 0 ]; do
    if [ "$1" = -g ]; then echo "$2" >> {tmp_path}/groups; shift 2; else kept+=("$1"); shift; fi
done
exec {bed.directory}/commands/qsub "${{kept[@]}}"
""")
    qsub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = program("""
with SGEGPUCluster(**SMALL, profile="tsubame4", account="tga-demo", jobs=1, scheduler={"gpus_per_node": 0}) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    with cluster.get_client() as client:
        print(client.submit(sum, [1, 2, 3]).result())
    answer = subprocess.run(["qstat", "-r"], capture_output=True, text=True).stdout
    print(*(word for word in ("gpu_1=1", "node_f=1", "gpu=", "-pe") if word in answer))
""")
    assert done.stdout.split() == ["6", "gpu_1=1", "node_f=1"], done.stderr
    assert (tmp_path / "groups").read_text().split() == ["tga-demo"] * 2


def test_workers_have_the_gpus_that_the_site_numbers(program: Run, gpus: str) -> None:
    done = program(f"""
with SGEGPUCluster(**{gpus}, queue="short.q", jobs=1) as cluster:
    cluster.wait_for_workers(2, timeout=120)
    with cluster.get_client() as client:
        visible = client.run(lambda: __import__("os").environ["CUDA_VISIBLE_DEVICES"])
        print(*sorted(visible.values()))
    print("gpu=2" in subprocess.run(["qstat", "-r"], capture_output=True, text=True).stdout)
""")
    assert done.stdout.split() == ["2,3", "3,2", "True"], done.stderr


def test_a_site_that_does_not_report_which_gpus_a_job_has_is_explained(program: Run, gpus: str) -> None:
    done = program(f"SGEGPUCluster(**{gpus}, queue='gpu.q', jobs=1).wait_for_workers(2, timeout=120)")
    assert done.returncode != 0 and "does not say which GPUs are this job's" in done.stderr


def test_a_job_of_two_nodes_that_gets_one_host_reports_which_environment_it_needs(program: Run) -> None:
    done = program("""
several = SMALL | {"nodes_per_job": 2, "nodes_environment": "mpi"}
with SGEGPUCluster(**several, jobs=1) as cluster:
    cluster.wait_for_workers(2, timeout=120)
""")
    assert done.returncode != 0
    assert "gave this job of 2 nodes these hosts: localhost. Set nodes_environment" in done.stderr


def test_a_cluster_outlasts_its_master(program: Run, bed: GridEngineBed) -> None:
    done = program(
        """
bed = lambda action: subprocess.run([sys.executable, BED, action, WHERE], check=True)
with SGEGPUCluster(**SMALL, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    with cluster.get_client() as client:
        bed("stop-master")
        cluster.scale(jobs=2)
        print(client.submit(sum, [1, 2, 3]).result())
        bed("start-master")
        client.wait_for_workers(2, timeout=200)
        print(client.submit(sum, [4, 5]).result())
""".replace("BED", repr(gridengine_bed.__file__)).replace("WHERE", repr(str(bed.directory)))
    )
    assert done.stdout.split() == ["6", "9"], done.stderr


def test_a_refused_job_ends_the_program_with_what_to_check(program: Run) -> None:
    done = program('SGEGPUCluster(**SMALL | {"queue": "nope.q"}, jobs=1).wait_for_workers(1, timeout=60)')
    assert done.returncode != 0
    assert 'requests unknown queue "nope.q"' in done.stderr and "Check `queue`" in done.stderr


def test_workers_leave_before_their_walltime(program: Run, bed: GridEngineBed) -> None:
    done = program("""
short = SMALL | {"walltime": "70s", "walltime_margin": "40s", "scheduler": {"walltime": "10m"}}
with SGEGPUCluster(**short, jobs=1) as cluster:
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
def test_the_command_line_starts_lists_shows_reports_and_stops(stopped: None, cli: Run, bed: GridEngineBed) -> None:
    started = cli("start", "demo", "--system", "gridengine", "--jobs", "1", *SMALL.split())
    assert started.returncode == 0, started.stderr
    [found] = json.loads(cli("list", "--json").stdout)
    assert (found["name"], found["system"]) == ("demo", "gridengine")
    assert "demo on gridengine" in cli("status", "demo").stdout
    assert "Scheduler at" in cli("logs", "demo").stdout
    assert cli("report", "demo").returncode == 0
    done = cli("stop", "demo")
    assert done.returncode == 0, done.stderr
    assert json.loads(cli("list", "--json").stdout) == []
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.mark.shows("`hpcgpu check`")
def test_check_and_profiles_ask_it_for_its_queues(bed: GridEngineBed, cli: Run) -> None:
    said = cli("check", "--system", "gridengine", "--queue", "gpu.q", "--gpus-per-node", "4").stdout
    assert "gridengine: SGE 8.1.9" in said and "gpu.q: 4 x GPU per node" in said
    drafted = cli("profiles", "new", "site", "--system", "gridengine", "-o", "-").stdout
    assert "system: gridengine\n" in drafted and "gpu.q" in drafted and "gpus-per-node: 4" in drafted


def test_a_machine_that_has_it_uses_it(bed: GridEngineBed, cli: Run) -> None:
    assert "gridengine: SGE 8.1.9" in cli("check").stdout


@pytest.mark.shows("Scripts that stand alone")
def test_rendered_scripts_launch_and_stop(bed: GridEngineBed, cli: Run, tmp_path: Path) -> None:
    place = tmp_path / "alone"
    options = [word for word in SMALL.split() if word not in ("--poll-interval", "0.5")]
    done = cli("render", "gridengine", *options, "-o", str(place))
    assert done.returncode == 0, done.stderr
    launched = subprocess.run([place / "launch.sh", "1"], capture_output=True, text=True, timeout=100)
    stopped = subprocess.run([place / "stop.sh"], capture_output=True, text=True, timeout=100)
    assert launched.returncode == 0 and "worker job" in launched.stdout, launched.stderr
    assert stopped.returncode == 0 and "Cancelling" in stopped.stdout, stopped.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.mark.shows("The command line; a cluster that another program takes over")
def test_a_cluster_adapts_and_another_program_takes_it_over(program: Run, bed: GridEngineBed) -> None:
    done = program("""
first = SGEGPUCluster(**SMALL, name="kept", jobs=1, shutdown_on_close=False)
first.wait_for_workers(1, timeout=120)
first.close()
with SGEGPUCluster.from_name("kept") as cluster, cluster.get_client() as client:
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


def test_the_words_of_a_site_s_verifier_that_refuses_reach_the_user(program: Run, bed: GridEngineBed) -> None:
    bed.set_verifier("no GPU jobs before the maintenance")
    try:
        done = program("SGEGPUCluster(**SMALL, jobs=1).wait_for_workers(1, timeout=60)")
    finally:
        bed.set_verifier("")
    assert done.returncode != 0
    assert "Grid Engine refused job" in done.stderr and "no GPU jobs before the maintenance" in done.stderr
    assert bed.jobs() == {}


def test_a_worker_job_that_cannot_start_ends_the_wait_with_why(program: Run, bed: GridEngineBed) -> None:
    done = program("""
broken = SMALL | {"job_extra_directives": ["-wd /nowhere"], "scheduler": {"job_extra_directives": ()}}
with SGEGPUCluster(**broken, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=100)
""")
    assert done.returncode != 0
    assert "will never start" in done.stderr and "/nowhere: No such file or directory" in done.stderr


def test_a_lost_job_that_the_accounting_does_not_have_is_replaced(program: Run, bed: GridEngineBed) -> None:
    usual = gridengine_bed.GLOBAL["reporting_params"]
    bed.set_global(reporting_params=usual.replace("accounting=true", "accounting=false"))
    try:
        done = program("""
with SGEGPUCluster(**SMALL | {"quiet": False}, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    [lost] = running(cluster)
    subprocess.run(["qdel", lost], check=True, stdout=subprocess.DEVNULL)
    while not running(cluster) - {lost}:
        cluster.settle()
    cluster.wait_for_workers(1, timeout=120)
    print("replaced")
""")
    finally:
        bed.set_global(reporting_params=usual)
    assert done.stdout.split()[-1:] == ["replaced"], done.stderr
    assert "failed: the queue has forgotten how it ended" in done.stderr
