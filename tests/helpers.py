"""What several test modules use, and pytest does not need."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import fake_pbs
import pytest
from distributed import Client, Event, get_worker
from distributed.comm import connect, listen

from hpcgpu import ClusterError, GPUCluster
from hpcgpu import connect as connect_to
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cli.json_types import OUTPUTS
from hpcgpu.display.progress import Progress
from hpcgpu.fabric.ucx_authentication import ARGUMENT
from hpcgpu.scaling.decide_actions import Drain
from tests.conftest import live, told, wait_until

GOLDEN = Path(__file__).parent / "unit" / "golden"
#: Clusters on the embedded queue, and on the PBS that pretends.
CPU: dict[str, Any] = {"gpus_per_node": 0, "cores": 1, "poll_interval": 0.5, "quiet": True}
GPU: dict[str, Any] = {
    "gpus_per_node": 2,
    "scheduler": {"gpus_per_node": 0},
    "protocol": "tcp",
    "poll_interval": 0.5,
    "quiet": True,
}
PBS_CPU: dict[str, Any] = {**CPU, "memory": "1GB"}
#: Adaptive scaling that changes its mind fast.
ADAPT: dict[str, Any] = {"idle_timeout": "1s", "target_duration": "1s"}


@asynccontextmanager
async def echo_server(where: str, key: bytes, messages: list[Any]) -> AsyncIterator[str]:
    """A listener of Dask that has a key, and notes and returns what it gets; its address."""

    async def handle(comm: Any) -> None:
        try:
            while True:
                messages.append(await comm.read())
                await comm.write(messages[-1])
        except OSError:
            pass

    listener = await listen(where, handle, **{ARGUMENT: key})
    yield listener.contact_address
    listener.stop()


async def converse_with(key: bytes, address: str) -> None:
    """Connect to such a listener with a key, and receive back what was sent."""
    comm = await connect(address, **{ARGUMENT: key})
    await comm.write({"x": 1})
    assert await comm.read() == {"x": 1}
    await comm.close()


def block_queue(queue: LocalQueue, home: Path) -> str:
    """Fill all GPUs of the queue with a job, so that those of the test wait."""
    script = home / "block.sh"
    script.write_text("#!/bin/bash\n#HPCGPU --gpus=4\n#HPCGPU --output=/dev/null\nexec sleep 600\n")
    return queue.submit(script, job_name="blocker")


def in_queue(queue: LocalQueue, name: str) -> list[str]:
    """Live jobs whose name begins so."""
    return [i for i in live(queue) if queue.poll([i])[i].name.startswith(name)]


#: Waits for a signal. One that arrives just before a call that waits begins does not interrupt that call: Python runs
#: handlers only between two instructions. So no call waits for long.
FOR_EVER = "while True: time.sleep(1)"
PROGRAM = """
import sys, time
from hpcgpu import {kind}
cluster = {kind}(**{options})
print("up", flush=True)
{then}
"""


def start_program(
    options: dict[str, Any], then: str = FOR_EVER, kind: str = "LocalGPUCluster"
) -> subprocess.Popen[str]:
    """Start another program that has a cluster."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(options=options, then=then, kind=kind)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupt_program(number: signal.Signals, options: dict[str, Any], kind: str) -> int:
    """Send a signal to a program that waits for the workers of its cluster; return its exit code."""
    program = start_program(options, f"cluster.wait_for_workers(2)\n{FOR_EVER}", kind)
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.send_signal(number)
    program.communicate(timeout=250)
    return int(program.returncode)


def kill_program(options: dict[str, Any], kind: str = "LocalGPUCluster") -> None:
    """Kill a program once its cluster has its workers."""
    program = start_program(options, f"cluster.wait_for_workers(); print('there', flush=True)\n{FOR_EVER}", kind)
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(2)] == ["up\n", "there\n"]
    program.send_signal(signal.SIGKILL)
    program.communicate()


#: A cluster of CPU workers on the embedded queue.
ON_CPUS = ("--system", "local", "--gpus-per-node", "0", "--cores", "1", "--poll-interval", "0.5")


def command(*arguments: str) -> list[str]:
    """The command line of the program `hpcgpu`."""
    return [sys.executable, "-m", "hpcgpu", *arguments]


def hpcgpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program `hpcgpu`."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=250, env=os.environ | environment
    )


def printed(command: str, text: str) -> Any:
    """What a command printed with --json: it has the documented type, and nothing that the type does not have."""
    said = json.loads(text)
    assert keeps_to(said, OUTPUTS[command]), said
    return said


