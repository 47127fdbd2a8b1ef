"""A cluster inside an existing allocation: ``srun python program.py``, where every task runs the same program.

Task 0 becomes the scheduler, task 1 continues with the program, the others become workers, one for each GPU. Scheduler
and workers start as in the jobs of a cluster: from the same templates, by `hpcgpu.runtime.launch`. One `dask cuda
worker` starts all workers of a node, so that they can share GPU memory by CUDA IPC. So one task of each node starts it,
and the others wait.

The output of the step is only the program's. Scheduler and workers write to their own log files, because their last
messages look like a crash when the program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from distributed import Client
from distributed.core import Status, rpc

from hpcgpu.batch import batch_system
from hpcgpu.batch.cuda_visible_devices import visible_devices
from hpcgpu.client.connect import wait_for_contact
from hpcgpu.client.held_set import Manager
from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler.held_workers import HOLDS_OTHERS
from hpcgpu.display.counts_and_durations import counted
from hpcgpu.display.job_info import JobInfo
from hpcgpu.errors import CertificateError, ClusterError, OptionError
from hpcgpu.existing_clusters.snapshot import Observer
from hpcgpu.fabric import ucx_settings
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import JobOptions, Options, WorkerOptions
from hpcgpu.posix.threads import in_thread, run
from hpcgpu.runtime.credentials_of_job import make_credentials
from hpcgpu.runtime.scheduler_connection import answers
from hpcgpu.scripts import render
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from hpcgpu.configuration.typed import RunnerArguments


_J = TypeVar("_J", bound=JobOptions)

#: Options that have a meaning in an existing job.
OPTIONS = {
    "protocol",
    "interface",
    "client_interface",
    "ucx_env",
    "security",
    "cluster_directory",
    "death_timeout",
    "quiet",
} | {
    *("nthreads", "memory", "resources", "local_directory", "worker_extra_args", "walltime_margin"),
    *(name for name, f in names(WorkerOptions).items() if f.metadata["flag"]),
}
#: The scheduler ends if it gets no heartbeat from the program for
#: this number of seconds: the program was killed, or always holds Python's lock.
_LEASE = 300.0
_HEARTBEAT = 10.0
#: Seconds that scheduler and workers have to end.
_TEARDOWN = 30.0
#: Runs a command with its own log, forwards a signal, and shows the end of the log if the command fails by itself.
_LOGGED = """
trap 'stopped=1; kill -TERM "$child"' TERM INT
{command} >> {log} 2>&1 &
child=$!
while wait "$child"; code=$?; kill -0 "$child" 2> /dev/null; do :; done
if [ "$code" != 0 ] && [ -z "${{stopped:-}}" ]; then
    printf 'hpcgpu: %s ended with exit code %s. The end of %s:\\n' {what} "$code" {log} >&2
    tail -n 30 {log} >&2
fi
exit "$code"
"""


@dataclass(frozen=True)
class Task:
    """One task of a job step, from its environment (``man srun``, OUTPUT ENVIRONMENT VARIABLES).

    Attributes
    ----------
    rank, tasks : int
        Index among all tasks of the step, and their number.
    node, nodes : int
        Index of its node, and the number of nodes.
    on_node : int
        Tasks on its node.
    step : str
        ``JOB.STEP``.
    gpus : int
        GPUs that it sees: those of its node that the step has.
    """

    rank: int
    tasks: int
    node: int
    nodes: int
    on_node: int
    step: str
    gpus: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Task:
        """Read the environment.

        Raises
        ------
        ClusterError
            This is not a task of a job step.
        """
        if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ or "SLURM_JOB_ID" not in environ:
            raise ClusterError(
                "SlurmGPURunner works in a job step: start the program by srun, such as `srun --ntasks=6 python "
                "program.py`"
            )
        node = int(environ["SLURM_NODEID"])
        listed = visible_devices(environ.get("CUDA_VISIBLE_DEVICES", ""))
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            rank=int(environ["SLURM_PROCID"]),
            tasks=int(environ["SLURM_NTASKS"]),
            node=node,
            nodes=int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))),
            on_node=tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node],
            step=f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}" + (f".{restart}" if restart != "0" else ""),
            gpus=len(listed or []),
        )


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's short form: ``2(x3),1``."""
    counts = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts


