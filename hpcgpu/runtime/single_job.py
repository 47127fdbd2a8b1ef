"""One job for all, ``python -m hpcgpu.runtime.single_job``: scheduler, workers and a program in one allocation.

It starts the three, watches them, and ends with the program's exit code. When one of them ends, it ends the others. The
log of the job is the program's log. Scheduler and workers have separate log files, because their last messages, and
those of srun, which ends them, look like a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpcgpu.batch import batch_system
from hpcgpu.display.counts_and_durations import counted
from hpcgpu.posix.printable import printable
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written
from hpcgpu.runtime import stage
from hpcgpu.runtime.credentials_of_job import make_credentials
from hpcgpu.scaling.wanted_state import Detach, Wanted, apply
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

_T = TypeVar("_T")

#: Seconds that the program has to end after SIGTERM; the job itself gets its signal 60 s before the end of the
#: walltime.
_GRACE = 20.0
#: Seconds that scheduler and workers have to end.
_TEARDOWN = 10.0
#: Bytes shown from the end of the log of a process that ended too early.
_TAIL = 4096


class _Aborted(Exception):
    """The program cannot start, or cannot continue."""


async def _workers_connected(contact: Contact, directory: ClusterDirectory, workers: int) -> None:
    from distributed import Client

    async with Client(
        contact.client, security=certificates_and_keys.security(directory), asynchronous=True, set_as_default=False
    ) as client:
        await client.wait_for_workers(workers)


async def _scheduler_contact(directory: ClusterDirectory) -> Contact:
    while (contact := directory.contact()) is None:
        await asyncio.sleep(0.2)
    return contact


class Single:
    """The three processes of a job.

    Parameters
    ----------
    directory : ClusterDirectory
    workers : int
        Dask workers that must be connected before the program starts.
    timeout : float
        Seconds that the workers may take to connect.
    """

    def __init__(self, directory: ClusterDirectory, workers: int, timeout: float) -> None:
        self.directory = directory
        self.workers = workers
        self.timeout = timeout
        self.signalled: asyncio.Future[int] | None = None

    async def run(self, scheduler: Sequence[str], workers: Sequence[str], program: Sequence[str]) -> int:
        """Run the program on the cluster; return the exit code."""
        loop = asyncio.get_running_loop()
        self.signalled = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        cluster: dict[str, asyncio.subprocess.Process] = {}
        try:
            cluster["the scheduler"] = await self._start("the scheduler", scheduler)
            cluster["the workers"] = await self._start("the workers", workers)
            contact = await self._unless_ended(cluster, _scheduler_contact(self.directory), "the scheduler")
            await self._unless_ended(
                cluster, _workers_connected(contact, self.directory, self.workers), counted(self.workers, "worker")
            )
            return await self._program(cluster, program, contact)
        except _Aborted as problem:
            print(f"hpcgpu: {problem}", file=sys.stderr, flush=True)
            return 128 + self.signalled.result() if self.signalled.done() else 1
        finally:
            await asyncio.gather(*(_end(process, _TEARDOWN) for process in cluster.values()))

    def _log(self, name: str) -> Path:
        return self.directory.logs / f"{name.removeprefix('the ')}.log"

    async def _start(self, name: str, command: Sequence[str]) -> asyncio.subprocess.Process:
        """Start scheduler or workers, with a separate log."""
        with self._log(name).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=asyncio.subprocess.STDOUT, start_new_session=True
            )

    def _end_of_log(self, name: str) -> str:
        """Return the end of a log, for a message."""
        with self._log(name).open("rb") as log:
            log.seek(max(0, self._log(name).stat().st_size - _TAIL))
            end = printable(log.read().decode(errors="replace"), None, lines=True).rstrip()
        return f"The end of {self._log(name)}:\n{end or '(empty)'}"

    def _on_signal(self, number: int) -> None:
        if self.signalled is not None and not self.signalled.done():
            self.signalled.set_result(number)

    async def _unless_ended(self, cluster: dict[str, asyncio.subprocess.Process], work: Awaitable[_T], what: str) -> _T:
        """Wait for something; stop waiting if the job is to end or a part of the cluster has ended."""
        task = asyncio.ensure_future(work)
        ends = {asyncio.ensure_future(process.wait()): name for name, process in cluster.items()}
        assert self.signalled is not None
        try:
            events: list[asyncio.Future[Any]] = [task, self.signalled, *ends]
            done, _ = await asyncio.wait(events, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.signalled in done:
                raise _Aborted(
                    f"{signal.Signals(self.signalled.result()).name} arrived while the job waited for {what}: the "
                    "program was not started"
                )
            if ended := next((name for end, name in ends.items() if end in done), None):
                raise _Aborted(f"{ended} ended too early: the program was not started. {self._end_of_log(ended)}")
            if task not in done:
                raise _Aborted(
                    f"the job waited {self.timeout:g} s (death_timeout) for {what}: the program was not started. The "
                    f"logs of scheduler and workers are in {self.directory.logs}"
                )
            return task.result()
        finally:
            for waiting in (task, *ends):
                waiting.cancel()

    async def _program(
        self, cluster: dict[str, asyncio.subprocess.Process], command: Sequence[str], contact: Contact
    ) -> int:
        environment = {
            **os.environ,
            **certificates_and_keys.environment(self.directory),
            "DASK_SCHEDULER_ADDRESS": contact.client,
            "HPCGPU_CLUSTER_DIRECTORY": str(self.directory.path),
        }
        try:
            program = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
        except OSError as error:
            print(f"hpcgpu: {shlex.join(command)} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
            return 127 if isinstance(error, FileNotFoundError) else 126
        ends = {asyncio.ensure_future(process.wait()): name for name, process in cluster.items()}
        over = asyncio.ensure_future(program.wait())
        assert self.signalled is not None
        try:
            done, _ = await asyncio.wait([over, self.signalled, *ends], return_when=asyncio.FIRST_COMPLETED)
            if over in done:
                return self._report_end(over.result())
            await _end(program, _GRACE)
            if self.signalled in done:
                raise _Aborted(
                    f"{signal.Signals(self.signalled.result()).name} arrived, at the end of the walltime or from "
                    "scancel: the program was stopped"
                )
            ended = next(name for end, name in ends.items() if end in done)
            raise _Aborted(f"{ended} ended: the program was stopped too. {self._end_of_log(ended)}")
        finally:
            for waiting in (over, *ends):
                waiting.cancel()

    def _report_end(self, code: int) -> int:
        """Print how the program ended; return the exit code of the job."""
        how = f"signal {-code}: exit code {128 - code}" if code < 0 else f"exit code {code}"
        logs = f"scheduler and workers wrote to {self.directory.logs}"
        print(f"hpcgpu: the program ended with {how}; {logs}", file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """End a process and its children."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            continue