def keeps_to(said: Any, shape: Any) -> bool:
    """Whether JSON has this type: an object has all the fields of its class, and no others."""
    origin, of = get_origin(shape), get_args(shape)
    if is_typeddict(shape) or is_dataclass(shape):
        hints = get_type_hints(shape)
        return said.keys() == hints.keys() and all(keeps_to(said[name], kind) for name, kind in hints.items())
    if origin in (list, tuple):
        return isinstance(said, list) and all(keeps_to(one, of[0]) for one in said)
    if origin in (dict, Mapping):
        return isinstance(said, dict) and all(keeps_to(one, of[1]) for one in said.values())
    if origin is Literal:
        return said in of
    if of:
        return any(keeps_to(said, one) for one in of)
    kinds = {Path: str, float: (int, float), Any: object}
    return isinstance(said, kinds.get(shape, shape)) and (shape in (bool, Any) or not isinstance(said, bool))


def travels(function: Any) -> Any:
    """Let a function be pickled by value: jobs cannot import this module."""
    function.__module__ = "__main__"
    return function


@travels
def waits_for_file(place: str) -> None:
    """A task or call that runs until there is a file."""
    while not Path(place, "go").exists():
        time.sleep(0.1)


@travels
def sum_over_ranks(own: int, rank: int, world: int, where: tuple[str, int]) -> int:
    """Add a number of each rank over sockets, as a library of collectives does; the first rank listens."""
    total = own
    if rank == 0:
        others = []
        with socket.create_server(where) as server:
            for _ in range(world - 1):
                other, _ = server.accept()
                others.append(other)
                total += int(other.makefile().readline())
            for other in others:
                other.sendall(f"{total}\n".encode())
                other.close()
        return total
    while True:
        try:
            connection = socket.create_connection(where)
            break
        except ConnectionRefusedError:  # the first rank does not listen yet
            time.sleep(0.05)
    with connection:
        connection.sendall(f"{own}\n".encode())
        return int(connection.makefile().readline())


@travels
async def waits_for(name: str, dask_worker: Any) -> str:
    """A call that runs until `let_go` is called on its worker."""
    dask_worker.begun = True
    while not hasattr(dask_worker, name):
        await asyncio.sleep(0.1)
    return str(dask_worker.name)


@travels
def let_go(name: str, dask_worker: Any) -> None:
    """End the call."""
    setattr(dask_worker, name, True)


