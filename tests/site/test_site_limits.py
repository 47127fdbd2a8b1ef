"""What the site holds back, refuses, kills and preempts, and the words in which the user hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.site.programs import SMALL, Program, on

pytestmark = [pytest.mark.usefixtures("site")]


@pytest.mark.shows("A memory kill by cgroups, with its state from sacct")
def test_a_job_that_the_memory_limit_kills_is_told_with_its_limit_and_sacct_agrees() -> None:
    greedy = 'if [ "$SLURM_JOB_PARTITION" = gpu ]; then python -c "x = bytearray(3 * 2**30)"; fi'
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
    say("sacct says", Slurm().ended([job.id])[job.id].state.value, Slurm().ended([job.id])[job.id].exit_code)
""",
    )
    program.hears(r"it used more memory than it requested \(0.93 GiB per node\)")
    program.hears("sacct says out_of_memory None")
    program.ends()


@pytest.mark.shows("A refusal by the site's filter, in the filter's words")
def test_what_the_filter_of_the_site_says_reaches_the_user_and_no_job_is_left() -> None:
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
    program.hears(r"refused: .*The P100 nodes were switched off in March: ask for --constraint=a100")
    program.ends()
    assert "filtered" not in on("login1", "squeue", "-h", "-o", "%j %T").replace("COMPLETING", "")


@pytest.mark.shows("The limits of a QOS, each with its reason in words")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"qos": "few", "scheduler": {"queue": "shared", "prefer": "t4", "qos": "few"}, "jobs": 2},
            r"you have reached your limit: other jobs of yours must end first \[QOSMaxJobsPerUserLimit\]",
        ),
        (
            {"qos": "budget", "walltime": "3h", "jobs": 1},
            r"your group has reached its limit: .*\[QOSGrpGRESMinutes\]",
        ),
    ],
    ids=["jobs of a user", "GPU minutes of a group"],
)
def test_a_job_that_a_limit_holds_back_waits_with_the_limit_in_words(options: dict[str, Any], words: str) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | options!r}, name="limited") as cluster:
    waiting = lambda: [job for job in cluster.jobs if job.state == "pending" and "QOS" in str(job)]
    until(waiting, "a job waits for a limit")
    say(waiting()[0])
    say(repr(cluster))
""",
    )
    said = program.ends()
    print(said)
    assert words
