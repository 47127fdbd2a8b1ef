"""What the site holds back, refuses, kills and preempts, and the words in which the user reads of it."""

from __future__ import annotations

from typing import Any

import pytest
from site_bed import Site

from tests.site.programs import SMALL, Program

pytestmark = pytest.mark.usefixtures("site")


@pytest.fixture
def no_budget(site: Site) -> None:
    """The QOS `budget` has used its GPU minutes."""
    site.set_budget("gres/gpu=0")


@pytest.mark.shows("A memory kill by cgroups, with its state from sacct")
def test_a_job_that_the_memory_limit_kills_is_reported_with_its_limit_and_sacct_agrees() -> None:
    greedy = 'if [ "$SLURM_JOB_PARTITION" = gpu ]; then exec python3 -c "x = bytearray(3 * 2**30)"; fi'
    options = SMALL | {"job_script_prologue": [greedy], "worker_restarts": 0, "name": "greedy"}
    program = Program(
        "login1",
        f"""
from hpcgpu.batch.slurm.client import Slurm
with SlurmGPUCluster(**{options!r}) as cluster:
    cluster.scale(jobs=1)
    until(lambda: [job for job in cluster.jobs if job.kind == "worker" and job.state == "out_of_memory"], "it ends")
    [job] = [job for job in cluster.jobs if job.kind == "worker"]
    until(lambda: Slurm().ended([job.id]), "sacct knows it")
    say("sacct:", Slurm().ended([job.id])[job.id].state.value)
    until(lambda: "a worker job failed; it is not replaced" in repr(cluster), "the cluster says so")
""",
    )
    said = program.ends()
    assert "it used more memory than it requested (0.93 GiB per node)" in said
    assert "sacct: out_of_memory" in said


@pytest.mark.shows("A job that the site's submit filter refuses, with the filter's message")
def test_what_the_filter_of_the_site_reports_reaches_the_user() -> None:
    options = SMALL | {"constraint": "p100", "jobs": 1, "name": "filtered"}
    program = Program(
        "login1",
        f"""
try:
    SlurmGPUCluster(**{options!r})
except hpcgpu.ClusterError as error:
    say("refused:", error)
""",
    )
    assert "The P100 nodes were switched off in March: ask for --constraint=a100" in program.ends()


@pytest.mark.shows("The limits of a QOS, each explained")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"qos": "few", "scheduler": {"queue": "shared", "prefer": "t4", "qos": "few"}, "jobs": 2},
            "you have reached your limit: other jobs of yours must end first [QOSMaxJobsPerUserLimit]",
        ),
        (
            {"qos": "budget", "scheduler": {"queue": "shared", "prefer": "t4", "qos": "normal"}, "jobs": 1},
            "it may use more than is left of your group's budget: request a shorter `walltime`, or more budget "
            "[QOSGrpGRESMinutes]",
        ),
    ],
    ids=["jobs of a user", "GPU minutes of a group"],
)
@pytest.mark.usefixtures("no_budget")
def test_a_job_that_a_limit_holds_back_waits_with_the_limit_in_words(options: dict[str, Any], words: str) -> None:
    program = Program(
        "login1",
        f"""
from hpcgpu import snapshot
with SlurmGPUCluster(**{SMALL | options | {"name": f"limited-{options['qos']}"}!r}) as cluster:
    held = lambda: [job for job in cluster.snapshot().jobs if "QOS" in job.reason]
    until(held, "a job waits for a limit")
    say(held()[0].reason)
""",
    )
    assert words in program.ends()


@pytest.mark.shows("Preemption by a QOS")
def test_a_job_that_is_preempted_is_no_failure_and_comes_back(site: Site) -> None:
    options = SMALL | {"qos": "scavenger", "worker_restarts": 0, "jobs": 1, "name": "scavenges"}
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{options!r}) as cluster:
    cluster.wait_for_workers(1)
    cluster.settle()
    [job] = [job for job in cluster.jobs if job.kind == "worker"]
    say("works on", job.node)
    until(lambda: list(cluster.workers) == ["scavenges-1"], "another job takes its place")
    cluster.wait_for_workers(1)
    say("works again")
""",
    )
    node = program.hears(r"works on (n\d)")[1]
    urgent = ["--qos=urgent", "--exclusive", "--mem=0", f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 600"]
    blocker = site.slurm("sbatch", "--parsable", *urgent, user="ada").strip()
    program.hears("preempted: a job of higher priority preempted it.*hpcgpu replaces it")
    program.hears("works again")
    site.slurm("scancel", blocker, user="ada")
    program.ends()


@pytest.mark.by_hand
@pytest.mark.shows("A job that reaches its walltime")
def test_a_job_that_its_walltime_ends_is_no_failure_and_another_takes_its_place() -> None:
    options = SMALL | {"walltime": "1m", "walltime_margin": "20s", "worker_restarts": 0, "jobs": 1, "name": "brief"}
    options["scheduler"] = SMALL["scheduler"] | {"walltime": "30m"}
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{options!r}) as cluster:
    cluster.wait_for_workers(1)
    until(lambda: "brief-0" not in cluster.workers and cluster.workers, "another takes its place")
    cluster.wait_for_workers(1)
    ended = ("cancelled", "timeout", "completed")
    until(lambda: [job for job in cluster.jobs if job.name == "brief-0" and job.state in ended], "it ends")
    say("failure" if "failed" in repr(cluster) else "fine")
""",
    )
    assert "fine" in program.ends()
