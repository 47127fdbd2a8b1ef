"""What the manager of a thousand worker jobs costs the login node.

``python benchmarks/scale.py`` takes about three minutes on two cores. It needs no batch system and no GPU:

- `SlurmGPUCluster` in this process, which is measured, with the real commands' arguments. Its sbatch, squeue, scancel,
  scontrol and sacct are small scripts that keep a queue in files. sbatch really runs the scheduler job's script.
- the scheduler of that job, with hpcgpu's extension, in a process of its own.
- workers as the scheduler sees them: connections that register and send heartbeats, a few thousand in each of two
  processes, without a `Worker` object.

There is no TLS, as the handshakes of 8,000 workers would take most of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import functools
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

WORKERS_PER_JOB = 8
#: What Linux accepts as one argument of a command (MAX_ARG_STRLEN).
ARGUMENT_LIMIT = 131072

#: Of all commands: notes the length of its command line.
NOTE = """#!/bin/sh
cd {place} || exit 1
line="$0 $*"
echo "${{0##*/}} ${{#line}}" >> commands
"""

COMMANDS = {
    # The script of the scheduler job runs; a worker job is only a line, and begins when the file `begun` is there.
    "sbatch": r"""
for word in "$@"; do
    case $word in --job-name=*) name=${word#*=} ;; esac
    script=$word
done
exec 9>> lock; flock 9
read -r id < next
echo $((id + 1)) > next
echo "$id $name" >> jobs
exec 9>&-
case $name in *-scheduler)
    echo "$id" > scheduler
    SLURM_JOB_ID=$id SLURM_JOB_NAME=$name setsid /bin/bash "$script" > scheduler.log 2>&1 < /dev/null &
    echo $! > scheduler.pid ;;
esac
echo "$id"
""",
    "squeue": r"""
for word in "$@"; do
    case $word in --jobs=*) ids=${word#*=} ;; --name=*) only=${word#*=} ;; esac
done
touch jobs ended
begun=$(cat begun 2> /dev/null || echo 0)
exec awk -v ids="$ids" -v only="$only" -v begun="$begun" -v scheduler="$(cat scheduler)" '
BEGIN { n = split(ids, list, ","); for (i = 1; i <= n; i++) asked[list[i]] = 1; split(begun, run, " ") }
FILENAME == "ended" { state[$1] = $2; next }
(n && !($1 in asked)) || (only != "" && $2 != only) { next }
$1 in state { print $1 "|" state[$1] "|n" $1 "|" run[2] "|N/A|" $2 "|None"; next }
$1 == scheduler || $1 <= run[1] { print $1 "|RUNNING|n" $1 "|" (run[2] ? run[2] : "N/A") "|N/A|" $2 "|None"; next }
{ print $1 "|PENDING||N/A|N/A|" $2 "|" ($1 % 5 ? "Priority" : "Resources") }
' ended jobs
""",
    "scancel": r"""
scheduler=$(cat scheduler)
for id in "$@"; do
    case $id in --state=PENDING) pending=1 ;; [0-9]*)
        [ "$pending" ] || { echo "$id CANCELLED"; [ "$id" != "$scheduler" ] || kill "$(cat scheduler.pid)"; } ;;
    esac
