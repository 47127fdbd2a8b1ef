"""What `hpcgpu check` makes of what it saw."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.batch.base import JobStatus
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.batch.pbs.queues import PBSQueue
from hpcgpu.batch.queues import Machine, Queue, Queues, Rules
from hpcgpu.checks import check_jobs
from hpcgpu.checks.judge_job_reports import (
    Seen,
    environment_lines,
    fabric_line,
    judge,
    polars_lines,
    untested_lines,
    visibility,
)
from hpcgpu.checks.login_node import directory_lines, judge_queues
from hpcgpu.checks.result_lines import Line, text
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import BatchUnavailable
from hpcgpu.fabric.protocol_and_interface import Node, decide
from hpcgpu.releases import TESTED, Release
from hpcgpu.software import compare_environments
from hpcgpu.store import certificates_and_keys, create_directory
from tests.helpers import Clock

INFINIBAND = Node(
    has_ucxx=True,
    ports=("mlx5_0/1",),
    transports=("rc_mlx5", "cuda_copy"),
    infiniband=("ib0",),
    addresses={"lo": "127.0.0.1", "ib0": "10.1.0.3"},
)


def seen(kind: str = "worker", **changes: Any) -> Seen:
    """What a healthy job reports, changed."""
    job = Seen(kind)
    job.waited = 42.0
    job.found = {
        "kind": kind,
        "job": "17",
        "host": "n3",
        "python": "/opt/env/bin/python",
        "environment": {
            "python": "3.12.4",
            "GPU": "A100",
            "GPU memory": "40 GiB",
            "driver": "580",
            "CUDA of the driver": "13.0",
        },
        "visible": "0,1,2,3",
        "gpus_on_node": 4,
        "transport": asdict(decide(INFINIBAND, "auto", None, gpu=True)),
        "node": asdict(INFINIBAND),
        "open_files": 65536,
        "gpu_error": "",
        "interface_error": "",
        "queue_error": "",
        "local_directory": "",
        "import_seconds": 1.5,
        "import_filesystem": "nfs4",
        "import_shared": True,
        "address": ["10.0.0.3", 4711],
        "via": "eth0",
        "time": 0.0,
    } | changes
    return job


def found(job: Seen, gpus: int = 4) -> dict[str, Line]:
    return {line.what: line for line in judge(job, gpus)}


def test_a_slow_import_from_a_shared_filesystem_is_shown_with_what_helps() -> None:
    assert found(seen())["import"].found == "importing dask.distributed takes 1.5 s from nfs4"
    line = found(seen(import_seconds=60.0))["import"]
    assert line.grade == "warning" and "60.0 s from nfs4" in line.found and "set stage to an archive" in line.advice
    assert found(seen(import_seconds=60.0, import_filesystem="ext4", import_shared=False))["import"].grade == "ok"
    assert "import" not in found(seen(import_seconds=None))


def test_a_healthy_job_is_ok_in_every_line() -> None:
    lines = found(seen())
    assert {line.grade for line in lines.values()} == {"ok"}
    assert lines["job"].found == "17 ran on n3, 42 s after it was submitted"
    assert lines["GPUs"].found == "4 x A100, 40 GiB; CUDA_VISIBLE_DEVICES holds indices (0,1,2,3)"
    assert lines["fabric"].found == "UCX over InfiniBand (mlx5_0/1) over ib0; UCX has rc_mlx5, cuda_copy"
    assert lines["reachable from here"].found == "10.0.0.3 (eth0), by TLS"


@pytest.mark.parametrize(
    ("changes", "what", "grade", "said"),
    [
        ({"gpu_error": "this job requested 4 GPUs and sees 2"}, "GPUs", "failure", "sees 2"),
        ({"interface_error": "interface 'ib7' does not exist"}, "fabric", "failure", "ib7"),
        ({"local_directory": "error: no space"}, "local_directory", "failure", "no space"),
        ({"local_directory": "/scratch: 900 GiB free"}, "local_directory", "ok", "900 GiB"),
        ({"environment": {"python": "3.12.4"}}, "driver", "failure", "NVML"),
    ],
)
def test_what_is_wrong_in_a_job_is_reported_with_what_to_do(
    changes: dict[str, Any], what: str, grade: str, said: str
) -> None:
    line = found(seen(**changes))[what]
    assert line.grade == grade and said in line.found
    assert line.advice or line.grade == "ok" or what == "GPUs", "the GPUs' own words say what to do"


def test_a_job_in_a_container_reports_what_runs_it_and_what_its_inside_lacks() -> None:
    container = "apptainer runs /shared/rapids.sif, with hpcgpu of the host; the lines below are from inside it"
    lines = found(seen(container=container, container_warning="the container has no /dev/infiniband"))
    assert lines["container"].found == container and lines["container"].grade == "ok"
    assert lines["InfiniBand in the container"].grade == "warning"
    lines = found(seen(container=container, container_warning="", environment={"python": "3.12.4"}))
    assert "the container lacks the node's NVIDIA driver" in lines["driver"].advice
    assert "InfiniBand in the container" not in lines


def test_a_scheduler_that_cannot_be_reached_is_a_failure_a_worker_is_not() -> None:
    job = seen("scheduler")
    job.unreachable = "timed out"
    line = found(job)["reachable from here"]
    assert line.grade == "failure" and "timed out" in line.found
    assert "set client_interface to a network that the login node reaches: ib0 (10.1.0.3)" in line.advice
    job.found = {**job.found, "via": "ib0"}
    assert "ib0" not in found(job)["reachable from here"].advice, "what was just tried is no advice"
    worker = seen()
    worker.unreachable = "timed out"
    assert "reachable from here" not in found(worker), "clients never connect to workers"


def test_a_job_that_was_seen_too_late_is_not_called_unreachable() -> None:
    job = seen("scheduler")
    job.unreachable, job.late = "Connection refused", 253.0
    line = found(job)["reachable from here"]
    assert line.grade == "warning" and "the queue answered only after 253 s" in line.found
    assert "clock" not in found(job), "it was not asked"


def test_a_scheduler_that_may_open_few_files_is_a_warning() -> None:
    line = found(seen("scheduler", open_files=1024))["open files"]
    assert (line.grade, line.found) == ("warning", "at most 1024") and "ulimit -n" in line.advice
    assert "open files" not in found(seen("scheduler", open_files=-1)) and "open files" not in found(
        seen(open_files=1024)
    )


def test_the_interface_of_collectives_is_that_of_workers() -> None:
    variables = "GLOO_SOCKET_IFNAME=ib0, NCCL_SOCKET_IFNAME==ib0"
    assert found(seen(collectives=variables))["collectives"].found == variables
    assert "collectives" not in found(seen()), "an earlier release does not report it"
    assert "collectives" not in found(seen("scheduler", collectives=variables))


def test_infiniband_that_is_not_used_is_a_warning_with_the_reason() -> None:
    node = replace(INFINIBAND, transports=("tcp",), locked_memory=64 * 1024)
    lines = found(seen(node=asdict(node), transport=asdict(decide(node, "auto", None, gpu=True))))
    assert lines["fabric"].grade == "warning" and "this UCX was built without InfiniBand" in lines["fabric"].advice
    assert lines["locked memory"].found == "at most 64 KiB"
    lines = found(seen(node=asdict(node), transport=asdict(decide(node, "ucx", None, gpu=True))))
    assert lines["fabric"].grade == "warning", "UCX that was asked for, and then runs over TCP"
    lines = found(seen(transport=asdict(decide(INFINIBAND, "tcp", None, gpu=True))))
    assert lines["fabric"].advice == "the InfiniBand of this node is not used: the option `protocol` requests TCP"
    assert (
        found(seen(node=asdict(Node()), transport=asdict(decide(Node(), "auto", None, gpu=True))))["fabric"].grade
        == "ok"
    ), "there is none"


def test_a_scheduler_on_a_lesser_network_than_the_workers_is_a_warning() -> None:
    plain = Node(has_ucxx=True)
    line = fabric_line(
        seen("scheduler", node=asdict(plain), transport=asdict(decide(plain, "auto", None, gpu=True))).found,
        seen().found,
        resolve("slurm", {}),
    )
    assert line.grade == "warning" and "run the scheduler job on a node with the same network" in line.advice


def test_clocks_may_differ_by_a_minute() -> None:
    job = seen()
    job.skew = -90.0
    assert (found(job)["clock"].grade, found(job)["clock"].found) == ("warning", "90 s behind")
    job.skew = 59.0
    assert (found(job)["clock"].grade, found(job)["clock"].found) == ("ok", "+59.0 s")


def test_a_scheduler_job_without_the_commands_of_the_queue_is_a_warning_and_a_worker_job_is_not() -> None:
    error = "`squeue` was not found on the PATH"
    line = found(seen("scheduler", queue_error=error))["queue commands in the job"]
    assert (line.grade, line.found) == ("warning", error) and "`hpcgpu adapt` needs" in line.advice
    assert "queue commands in the job" not in found(seen("worker", queue_error=error))


def test_a_submit_that_printed_no_id_is_a_warning() -> None:
    job = seen()
    assert "job id" not in found(job)
    job.unread = "Thank you\x1b[2J\n"
    line = found(job)["job id"]
    assert line.grade == "warning" and "Thank you" in line.found and line.found.isprintable()
    job.unread = ""
    assert found(job)["job id"].grade == "warning", "a command of the site that prints nothing"


def test_a_job_that_reported_nothing_is_one_failure() -> None:
    job = Seen("scheduler")
    job.problem = "job 7 will never start: PartitionTimeLimit"
    assert list(judge(job, 1)) == [
        Line("scheduler job", "job", "failure", "job 7 will never start: PartitionTimeLimit")
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "nothing (it is not set): the job sees every GPU of the node"),
        ("", "no GPU"),
        ("NoDevFiles", "no GPU"),
        ("0,1", "indices (0,1)"),
        ("GPU-8f2e,GPU-9a", "UUIDs"),
        ("MIG-5d,MIG-6e", "MIG UUIDs"),
    ],
)
def test_each_form_of_visible_gpus_is_named(value: str | None, expected: str) -> None:
    assert visibility(value) == expected


def test_a_worker_s_node_without_the_scheduler_s_fabric_is_a_failure() -> None:
    options = resolve("slurm", {})
    assert fabric_line(seen("scheduler").found, seen().found, options).grade == "ok"
    line = fabric_line(seen("scheduler").found, seen(node=asdict(Node(has_ucxx=True))).found, options)
    assert line.grade == "failure" and "no active InfiniBand port" in line.found


def test_options_that_the_engine_of_cudf_polars_forbids_are_a_warning_where_it_is_installed() -> None:
    has_it = seen(environment={"python": "3.12.4", "cudf-polars": "26.10.0"}).found
    options = resolve("slurm", {"rmm_pool_size": "20GB", "enable_nvlink": True, "rmm_async": False})
    [line] = polars_lines(has_it, options)
    assert line.grade == "warning" and line.found.endswith("these are set: rmm_pool_size, enable_nvlink")
    assert not list(polars_lines(has_it, resolve("slurm", {})))
    assert not list(polars_lines(seen().found, options)), "another library may need them"


def test_differences_of_software_are_lines() -> None:
    here = {"python": "3.12.4", "dask": "1"}
    [dask] = environment_lines(
        compare_environments.compare(here, here | {"dask": "2"}, {"worker": here | {"dask": "2"}})
    )
    assert (dask.grade, dask.found) == (
        "failure",
        "login 1, scheduler 2, worker 2",
    ) and "install one version" in dask.advice
    [told] = environment_lines(compare_environments.compare(here, None, {"worker": here | {"dask": "2"}}))
    assert told.found == "login 1, worker 2", "the scheduler job may have said nothing"
    [same] = environment_lines(compare_environments.compare(here, here, {"worker": here}))
    assert same.grade == "ok"


def judged(system: str, gpus: list[Queue], **options: Any) -> Line:
    without = [Queue("cpu", 0, 64, 256000)]
    rules = {one.name: Rules() for one in (*gpus, *without)}
    there = Machine(Queues(gpus=gpus, without=without, by_default=True, rules=rules))
    return judge_queues("GPU queues", resolve(system, options).worker, there)


@pytest.mark.parametrize(
    ("options", "grade", "said"),
    [
        ({"gpus_per_node": 4}, "ok", ""),
        ({"queue": "gpu", "gpu_type": "a100", "gpus_per_node": 4}, "ok", ""),
        ({"queue": "cpu", "gpus_per_node": 4}, "failure", "its nodes list no GPUs (write queue: gpu or small)"),
        ({"queue": "cpu", "gpus_per_node": 0}, "ok", ""),
        ({"queue": "cpu", "gpu_request": "none"}, "ok", ""),
        ({"queue": "none"}, "failure", "there is no such queue"),
        ({"queue": "gpu", "gpu_type": "h100"}, "failure", "its nodes have a100 (write gpu-type: a100)"),
        ({"queue": "gpu", "gpus_per_node": 8}, "failure", "a node has 4 (write gpus-per-node: 4)"),
        ({"gpus_per_node": 8}, "warning", "a node has 4"),
        ({"queue": "gpu,small", "gpu_type": "t4", "gpus_per_node": 4}, "failure", "a node has 1"),
    ],
)
def test_options_are_compared_with_the_queues_that_have_gpus(options: dict[str, Any], grade: str, said: str) -> None:
    line = judged("slurm", [Queue("gpu", 4, 64, 256000, "a100"), Queue("small", 1, 8, 32000, "t4")], **options)
    assert line.grade == grade and said in line.advice and "gpu: 4 x a100 per node" in line.found


def test_a_queue_that_only_the_batch_system_could_name_is_no_failure_where_it_lists_none() -> None:
    gpus = [Queue("gpu", 4, 64, 256000, "a100")]  # the nodes name the queues that have them
    there = Machine(Queues(gpus=gpus, without=[], by_default=True))
    line = judge_queues("GPU queues", resolve("pbs", {"queue": "route", "gpus_per_node": 4}).worker, there)
    assert (line.grade, line.advice) == ("ok", ""), "it may hand jobs on to the other"


def test_names_and_numbers_of_gpus_are_understood_as_the_queue_does() -> None:
    mixed = [Queue("gpu", 14, 64, 1, "a100_1g.5gb", others=2), Queue("gpu", 2, 64, 1, "a100", others=14)]
    assert judged("slurm", mixed, queue="gpu", gpu_type="a100", gpus_per_node=2).grade == "ok"
    assert judged("slurm", mixed, queue="gpu", gpus_per_node=16).grade == "ok"
    assert "(write gpus-per-node: 2)" in judged("slurm", mixed, queue="gpu", gpu_type="a100", gpus_per_node=3).advice
    assert judged("slurm", mixed, queue="gpu", gpu_type="A100").grade == "failure", "Slurm takes the case seriously"
    aliases = [PBSQueue("", 4, 64, 1, '"A100,cc80"'), PBSQueue("", 4, 64, 2, '"A100,cc80"')]
    line = judged("pbs", aliases, gpu_type="cc80", gpus_per_node=4)
    assert line.grade == "ok" and line.found.count("per node") == 1, "each kind is named once"


def test_a_site_that_names_no_gpus_is_a_warning() -> None:
    assert judged("slurm", [], gpus_per_node=4).grade == "warning"
    assert judged("slurm", [], gpus_per_node=0).grade == "ok"


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "above" / "clusters"
    path.mkdir(parents=True, mode=0o700)
    path.parent.chmod(0o755)
    yield path
    path.chmod(0o700)


def test_directories_that_others_can_write_to_are_named(mine: Path) -> None:
    assert [line.grade for line in directory_lines(mine, shared=False)] == ["ok", "ok"], (
        "the directory of temporary files is sticky"
    )
    mine.parent.chmod(0o777)
    [_, line] = directory_lines(mine, shared=False)
    assert line.grade == "failure" and str(mine.parent) in line.found and f"chmod o-w {mine.parent}" in line.advice


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_a_failure(mine: Path) -> None:
    mine.chmod(0o500)
    [line] = directory_lines(mine, shared=False)
    assert line.grade == "failure" and "Permission denied" in line.found


def test_a_directory_that_cannot_be_made_is_a_failure() -> None:
    [line] = directory_lines(Path("/proc/none/clusters"), shared=False)
    assert line.grade == "failure" and "set cluster_directory" in line.advice


def test_a_filesystem_of_one_machine_is_a_warning_where_others_must_see_it() -> None:
    place = Path(f"/dev/shm/hpcgpu-test-{os.getpid()}")
    [line, _] = directory_lines(place, shared=True)
    place.rmdir()
    assert line.grade == "warning" and "tmpfs" in line.found


def test_the_lines_of_a_check_are_printed_as_a_table() -> None:
    line = Line("login", "queue", "failure", "no", "do this")
    assert text([line], 1000).splitlines()[1].split() == ["login", "queue", "failure", "no", "->", "do", "this"]


class Forgetful(LocalQueue):
    """A queue that takes jobs, and lists none of them afterwards; at last it does not answer."""

    def __init__(self, directory: Path, answers: int) -> None:
        super().__init__(directory, gpus=0)
        self.answers = answers

    def submit(self, script: Path, **arguments: Any) -> str:
        return arguments["job_name"][-3:]

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        self.answers -= 1
        if self.answers < 0:
            raise BatchUnavailable("squeue: timed out")
        return {}


def test_a_job_that_reads_old_files_is_a_failure_and_one_that_does_not_listen_is_not_reached(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", None)
    certificates_and_keys.create(directory)
    job, report = Seen("scheduler"), seen().found
    assert report is not None
    report |= {"token": "of an earlier check", "address": ["127.0.0.1", 9]}  # nothing listens there
    check_jobs._record_report(job, report, directory, waited=1.0)
    assert job.found is None and "the filesystem is not shared, or shows old content" in job.problem
    job = Seen("scheduler")
    check_jobs._record_report(job, report | {"token": directory.token()}, directory, waited=1.0)  # type: ignore[arg-type]
    assert job.found is not None and "refused" in job.unreachable and job.skew is None
    assert found(job)["reachable from here"].grade == "failure"


def test_jobs_that_the_queue_forgets_end_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_jobs, "time", Clock())
    options = resolve("local", {"gpus_per_node": 0, "cluster_directory": str(tmp_path / "clusters")})
    result = check_jobs.check_jobs(options, Forgetful(tmp_path / "queue", answers=100), quiet=True)
    assert [line.grade for line in result.lines] == ["failure", "failure"] and result.kept is not None
    assert all("the queue no longer knows job" in line.found and "No log at" in line.found for line in result.lines)


@pytest.mark.parametrize(
    ("scheduler", "expected"), [("local", "login 1, scheduler 1, worker 2"), ({}, "login 1, scheduler 3, worker 2")]
)
def test_software_is_compared_with_that_of_the_scheduler_wherever_it_runs(
    scheduler: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"scheduler": "3", "worker": "2"}

    def reports(directory: object, batch: object, jobs: dict[str, Seen], *_: object, **__: object) -> None:
        for kind, job in jobs.items():
            job.found = seen(kind, environment={"python": "3.12", "numpy": versions[kind]}).found

    monkeypatch.setattr(check_jobs, "_wait", reports)
    monkeypatch.setattr(check_jobs, "_end", lambda directory, batch: [])
    monkeypatch.setattr(compare_environments, "collect", lambda: {"python": "3.12", "numpy": "1"})
    arguments = {"gpus_per_node": 0, "cluster_directory": str(tmp_path / "clusters"), "scheduler": scheduler}
    result = check_jobs.check_jobs(resolve("local", arguments), Forgetful(tmp_path / "queue", answers=0), quiet=True)
    [line] = [line for line in result.lines if line.what == "numpy"]
    assert line.found == expected


def test_a_queue_that_is_away_at_the_end_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_jobs, "time", Clock())
    options = resolve("local", {"gpus_per_node": 0, "cluster_directory": str(tmp_path / "clusters")})
    result = check_jobs.check_jobs(options, Forgetful(tmp_path / "queue", answers=3), quiet=True, timeout=25.0)
    [line] = [line for line in result.lines if line.what == "jobs"]
    assert line.found == "the jobs of the check may still be in the queue: squeue: timed out"
    assert line.advice == f"cancel them: hpcgpu stop {result.kept}"


def test_a_release_that_was_not_tested_is_a_warning_with_the_range() -> None:
    dask = TESTED["dask"]
    assert not list(
        untested_lines("login", {"dask": dask.highest, "distributed": TESTED["distributed"].lowest, "numpy": "1.0"})
    )
    [line] = untested_lines("login", {"dask": "2999.1.0", "distributed": TESTED["distributed"].highest})
    assert (
        line.grade == "warning"
        and line.found == f"dask 2999.1.0: hpcgpu is tested with {dask.lowest} to {dask.highest}"
    )
    assert "try again with a release that is tested" in line.advice
    [line] = untested_lines("worker job", {"distributed": "2025.9.1"})
    assert line.where == "worker job" and "GHSA-c336-7962-wfj2" in line.advice and "before 2026.1.1" in line.advice


@pytest.mark.parametrize(
    ("version", "inside"), [("2.9.9", False), ("2.10.0", True), ("2.10.0a3", True), ("10.1", True), ("10.1.1", False)]
)
def test_releases_are_compared_by_their_numbers(version: str, inside: bool) -> None:
    assert Release("2.10.0", "10.1.0").holds(version) is inside
