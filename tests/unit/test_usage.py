"""What the scheduler records of its workers from their heartbeats: their GPUs, and the bill of their jobs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.dask_scheduler.measure_usage import Usage, period, works
from hpcgpu.dask_worker.gpu_metrics import GPUS, METRIC, SENT, Device, GPUUse
from hpcgpu.fabric.connection_report import NODE
from hpcgpu.fabric.node_gpus import whole_uuids
from hpcgpu.posix.json_records import parse
from hpcgpu.runtime.job_identity import JOB, JobIdentity
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.usage_file import FILE, JobUsage, line, read

CALLS: Any = SimpleNamespace(running=lambda worker: worker.calls)


class Worker:
    """What the scheduler has of a worker."""

    def __init__(self, name: str, *, gpus: int = 1) -> None:
        self.name, self.host, self.address = name, "10.0.0.1", f"tls://{name}"
        self.has_what: list[Any] = []
        self.processing: dict[str, float] = {}
        self.calls = 0
        self.metrics: dict[str, Any] = {}
        self.extra: dict[str, Any] = {GPUS: gpus, NODE: "n1"}
        if gpus:
            self.extra[METRIC] = {"model": "A100", "memory_total": 40}

    def says(self, utilization: float | None, tasks: int = 0) -> None:
        self.metrics = {METRIC: GPUUse(utilization=utilization, memory_used=9, power=60.5)}
        self.processing = {str(i): 1.0 for i in range(tasks)}


def usage_of(*workers: Worker) -> Usage:
    async def make() -> Usage:
        return Usage(SimpleNamespace(workers={w.name: w for w in workers}), CALLS)  # type: ignore[arg-type]

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("utilization", "tasks", "expected"), [(0, 3, False), (1, 0, True), (None, 3, True), (None, 0, False)]
)
def test_a_gpu_computes_if_the_driver_reports_it_and_else_if_its_worker_has_tasks(
    utilization: float | None, tasks: int, expected: bool
) -> None:
    assert works(GPUUse(utilization=utilization, memory_used=None, power=None), tasks) is expected


def test_a_gpu_is_idle_since_the_first_sample_in_which_it_computes_nothing() -> None:
    worker = Worker("demo-0")
    usage = usage_of(worker)
    for now, utilization, idle_since in ((1.0, 0, 1.0), (2.0, 0, 1.0), (3.0, 50, None), (4.0, 0, 4.0), (5.0, 0, 4.0)):
        worker.says(utilization)
        usage.sample(now)
        assert [gpu["idle_since"] for gpu in usage.gpus()] == [idle_since]


def test_a_heartbeat_since_the_last_sample_never_shows_a_gpu_that_computes_as_idle() -> None:
    worker = Worker("demo-0")
    usage = usage_of(worker)
    worker.says(0)
    usage.sample(time.time())
    worker.says(80)
    entry = usage.gpus()[0]
    assert (entry["utilization"], entry["idle_since"]) == (80, None)
    usage.sample(time.time())
    worker.says(0)
    entry = usage.gpus()[0]
    assert entry["utilization"] == 0 and entry["idle_since"]


def test_each_worker_with_a_gpu_has_an_entry_also_if_its_driver_reports_nothing_and_others_have_none() -> None:
    silent, talks, cpu = Worker("b-0"), Worker("a-0"), Worker("cpu-0", gpus=0)
    del silent.extra[METRIC], silent.extra[NODE]
    talks.says(None, tasks=1)
    entries = usage_of(silent, talks, cpu).gpus()
    assert entries[0] == {
        "worker": "a-0",
        "node": "n1",
        "model": "A100",
        "utilization": None,
        "memory_used": 9,
        "memory_total": 40,
        "power": 60.5,
        "idle_since": None,
    }
    assert entries[1].pop("idle_since") is not None  # type: ignore[misc]
    assert entries[1] == {
        "worker": "b-0",
        "node": "10.0.0.1",
        "model": "",
        "utilization": None,
        "memory_used": None,
        "memory_total": None,
        "power": None,
    }
    assert len(entries) == 2


def test_samples_of_many_workers_are_as_seldom_as_their_heartbeats() -> None:
    assert period(0) == period(200) == 1
    assert period(1000) == 5


def test_a_process_without_a_driver_reads_nothing_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    device = Device()
    assert device.model() == {"model": "", "memory_total": None}
    assert device.read() == {"utilization": None, "memory_used": None, "power": None}


_SHOW = (
    "from hpcgpu.dask_worker.gpu_metrics import Device; d = Device(); print(*d.model().values(), *d.read().values())"
)


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("2,3,0,1", "Fake GPU 17179869184 37.0 5000 61.5"),
        ("GPU-00000000-0000-0000-0000-000000000002", "Fake GPU 17179869184 37.0 5000 61.5"),
        ("MIG-00000000-0000-0000-0000-000000000003", "Fake GPU 17179869184 None 7000 None"),
        ("7", " None None None None"),
        ("GPU-00000000-0000-0000-0000-0000000000ff", " None None None None"),
        ("", " None None None None"),
        (None, "Fake GPU 17179869184 0.0 1073741824 70.0"),
    ],
)
def test_the_first_visible_gpu_is_read_and_what_it_does_not_report_is_none(
    visible: str | None, shown: str, fake_gpus: None, tmp_path: Path
) -> None:
    pytest.importorskip("pynvml")
    (tmp_path / "2").write_text("37 5000 61500")
    (tmp_path / "3").write_text("-1 7000 -1")  # as a MIG device
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {
        "STUBNVML_READINGS": str(tmp_path)
    }
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run([sys.executable, "-c", _SHOW], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == shown, done.stderr


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("GPU-00000002", "GPU-00000002-0000-0000-0000-000000000002"),
        ("GPU-00000001,3", "GPU-00000001-0000-0000-0000-000000000001,3"),
        ("GPU-0000000", "GPU-0000000"),
        ("GPU-ff,MIG-1", "GPU-ff,MIG-1"),
    ],
)
def test_uuids_of_which_a_batch_system_gives_the_beginning_are_completed(
    fake_gpus: None, visible: str, expected: str
) -> None:
    pytest.importorskip("pynvml")
    program = f"from hpcgpu.fabric.node_gpus import whole_uuids; print(whole_uuids({visible!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr


def test_beginnings_of_uuids_stay_where_no_driver_is() -> None:
    assert whole_uuids("GPU-12,3") == "GPU-12,3" and whole_uuids("0,1") == "0,1"


def test_a_user_who_switches_nvml_off_in_dask_gets_no_readings(fake_gpus: None) -> None:
    environ = os.environ | {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "false"}
    done = subprocess.run([sys.executable, "-c", _SHOW], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None None None None"


# What the jobs did


class Cluster:
    """A scheduler with workers, whose clock a test moves."""

    def __init__(self, directory: Path) -> None:
        self.workers: dict[str, Worker] = {}
        self.directory = ClusterDirectory(directory)
        self.directory.path.mkdir()
        self.directory.write("cluster.json", json.dumps({"name": "demo", "token": "t", "created": 1, "format": FORMAT}))

    def join(self, name: str, job: str = "7", *, gpus: int = 1) -> Worker:
        self.workers[name] = Worker(name, gpus=gpus)
        self.workers[name].extra[JOB] = {"id": job, "name": f"demo-{job}", "began": 50.0}
        return self.workers[name]

    def run(self, play: Callable[[Usage], Awaitable[None]]) -> dict[str, JobUsage]:
        """Let a play happen between start and end of the scheduler; what the file has then."""

        async def whole() -> None:
            usage = Usage(SimpleNamespace(workers=self.workers), CALLS)  # type: ignore[arg-type]
            usage.write_into(
                self.directory, JobIdentity(id="6", name="demo-scheduler", began=40.0, ends=None, margin=None)
            )
            await asyncio.sleep(0)
            assert usage._file is not None
            await usage._file.read()
            await play(usage)
            usage.sample = lambda now: None  # type: ignore[method-assign]
            await usage.stop()

        asyncio.run(whole())
        return read(self.directory.path).jobs


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "demo")


def test_a_worker_is_busy_while_a_call_runs_on_it(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        worker = cluster.join("demo-7", gpus=0)
        for now, calls in ((100.0, 0), (110.0, 0), (120.0, 1), (130.0, 2), (140.0, 0)):
            worker.calls = calls
            usage.sample(now)

    job = cluster.run(play)["7"]
    assert (job.seconds, job.busy, job.firsts) == (40.0, 20.0, [120.0]), "as with tasks"


def test_the_file_has_for_each_job_what_its_workers_did(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        first, second = cluster.join("demo-7-0"), cluster.join("demo-7-1")
        first.says(0), second.says(0)
        usage.sample(100.0)
        usage.sample(110.0)
        first.says(90, tasks=2)
        first.metrics[SENT] = 5000
        usage.done[first.address] = 3
        usage.sample(120.0)
        first.says(0)
        first.metrics[SENT] = 6000
        usage.sample(130.0)

    job = cluster.run(play)["7"]
    assert (job.name, job.kind, job.began, job.last) == ("demo-7", "worker", 50.0, 130.0)
    assert (job.seconds, job.busy, job.firsts) == (60.0, 10.0, [120.0])
    assert (job.utilization.mean, job.utilization.peak, job.working.mean) == (15.0, 90.0, 90.0)
    assert (job.memory.mean, job.memory_total, job.model) == (9.0, 40, "A100")
    assert (job.done, job.sent, job.spilled) == (3, 6000, None)


def test_the_scheduler_s_own_job_is_in_the_file_and_the_file_is_for_its_user_alone(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        pass

    job = cluster.run(play)["6"]
    assert (job.kind, job.name, job.began) == ("scheduler", "demo-scheduler", 40.0) and job.last > 50
    assert (cluster.directory.path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_worker_that_starts_again_counts_its_bytes_from_zero_and_its_first_task_once(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        for now, sent in ((100.0, 10), (200.0, 20)):
            worker = cluster.join("demo-7-0")
            worker.says(50, tasks=1)
            worker.metrics[SENT] = sent
            usage.sample(now)

    job = cluster.run(play)["7"]
    assert (job.sent, job.firsts) == (30, [100.0])


@pytest.mark.parametrize(("closing", "lost"), [(False, 2), (True, 0)])
def test_what_goes_with_a_worker_is_lost_unless_the_cluster_is_closed_then(
    closing: bool, lost: int, cluster: Cluster
) -> None:
    async def play(usage: Usage) -> None:
        worker = cluster.join("demo-7-0")
        worker.says(50, tasks=1)
        wanted, unwanted = SimpleNamespace(who_wants={1}, waiters=()), SimpleNamespace(who_wants=(), waiters=())
        usage.sample(100.0)
        usage.lost(worker, [wanted, unwanted])  # type: ignore[arg-type, list-item]
        if closing:
            cluster.directory.begin_close()

    assert cluster.run(play)["7"].lost == lost


def test_what_counts_after_the_last_sample_of_a_job_is_in_the_file_too(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        assert usage._file is not None
        worker = cluster.join("demo-7-0")
        worker.says(50, tasks=5)
        usage.sample(100.0)
        await usage._file.write(100.0)
        usage.done[worker.address] += 4
        usage.lost(worker, ())  # type: ignore[arg-type]
        cluster.workers.clear()
        usage.sample(101.0)

    job = cluster.run(play)["7"]
    assert (job.done, job.lost) == (4, 5)


def test_a_first_read_that_fails_is_tried_again_and_reported_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(directory: ClusterDirectory) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def whole() -> None:
        usage = Usage(SimpleNamespace(workers={}), CALLS)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(ClusterDirectory, "token", stale)
            usage.write_into(
                cluster.directory, JobIdentity(id="6", name="demo-scheduler", began=40.0, ends=None, margin=None)
            )
            await usage.write()
            await usage.write()
        assert read(cluster.directory.path).jobs.keys() == {"5"}
        await usage.write()
        assert read(cluster.directory.path).jobs.keys() == {"5", "6"}
        await usage.stop()

    (cluster.directory.path / FILE).write_text(line(JobUsage(id="5", done=3)))
    asyncio.run(whole())
    assert [record.message for record in caplog.records if "cannot be written" in record.message] == [
        f"hpcgpu: what the jobs did cannot be written to {cluster.directory.path / FILE}, for `hpcgpu report`: "
        "Stale file handle"
    ]


def test_a_journal_that_cannot_be_read_at_the_end_does_not_cost_the_last_write(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(directory: ClusterDirectory) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def play(usage: Usage) -> None:
        cluster.join("demo-7-0").says(50)
        usage.sample(100.0)
        monkeypatch.setattr(ClusterDirectory, "closing", property(stale))

    assert cluster.run(play).keys() == {"6", "7"}


def test_many_who_watch_cost_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("demo-0")
    worker.says(7)
    usage = usage_of(worker)
    at, samples, sample = [1000.0], list[float](), usage.sample
    monkeypatch.setattr("hpcgpu.dask_scheduler.measure_usage.time", SimpleNamespace(time=lambda: at[0]))
    usage.sample = lambda now: (samples.append(now), sample(now))[1]  # type: ignore[method-assign, func-returns-value]
    for at[0] in (1000.0, 1000.1, 1000.9):
        assert [gpu["utilization"] for gpu in usage.gpus()] == [7]
    assert samples == [1000.0]
    at[0] = 1002.0
    usage.gpus()
    assert samples == [1000.0, 1002.0]


def test_a_worker_of_no_job_costs_nothing_and_one_without_gpus_reports_what_it_spills(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        cluster.workers["stranger"] = Worker("stranger")
        cluster.join("cpu-0", gpus=0), cluster.join("cpu-1", gpus=0)
        for disk in (100, 300, 200):
            for name in ("cpu-0", "cpu-1"):
                cluster.workers[name].metrics = {"spilled_bytes": {"memory": 9, "disk": disk}}
            usage.sample(float(disk))

    jobs = cluster.run(play)
    assert jobs.keys() == {"6", "7"} and jobs["7"].spilled == 600


def test_a_second_scheduler_of_a_cluster_keeps_what_the_first_one_wrote(cluster: Cluster) -> None:
    async def first(usage: Usage) -> None:
        cluster.join("demo-7").says(0)
        usage.sample(100.0)

    async def second(usage: Usage) -> None:
        cluster.workers.clear()

    before = cluster.run(first)["7"]
    assert cluster.run(second)["7"] == before


def test_a_job_whose_scheduler_is_restarted_has_as_many_gpus_and_first_tasks_as_before(cluster: Cluster) -> None:
    """The report counted each GPU once for each scheduler, and the GPU hours of the job were twice as many."""

    def play(now: float, *names: str) -> Callable[[Usage], Awaitable[None]]:
        async def works(usage: Usage) -> None:
            cluster.workers.clear()
            for number, name in enumerate(names):
                cluster.join(name).says(50, tasks=1)
                usage.sample(now + number)

        return works

    cluster.run(play(100.0, "demo-7-0"))
    job = cluster.run(play(200.0, "demo-7-0"))["7"]
    assert (job.gpus, job.firsts) == (1, [100.0])
    job = cluster.run(play(300.0, "demo-7-0", "demo-7-1"))["7"]
    assert (job.gpus, job.firsts) == (2, [100.0, 301.0]), "another worker of the job counts"


def test_a_scheduler_that_was_replaced_writes_no_more(cluster: Cluster) -> None:
    """Its node was cut off from the network, and is back: it would overwrite what the next scheduler has written."""

    async def play(usage: Usage) -> None:
        cluster.directory.intend("demo-scheduler", "scheduler")
        cluster.directory.submitted("demo-scheduler", "6")
        cluster.join("demo-7").says(0)
        await usage.write()
        cluster.directory.ended({"demo-scheduler": "6"}, {})
        cluster.join("demo-8", job="8").says(0)
        await usage.write()

    assert cluster.run(play).keys() == {"6", "7"}


def test_the_file_is_bounded_and_reports_that_the_oldest_jobs_are_not_in_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.dask_scheduler.measure_usage._MOST_JOBS", 3)

    async def play(usage: Usage) -> None:
        for number in range(6):
            cluster.workers.clear()
            cluster.join(f"w{number}", job=str(10 + number)).says(0)
            usage.sample(100.0 + number)

    assert cluster.run(play).keys() == {"14", "15", "6"}
    assert not read(cluster.directory.path).whole


def test_ten_thousand_jobs_need_few_bytes_each() -> None:
    job = JobUsage(id="1234567", name="analysis-1234", began=1.8e9, last=1.8e9, firsts=[1.8e9] * 4, memory_total=2**36)
    assert len(line(job)) < 300
    assert parse(line(job).encode(), JobUsage, "it") == job


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_written_is_reported_once_and_harms_nothing(
    number: int, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(usage: Usage) -> None:
        assert usage._file is not None
        await usage._file.write(100.0)
        before = (cluster.directory.path / FILE).read_text()

        def full(*arguments: object, **keywords: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(ClusterDirectory, "write", full)
            for _ in range(3):
                await usage._file.write(100.0)
        assert (cluster.directory.path / FILE).read_text() == before

    cluster.run(play)
    assert [record.message for record in caplog.records if "cannot be written" in record.message] == [
        f"hpcgpu: what the jobs did cannot be written to {cluster.directory.path / FILE}, for `hpcgpu report`: "
        f"{os.strerror(number)}"
    ]


def test_a_filesystem_that_hangs_holds_neither_the_scheduler_nor_its_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.dask_scheduler.measure_usage._LAST", 0.2)
    hangs = threading.Event()

    async def play(usage: Usage) -> None:
        assert usage._file is not None
        monkeypatch.setattr(ClusterDirectory, "write", lambda *arguments: hangs.wait(60))
        writing = asyncio.ensure_future(usage._file.write(100.0))
        await asyncio.sleep(0)
        await usage._file.write(100.0)  # returns at once: one write at a time
        assert not writing.done()
        writing.cancel()

    cluster.run(play)
    hangs.set()


def test_a_later_cluster_of_the_name_gets_no_file_of_the_earlier_one(cluster: Cluster) -> None:
    async def play(usage: Usage) -> None:
        about = json.loads((cluster.directory.path / "cluster.json").read_text())
        cluster.directory.write("cluster.json", json.dumps(about | {"token": "another"}))

    assert cluster.run(play) == {}


def test_a_damaged_line_costs_itself_alone_and_is_reported(cluster: Cluster) -> None:
    lines = [line(JobUsage(id=str(number), done=number)) for number in range(1, 4)]
    lines[1] = lines[1].replace('"done":2', '"done":"two"')
    (cluster.directory.path / FILE).write_text("".join(lines))
    kept = read(cluster.directory.path)
    assert kept.jobs.keys() == {"1", "3"} and not kept.whole
    assert kept.problems == [f"line 2 of {cluster.directory.path / FILE} is damaged: 'done' is 'two'"]