done >> ended
""",
    "scontrol": 'echo "ClusterName = scale"\n',
    "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1\n',
}


class Queue:
    """The queue: files in a directory, and commands in front of all others on the PATH."""

    def __init__(self, place: Path) -> None:
        self.place = place
        bin_ = place / "bin"
        bin_.mkdir()
        for name, text in COMMANDS.items():
            path = bin_ / name
            path.write_text(NOTE.format(place=shlex.quote(str(place))) + text)
            path.chmod(0o755)
        (place / "next").write_text("10000001\n")  # as long as ids get on a large system
        os.environ["PATH"] = f"{bin_}:{os.environ['PATH']}"

    def jobs(self) -> dict[str, str]:
        """Ids of the worker jobs by name."""
        lines = [line.split() for line in (self.place / "jobs").read_text().splitlines()]
        return {name: id_ for id_, name in lines if not name.endswith("-scheduler")}

    def begin(self) -> None:
        """Let all jobs run."""
        last = (self.place / "jobs").read_text().splitlines()[-1].split()[0]
        (self.place / "begun.new").write_text(f"{last} {int(time.time())}\n")
        (self.place / "begun.new").rename(self.place / "begun")

    def end(self, job_id: str, state: str) -> None:
        """Let a job end."""
        with open(self.place / "ended", "a") as file:
            file.write(f"{job_id} {state}\n")

    def commands(self) -> dict[str, tuple[int, int]]:
        """How often each command was called, and the length of its longest command line."""
        called: dict[str, tuple[int, int]] = {}
        for line in (self.place / "commands").read_text().splitlines():
            name, length = line.split()
            count, longest = called.get(name, (0, 0))
            called[name] = count + 1, max(longest, int(length))
        return called

    def close(self) -> None:
        """Kill what is left of the scheduler job, as batch systems do some time after they have asked it to end.

        Then it still removes thousands of workers, one after the other, and takes GBs: distributed makes a task for
        each message to a worker whose connection is closed, and sends one to all the others for each that leaves.
        """
        with suppress(OSError):  # it never began, or has ended
            os.killpg(int((self.place / "scheduler.pid").read_text()), signal.SIGKILL)


# Workers


METRICS: dict[str, Any] = {
    "task_counts": {},
    "bandwidth": {"total": 100_000_000, "workers": {}, "types": {}},
    "digests_total_since_heartbeat": {"tick-duration": 0.52, "latency": 0.0021},
    "managed_bytes": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "transfer": {"incoming_bytes": 0, "incoming_count": 0, "incoming_count_total": 0}
    | {"outgoing_bytes": 0, "outgoing_count": 0, "outgoing_count_total": 0},
    "event_loop_interval": 0.0201,
    "cpu": 2.0,
    "memory": 250_000_000,
    "time": 1.7e9,
    "host_net_io": {"read_bps": 1204.5, "write_bps": 2048.1},
    "host_disk_io": {"read_bps": 0.0, "write_bps": 4096.0},
    "num_fds": 32,
}


class Workers:
    """Connections to a scheduler that behave as workers do, in this process."""

    def __init__(self, address: str, first: int) -> None:
        from distributed.core import rpc

        from hpcgpu.software import compare_environments

        self.address, self.number = address, first
        self.scheduler = rpc(address)
        self.environment = compare_environments.collect()
        self.comms: dict[str, Any] = {}
        self.addresses: dict[str, str] = {}

    async def join(self, name: str) -> None:
        """Register a worker, and read what the scheduler sends to it."""
        from distributed.comm import connect
        from distributed.versions import get_versions

        from hpcgpu.dask_worker.gpu_metrics import GPUS
        from hpcgpu.fabric.connection_report import NODE

        self.number += 1
        number = self.number
        address = f"tcp://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:40000"
        comm = await connect(self.address)
        await comm.write(
            {
                "op": "register-worker",
                "reply": False,
                "address": address,
                "status": "running",
                "nthreads": 1,
                "name": name,
                "now": time.time(),
                "resources": {"GPU": 1},
                "memory_limit": 64 * 2**30,
                "local_directory": f"/tmp/dask-scratch-space/worker-{number:08}",
                "services": {"dashboard": 30000 + number % 10000},
                "nanny": address.replace("40000", "40001"),
                "pid": number,
                "versions": get_versions(),
                "metrics": METRICS,
                "extra": {"hpcgpu": self.environment, NODE: name.rsplit("-", 1)[0], GPUS: 1},
                "stimulus_id": f"worker-connect-{time.time()}",
                "server_id": f"Worker-{number}",
            },
            serializers=["msgpack"],
        )
        await comm.read(deserializers=["msgpack"])
        self.comms[name], self.addresses[name] = comm, address
        with suppress(OSError):
            while True:
                await comm.read(deserializers=["msgpack"])

    async def heartbeats(self) -> None:
        """Send the heartbeats of all of them, as often as the scheduler wants those of so many."""
        from distributed.scheduler import heartbeat_interval

        while True:
            begun = time.monotonic()
            for name in list(self.addresses):
                with suppress(OSError):
                    await self.scheduler.heartbeat_worker(
                        address=self.addresses[name], now=time.time(), metrics=METRICS, executing={}, extensions={}
                    )
                pause = heartbeat_interval(2 * len(self.addresses)) / max(1, len(self.addresses))
                await asyncio.sleep(pause)
            await asyncio.sleep(max(0.0, 0.5 - (time.monotonic() - begun)))

    async def run(self) -> None:
        """Do what the lines of stdin say: ``+NAME`` a worker joins, ``-NAME`` it is lost."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks = {asyncio.ensure_future(self.heartbeats())}
        slots = asyncio.Semaphore(50)

        async def joined(name: str) -> None:
            async with slots:
                task = asyncio.ensure_future(self.join(name))
                tasks.add(task)
                while name not in self.comms and not task.done():
                    await asyncio.sleep(0.005)

        while line := (await reader.readline()).decode().strip():
            if line[0] == "+":
                tasks.add(asyncio.ensure_future(joined(line[1:])))
            else:
                self.addresses.pop(line[1:])
                self.comms.pop(line[1:]).abort()