def other(tmp_path: Path, name: str, version: str) -> dict[str, str]:
    """The environment variables of a Python that has another version of a distribution, as its metadata report."""
    info = tmp_path / f"other-{name}" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join([str(info.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}


def golden(name: str, text: str) -> None:
    """Compare a script with the one in the repository, and let bash read it."""
    path = GOLDEN / name
    if os.environ.get("HPCGPU_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} differs: HPCGPU_UPDATE_GOLDEN=1 writes it anew"
    subprocess.run(["bash", "-n", str(path)], check=True)


def fill(site: fake_pbs.Site, home: Path) -> str:
    """Fill all GPUs of the PBS that pretends with a job, so that those of the test wait."""
    script = home / "block.pbs"
    script.write_text("#!/bin/bash\n#PBS -l select=2:ngpus=2\n#PBS -o /dev/null\nexec sleep 600\n")
    return site.run("qsub", "-N", "blocker", str(script)).stdout.strip()


def names(cluster: GPUCluster) -> set[str]:
    """The names of the connected workers."""
    return {str(worker["name"]) for worker in cluster.scheduler_info["workers"].values()}


# What real tests drive in the manager of a cluster: when it polls and decides, and what time does. These alone reach
# into `cluster.reconciler` (tests/unit/test_repository.py). Tests assert what the user sees; what only the
# manager records is asserted in tests/unit/test_reconciler.py.


def poll_now(cluster: GPUCluster) -> None:
    """Let the cluster's own watch poll the queue soon, however long it would have waited."""
    cluster.loop.add_callback(cluster.reconciler.state.poll_now.set)


def decide_now(cluster: GPUCluster) -> None:
    """Let the cluster decide on its size soon, as it does each second."""
    cluster.loop.add_callback(cluster.reconciler.decide)


def poll_and_decide(cluster: GPUCluster) -> None:
    """Poll the queue, report and count the jobs that ended, and decide on the size; return when that is done."""
    cluster.sync(cluster.reconciler.observe_queue)


def drain_now(cluster: GPUCluster, job: str) -> None:
    """Let the cluster drain this job, as if it had decided so just now."""
    cluster.loop.add_callback(lambda: cluster.reconciler.drainer.drain([job], Drain.UNWANTED))


def set_grace(cluster: GPUCluster, seconds: float) -> None:
    """Set for how long the queue may not show a job before it counts as ended; a minute otherwise."""
    cluster.reconciler.state.dispatcher.monitor.grace = seconds


def let_the_budget_end_soon(patch: pytest.MonkeyPatch) -> None:
    """Let a budget of some GPU seconds be worth a job, and running tasks get a second at its end, instead of 20."""
    patch.setattr("hpcgpu.scaling.adaptive_policy._USEFUL", 1.0)
    patch.setattr("hpcgpu.scaling.adaptive_policy._BUDGET_MARGIN", 1.0)
    patch.setattr("hpcgpu.scaling.decide_actions.BUDGET_END", 1.0)


def decisions(cluster: GPUCluster, until: Callable[..., None], count: int = 8) -> None:
    """Wait until adaptive scaling has decided so many times more."""
    group = cluster.reconciler.state.registry.groups["default"]
    decided = 0
    take = group.record_load

    def counting(*arguments: Any, **more: Any) -> None:
        nonlocal decided
        take(*arguments, **more)
        decided += 1

    group.record_load = counting  # type: ignore[method-assign]
    until(lambda: decided >= count, "the policy decides")
    group.record_load = take  # type: ignore[method-assign]


def time_passes(cluster: GPUCluster, job: str, until: Callable[..., None]) -> None:
    """Let the time be over that this manager waits for the workers of a job; their processes keep `death_timeout` as it
    was.
    """
    group = cluster.reconciler.state.registry.groups["default"]
    options, group.options = group.options, replace(group.options, death_timeout=0.5)
    until(lambda: cluster.reconciler.state.registry.jobs[job].lost_workers, "the time is over")
    group.options = options


# What the user sees of that


def messages(cluster: GPUCluster) -> str:
    """The log of the cluster itself: what the manager did, and all that it warned of."""
    return str(cluster.get_logs(scheduler=False, workers=False)["Cluster"])


def answers(cluster: GPUCluster) -> bool:
    """Poll the queue; return whether it answered, as the age of the table of jobs shows."""
    asked = time.time()
    cluster.settle()
    return time.time() - cluster.jobs.age > asked


def asks_for(cluster: GPUCluster, workers: int, jobs: str) -> None:
    """These workers are connected, and the cluster asks for no more of them in these jobs: "1 job"."""
    cluster.wait_for_workers(timeout=150)
    wait_until(lambda: len(cluster.scheduler_info["workers"]) == workers, "no other worker is connected")
    with pytest.raises(
        ClusterError,
        match=rf"will have only {workers} workers? in {jobs}, but the program waits for {workers + 1}: call",
    ):
        cluster.wait_for_workers(workers + 1, timeout=150)


def waiting(cluster: GPUCluster, n: int) -> str:
    """Wait for workers in the background, and return the first line that names what for, or why that fails."""
    said: list[str] = []
    there = threading.Event()

    def note(self: Progress, what: str, detail: str = "") -> None:
        if "waiting for" in what and "worker" in what and detail:
            said.append(detail)
            there.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "update", note)
        task = asyncio.run_coroutine_threadsafe(cluster._wait_until_connected(n, None), cluster.loop.asyncio_loop)
        task.add_done_callback(lambda _: there.set())
        assert there.wait(150)
        if not said:
            return str(task.exception(150))
        task.cancel()
    return said[0]


def two_of_four_are_missing(cluster: GPUCluster) -> bool:
    """Whether the table of jobs shows that node 1 of the first worker job has no workers, and a log why."""
    reason = next(job.reason for job in cluster.jobs if job.kind == "worker")
    words = (
        r"2 of 4 workers on its node 1 missing, \d+ s after the first connected; "
        r"replaced if they do not connect within \d+ s"
    )
    logs = [path.read_bytes() for path in cluster.directory.logs.rglob("*") if path.is_file()]
    return re.fullmatch(words, reason) is not None and any(b"no driver here" in log for log in logs)


def have_their_gpus(cluster: GPUCluster) -> None:
    """Two jobs with two GPUs each, and a worker for each GPU that sees those of its job, its own first."""
    workers = cluster.scheduler_info["workers"].values()
    assert {w["name"] for w in workers} == {f"{cluster.name}-{job}-{gpu}" for job in (0, 1) for gpu in (0, 1)}
    assert all(w["resources"] == {"GPU": 1.0} for w in workers)
    with Client(cluster) as client:
        devices = client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    assert sorted(map(sorted, devices.values())) == [["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]]


def holds_workers(cluster: GPUCluster, cancel: Callable[[str], object], until: Callable[..., None]) -> set[str]:
    """Of two jobs a program holds all workers, then those of one job. The batch system cancels that job by `cancel`.

    Return the nodes of the workers.
    """
    n_workers = 2 * cluster.options.worker.workers_per_job
    rank = travels(lambda: int(os.environ["RANK"]))
    with cluster.hold(jobs=2) as workers:
        assert [worker.rank for worker in workers] == workers.run(rank) == [*range(n_workers)]
        assert {worker.job_id for worker in workers} == {job.id for job in cluster.jobs if job.kind == "worker"}
        nodes = {worker.node for worker in workers}
        # the first worker listens where the others meet it
        where, own = (workers[0].host, workers[0].port), travels(sum_over_ranks)
        totals = workers.run(
            travels(lambda total, *where: total(1, int(os.environ["RANK"]), *where)), own, n_workers, where
        )
        assert totals == n_workers * [n_workers]
    with cluster.hold(jobs=1) as workers:
        cluster.scale(jobs=0)
        until(lambda: names(cluster) == {worker.name for worker in workers}, "the other job drains")
        assert workers.run(rank) == [*range(n_workers // 2)], "nothing has taken a held worker"
        cancel(workers[0].job_id)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(ClusterError, match=f"of job {workers[0].job_id} .* was lost while a program held it: "),
        ):
            patch.setattr("hpcgpu.client.held_set._ENDED", 150.0)  # a busy queue reports the end later
            workers.run(time.sleep, 600)
    return nodes


def package_reaches_all_workers(cluster: GPUCluster, place: Path) -> None:
    """A function of a package that a program uploads runs on the workers of one job, and on those of a later job."""
    (place / "own_model").mkdir()
    (place / "own_model" / "__init__.py").write_text("def double(x): return 2 * x, __file__\n")
    with pytest.MonkeyPatch.context() as patch, Client(cluster) as client:
        patch.syspath_prepend(place)
        own_model = importlib.import_module("own_model")
        del sys.modules["own_model"]
        patch.setitem(sys.modules, "own_model", own_model)  # until this block ends
        assert cluster.upload_package(place / "own_model") == ["own_model"]
        for jobs in (1, 2):
            cluster.scale(jobs=jobs)
            cluster.wait_for_workers()
            workers = client.scheduler_info()["workers"]
            assert len(workers) == jobs * cluster.options.worker.workers_per_job
            calls = [client.submit(own_model.double, jobs, workers=[worker], pure=False) for worker in workers]
            for result, file in client.gather(calls):
                assert result == 2 * jobs and file != own_model.__file__


def a_refused_request_pauses(cluster: GPUCluster, until: Callable[..., None], words: str, **options: Any) -> None:
    """Adaptive scaling of a group that the batch system refuses in these words pauses and reports it."""
    _, slow = tasks()
    with Client(cluster) as client:
        cluster.add_worker_group("odd", gpus_per_node=0, resources={"ODD": 1}, **options)
        with told(words):
            adaptive = cluster.adapt(maximum_jobs=1, worker_group="odd", **ADAPT)
            future = client.submit(slow, 1, resources={"ODD": 1})
            until(lambda: adaptive.state.paused, "it pauses")
        assert "5 submissions in a row were refused" in repr(cluster)
        with pytest.raises(ClusterError, match=words):
            cluster.wait_for_workers(1)
        future.cancel()


def tasks(seconds: float = 0.2) -> tuple[Callable[[str], str], Callable[[int], int]]:
    """A task that waits for an event, and one that is slow. Functions of a function are pickled by value."""

    def wait_for(name: str) -> str:
        Event(name).wait()
        return str(get_worker().name)

    def slow(index: int) -> int:
        time.sleep(seconds)
        return index

    return wait_for, slow


@dataclass
class Clock:
    """Stands in for the module `time`: an hour of waiting takes no time."""

    now: float = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def workers_retire_without_a_manager(
    cluster: GPUCluster, submit: Callable[[Path], str], names: Callable[[], Iterable[str]], until: Callable[..., None]
) -> str:
    """Leave a cluster named ``short`` alone: its job ends in time, and its data moves to one that is submitted by hand.

    Return the id of that job.
    """
    cluster.wait_for_workers(1)
    [script] = cluster.directory.path.glob("worker.*")
    cluster.detach()
    with connect_to("short", quiet=True) as client:
        kept = client.scatter({"answer": 42}, hash=False)["answer"]
        later = submit(script)
        until(lambda: "short-0" not in names(), "the first job ends", timeout=250)
        assert kept.result() == 42, "its data moved to the job that was submitted with a longer walltime"
        workers = client.scheduler_info()["workers"].values()
        assert f"short-by-hand-{later}" in [worker["name"] for worker in workers]
        [first] = cluster.directory.logs.glob("short-0*")
        assert "the walltime of this job ends soon: its workers retire" in first.read_text()
    return later
