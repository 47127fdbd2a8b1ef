"""Clusters on a real Grid Engine of a login host and two execution hosts, which are namespaces of one machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import gridengine_bed
import pytest
from conftest import Run, started
from gridengine_bed import wait_for
from gridengine_hosts import GridEngineHosts, why_no_hosts

pytestmark = pytest.mark.shows("Worker jobs of several nodes")


@pytest.fixture(scope="module")
def _bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngineHosts]:
    if reason := gridengine_bed.why_not() or why_no_hosts():
        pytest.skip(f"no Grid Engine with several hosts can run here: {reason}")
    yield from started(GridEngineHosts(tmp_path_factory.mktemp("gridengine")))


@pytest.fixture
def around(_bed: GridEngineHosts) -> list[str]:
    """The user's programs run on the login host."""
    return _bed.on("login")


def test_a_worker_job_has_workers_on_two_hosts(program: Run, bed: GridEngineHosts) -> None:
    done = program("""
several = SMALL | {"nodes_per_job": 2, "nodes_environment": "each1"}
with SGEGPUCluster(**several, jobs=1) as cluster:
    cluster.wait_for_workers(2, timeout=120)
    with cluster.get_client() as client:
        print(*sorted(client.run(lambda: __import__("socket").gethostname()).values()))
        print(client.submit(sum, [1, 2, 3]).result())
    [job] = running(cluster)
    print(subprocess.run(["qstat", "-g", "t"], capture_output=True, text=True).stdout.count("SLAVE"))
""")
    assert done.stdout.split() == ["node1", "node2", "6", "1"], done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


def test_a_job_of_two_hosts_has_its_gpus_on_both_and_no_other_job_has_them(
    program: Run, bed: GridEngineHosts, gpus: str
) -> None:
    bed.count_gpus("YES")
    try:
        done = program(f"""
several = {{"nodes_per_job": 2, "nodes_environment": "each1", "gpus_counted": "slot", "cores": 1}}
several["job_script_prologue"] = ["export CUDA_VISIBLE_DEVICES=2,3"]
with SGEGPUCluster(**{gpus} | several, jobs=1) as cluster:
    cluster.wait_for_workers(4, timeout=120)
    [job] = running(cluster)
    with cluster.get_client() as client:
        print(*sorted(client.run(lambda: __import__("socket").gethostname()).values()))
    print(subprocess.run(["qstat", "-j", job], capture_output=True, text=True).stdout.count("gpu=2\\n"))
    free = subprocess.run(["qhost", "-F", "gpu"], capture_output=True, text=True).stdout
    print(free.count("hc:gpu=2.000000"), free.count("hc:gpu="))
""")
    finally:
        wait_for(lambda: not bed.jobs(), "no job is left")
        bed.count_gpus("JOB")
    assert done.stdout.split() == ["node1", "node1", "node2", "node2", "1", "2", "2"], done.stderr


def test_a_worker_job_of_two_hosts_that_is_deleted_leaves_nothing_and_is_replaced(
    program: Run, bed: GridEngineHosts
) -> None:
    done = program("""
several = SMALL | {"nodes_per_job": 2, "nodes_environment": "each1"}
with SGEGPUCluster(**several, jobs=1) as cluster:
    cluster.wait_for_workers(2, timeout=120)
    with cluster.get_client() as client:
        before = set(client.scheduler_info(-1)["workers"])
        [deleted] = running(cluster)
        subprocess.run(["qdel", deleted], check=True, stdout=subprocess.DEVNULL)
        while before & set(client.scheduler_info(-1)["workers"]):
            cluster.settle()
        client.wait_for_workers(2, timeout=120)
        print(*sorted(client.run(lambda: __import__("socket").gethostname()).values()))
""")
    assert done.stdout.split() == ["node1", "node2"], done.stderr


@pytest.mark.shows("A compute node that is switched off")
def test_a_lost_host_s_workers_are_replaced_on_another(program: Run, bed: GridEngineHosts) -> None:
    asked = bed.directory / "lose"

    def lose() -> None:
        wait_for(asked.exists, "a host is named", 200)
        bed.lose_host(asked.read_text())

    watch = threading.Thread(target=lose)
    watch.start()
    done = program(
        """
from pathlib import Path

with SGEGPUCluster(**SMALL | {"quiet": False}, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    with cluster.get_client() as client:
        where = lambda: __import__("socket").gethostname()
        hosts = lambda: set(client.run(where, on_error="ignore").values())
        on_scheduler = client.run_on_scheduler(where)
        cluster.scale(jobs=4)
        client.wait_for_workers(4, timeout=120)
        [lost] = {"node1", "node2"} - {on_scheduler}
        gone = [job.id for job in cluster.jobs if job.kind == "worker" and job.node == lost]
        slow = client.map(lambda i: __import__("time").sleep(0.1) or i, range(100))
        Path("ASKED.new").write_text(lost)
        Path("ASKED.new").rename("ASKED")
        print(sum(client.gather(slow)))
        while len(now := running(cluster)) < 4 or now & set(gone):
            cluster.settle()
        print(bool(gone))
""".replace("ASKED", str(asked))
    )
    watch.join()
    for host in sorted(bed.away()):
        bed.start_host(host)
    assert done.stdout.split() == ["4950", "True"], done.stderr
    print(done.stderr)
    wait_for(lambda: not bed.jobs(), "no job is left")