def _leave_warnings_to_the_program() -> None:
    """Let this process, and the program that it becomes, ignore the signals with which Slurm warns all tasks.

    They end a process that does not expect them: the cluster would end at the warning.
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def _here(job: _J) -> _J:
    """Return the options of a job without a container.

    The step is already running, in a container or not. The configuration may have a container for other clusters.
    """
    return replace(job, container=None, python=sys.executable) if job.container else job


class _Manager(Manager):
    """What `hpcgpu.hold` uses as manager: a job step gets no more workers than its tasks and GPUs allow."""

    def __init__(self, runner: SlurmGPURunner) -> None:
        self._runner = runner
        self.observer = Observer(runner.directory)

    async def start(self) -> None:
        """Do nothing: a runner has started."""

    async def poll(self, job_ids: Collection[str], *, recent: bool = False) -> bool:
        """Let the next question for the jobs query the queue."""
        del job_ids, recent
        self.observer.soon()
        return True

    def hold_wait(self, n_workers: int, resources: Mapping[str, float], beside: Collection[str]) -> _HoldWait:
        """Return the wait of a program for workers to hold, beside those that it holds already."""
        return _HoldWait(self._runner, n_workers + len(beside), resources)


@dataclass(frozen=True)
class _HoldWait:
    """The wait of a program for workers to hold."""

    runner: SlurmGPURunner
    n_workers: int
    resources: Mapping[str, float]

    async def check(self) -> str:
        """Raise `ClusterError` if the step will not have so many workers of this kind."""
        gpus, there = self.runner.task.gpus, dict(self.runner.options.worker.worker_resources())
        lacking = [name for name, amount in self.resources.items() if there.get(name, 0.0) < amount]
        if not self.resources and not gpus:
            lacking = ["a GPU"]
        most = self.n_workers
        with contextlib.suppress(OSError, ValueError):  # the next check reads the files again
            most = 0 if lacking else await in_thread(self._most_workers)
        if most >= self.n_workers:
            return ""
        why = f"each needs {'a GPU and ' if gpus else ''}a task of its own (srun --ntasks)"
        if lacking:
            why = f"its workers do not have {', '.join(lacking)}{'' if self.resources else f'; {HOLDS_OTHERS}'}"
        raise ClusterError(
            f"job step {self.runner.task.step} will have only {counted(most, 'worker')}"
            f"{' of this kind' if lacking else ''}, but the program waits for {self.n_workers}: {why}"
        )

    def _most_workers(self) -> int:
        """Return how many workers there are or will be; a node that has not begun counts with all its tasks."""
        directory, most = self.runner.directory, 0
        directory.refresh()
        others = _nodes_of_others(directory)
        for node, tasks in enumerate(tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"])):
            begun = directory.path / f"node-{node}"
            workers = begun.read_text() if begun.exists() else ""
            most += int(workers) if workers else tasks - others.count(node)
        return most


def _nodes_of_others(directory: ClusterDirectory) -> list[int]:
    """Return the nodes of the tasks that are no workers."""
    return [int((directory.path / name).read_text()) for name in ("task-0", "task-1")]


class SlurmGPURunner:
    """A GPU Dask cluster of the tasks of one job step.

    Only task 1 runs the block of ``with SlurmGPURunner() as cluster:``.

    Start the program with ``srun``, with two tasks more on each node than it has GPUs: on nodes with four GPUs,
    ``--ntasks-per-node=6`` makes four workers on each. Each task must see all GPUs of its node, so do not use
    ``--gpus-per-task`` or ``--gpu-bind``. The scheduler shares the first GPU of its node with a worker. Without GPUs,
    each task after the first two is a worker.

    Parameters
    ----------
    **options
        `protocol`, `interface`, `client_interface`, `security`, `cluster_directory`, `death_timeout`, `quiet` and the
        options of a Dask worker; see the page on options. `memory` is that of a node.

    Raises
    ------
    OptionError
        An unknown option, one that belongs to jobs, or a value that is not allowed.
    ClusterError
        This is not a task of a job step, or the scheduler did not start in time (`death_timeout`).
    ClusterExists
        Another cluster uses the directory of this one.
    NotTrusted
        Another user can write to the cluster directory.
    SystemExit
        In all tasks except task 1: the task of the scheduler or of workers has ended, or there are fewer than three
        tasks.
    """

    system = "slurm"

    def __init__(self, **options: Unpack[RunnerArguments]) -> None:
        for name in options:
            if name not in OPTIONS:
                known = ", ".join(sorted(OPTIONS))
                raise OptionError(
                    f"{name} is not an option of SlurmGPURunner, which runs in an existing job. Its options are {known}"
                )
        self.task = task = Task.of(os.environ)
        if task.tasks < 3:
            if task.rank == 0:
                print(
                    f"hpcgpu: {counted(task.tasks, 'task')} cannot make a cluster: scheduler, program and a worker "
                    "need one each (srun --ntasks=3)",
                    file=sys.stderr,
                )
            sys.exit(2)
        given = {
            "gpus_per_node": min(1, task.gpus),
            **options,
            "name": f"runner-{task.step}",
            "nodes_per_job": task.nodes,
            "scheduler": {},
        }
        found = resolve(self.system, given)
        assert found.scheduler is not None
        self.options: Options = replace(found, worker=_here(found.worker), scheduler=_here(found.scheduler))
        cluster = self.options.cluster
        self.directory = ClusterDirectory(cluster.cluster_directory / cluster.name)
        self.status = Status.created
        if task.rank != 1:
            _leave_warnings_to_the_program()
        if task.rank == 0:
            self._become_scheduler()
        self._wait_for("cluster.json", "the scheduler's task")
        ClusterDirectory.existing(self.directory.path)
        if task.rank == 1:
            self._become_client()
        else:
            self._become_worker()

    # The scheduler

    def _become_scheduler(self) -> NoReturn:
        directory = create_directory.claim(
            self.directory.path,
            None,
            system=self.system,
            queue=batch_system(self.system).identity(),
            security=self.options.cluster.security,
            complete=self._complete,
        )
        assert self.options.scheduler is not None
        living = replace(self.options.cluster, lease=_LEASE, shutdown_on_close=True)
        command = render.command(self.system, "scheduler", replace(self.options, cluster=living), directory.path)
        self._become("scheduler", command)

    def _complete(self, directory: ClusterDirectory) -> None:
        """Write the files that the other tasks need, before they see the directory."""
        if self.options.cluster.security:
            batch = batch_system(self.system)
            make_credentials(directory, batch.own_job(os.environ), batch)
        directory.write("task-0", str(self.task.node))
        job_name = os.environ.get("SLURM_JOB_NAME", self.task.step)
        directory.intend(job_name, "scheduler")
        directory.submitted(job_name, os.environ["SLURM_JOB_ID"])

    def _become(self, name: str, command: str) -> NoReturn:
        """Replace this process by a bash command of the templates, with a log of that name."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ.update(ucx_settings.environment(self.options.worker, self.options.worker.ucx_env))
        log = shlex.quote(str(self.directory.logs / f"{name}.log"))
        os.execv(
            "/bin/bash",
            ["bash", "-c", _LOGGED.format(command=command.strip(), log=log, what=shlex.quote(f"the {name}"))],
        )

    # The workers

    def _become_worker(self) -> NoReturn:
        """Start the workers of this node, or wait until the task that starts them has ended."""
        worker = self.options.worker
        if not self.task.gpus:  # each task starts one worker, with its own name
            os.environ["SLURM_JOB_NAME"] = f"{os.environ.get('SLURM_JOB_NAME', 'worker')}-{self.task.rank}"
            worker = replace(worker, nodes_per_job=1)
            self._become_workers(f"worker-{self.task.rank}", worker)
        self._wait_for("task-1", "the program's task")
        workers = min(self.task.on_node - _nodes_of_others(self.directory).count(self.task.node), self.task.gpus)
        if not self._first_of_node(workers):
            self._wait_for_end()
        if idle := self.task.gpus - workers:
            print(
                f"hpcgpu: node {self.task.node} has {counted(self.task.gpus, 'GPU')} but only "
                f"{counted(workers, 'worker task')}, so {counted(idle, 'GPU')} {'stays' if idle == 1 else 'stay'} "
                "unused: start more tasks per node (srun --ntasks)",
                file=sys.stderr,
            )
        self._become_workers(f"workers-of-node-{self.task.node}", replace(worker, gpus_per_node=workers))

    def _become_workers(self, name: str, worker: WorkerOptions) -> NoReturn:
        options = replace(self.options, worker=worker)
        self._become(name, render.command(self.system, "worker", options, self.directory.path))

    def _first_of_node(self, workers: int) -> bool:
        """Whether this task starts the workers of its node; record their number."""
        try:
            descriptor = os.open(
                self.directory.path / f"node-{self.task.node}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600
            )
        except FileExistsError:
            return False
        with open(descriptor, "w") as file:
            file.write(str(workers))
        return True

    def _wait_for_end(self) -> NoReturn:
        silent = 0
        while not self.directory.closed:
            contact = self.directory.contact()
            try:
                silent = 0 if contact is not None and answers(contact, self.directory) else silent + 1
            except CertificateError:
                silent += 1
            if silent * _HEARTBEAT > self.options.worker.death_timeout:
                break
            for _ in range(int(_HEARTBEAT)):
                if self.directory.closed:
                    break
                time.sleep(1.0)
        sys.exit(0)

    def _wait_for(self, name: str, what: str) -> None:
        """Wait for a file in the cluster directory."""
        deadline = time.monotonic() + self.options.worker.death_timeout
        while not (self.directory.path / name).exists():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{what} did not write {self.directory.path / name} within "
                    f"{self.options.worker.death_timeout:g} s (death_timeout): it has failed, or the nodes do not "
                    "share this directory (cluster_directory)"
                )
            self.directory.refresh()
            time.sleep(0.2)

    # The client

    def _become_client(self) -> None:
        self.directory.write("task-1", str(self.task.node))
        contact = wait_for_contact(
            self.directory, timeout=self.options.worker.death_timeout, quiet=self.options.cluster.quiet
        )
        self.scheduler_address = contact.client
        self.security = certificates_and_keys.security(self.directory)
        self.status = Status.running
        self.manager = _Manager(self)
        if not self.options.cluster.quiet:
            print(f"hpcgpu: scheduler and workers write to {self.directory.logs}", file=sys.stderr, flush=True)
        self._closing = threading.Event()
        self._alive = threading.Thread(
            target=lambda: asyncio.run(self._keep_alive()), name="hpcgpu-heartbeat", daemon=True
        )
        self._alive.start()

    async def _keep_alive(self) -> None:
        async with self._scheduler() as scheduler:
            while not self._closing.is_set():
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(scheduler.hpcgpu_heartbeat(manager=1, about="SlurmGPURunner"), _HEARTBEAT)
                await asyncio.to_thread(self._closing.wait, _HEARTBEAT)

    def _scheduler(self) -> Any:
        return rpc(self.scheduler_address, connection_args=self.security.get_connection_args("client"))

    @property
    def n_workers(self) -> int:
        """The number of connected workers."""
        return len(run(self._identity())["workers"])

    async def _identity(self) -> dict[str, Any]:
        async with self._scheduler() as scheduler:
            return dict(await scheduler.identity(n_workers=-1))

    @property
    def jobs(self) -> list[JobInfo]:
        """The job of this step, as its queue reports it; once for each name by which its workers report it."""
        found = [replace(job, log=self.directory.logs) for job in self.manager.observer.snapshot().jobs]
        ranks = range(2, self.task.tasks) if not self.task.gpus else ()
        return found + [replace(job, name=f"{job.name}-{rank}") for job in found for rank in ranks]

    def get_client(self) -> Client:
        """Return a Dask client."""
        return Client(self)

    def close(self) -> None:
        """End the scheduler and the workers."""
        if self.status != Status.running:
            return
        self.status = Status.closing
        self._closing.set()
        with contextlib.suppress(OSError, TimeoutError):
            run(asyncio.wait_for(self._terminate(), _TEARDOWN))
        self._alive.join(_TEARDOWN)
        self.directory.remove_secrets()
        self.directory.close()
        self.status = Status.closed

    async def _terminate(self) -> None:
        async with self._scheduler() as scheduler:
            await scheduler.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self
        yield

    def __repr__(self) -> str:
        return f"<SlurmGPURunner {self.task.step}: {self.scheduler_address}, {self.status.name}>"