class Pool:
    """The processes of the workers."""

    def __init__(self, address: str, processes: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--workers-of", address, "--first", str(i << 17)],
                stdin=subprocess.PIPE,
                text=True,
            )
            for i in range(processes)
        ]
        self.joined: set[str] = set()

    def say(self, sign: str, job: str) -> None:
        """Let the workers of a job join or be lost."""
        pipe = self.processes[hash(job) % len(self.processes)].stdin
        assert pipe is not None
        for i in range(WORKERS_PER_JOB):
            pipe.write(f"{sign}{job}-{i}\n")
        pipe.flush()

    def join(self, jobs: dict[str, str]) -> None:
        """Let the workers of these jobs join that have not yet."""
        for job in jobs.keys() - self.joined:
            self.joined.add(job)
            self.say("+", job)

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


# What is measured


class Traffic:
    """Bytes that this process sends and receives, by call of the scheduler."""

    def __init__(self) -> None:
        import distributed.comm.tcp
        import distributed.core

        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        call: contextvars.ContextVar[str] = contextvars.ContextVar("call", default="stream of events")
        core, tcp = distributed.core, distributed.comm.tcp
        send_recv, write, from_frames = core.send_recv, tcp.TCP.write, tcp.from_frames

        def count(size: int) -> None:
            self.bytes[call.get()] += size
            self._now += size

        @functools.wraps(send_recv)
        async def counted(comm: Any, **arguments: Any) -> Any:
            operation = str(arguments["op"])
            token = call.set(operation)
            before = self.bytes[operation]
            try:
                return await send_recv(comm, **arguments)
            finally:
                call.reset(token)
                self.calls[operation] += 1
                self.largest[operation] = max(self.largest[operation], self.bytes[operation] - before)

        async def written(comm: Any, *arguments: Any, **named: Any) -> Any:
            size = await write(comm, *arguments, **named)
            count(size)
            return size

        async def read(frames: Any, *arguments: Any, **named: Any) -> Any:
            count(sum(memoryview(frame).nbytes for frame in frames))
            return await from_frames(frames, *arguments, **named)

        self._now = 0
        core.send_recv, tcp.TCP.write, tcp.from_frames = counted, written, read

    @contextmanager
    def of(self) -> Iterator[dict[str, tuple[int, int]]]:
        """Fill in, for each call that was made meanwhile, how often, and the bytes of the largest."""
        self.calls.clear()
        self.bytes.clear()
        self.largest.clear()
        made: dict[str, tuple[int, int]] = {}
        yield made
        made |= {name: (self.calls[name], self.largest[name]) for name in self.calls}
        if size := self.bytes["stream of events"]:
            made["stream of events"] = (0, size)


