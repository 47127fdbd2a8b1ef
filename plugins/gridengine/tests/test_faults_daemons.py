"""Faults of clusters on a real Grid Engine: what the user sees, and that no job is lost or submitted twice."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import gridengine_bed
import pytest
from conftest import Run
from gridengine_bed import GridEngineBed, wait_for

pytestmark = pytest.mark.shows("A job that reaches its walltime")


def test_a_job_that_h_rt_kills_reports_why_is_replaced_and_its_task_is_done_again(
    program: Run, bed: GridEngineBed
) -> None:
    """The processes of its workers are stopped, and so is the program: nobody makes the workers leave in time."""
    done = program("""
import os, signal
from pathlib import Path

def stop_once(flag):
    try:
        Path(flag).mkdir()
    except FileExistsError:
        return "again"
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGSTOP)

short = SMALL | {"quiet": False, "walltime": "60s", "scheduler": {"walltime": "10m"}}
with SGEGPUCluster(**short, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    [killed] = running(cluster)
    with cluster.get_client() as client:
        kept = client.submit(sum, [1, 2, 3])
        print(kept.result())
        again = client.submit(stop_once, os.path.abspath("flag"))
        while not Path("flag").exists():
            pass
        wake = f"while qstat -j {killed} >&- 2>&-; do sleep 0.5; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        print(again.result(), kept.result())
        print(*(job.state for job in cluster.jobs if job.id == killed))
""")
    assert done.stdout.split() == ["6", "again", "6", "timeout"], done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


def test_workers_leave_before_the_walltime_of_their_queue(program: Run, bed: GridEngineBed) -> None:
    bed.call("qconf", "-mattr", "queue", "h_rt", "0:1:10", "short.q")
    try:
        done = program("""
none = SMALL | {"walltime": None, "queue": "short.q", "walltime_margin": "40s"}
with SGEGPUCluster(**none | {"scheduler": {"queue": "gpu.q"}}, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    [first] = running(cluster)
    with cluster.get_client() as client:
        slow = client.map(lambda i: __import__("time").sleep(0.5) or i, range(100))
        while running(cluster) <= {first}:
            cluster.settle()
        print(sum(client.gather(slow)))
""")
    finally:
        bed.call("qconf", "-mattr", "queue", "h_rt", "0:10:0", "short.q")
    assert done.stdout.split() == ["4950"], done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")
def test_a_job_that_the_accounting_has_late_is_not_called_ended_before(program: Run, bed: GridEngineBed) -> None:
    """The qmaster writes its accounting every 20 s. The job leaves the queue at once."""
    usual = gridengine_bed.GLOBAL["reporting_params"]
    bed.set_global(reporting_params=usual.replace("accounting_flush_time=00:00:00", "accounting_flush_time=00:00:20"))
    try:
        done = program("""
late = SMALL | {"quiet": False}
with SGEGPUCluster(**late, jobs=1) as cluster:
    for _ in range(5):  # a job may end just before the accounting is written
        cluster.wait_for_workers(1, timeout=120)
        [lost] = running(cluster)
        subprocess.run(["qdel", lost], check=True, stdout=subprocess.DEVNULL)
        seen = []
        while not (seen and seen[-1] in ("cancelled", "completed", "failed")):
            cluster.settle()
            seen += [job.state for job in cluster.jobs if job.id == lost and job.state not in seen]
            in_queue = subprocess.run(["qstat", "-j", lost], capture_output=True).returncode == 0
            in_accounting = subprocess.run(["qacct", "-j", lost], capture_output=True).returncode == 0
            if not in_queue and not in_accounting and "late" not in seen:
                seen.append("late")
        while not running(cluster) - {lost}:
            cluster.settle()
        if "late" in seen:
            break
    print(*seen)
""")
    finally:
        bed.set_global(reporting_params=usual)
    seen = done.stdout.split()
    assert seen[-1:] == ["cancelled"] and "late" in seen, done.stderr
    assert not {"completed", "failed"} & set(seen)
    assert "cancelled: a user or the batch system cancelled it" in done.stderr and "forgotten" not in done.stderr
    wait_for(lambda: not bed.jobs(), "no job is left")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "hpcgpu-full", str(place)]).returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")
def test_a_full_disk_while_jobs_are_submitted_is_reported_and_no_job_is_left(
    program: Run, bed: GridEngineBed, disk: Path
) -> None:
    done = program(
        """
from pathlib import Path

with SGEGPUCluster(**SMALL | {"quiet": False}, jobs=1, cluster_directory="DISK/clusters") as cluster:
    cluster.wait_for_workers(1, timeout=120)
    filler = Path("DISK/filler").open("wb", buffering=0)
    try:
        while True:
            filler.write(bytes(4096))
    except OSError:
        pass
    cluster.scale(jobs=3)
    try:
        cluster.wait_for_workers(3, timeout=30)
    except Exception as error:
        print(error)
    Path("DISK/filler").unlink()
    filler.close()
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2, timeout=120)
    print("grown")
""".replace("DISK", str(disk))
    )
    wait_for(lambda: not bed.jobs(), "no job is left")
    assert done.stdout.split()[-1:] == ["grown"], done.stderr
    assert "No space left on device" in done.stdout + done.stderr and str(disk) in done.stdout + done.stderr
