"""The command line, as a user types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local import LocalQueue
from tests.conftest import live
from tests.local.test_cluster import CPU, start_program

Until = Callable[..., None]


def hpcgpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hpcgpu", *arguments], capture_output=True, text=True, timeout=100)


def test_a_cluster_whose_program_crashed_is_listed_and_stopped_and_no_other(queue: LocalQueue, home: Path, until: Until) -> None:
    program = start_program(CPU | {"name": "orphan", "jobs": 1})
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.send_signal(signal.SIGKILL)
    program.communicate()
    with LocalGPUCluster(**CPU, name="mine") as cluster:
        listed = {entry["name"]: entry for entry in json.loads(hpcgpu("list", "--json").stdout)}
        assert set(listed) == {"orphan", "mine"}
        assert sorted(job["name"] for job in listed["orphan"]["jobs"]) == ["orphan-0", "orphan-scheduler"]
        assert "orphan" in hpcgpu("list").stdout
        done = hpcgpu("stop", "orphan")
        assert (done.returncode, done.stdout) == (0, "orphan: 2 jobs cancelled, none is left\n")
        assert len(live(queue)) == 1 and cluster.status.name == "running"
    assert not (home / "clusters" / "orphan" / "tls").exists()
    assert hpcgpu("list").stdout == "There is no cluster.\n"


def test_all_clusters_are_stopped(queue: LocalQueue, home: Path) -> None:
    for name in ("a", "b"):
        program = start_program(CPU | {"name": name})
        assert program.stdout is not None and program.stdout.readline() == "up\n"
        program.send_signal(signal.SIGKILL)
        program.communicate()
    done = hpcgpu("stop", "--all")
    assert done.returncode == 0 and done.stdout.count("none is left") == 2
    assert live(queue) == []


def test_a_name_that_is_not_there_is_said(home: Path) -> None:
    done = hpcgpu("stop", "nobody")
    assert done.returncode == 2 and "no cluster named nobody in" in done.stderr
    assert hpcgpu("stop").returncode == 2