class Load:
    """CPU seconds of this process and wall seconds, from now on."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.monotonic()

    @property
    def share(self) -> float:
        """Per cent of a core."""
        return 100 * (time.process_time() - self.cpu) / self.seconds

    @property
    def seconds(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.wall

    @property
    def used(self) -> float:
        """CPU seconds since then."""
        return time.process_time() - self.cpu


def memory(pid: str = "self") -> float:
    """MB that a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def cpu_of(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(done: Callable[[], bool], timeout: float, what: str) -> float:
    """Wait, and return for how long."""
    begun = time.monotonic()
    while not done():
        if time.monotonic() - begun > timeout:
            raise TimeoutError(what)
        time.sleep(0.05)
    return time.monotonic() - begun


class Measured:
    """A cluster that grows, is left alone, loses a node and closes; and the rows of the table.

    Parameters
    ----------
    cluster : SlurmGPUCluster
    queue : Queue
    pool : Pool
    traffic : Traffic
    """

    def __init__(self, cluster: Any, queue: Queue, pool: Pool, traffic: Traffic) -> None:
        self.cluster, self.queue, self.pool, self.traffic = cluster, queue, pool, traffic
        self.scheduler = int((queue.place / "scheduler.pid").read_text())
        self.calls: dict[str, dict[str, tuple[int, int]]] = {}

    def row(self, what: str, value: str, aim: str = "") -> None:
        """Print a row."""
        print(f"{what:66}{value:>10}  {aim}".rstrip(), flush=True)

    def connected(self) -> int:
        """How many workers the manager knows."""
        return sum(len(job.workers) for job in self.cluster.workers.values())

    def grow(self, jobs: int, *, told: bool) -> None:
        """Submit jobs, and then let their workers connect."""
        before = len(self.cluster.workers)
        load = Load()
        self.cluster.scale(jobs=jobs)

        def submitted() -> bool:
            ids = [job.job_id for job in self.cluster.workers.values()]
            return len(ids) == jobs and all(ids)

        until(submitted, 300, "submits")
        if told:
            self.row(f"{jobs - before} jobs submitted, four at a time", f"{load.seconds:.1f} s")
            self.row("  CPU of the manager, without the commands", f"{load.used:.1f} s")
            self.shown("when they wait")
        self.queue.begin()
        load = Load()
        self.pool.join(self.queue.jobs())
        until(lambda: self.connected() == jobs * WORKERS_PER_JOB, 300, "workers")
        if told:
            self.row(f"{(jobs - before) * WORKERS_PER_JOB} workers connected", f"{load.seconds:.1f} s")
            self.row("  CPU of the manager", f"{load.used:.1f} s")

    def alone(self, name: str, seconds: float, *, aim: str = "", told: bool = True) -> None:
        """Leave the cluster alone, and record what the manager does."""
        load, before = Load(), cpu_of(self.scheduler)
        with self.traffic.of() as calls:
            time.sleep(seconds)
        share, of_scheduler = load.share, 100 * (cpu_of(self.scheduler) - before) / load.seconds
        self.calls[name] = calls
        if told:
            self.row(f"CPU of the manager, {name}, for {seconds:.0f} s", f"{share:.2f} %", aim)
            self.row("  CPU of the scheduler, with the heartbeats of all workers", f"{of_scheduler:.1f} %")

    def shown(self, when: str) -> None:
        """Print how long the table of jobs takes."""
        begun = time.monotonic()
        lines = repr(self.cluster.jobs).splitlines()
        took = (time.monotonic() - begun) * 1e3
        self.row(f"repr(cluster.jobs) {when}: {len(lines)} lines", f"{took:.0f} ms")

    def lose_a_node(self) -> None:
        """Let one job end with its node."""
        name, job_id = next(iter(self.queue.jobs().items()))
        self.queue.end(job_id, "NODE_FAIL")
        self.pool.say("-", name)
        took = until(lambda: name not in self.cluster.workers, 120, "a node that died")
        self.row("a node died: until the manager knows it", f"{took:.1f} s")

    def close(self) -> None:
        """Close the cluster."""
        load = Load()
        self.cluster.close()
        self.row("the cluster closes", f"{load.seconds:.1f} s", "under 10 s")
        self.row("  CPU of the manager", f"{load.used:.1f} s")

    def run(self, jobs: int, few: int, seconds: float) -> None:
        """Measure all of it."""
        self.grow(few, told=False)
        self.alone("few", 12, told=False)
        self.cluster.adapt(minimum_jobs=few, maximum_jobs=few)
        time.sleep(5)
        self.alone("few adapt", 5, told=False)
        self.grow(jobs, told=True)
        self.cluster.settle()
        time.sleep(5)
        self.alone("with a fixed size", seconds, aim="under 1 %")
        self.cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)
        time.sleep(5)
        self.alone("with adapt()", seconds / 2)
        self.row("memory of the manager", f"{memory():.0f} MB", "under 200 MB")
        self.row("  memory of the scheduler", f"{memory(str(self.scheduler)):.0f} MB")
        self.cluster.scale(jobs=jobs)
        self.shown("when they run")
        self.lose_a_node()
        self.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        self.row("memory of the manager at most", f"{peak:.0f} MB", "under 200 MB")
        self.print_commands()
        self.print_calls((few, jobs), ("few", "with a fixed size"), ("few adapt", "with adapt()"))

    def print_commands(self) -> None:
        """Print what the queue was asked."""
        print(f"\nCommands of the queue, and the longest command line (Linux: {ARGUMENT_LIMIT:,} B for one argument)")
        for command, (count, longest) in sorted(self.queue.commands().items()):
            print(f"  {command:22}{count:>6} {longest:>10,} B")

    def print_calls(self, jobs: tuple[int, int], *names: tuple[str, str]) -> None:
        """Print the calls of the scheduler with few jobs and with all."""
        for small, large in names:
            print(f"\nCalls of the scheduler {large}: their number, bytes of the largest, with its answer")
            print(f"  {'':22}{jobs[0]:>12} jobs {jobs[1]:>15} jobs")
            few, many = self.calls[small], self.calls[large]
            for name in sorted(few.keys() | many.keys()):
                cells = [f"{count:>6} {size:>8,} B" for count, size in (few.get(name, (0, 0)), many.get(name, (0, 0)))]
                print(f"  {name:22}{'   '.join(cells)}")