def main(argv: Sequence[str]) -> int:
    """Make the cluster's directory, run, remove the credentials."""
    drop_what_cannot_be_written()
    stage.release_at_exit()
    parser = argparse.ArgumentParser(
        prog="python -m hpcgpu.runtime.single_job", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--workers", type=int, required=True, help="Dask workers to wait for")
    parser.add_argument("--timeout", type=float, required=True, help="seconds to wait for them")
    parser.add_argument("--insecure", action="store_true", help="security=False")
    parser.add_argument("--authenticated", action="store_true", help="security='authenticated'")
    parser.add_argument("system", help="batch system")
    parser.add_argument("directory", type=Path, help="cluster directory to create")
    parser.add_argument(
        "commands",
        nargs=argparse.REMAINDER,
        help="three commands, one after another: the scheduler's, with the number of its words before it; the "
        "workers', likewise; then the program",
    )
    arguments = parser.parse_args(argv)
    words = list(arguments.commands)
    scheduler, words = words[1 : int(words[0]) + 1], words[int(words[0]) + 1 :]
    workers, program = words[1 : int(words[0]) + 1], words[int(words[0]) + 1 :]
    batch = batch_system(arguments.system)
    own = batch.own_job(os.environ)
    if own is None:
        print(f"hpcgpu: this is not a job of {arguments.system}: submit the script, do not run it", file=sys.stderr)
        return 1

    def complete(directory: ClusterDirectory) -> None:
        if not arguments.insecure:
            make_credentials(directory, own, batch)
        directory.want(apply(Wanted(), Detach()))
        directory.intend(own.name, "scheduler")
        directory.submitted(own.name, own.job_id)

    directory = create_directory.claim(
        arguments.directory,
        None,
        system=arguments.system,
        queue=batch.identity(),
        security="authenticated" if arguments.authenticated else not arguments.insecure,
        complete=complete,
    )
    try:
        return asyncio.run(Single(directory, arguments.workers, arguments.timeout).run(scheduler, workers, program))
    finally:
        directory.remove_secrets()
        directory.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
