"""When a cluster would start: what the batch systems report before a submit, and what is made of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.pbs import estimate as pbs
from hpcgpu.batch.pbs.nodes import parse_pbsnodes
from hpcgpu.batch.slurm import estimate as slurm
from hpcgpu.configuration.resolve import resolve
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.plan import Plan, make

QUEUE = (Path(__file__).parents[1] / "queue" / "openpbs-pbsnodes.txt").read_text()


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: Job 3 to start at 1795369268 using 1 processors on nodes n[0-1] in partition shared",
        "Welcome to project 4242! sbatch: Job 3 to start at 1795369268 using 16 processors on nodes n[0-1] in "
        "partition shared sbatch: bye",
        f"sbatch: Job 3 to start at {time.strftime('%FT%T', time.localtime(1795369268))} using 1 processors on nodes "
        "n[0-1] in partition shared",
    ],
)
def test_slurm_s_estimate_is_read(words: str) -> None:
    estimate = slurm.read_test(0, words)
    assert (estimate.start, estimate.place, estimate.queue) == (1795369268.0, "n[0-1]", "shared")
    assert estimate.tested


@pytest.mark.parametrize("words", ["", "ok", "sbatch: Job 3 to start at Unknown", "to start at 99999999999999999999"])
def test_what_does_not_hold_a_time_is_shown_and_no_time_is_invented(words: str) -> None:
    assert slurm.read_test(0, words).start is None


def test_a_refusal_of_slurm_is_shown_with_what_to_check() -> None:
    estimate = slurm.read_test(1, "allocation failure: Invalid partition name specified")
    assert estimate.limits == ("allocation failure: Invalid partition name specified. Check `queue`",)
    assert slurm.read_test(255, "").limits == ("exit code 255",)


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        ("#PBS -l select=1:ncpus=1:ngpus=1\n#PBS -l place=free\n", ""),
        ("#PBS -l select=1:ncpus=1:ngpus=99\n", "no node has ncpus=1 ngpus=99"),
        ("#PBS -l ncpus=1\n#PBS -l ngpus=99\n#PBS -l walltime=01:00:00\n", "no node has ncpus=1 ngpus=99"),
        ("#PBS -l ncpus=1\n#PBS -l gpu_type=h100\n", "no node has ncpus=1 gpu_type=h100"),
        ("#PBS -l 'select=1:gpu_type=\"h100,v100\"'\n", "no node has"),
        ("#PBS -l 'select=1:gpu_type=\"h100,a100\"'\n", ""),
        ("#PBS -l 'select=1:gpu_type=\"h1:0+1\"+99:ngpus=1'\n", "no node has"),
        (
            "#PBS -l 'place=scatter' \n#PBS -l 'select=99:ncpus=1'\n",
            "99 chunks of ncpus=1, and the nodes can hold only",
        ),
    ],
)
def test_what_pbs_reports_of_its_nodes(lines: str, limit: str) -> None:
    asked = pbs.request(f"#!/bin/bash\n{lines}exec true\n", "gpu")
    found = pbs.estimate(asked, {}, parse_pbsnodes(QUEUE))
    assert found.start is None and "PBS says when a job starts only after it is submitted" in found.known
    assert limit in "".join(found.limits) and bool(limit) == bool(found.limits), found


def test_what_pbs_reports_of_those_who_wait() -> None:
    queue = pbs.parse_queue("Queue: gpu\n    state_count = Transit:0 Queued:17 Held:0 Begun\n\t:0 \n")
    assert "jobs that wait in its queue: 17" in pbs.estimate({}, queue, {}).known


@pytest.mark.parametrize(("state", "assigned", "words"), [("free", 1, "enough"), ("free", 3, "not enough")])
def test_the_nodes_of_pbs_that_are_free_now(state: str, assigned: int, words: str) -> None:
    nodes = {
        "n0": {
            "state": state,
            "resources_available.ngpus": "4",
            "resources_assigned.ngpus": str(assigned),
            "resources_available.host": "n0",
        }
    }
    asked = {"queue": "", "Resource_List.select": "1:ngpus=2"}
    assert f"{words} of its nodes' resources are free now" in pbs.estimate(asked, {}, nodes).known
    down = {"n0": nodes["n0"] | {"state": "down"}}
    assert "not enough of its nodes' resources are free now" in pbs.estimate(asked, {}, down).known


class Oracle(BatchSystem):
    """A batch system that reports when jobs start, by queue; it keeps the scripts that it was shown."""

    name = "oracle"

    def __init__(self, **starts: float) -> None:
        self.starts = starts
        self.shown: list[tuple[str | None, float | None, str]] = []

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        self.shown.append((queue, walltime, script.read_text()))
        start = self.starts.get(queue or "")
        return Estimate(start=start, limits=() if start else ("<b>no\x1b[2J</b>",))


Oracle.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # a plan needs nothing else of it


def options(**given: object) -> Options:
    return resolve("slurm", {"walltime": "2h", "gpus_per_node": 4, "jobs": 4, **given})


def test_each_queue_is_asked_for_the_scheduler_job_and_for_one_worker_job(tmp_path: Path) -> None:
    oracle = Oracle(a=1.0, b=2.0)
    plan = make(options(queue="a,b", cluster_directory=tmp_path), oracle)  # type: ignore[abstract]
    assert [(job.queue, job.kind, job.start) for job in plan.jobs] == [
        ("a", "scheduler", 1.0),
        ("a", "worker", 1.0),
        ("b", "scheduler", 2.0),
        ("b", "worker", 2.0),
    ]
    assert [(queue, f"--partition={queue}\n" in script) for queue, _, script in oracle.shown] == [
        ("a", True),
        ("a", True),
        ("b", True),
        ("b", True),
    ]
    assert {walltime for _, walltime, _ in oracle.shown} == {7200}
    assert list(tmp_path.iterdir()) == [], "a plan leaves nothing behind"


def test_a_scheduler_job_with_a_queue_of_its_own_is_asked_for_once() -> None:
    plan = make(options(queue="a,b", scheduler={"queue": "c"}), Oracle())  # type: ignore[abstract]
    assert [(job.queue, job.kind) for job in plan.jobs] == [("c", "scheduler"), ("a", "worker"), ("b", "worker")]
    plan = make(options(scheduler="local"), Oracle())  # type: ignore[abstract]
    assert [(job.queue, job.kind) for job in plan.jobs] == [("", "worker")]


@pytest.mark.parametrize(
    ("given", "hours"),
    [
        ({}, 4 * 4 * 2 + 2),
        ({"scheduler": {"walltime": "12h"}}, 4 * 4 * 2 + 12),
        ({"scheduler": {"gpus_per_node": 0}}, 4 * 4 * 2),
        ({"nodes_per_job": 2}, 4 * 8 * 2 + 2),
        ({"scheduler": "local"}, 4 * 4 * 2),
        ({"walltime": None}, None),
        ({"walltime": None, "gpus_per_node": 0}, 0),
        ({"jobs": 0}, 2),
    ],
)
def test_the_cost_counts_every_gpu_of_every_job(given: dict[str, object], hours: float | None) -> None:
    assert make(options(**given), Oracle()).gpu_hours == hours  # type: ignore[abstract]


def shown(plan: Plan) -> str:
    return " ".join(repr(plan).split())


def test_a_plan_reports_what_the_estimates_are_not() -> None:
    now = time.time()
    plan = replace(make(options(queue="a,b"), Oracle(a=now + 4500, b=now - 1)), at=now)  # type: ignore[abstract]
    text = shown(plan)
    assert "in 75 min" in text and " now " in text
    assert "Each estimate is for one job alone" in text
    assert "It does not say when the last of several worker jobs would start." in text
    assert "If 4 worker jobs and the scheduler job run for their whole walltime, they cost 34 GPU hours." in text
    assert "Nothing was submitted." in text
    assert "give a walltime" in shown(make(options(walltime=None), Oracle()))  # type: ignore[abstract]


def test_what_a_batch_system_reports_stays_text() -> None:
    plan = make(options(), Oracle())  # type: ignore[abstract]
    assert "never" in repr(plan)
    assert "\x1b" not in repr(plan) and r"<b>no\x1b[2J</b>" in repr(plan)
    assert "<b>" not in plan._repr_html_() and "&lt;b&gt;no" in plan._repr_html_()
