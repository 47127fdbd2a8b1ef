"""One name, one cluster, whoever starts it and however it ends: whole starts on the embedded queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cli import main
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import live, running
from tests.helpers import CPU, in_queue, printed, start_program

Until = Callable[..., None]

ROUNDS = int(os.environ.get("HPCGPU_START_ROUNDS", "1"))
START = [
    sys.executable,
    "-m",
    "hpcgpu",
    "start",
    "demo",
    "--system",
    "local",
    "--gpus-per-node",
    "0",
    "--cores",
    "1",
    "--no-wait",
    "--json",
]


def hpcgpu(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_of_four_programs_that_start_one_name_one_wins_and_no_job_is_left(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    for _ in range(ROUNDS):
        programs = [
            subprocess.Popen(START, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
        ]
        ended = [(*program.communicate(timeout=250), program.returncode) for program in programs]
        said = [(text, code) for _, text, code in ended]
        assert sorted(code for _, code in said) == [0, 2, 2, 2], said
        assert all(
            "Error: a cluster named 'demo' " in text and "Traceback" not in text for text, code in said if code == 2
        ), said
        (started,) = [printed("start", out) for out, _, code in ended if code == 0]
        (listed,) = printed("list", hpcgpu("list", "--json"))
        assert sorted(job["id"] for job in listed["jobs"]) == running(queue), "every job that runs is listed"
        assert listed["problem"] == "" and listed["name"] == started["name"] == "demo"
        assert "no job is left" in hpcgpu("stop", "--all")
        assert live(queue) == []


def test_a_program_that_is_killed_while_it_waits_for_its_jobs_to_end_leaves_no_keys(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    directory = ClusterDirectory(home / "clusters" / "killed")
    program = start_program({**CPU, "jobs": 1, "name": "killed"}, then="pass")
    until(lambda: directory.closing, "the program ends")
    program.kill()
    program.communicate()
    assert not directory.tls.exists() and not (directory.path / "contact.json").exists()
    until(lambda: live(queue) == [], "its jobs were cancelled first")
    assert hpcgpu("list") == "No clusters.\n"
    assert directory.closed


@pytest.mark.parametrize("ending", ["cancelled", "by itself"])
def test_the_scheduler_job_removes_the_keys_at_its_end(
    queue: LocalQueue, home: Path, until: Until, ending: str
) -> None:
    options: dict[str, Any] = {"idle_timeout": "20s"} if ending == "by itself" else {}
    program = start_program({**CPU, **options, "jobs": 0, "name": "alone", "shutdown_on_close": False})
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.send_signal(signal.SIGKILL)
    program.communicate()
    directory = ClusterDirectory(home / "clusters" / "alone")
    if ending == "cancelled":
        assert directory.tls.exists()
        queue.cancel(live(queue))
    until(lambda: live(queue) == [], "the scheduler job ends")
    assert not directory.tls.exists() and not directory.closing
    assert hpcgpu("list") == "No clusters.\n", "what has ended is closed"
    assert directory.closed


def test_a_second_scheduler_that_is_submitted_by_hand_ends_and_leaves_the_cluster_its_keys(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with LocalGPUCluster(name="one", jobs=1, **CPU) as cluster, cluster.get_client() as client:
        client.wait_for_workers(1)
        contact = cluster.directory.contact()
        second = queue.submit(cluster.directory.path / "scheduler.sh", job_name="by-hand")
        until(lambda: queue.poll([second])[second].state.ended, "it ends")
        assert queue.poll([second])[second].exit_code == 1
        log = "".join(path.read_text() for path in cluster.directory.logs.glob(f"*-{second}.log"))
        assert (
            f"cluster one already has a scheduler, in job {contact.job_id if contact else ''}. A second one would take"
            in log
        )
        assert "first run: hpcgpu stop one" in log
        assert (
            cluster.directory.tls.is_dir()
            and cluster.directory.dashboard_token()
            and cluster.directory.contact() == contact
        )
        cluster.scale(jobs=2)
        cluster.wait_for_workers(2)
        assert client.submit(sum, [1, 2]).result() == 3


def test_a_first_submit_that_was_refused_leaves_no_directory(queue: LocalQueue, home: Path) -> None:
    with pytest.raises(ClusterError, match="unknown directive --partition: this queue knows") as caught:
        LocalGPUCluster(name="refused", jobs=1, scheduler={"job_extra_directives": ["--partition=none"]}, **CPU)
    assert list((home / "clusters").iterdir()) == []
    assert not re.search(r"/\S+", str(caught.value)), "nothing is there to be read"


def test_a_cluster_whose_directory_was_replaced_cancels_its_jobs(queue: LocalQueue, home: Path, until: Until) -> None:
    cluster = LocalGPUCluster(name="replaced", jobs=1, **CPU)
    try:
        cluster.directory.path.rename(home / "elsewhere")
        create_directory.claim(cluster.directory.path, lambda earlier: [], system="local")
        with pytest.warns(match="another cluster now has its name and its .*The jobs of this one are cancelled"):
            until(lambda: cluster.status.name == "failed", "it notices")
        until(lambda: in_queue(queue, "replaced") == [], "its jobs end")
    finally:
        cluster.close()
    assert cluster.directory.token() and not cluster.directory.closing, "the other one's directory is left alone"
