"""A cluster of a login node, as a program on another machine holds it: ``SlurmGPUCluster(host="login1", ...)``.

It has no state of the cluster. Its jobs are managed in the scheduler job, so a laptop that sleeps loses nothing and
costs nothing; each method asks the login node by ssh.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import secrets
import shlex
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self, TypeVar

from distributed import Client, futures_of
from distributed.core import Status
from distributed.security import Security
from distributed.utils import Log, Logs

from hpcgpu.checkpoints import save_and_restore
from hpcgpu.checkpoints.save_and_restore import KEEP
from hpcgpu.client import futures_to_replay, reached_by_ssh
from hpcgpu.client.connect import ClientBySSH
from hpcgpu.client.hold import Hold, check_size
from hpcgpu.client.questions_by_ssh import Questions
from hpcgpu.client.reached_by_ssh import TIMEOUT, ReachedCluster, cluster_of
from hpcgpu.client.replay import check
from hpcgpu.client.upload_package import upload, upload_package
from hpcgpu.cluster import notebook, notebook_by_ssh
from hpcgpu.cluster.saved_results import chosen, with_client
from hpcgpu.display.job_table import JobTable
from hpcgpu.display.progress import Progress
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError, ClusterWarning, HostError, HpcgpuError, OptionError
from hpcgpu.existing_clusters.printed_snapshot import from_printed
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.options import values
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.posix.threads import in_event_loop, in_thread
from hpcgpu.software.compare_environments import collect
from hpcgpu.ssh.login import Login

_T = TypeVar("_T")
#: Options whose values only this program has.
_ONLY_HERE = ("on_ending", "loop")
#: Seconds until a login node that has not answered is asked again.
_AGAIN = 10.0


class ClusterBySSH:
    """A cluster of a login node.

    With ``asynchronous=True`` it is used from a running event loop, with ``await`` and ``async with``. What asks the
    login node then returns an awaitable, also `jobs`; changes are made in the order of the calls.

    Parameters
    ----------
    system : str
        The batch system there.
    host : str
        The login node: what `ssh` understands.
    options : mapping
        Options of the cluster, as for a cluster of this machine. Paths are paths on the login node. With `python`, the
        interpreter of the jobs also runs hpcgpu on the login node.

    Raises
    ------
    OptionError
        A value that is not allowed. Nothing was submitted.
    HostError
        The login node cannot be reached by ssh, or hpcgpu is not there.
    ClusterError, BatchError
        The start failed: no job is left.
    """

    def __init__(self, system: str, host: str, options: Mapping[str, Any]) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        for name in _ONLY_HERE:
            if given.pop(name, None):
                raise OptionError(f"{name} does not work with host={host!r}: leave it out")
        if given.get("scheduler") == "local":
            raise OptionError(f"scheduler='local' does not work with host={host!r}: workers do not reach this machine")
        if given.get("security") is False:
            raise OptionError(
                f"security=False does not work with host={host!r}: all users of this machine could use the way to it"
            )
        if callable(given.get("notify")):
            raise OptionError(f"notify: with host={host!r} it is a command, which runs on the login node")
        self.host, self.system = host, system
        self.quiet = bool(given.get("quiet", False))
        self.login = Login(host, str(given.get("python", "")))
        self._asynchronous = bool(given.pop("asynchronous", False))
        #: Held by what changes the cluster, if it is asynchronous.
        self._turn = asyncio.Lock()
        self._waits = given.pop("wait", True)
        self._ends_jobs = values.boolean("shutdown_on_close", given.pop("shutdown_on_close", True))
        self._name = str(given.pop("name", "") or f"hpcgpu-{uuid.uuid4().hex[:8]}")
        self._reached: ReachedCluster | None = None
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._closed = False
        #: The widget that shows it in notebooks; None before it was shown in one.
        self._live: Any = None
        #: Its directory on the login node; empty before its start.
        self.directory = ""
        self._given = given
        if not self._asynchronous:
            self._start()
            if self._waits:
                try:
                    self._reach_cluster()
                except BaseException:
                    self.close()
                    raise

    def _start(self) -> None:
        """Submit its jobs, if that was not done."""
        if self.directory or self._closed:
            return
        self.login.connect()
        # beside the start: the way to the scheduler is open when it answers
        threading.Thread(target=self._open_tunnel, name="hpcgpu-ssh", daemon=True).start()
        given = self._given
        here = collect() if given.get("environment_check", "error") == "error" else None
        # by the token it is the same start if the connection breaks, and the command runs again
        arguments = ["start", "--system", self.system, "--token", secrets.token_hex(16), "--managed", "--no-wait"]
        more = {"config": _plain(given), "software": here, "show_errors": not self.quiet}
        answer = self.login.call_again([*arguments, "--json", "--", self._name], **more)
        self._found(json.loads(answer.output)["directory"])

    def _found(self, directory: str) -> None:
        self.directory = directory
        #: The same as an argument of a command, in which $ begins a variable.
        self._named = self.directory.replace("$", "$$")
        self.questions = Questions(self.login, self.directory)
        self._finalizer = weakref.finalize(self, _end, self.login, self.directory, self._ends_jobs, self._clients)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    @classmethod
    def of_client(cls, client: ClientBySSH) -> Self:
        """Return the cluster of a client that has connected to it; the end of this program is not its end."""
        reached = client.reached
        directory = reached.scheduler.directory
        system = Questions(reached.login, directory).snapshot().system
        left = {"name": PurePath(directory).name, "shutdown_on_close": False}
        self = cls(system, reached.login.host, {**left, "asynchronous": True})  # so that it starts nothing
        self._asynchronous, self.login, self._reached = client.asynchronous, reached.login, reached
        self._clients.add(client)
        self._found(directory)
        return self

    def _open_tunnel(self) -> None:
        with suppress(HpcgpuError, OSError):  # `_reach_cluster` tries again, and reports the error
            reached_by_ssh.tunnel_of(self.login)

    def _reach_cluster(self, timeout: float | None = None) -> ReachedCluster:
        """Return the way to its scheduler, after a wait for it."""
        self._check_usable()
        if self._reached is None:
            self._reached = reached_by_ssh.reach_cluster(self.login, self._named, timeout=timeout, quiet=self.quiet)
            threading.Thread(target=self._let_manage, name="hpcgpu-manage", daemon=True).start()
        return self._reached

    def _let_manage(self) -> None:
        """Let a process of the login node manage the cluster if compute nodes cannot submit jobs, and report it."""
        while not self._closed:
            try:
                if text := self.questions.manage():
                    with Progress(self.quiet) as progress:
                        progress.update(text)
                return
            except HostError:  # the login node may have been restarted
                time.sleep(_AGAIN)
            except (HpcgpuError, OSError) as error:
                if self._closed or not self._finalizer.alive:  # its jobs end, or it was left
                    return
                with suppress(ClusterWarning):  # a program may turn it into an error
                    warn(f"no program manages cluster {self._name}, so that its jobs are not replaced: {error}")
                return

    def _check_usable(self) -> None:
        if self._closed:
            raise ClusterError(f"cluster {self._name} is closed, or this program has left it")
        if not self.directory:
            raise ClusterError(f"cluster {self._name} was not started yet: write `await cluster`, or use `async with`")

    def _now(self, timeout: float | None = None) -> ReachedCluster:
        """Return the way to its scheduler; only an asynchronous program does not wait for it."""
        if self._asynchronous and self._reached is None:
            self._check_usable()
            raise ClusterError(f"cluster {self._name} waits for its scheduler: `await cluster.get_client()`")
        return self._reach_cluster(timeout)

    def _do(self, work: Callable[[], _T], *, changes_cluster: bool = False) -> _T:
        """Do what waits for the login node; beside the event loop of an asynchronous program, which awaits it."""
        if not self._asynchronous or not in_event_loop():
            return work()
        return self._begin(work, changes_cluster=changes_cluster)  # type: ignore[return-value]

    def _begin(self, work: Callable[[], _T], *, changes_cluster: bool = False) -> asyncio.Future[_T]:
        """Begin in a thread. It goes on if nobody awaits it any more: jobs that are being submitted must be known."""
        return asyncio.shield(asyncio.ensure_future(self._later(work, changes_cluster)))

    async def _later(self, work: Callable[[], _T], changes_cluster: bool) -> _T:
        async with self._turn:  # after the changes of earlier calls
            if changes_cluster:
                return await in_thread(work)
        return await in_thread(work)

    def _call(self, command: str, *arguments: str) -> bytes:
        self._check_usable()
        answer = self.login.call([command, *arguments, "--", self._named], show_errors=not self.quiet)
        return answer.output

    # What Dask's client expects of a cluster

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def status(self) -> Status:
        """Whether it is starting, running, or closed."""
        if self._closed:
            return Status.closed
        return Status.running if self._reached is not None else Status.created

    @property
    def asynchronous(self) -> bool:
        """Whether its methods return awaitables."""
        return self._asynchronous

    @property
    def scheduler_address(self) -> str:
        """The address of its scheduler for programs of this machine; waits for the scheduler."""
        return self._now().address

    @property
    def security(self) -> Security:
        """The credentials for its scheduler, in memory."""
        return self._now().security

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._started().__await__()

    async def _started(self) -> Self:
        if self.directory:
            return self
        try:
            await self._begin(self._start, changes_cluster=True)
            if self._waits:
                await self._begin(self._reach_cluster)
        except BaseException:
            await self._close_later(jobs=self._ends_jobs)
            raise
        return self

    def get_client(self) -> Any:
        """Return a client of the cluster; waits for the scheduler."""
        if self._asynchronous and self._reached is None:
            return self._client_later()
        return self._client(default=True)

    def _client(self, *, default: bool) -> Client:
        client = Client(
            self,
            timeout=TIMEOUT,
            direct_to_workers=False,
            asynchronous=self._asynchronous,
            set_as_default=default,
        )
        self._clients.add(client)
        return client

    async def _client_later(self) -> Client:
        await self._begin(self._reach_cluster)
        return await self.get_client()

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard on this machine, through ssh; empty while there is none. It needs a token."""
        return self.dashboard_here()

    def dashboard_here(self, *, token: bool = False) -> str:
        """Return the same, with its token if that is wanted; do not wait for the scheduler."""
        return self._reached.dashboard_link(token=token) if self._reached is not None else ""

    def dashboard_link_with_token(self) -> str:
        """Return the link that opens the dashboard in a browser of this machine; empty while there is none.

        Everybody on this machine who has the link can read the dashboard.
        """
        if not self._asynchronous:
            self._reach_cluster()
        return self.dashboard_here(token=True)

    # The cluster

    def snapshot(self) -> Snapshot:
        """Return the cluster as it is now: jobs, GPUs, groups, time left, GPU hours."""
        self._check_usable()
        return self._do(self._snapshot)

    def _snapshot(self) -> Snapshot:
        answer = self.login.call(["status", self._named, "--json"], show_errors=False)
        return from_printed(answer.output, f"the answer of {self.host}")

    @property
    def jobs(self) -> JobTable:
        """The jobs of the cluster."""
        self._check_usable()
        return self._do(lambda: JobTable(self._snapshot().jobs))

    def wait_for_workers(self, n_workers: int | None = None, timeout: float | str | None = None) -> None:
        """Wait until this number of workers is connected.

        Parameters
        ----------
        n_workers : int, optional
            Default: all workers of the jobs that the cluster requests.
        timeout : number or str, optional
            Seconds, or a text with a unit. Default: none; the queue may take days.

        Raises
        ------
        ClusterError
            They cannot come any more.
        TimeoutError
            They were not connected within `timeout`.
        """
        limit = values.time_limit("wait_for_workers: timeout", timeout)
        self._check_usable()
        return self._do(lambda: self._wait_for_workers(n_workers, limit))

    def _wait_for_workers(self, n_workers: int | None, limit: float | None) -> None:
        self._reach_cluster(limit)
        more = ["--n-workers", str(n_workers)] if n_workers is not None else []
        more += ["--timeout", str(limit)] if limit is not None else []
        self.login.call_again(["wait-for-workers", *more, "--", self._named], show_errors=not self.quiet)

    def scale(self, n: int | None = None, *, worker_group: str = DEFAULT, **size: int | str) -> None:
        """Set the size of a group of workers: `n` workers, or ``jobs``, ``gpus``, ``cores`` or ``memory``.

        See `hpcgpu.GPUCluster.scale`.
        """
        given = {**({"n": n} if n is not None else {}), **size}
        return self._order({"command": "scale", "worker_group": worker_group, **given})

    def adapt(self, *, worker_group: str = DEFAULT, **limits: Any) -> None:
        """Let the amount of work determine the size of a worker group. See `hpcgpu.GPUCluster.adapt`."""
        given = {"interactive": notebook.interactive(), **limits}
        return self._order({"command": "adapt", "worker_group": worker_group, **given})

    def add_worker_group(self, name: str, *, jobs: int = 0, **options: Any) -> None:
        """Add a group of worker jobs with other options. See `hpcgpu.GPUCluster.add_worker_group`."""
        return self._order({"command": "add_worker_group", "name": name, "jobs": jobs, **options})

    def delete_worker_group(self, name: str) -> None:
        """Drain all jobs of a group, and delete the group."""
        return self._order({"command": "delete_worker_group", "name": name})

    def _order(self, command: Mapping[str, Any]) -> None:
        self._check_usable()
        return self._do(lambda: self._send(command), changes_cluster=True)

    def _send(self, command: Mapping[str, Any]) -> None:
        call = self.login.call_again if command["command"] in ("scale", "adapt") else self.login.call
        answer = call(["order", "--", self._named], config=_plain(command), show_errors=not self.quiet)
        if text := answer.output.decode(errors="replace").strip():
            with Progress(self.quiet) as progress:
                progress.update(text)

    def hold(
        self,
        n_workers: int | None = None,
        *,
        jobs: int | None = None,
        resources: Mapping[str, float] | None = None,
        timeout: float | str | None = None,
    ) -> Hold:
        """Hold workers for a block of a program. See `hpcgpu.GPUCluster.hold`."""
        check_size(n_workers, jobs)
        limit = values.time_limit("hold: timeout", timeout)
        scheduler = self._now(limit).scheduler
        number = n_workers or (jobs or 0) * scheduler.workers_per_job

        def make() -> Client:
            return self._client(default=False)

        return Hold(self, number, resources=resources, timeout=limit, quiet=self.quiet, make=make)

    def upload_package(self, path: str | Path) -> Any:
        """Give a package of this machine to all workers, present and later. See `hpcgpu.upload_package`."""
        if self._asynchronous:
            return self._upload_later(path)
        self._now()
        with self._client(default=False) as client:
            return upload_package(client, path)

    async def _upload_later(self, path: str | Path) -> Any:
        await self._begin(self._reach_cluster)
        async with self._client(default=False) as client:
            return await upload(client, path)

    def checkpoint(self, data: Any, path: str | Path | None = None, *, name: str, keep: int = KEEP) -> Any:
        """Save results on the disk of the cluster; `path` is a path there. See `hpcgpu.checkpoint`."""
        self._check_usable()
        place = chosen(path, self._given.get("checkpoint_directory"))
        more = {"name": name, "keep": keep, "quiet": self.quiet}
        return with_client(self, futures_of(data), save_and_restore.checkpoint, data, place, **more)

    def restore(
        self, name: str, path: str | Path | None = None, *, resources: Mapping[str, float] | None = None
    ) -> Any:
        """Return the data of a checkpoint on the disk of the cluster. See `hpcgpu.restore`."""
        self._check_usable()
        place = chosen(path, self._given.get("checkpoint_directory"))
        more = {"name": name, "resources": resources, "quiet": self.quiet}
        return with_client(self, [], save_and_restore.restore, place, **more)

    def replay(self) -> AbstractContextManager[None]:
        """Let the futures of a block outlive the scheduler: ``with cluster.replay():``. See `hpcgpu.replay`."""
        reached = self._now()
        check(reached.scheduler.on_scheduler_end)
        return futures_to_replay.keep(lambda client: cluster_of(client) is reached)

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool = True) -> Logs:
        """Return the logs of its jobs, as one text.

        The arguments are those of Dask's clusters; all logs are returned in any case.
        """
        del cluster, scheduler, workers
        self._check_usable()
        return self._do(lambda: Logs({self._name: Log(self._call("logs").decode(errors="replace"))}))

    def report(self) -> str:
        """Return the bill: the cost and use of the jobs, and what would have cost less."""
        self._check_usable()
        return self._do(lambda: self._call("report").decode(errors="replace"))

    def detach(self) -> None:
        """Leave the cluster: its jobs continue. ``hpcgpu.connect("HOST:NAME")`` connects again."""
        self._check_usable()
        return self._do(self._detach, changes_cluster=True)

    def _detach(self) -> None:
        self._finalizer.detach()
        self._leave()

    def close(self, timeout: float | None = None) -> Any:
        """Close the cluster: its jobs end, unless ``shutdown_on_close=False``.

        Raises
        ------
        HostError
            The login node cannot be reached: the jobs may still run. Run `hpcgpu stop` later.
        """
        del timeout
        if self._asynchronous and in_event_loop():
            return asyncio.ensure_future(self._close_later(jobs=self._ends_jobs))
        return self._end(jobs=self._ends_jobs) if not self._closed else None

    async def _close_later(self, *, jobs: bool) -> None:
        for client in list(self._clients):
            await client.close()
        await self._begin(lambda: self._end(jobs=jobs) if not self._closed else None, changes_cluster=True)

    def _end(self, *, jobs: bool) -> None:
        if not self.directory:  # it was not started
            self._closed = True
            return
        self._finalizer.detach()
        _close(self._clients)
        try:
            if jobs:
                _stop(self.login, self.directory)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        if self._reached is not None:
            self._reached.close()

    def __enter__(self) -> Self:
        if self._asynchronous:
            raise TypeError("this cluster is asynchronous: write `async with`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self._close_later(jobs=self._ends_jobs)

    def __repr__(self) -> str:
        state = {Status.created: "waits for its scheduler", Status.running: "running"}.get(self.status, "closed")
        return f"<{type(self).__name__} {self._name} on {self.system} of {self.host}: {state}>"

    def _repr_html_(self) -> str:
        from hpcgpu.widget.snapshot_as_html import picture

        return picture(self._snapshot()) if self.directory and not self._closed else repr(self)

    def _ipython_display_(self, **_: Any) -> None:
        """Show the cluster in a notebook; live if the notebook has widgets."""
        if self._live is None:
            self._live = notebook_by_ssh.widget_of(self)
        notebook_by_ssh.show(self, self._live)


def _close(clients: weakref.WeakSet[Client]) -> None:
    """Close the clients of a cluster that ends: else they wait for its next scheduler."""
    for client in list(clients):
        if not client.asynchronous:
            client.close()


def _stop(login: Login, directory: str) -> None:
    """End the jobs of a cluster; if that is not certain, report what to do."""
    try:
        login.call_again(["stop", "--", directory.replace("$", "$$")], show_errors=False)
    except (HostError, KeyboardInterrupt) as error:
        name = PurePath(directory).name
        left = f"the jobs of cluster {name} may still run"
        later = f"Later, run: hpcgpu stop {shlex.quote(name)} --host {shlex.quote(login.host)}"
        if isinstance(error, HostError):
            raise HostError(f"{left}: {error}. {later}") from error
        write_stderr(f"{left}. {later}")
        raise


def _end(login: Login, directory: str, ends_jobs: bool, clients: weakref.WeakSet[Client]) -> None:
    """End the jobs of a cluster that the program has not closed."""
    if ends_jobs:
        try:
            _close(clients)
            _stop(login, directory)
        except (HpcgpuError, OSError) as error:
            write_stderr(error)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON can hold them; paths and times as texts.

    Raises
    ------
    OptionError
        A value cannot be sent.
    """
    with suppress(TypeError, ValueError):
        sent: dict[str, Any] = json.loads(json.dumps(dict(options), default=_text, allow_nan=False))
        return sent
    raise OptionError("an option has a value that cannot be sent to the login node: write numbers and texts")


def _text(value: Any) -> Any:
    if isinstance(value, PurePath):
        return value.as_posix()
    if hasattr(value, "total_seconds"):
        return value.total_seconds()
    raise TypeError