def measure(queue: Queue, jobs: int, few: int, seconds: float) -> None:
    """Run it."""
    import distributed

    from hpcgpu import SlurmGPUCluster, __version__
    from hpcgpu.errors import ClusterWarning

    warnings.simplefilter("ignore", ClusterWarning)  # there is no TLS, and a node dies
    traffic = Traffic()
    print(
        f"{time.strftime('%F')}, hpcgpu {__version__}, distributed {distributed.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores\n{jobs} jobs of {WORKERS_PER_JOB} workers; memory of the "
        f"manager's process before: {memory():.0f} MB\n",
        flush=True,
    )
    cluster = SlurmGPUCluster(
        name="scale",
        jobs=0,
        gpus_per_node=WORKERS_PER_JOB,
        walltime="24:00:00",
        scheduler={"gpus_per_node": 0},
        protocol="tcp",
        security=False,
        cluster_directory=str(queue.place / "clusters"),
        quiet=True,
    )
    pool = Pool(cluster.scheduler_address, 2)
    try:
        Measured(cluster, queue, pool, traffic).run(jobs, few, seconds)
    finally:
        pool.close()
        cluster.close()


def main() -> None:
    """Measure, or be a process of workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=1000, help=f"worker jobs, of {WORKERS_PER_JOB} workers each")
    parser.add_argument("--few", type=int, default=10, help="jobs of the cluster that is compared")
    parser.add_argument("--seconds", type=float, default=40.0, help="for which the cluster is left alone")
    parser.add_argument("--workers-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers_of:
        asyncio.run(_workers(arguments.workers_of, arguments.first))
        return
    with tempfile.TemporaryDirectory(prefix="hpcgpu-scale-") as temporary:
        place = Path(temporary)
        queue = Queue(place)
        try:
            measure(queue, arguments.jobs, arguments.few, arguments.seconds)
        except BaseException:
            with suppress(OSError):
                print((place / "scheduler.log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            queue.close()


async def _workers(address: str, first: int) -> None:
    await Workers(address, first).run()


if __name__ == "__main__":
    main()
