"""A queue of jobs on this machine, embedded in its clients.

It keeps the same contract as Slurm. It is for laptops, workstations and tests.

There is no daemon. The queue is a directory: one file per job, and a lock. Every call of every client holds the lock
and advances the queue. Each running job has a supervisor process, which outlives the client, ends the job and starts
the next jobs that may run::

    lock            held for milliseconds by a process that reads or writes the other files
    queue.json      the machine: its name, GPUs and job slots
    last-id         the newest job id
    jobs/ID.json    the record of a job, kept after its end
    jobs/ID.sh      its script, and
    jobs/ID.env     its environment: both exist only while the job is alive, and so show which jobs are alive

A damaged file affects only its own job: hpcgpu ends a job whose record it cannot read, and writes the reason to a new
record. Linux only: process identity comes from ``/proc``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hpcgpu.batch.base import After, BatchSystem, JobState, JobStatus, OwnJob
from hpcgpu.batch.cuda_visible_devices import visible_devices
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.local.jobs import JobRecord, read_directives, startable, with_reasons
from hpcgpu.batch.local.reasons import REASONS
from hpcgpu.batch.recognise_own_scripts import runs_hpcgpu
from hpcgpu.batch.run_command import require
from hpcgpu.batch.scrub_environment import clean_environment
from hpcgpu.display.counts_and_durations import counted
from hpcgpu.errors import BatchError, BatchUnavailable, Damaged, NotTrusted, SubmitRefused
from hpcgpu.posix import checked_files, json_records
from hpcgpu.posix.ownership import check, private_directory
from hpcgpu.posix.process_identity import alive as _alive
from hpcgpu.posix.process_identity import identity as _identity
from hpcgpu.posix.process_trees import end_all, members

_T = TypeVar("_T")
_GRACE = 10.0  # seconds between TERM and KILL: a scheduler removes the credentials, and writes the bill
_RETAINED = 1000  # ended jobs that are remembered

#: Starts the supervisor from a shell that ends at once, so that no client has to
#: reap it. Until the supervisor waits for TERM, TERM is ignored: a cancel that comes
#: earlier is in the record, which the supervisor reads before it starts the script.
_DETACH = 'trap "" TERM; exec "$@" </dev/null >/dev/null 2>&1 & echo $!'

_REASONS = {JobState.FAILED: "NonZeroExitCode", JobState.TIMEOUT: "TimeLimit"}


@dataclass(frozen=True)
class _Machine:
    host: str
    gpus: list[str]
    slots: int


def _devices() -> list[str]:
    """Ids of the GPUs that this process may use."""
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        return list(dict.fromkeys(visible))
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


class LocalQueue(BatchSystem):
    """Runs job scripts as processes of this machine, first come first served over its GPUs and a number of slots.

    GPUs and slots belong to the queue directory: the first client sets them for all.

    Parameters
    ----------
    directory : Path, optional
        Where the queue is; default ``$HPCGPU_QUEUE_DIRECTORY``, else ``~/.hpcgpu/queue``.
    gpus : int, optional
        Number of GPUs, with ids from ``"0"``; default those in ``CUDA_VISIBLE_DEVICES`` if it is set, else all of the
        machine.
    slots : int, optional
        How many jobs may run at once; default twice the number of cores, at least 8.
    """

    name = "local"
    remembers = True

    def __init__(self, directory: Path | None = None, *, gpus: int | None = None, slots: int | None = None) -> None:
        path = directory or Path(os.environ.get("HPCGPU_QUEUE_DIRECTORY") or "~/.hpcgpu/queue")
        self.directory = path.expanduser().resolve()
        self._jobs = self.directory / "jobs"
        self._gpus = gpus
        self._slots = slots

    def check(self) -> None:
        require("bash", "The local queue needs it to run job scripts")
        with self._locked():
            pass

    def version(self) -> str:
        """Return the name of this queue, which has no release of its own."""
        return "the queue embedded in hpcgpu"

    def identity(self) -> str:
        """Return the directory of the queue, and the machine."""
        return f"{self.directory} on {socket.gethostname()}"

    def submit(
        self,
        script: Path,
        *,
        job_name: str,
        logs: Path | None = None,
        after: After | None = None,
        exclude: Collection[str] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> str:
        try:
            content, cwd = script.read_bytes(), str(Path.cwd())
        except OSError as error:
            raise SubmitRefused(f"cannot submit {script}: {error}") from error
        fields = {"name": script.name, "output": "hpcgpu-%j.out"} | read_directives(
            content.decode(errors="surrogateescape")
        )
        if job_name:
            fields["name"] = job_name
        environ = {
            k: v for k, v in clean_environment(os.environ).items() if k != "LC_ALL" and not k.startswith("HPCGPU_JOB_")
        }
        if "LC_ALL" in os.environ:
            environ["LC_ALL"] = os.environ["LC_ALL"]
        with self._locked() as machine:
            last = max([_load(self.directory / "last-id", int) or 0, *map(int, self._ids(".json"))])
            path = str(script.absolute())
            other = after.job_id if after is not None and not after.ended else None
            ended = after.job_id if after is not None and after.ended else None
            job = JobRecord(**fields, job_id=str(last + 1), cwd=cwd, script=path, after=other, after_end=ended)
            if words := _too_large(job, machine):
                raise SubmitRefused(words)
            if after is not None and not (re.fullmatch("[0-9]+", after.job_id) and 0 < int(after.job_id) <= last):
                raise SubmitRefused(f"job {job.name!r} waits for job {after.job_id}, which this queue does not know")
            _store(self.directory / "last-id", last + 1)
            _replace(self._jobs / f"{job.job_id}.sh", content)
            _store(self._jobs / f"{job.job_id}.env", environ)
            self._write(job)
            with contextlib.suppress(OSError):  # the job is in the queue: the next client can start it
                self._advance(machine)
        return job.job_id

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        """Return that a job starts at once if GPUs and a slot are free and no earlier job waits for them."""
        fields = {"name": script.name, "output": ""} | read_directives(script.read_text(errors="surrogateescape"))
        with self._locked() as machine:
            self._advance(machine)
            live = self._live()
        job = JobRecord(**fields, job_id="", cwd="")
        if words := _too_large(job, machine):
            return Estimate(limits=(words,))
        if any(one is job for one, _ in startable([*live, job], machine.gpus, machine.slots)):
            return Estimate(start=time.time(), place=machine.host)
        taken = sum(len(one.devices) for one in live if one.state is not JobState.PENDING)
        waiting = sum(one.state is JobState.PENDING for one in live)
        return Estimate(
            known=(
                f"{taken} of {counted(len(machine.gpus), 'GPU')} are taken, and {counted(waiting, 'job')} wait before "
                "it: this queue does not know when they end",
            )
        )

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        with self._locked() as machine:
            self._advance(machine)
            found = [job for job_id in job_ids if (job := self._read(job_id))]
        return {
            job.job_id: JobStatus(
                job_id=job.job_id,
                state=job.state,
                name=job.name,
                reason=job.reason,
                node="" if job.start is None else machine.host,
                start=job.start,
                end=job.end,
                exit_code=job.exit_code,
                words=REASONS,
            )
            for job in found
        }

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}  # `poll` already reports all known jobs

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        wanted = set(job_ids)
        with self._locked() as machine:
            for job in self._live():
                if job.job_id not in wanted:
                    continue
                if job.state is JobState.PENDING:
                    self._close(job, JobState.CANCELLED)
                elif job.state is JobState.RUNNING and not only_pending:
                    # before the record: if this program is killed between both, the job can be cancelled again
                    if _alive(job.supervisor):
                        os.kill(job.supervisor[0], signal.SIGTERM)
                    self._write(replace(job, state=JobState.COMPLETING, verdict=JobState.CANCELLED))
            self._advance(machine)

    def find(self, job_name: str) -> list[str]:
        with self._locked() as machine:
            self._advance(machine)
            return [job.job_id for job in self._live() if job.name == job_name]

    def marked(self, wanted: Callable[[Path], bool]) -> dict[str, Path]:
        if not self.directory.exists():  # nobody has used it
            return {}
        with self._locked(make=False):
            jobs = {job.job_id: Path(job.script) for job in self._live() if job.script}
        return {job_id: path for job_id, path in jobs.items() if wanted(path) and runs_hpcgpu(self._script_of(job_id))}

    def _script_of(self, job_id: str) -> str:
        try:
            return (self._jobs / f"{job_id}.sh").read_text(errors="replace")
        except FileNotFoundError:  # it has just ended
            return ""

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        if not (job_id := environ.get("HPCGPU_JOB_ID")):
            return None
        end = environ.get("HPCGPU_JOB_END")
        return OwnJob(job_id=job_id, name=environ.get("HPCGPU_JOB_NAME", ""), end=float(end) if end else None)

    @contextlib.contextmanager
    def _locked(self, *, make: bool = True) -> Iterator[_Machine]:
        """Hold the lock of the queue; make the queue if it does not exist."""
        import fcntl

        try:
            if make:
                private_directory(self.directory)
                self._jobs.mkdir(mode=0o700, exist_ok=True)
            check(self.directory)  # hpcgpu runs the scripts in this directory
            self.directory.chmod(0o700)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield self._machine()
            finally:
                # a close alone would not free it if another thread has forked meanwhile
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)
        except NotTrusted as error:
            raise BatchError(f"the local queue cannot be used: {error}") from error
        except OSError as error:
            raise BatchUnavailable(f"the local queue in {self.directory} cannot be used: {error}") from error

    def _machine(self) -> _Machine:
        path = self.directory / "queue.json"
        host = socket.gethostname()
        if (machine := _load(path, _Machine)) is None:
            gpus = _devices() if self._gpus is None else [str(index) for index in range(self._gpus)]
            slots = max(8, 2 * (os.cpu_count() or 1)) if self._slots is None else self._slots
            machine = _Machine(host, gpus, slots)
            _store(path, asdict(machine))
        if machine.host != host:  # its process ids would have no meaning here
            raise BatchError(
                f"the local queue in {self.directory} belongs to the machine {machine.host}. On {host}, set "
                "HPCGPU_QUEUE_DIRECTORY to another directory, or remove this one"
            )
        for what, requested, there in (("GPU", self._gpus, len(machine.gpus)), ("slot", self._slots, machine.slots)):
            if requested not in (None, there):
                raise BatchError(
                    f"the local queue in {self.directory} has {counted(there, what)}, not {requested}. Set "
                    f"{what.lower()}s={there}, use another directory, or remove this one when no job is left in it"
                )
        return machine

    # The rest is done under the lock.

    def _read(self, job_id: str) -> JobRecord | None:
        job = _load(self._jobs / f"{job_id}.json", JobRecord) if re.fullmatch("[0-9]+", job_id) else None
        return job if job is not None and job.job_id == job_id else None

    def _write(self, job: JobRecord) -> None:
        verdict = job.verdict and job.verdict.value
        _store(self._jobs / f"{job.job_id}.json", asdict(job) | {"state": job.state.value, "verdict": verdict})

    def _live(self) -> list[JobRecord]:
        """All jobs that have not ended, in order of submission."""
        return [job for job_id in self._ids(".env") if (job := self._read(job_id)) and not job.state.ended]

    def _ids(self, suffix: str) -> list[str]:
        """Ids of the jobs that have such a file, in order of submission."""
        return sorted(
            (path.stem for path in self._jobs.glob(f"*{suffix}") if re.fullmatch("[1-9][0-9]{0,17}", path.stem)),
            key=int,
        )

    def _close(self, job: JobRecord, state: JobState, reason: str = "", exit_code: int | None = None) -> None:
        """Record the end of a job, and delete the records of the oldest ended jobs."""
        self._write(replace(job, state=state, verdict=None, reason=reason, end=time.time(), exit_code=exit_code))
        for suffix in ("sh", "env"):
            (self._jobs / f"{job.job_id}.{suffix}").unlink(missing_ok=True)
        live = set(self._ids(".env"))
        ended = [job_id for job_id in self._ids(".json") if job_id not in live]
        for job_id in ended[:-_RETAINED]:
            (self._jobs / f"{job_id}.json").unlink()

    def _advance(self, machine: _Machine) -> None:
        """Update the queue: close lost jobs, start the jobs that may start, and record why the others wait.

        A job is lost if its supervisor or its record is gone. A process in a container cannot know that.
        """
        if self._in_container():
            return
        for job_id in self._ids(".env"):
            if self._read(job_id) is None:
                lost = JobRecord(job_id=job_id, name="", output="", cwd="")
                end_all(partial(members, self._marks(lost), None), grace=0)
                self._close(
                    lost,
                    JobState.FAILED,
                    f"its record {self._jobs / job_id}.json is damaged or missing, so the queue ended the job",
                )
        for job in self._live():
            if job.state is not JobState.PENDING and not _alive(job.supervisor):
                session = job.leader[0] if _alive(job.leader) else None
                end_all(partial(members, self._marks(job), session), grace=0)
                self._close(job, job.verdict or JobState.FAILED, "the process that supervised the job was killed")
        jobs = self._live()
        for job, devices in startable(jobs, machine.gpus, machine.slots):
            self._launch(job, devices)
        for job in with_reasons(self._live()):
            if job not in jobs:
                self._write(job)

    def _in_container(self) -> bool:
        """Return whether this process is part of a job, and sees other process ids than the job's supervisor."""
        job_id = os.environ.get("HPCGPU_JOB_ID")
        if not job_id or os.environ.get("HPCGPU_QUEUE_DIRECTORY") != str(self.directory):
            return False
        job = self._read(job_id)
        return job is None or not _alive(job.supervisor)

    def _launch(self, job: JobRecord, devices: list[str]) -> None:
        # this process may run in a job, and the supervisor is no part of that job
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HPCGPU_JOB_")}
        supervise = [sys.executable, "-P", "-m", "hpcgpu.batch.local.queue", "run", str(self.directory), job.job_id]
        done = subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *supervise],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path(__file__).parents[3],  # where `-m` finds this package, installed or not
            env=environ,
        )
        if not done.stdout.strip():
            raise OSError(
                "no new process could be started. Perhaps you have as many as you may have: `ulimit -u` shows the limit"
            )
        supervisor = _identity(int(done.stdout)) or [int(done.stdout), 0]
        start = time.time()
        end = None if job.walltime is None else start + job.walltime
        job = replace(job, state=JobState.RUNNING, reason="", start=start, end=end, devices=devices)
        self._write(replace(job, supervisor=supervisor))

    def _marks(self, job: JobRecord) -> dict[str, str]:
        """Return variables that mark the processes of this job, and that name its queue to clients inside it."""
        return {"HPCGPU_JOB_ID": job.job_id, "HPCGPU_QUEUE_DIRECTORY": str(self.directory)}

    @staticmethod
    def _open_log(job: JobRecord) -> int:
        """Change to the directory of a job, and open its log. Both may be on a filesystem that does not answer.

        Other users may have put something there: see `hpcgpu.posix.checked_files`.
        """
        os.chdir(job.cwd)
        fill = {"%x": job.name, "%j": job.job_id, "%%": "%"}
        output = Path(job.cwd, re.sub("%[xj%]", lambda match: fill[match[0]], job.output))
        try:
            return checked_files.created(output)
        except OSError as error:
            raise OSError(error.errno, f"its log {output} cannot be written: {error.strerror}") from error

    def _run_script(self, job: JobRecord, machine: _Machine, log: int) -> subprocess.Popen[bytes]:
        environ = _load(self._jobs / f"{job.job_id}.env", dict[str, str])
        if environ is None:
            raise OSError(f"its environment {self._jobs / job.job_id}.env is damaged or missing")
        environ |= self._marks(job) | {"HPCGPU_JOB_NAME": job.name}
        if job.end is not None:
            environ["HPCGPU_JOB_END"] = f"{job.end:.3f}"
        if machine.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        return subprocess.Popen(
            ["bash", self._jobs / f"{job.job_id}.sh"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, ()),  # noqa: PLW1509 - a supervisor has no threads
        )

    # The supervisor: what the process of a running job does.

    def supervise(self, job_id: str) -> None:
        """Run a job from its start to its end; the whole life of a supervisor process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        # the shell ignored these signals, and the script must not
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        script, job = self._start_script(job_id)
        if script is None or job is None:
            return
        verdict = _wait_for_end(script.pid, job.end)
        job = replace(job, state=JobState.COMPLETING, verdict=verdict)
        # whatever happens to the disk, the processes must end
        with contextlib.suppress(BatchError), self._locked(make=False):
            if (current := self._supervised(job_id)) and current.verdict:
                job = current
            elif current:
                self._write(job)
        # The script is reaped only now. Until then no other process can get its pid, and the pid identifies its
        # session.
        left = end_all(partial(members, self._marks(job), script.pid), _GRACE)
        code = script.poll()
        with self._locked(make=False) as machine:
            if not self._supervised(job_id):
                return  # somebody has removed the queue
            state = job.verdict or (JobState.FAILED if code else JobState.COMPLETED)
            reason = _REASONS.get(state, "")
            if left:
                reason = (
                    f"{counted(len(left), 'process', 'processes')} could not be ended ({' '.join(map(str, left))}): "
                    "end them yourself, or ask the administrator of the machine"
                )
            self._close(job, state, reason, 128 - code if code is not None and code < 0 else code)
            self._advance(machine)

    def _start_script(self, job_id: str) -> tuple[subprocess.Popen[bytes] | None, JobRecord | None]:
        """Start the script of a job; nothing if it does not start, or was cancelled before."""
        with self._locked(make=False):
            job = self._supervised(job_id)
        if job is None:  # the program that started this process died before it recorded that
            return None, None
        log, problem = -1, ""
        try:  # without the lock: other jobs do not wait for a filesystem that hangs
            log = self._open_log(job)
        except OSError as error:
            problem = error.strerror or str(error)
        with self._locked(make=False) as machine:
            if (job := self._supervised(job_id)) is None:
                return None, None
            script = None
            try:
                script = self._run_script(job, machine, log) if not job.verdict and log >= 0 else None
            except OSError as error:
                problem = str(error)
            finally:
                if log >= 0:
                    os.close(log)
            if script is None:
                self._close(job, job.verdict or JobState.FAILED, job.reason or problem)
                self._advance(machine)
                return None, None
            job = replace(job, leader=_identity(script.pid))
            self._write(job)
            return script, job

    def _supervised(self, job_id: str) -> JobRecord | None:
        """Return the job if this process supervises it."""
        job = self._read(job_id)
        return job if job and job.supervisor == _identity(os.getpid()) else None


def _wait_for_end(pid: int, end: float | None) -> JobState | None:
    """Wait until the script has ended or must end; return the state of the job.

    None means that the state depends on the exit code.
    """
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        timeout = 30.0 if end is None else min(end - time.time(), 30.0)  # short, as the clock may be set
        if timeout <= 0:
            return JobState.TIMEOUT
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, timeout)
        if received and received.si_signo == signal.SIGTERM:
            return JobState.CANCELLED
    return None


def _too_large(job: JobRecord, machine: _Machine) -> str:
    """Return why a job can never start on this machine; empty if it can."""
    if job.gpus <= len(machine.gpus):
        return ""
    return (
        f"job {job.name!r} requests {counted(job.gpus, 'GPU')}, but this machine has {len(machine.gpus)}: "
        "reduce gpus_per_node"
    )


def _load(path: Path, shape: type[_T]) -> _T | None:
    """Content of a JSON file; None if it is missing or damaged."""
    try:
        return json_records.read(path, shape, surrogates=True)
    except (FileNotFoundError, Damaged):
        return None


def _store(path: Path, data: Any) -> None:
    _replace(path, json.dumps(data).encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file for the user alone, so that others see it whole or not at all."""
    draft = path.with_name(f"{path.name}.tmp")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)


if __name__ == "__main__":
    _, command, directory, job_id = sys.argv
    assert command == "run"
    LocalQueue(Path(directory)).supervise(job_id)
