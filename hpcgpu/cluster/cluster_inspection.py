"""What a cluster shows to its user: jobs, workers, logs, scripts, fabric and dashboard.

It also has the wait for workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client
from distributed.core import Status
from distributed.exceptions import WorkerStartTimeoutError
from distributed.utils import Log, Logs

from hpcgpu.batch.base import BatchSystem
from hpcgpu.client import jupyter_dashboard_link
from hpcgpu.client.dashboard_forwarding import proven_link
from hpcgpu.cluster import notebook
from hpcgpu.cluster.spec_cluster import Adapter
from hpcgpu.dask_scheduler.rpc_types import GPUState
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.job_table import JobTable
from hpcgpu.errors import ClusterError, Damaged
from hpcgpu.existing_clusters.between_schedulers import Restart, between_schedulers
from hpcgpu.existing_clusters.snapshot import Observer, Snapshot, assemble
from hpcgpu.fabric import connection_report
from hpcgpu.fabric.connection_report import Fabric
from hpcgpu.manager import wait_for_workers
from hpcgpu.options import values
from hpcgpu.posix import checked_files
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.report.cluster_report import Report
from hpcgpu.report.cluster_report import report as report_of
from hpcgpu.runtime import dashboard_access
from hpcgpu.scaling import worker_names
from hpcgpu.scripts import render
from hpcgpu.store.contact import Contact
from hpcgpu.store.removed_directory import directory_exists
from hpcgpu.widget.snapshot_as_html import picture

if TYPE_CHECKING:
    from hpcgpu.widget.notebook_widget import ClusterWidget


class ClusterInspection(Adapter):
    """The part of `hpcgpu.cluster.gpucluster.GPUCluster` that changes nothing."""

    #: The widget that shows it in notebooks; None before it was shown in one.
    _live: ClusterWidget | None = None
    #: Reads its state when this program does not manage its jobs any more.
    _observer: Observer | None = None
    #: The number of the notebook cell that shows its start.
    _cell: int | None = None

    @property
    def batch(self) -> BatchSystem:
        """Its batch system."""
        return self._state.dispatcher.batch

    @property
    def managing(self) -> bool:
        """Whether this program manages the cluster's jobs: it is open, has not failed, and nobody has taken it over."""
        return self.manager.managing

    @property
    def fabric(self) -> Fabric:
        """The protocol and the transports that the workers really use, and whether they use RDMA and NVLink.

        UCX on the workers reports them.

        An awaitable if the cluster is asynchronous.

        Raises
        ------
        ClusterError
            The scheduler is not there.
        """
        self._check_usable()
        if self.status != Status.running:
            raise ClusterError(
                f"cluster {self.name} is {self.status.name}: its fabric is known only while its scheduler runs"
            )
        return self.sync(self._fabric)  # type: ignore[no-any-return]

    async def _fabric(self) -> Fabric:
        self._state.check()
        contact = self._contact
        assert contact is not None
        workers = (await self.scheduler_comm.identity(n_workers=-1))["workers"]
        links, _ = await connection_report.query_links(self.scheduler_comm, workers)
        return Fabric(contact.workers.split("://", 1)[0], contact.fabric, contact.interface, links)

    @property
    def _contact(self) -> Contact | None:
        if self._state.phase.superseded and self.same_directory:  # the other program may have restarted the scheduler
            with suppress(OSError, Damaged):
                return self.directory.contact()
        return self._state.scheduler.contact if self._state.scheduler is not None else None

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard; empty while there is none.

        In a notebook of a Jupyter server that has our extension, the link leads to that server, behind Jupyter's login.
        If Jupyter does not know its own address in your browser, the link is only a path, such as
        ``/user/ada/hpcgpu/dashboard/demo/status``. Then put ``https://`` and the host that your browser shows before
        it. Outside such a notebook the dashboard requires a token, see `dashboard_link_with_token`.
        """
        return jupyter_dashboard_link.with_host(self._dashboard_path)

    @property
    def _dashboard_path(self) -> str:
        """The address of the dashboard for a page of Jupyter, where a path is enough."""
        plain = dashboard_access.link(self._contact)
        return jupyter_dashboard_link.dashboard_link(self.directory.path, running=bool(plain)) or plain

    def dashboard_link_with_token(self) -> str:
        """Return the link that opens the dashboard in a browser; empty while there is none.

        Everybody who has the link can read the dashboard: do not keep it in a notebook that you share.

        Raises
        ------
        ClusterError
            The dashboard does not answer, or another program, which must not get the token, has its port.
        """
        if self._state.scheduler is not None and self._state.scheduler.in_process:  # this program itself listens
            return dashboard_access.link_with_token(self.directory, self._contact)
        return proven_link(self.directory, self._contact)

    def wait_for_workers(self, n_workers: int | None = None, timeout: float | str | None = None) -> None:
        """Wait until this number of workers is connected. Show the progress; raise an error if it cannot be reached.

        Parameters
        ----------
        n_workers : int, optional
            Default: all workers of the jobs that the cluster requests.
        timeout : number or str, optional
            Seconds, or a text with a unit. Default: none; the queue may take days.

        Raises
        ------
        OptionError
            `timeout` is not a time.
        ClusterError
            Jobs were refused or failed too often, the scheduler has ended, or the cluster requests fewer workers.
        WorkerStartTimeoutError
            The workers were not connected within `timeout`.
        """
        if n_workers is not None and (isinstance(n_workers, bool) or not isinstance(n_workers, int) or n_workers < 1):
            raise ValueError(f"`n_workers` must be a positive integer. Instead got {n_workers}.")
        limit = values.time_limit("wait_for_workers: timeout", timeout)
        self._check_usable()
        return self.sync(self._wait_until_connected, n_workers, limit)  # type: ignore[no-any-return]

    async def _wait_until_connected(self, n_workers: int | None, timeout: float | None) -> None:
        if self.manager.starting:
            begun = time.monotonic()
            try:
                await asyncio.wait_for(self._begin(), timeout)
            except TimeoutError as error:
                raise WorkerStartTimeoutError(0, n_workers or self._state.registry.wanted_workers, timeout) from error
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - begun))
        await wait_for_workers.wait_for_workers(self._state, n_workers, timeout, quiet=self.options.cluster.quiet)

    @property
    def jobs(self) -> JobTable:
        """The jobs of the cluster: all that have not ended, and the last thousand that have.

        Each has its id, kind, name, state, reason in words, seconds waited, node and workers.

        Connected workers are shown as they are now. The queue's status may be some seconds old: the table shows how
        old. `settle` polls the queue again.
        """
        if self.reads_only:
            return JobTable(self._now(self._snapshot([]), soon=True).jobs)
        return self.manager.jobs

    @property
    def same_directory(self) -> bool:
        """Whether the directory still belongs to this cluster: a later cluster may have its name."""
        return self.directory.has_token(self._state.dispatcher.token)

    def snapshot(self) -> Snapshot:
        """Return the cluster as it is now: jobs, GPUs, groups, time left, GPU hours.

        Works also after `detach`, and after another program has taken the cluster over. Then it returns what
        `hpcgpu.snapshot` shows.

        An awaitable if the cluster is asynchronous.
        """
        if self.asynchronous:
            return self.sync(self._async_snapshot)  # type: ignore[no-any-return]
        ended = self.status == Status.closed  # its event loop has ended, too
        return self._now(self._snapshot([]) if ended else self.sync(self._query_snapshot), soon=True)

    async def _async_snapshot(self) -> Snapshot:
        own = await self._query_snapshot()
        return await in_thread(lambda: self._now(own, soon=True))

    @property
    def left(self) -> bool:
        """Whether this program has left the cluster, and so only reads its state."""
        return self._state.phase.left

    @property
    def reads_only(self) -> bool:
        """Whether this program only reads the cluster's state: it has left the cluster, or the cluster is lost."""
        # do not read the state of a later cluster of this name
        return (self.left or bool(self._state.phase.lost)) and self.same_directory

    def _now(self, own: Snapshot, *, soon: bool = False) -> Snapshot:
        """Return this snapshot, or the snapshot that other programs get if this program only reads the cluster.

        If `soon`, the queue is polled now; otherwise as often as the cluster's cadence allows.
        """
        if not self.reads_only:
            return own
        self._observer = self._observer or Observer(self.directory)
        if soon:
            self._observer.soon()
        now = self._observer.snapshot()
        ended = now.state in ("closed", "ended")
        # the own problem may name a take-over, which makes no sense after the cluster has ended
        problems = [self._state.phase.lost if ended else own.problem, now.problem]
        return replace(now, problem="; ".join(filter(None, dict.fromkeys(problems))))

    async def _query_snapshot(self) -> Snapshot:
        client, gpus = await in_thread(self._state.present_client), list[GPUState]()
        if client is not None:
            with suppress(OSError, TimeoutError):
                if self.left:  # the stream of events is not opened again
                    await client.workers()
                else:
                    gpus = await client.gpus()
        return self._snapshot(gpus)

    def _snapshot(self, gpus: Iterable[GPUState]) -> Snapshot:
        state = self._state
        now, lost = state.now, state.phase.lost
        jobs = [job.info(now=now) for job in list(state.registry.jobs.values())]
        states = {Status.running: "running", Status.closed: "closed", Status.closing: "closed", Status.failed: "ended"}
        restart = self._restart(jobs) if state.phase.restarting else None
        running, contact, manager = self.status == Status.running, self._contact, state.dispatcher.directory.manager()
        return assemble(
            jobs,
            gpus,
            [group.state(now=now) for group in state.registry.all_groups()],
            now=now,
            name=state.name,
            system=self.system,
            directory=str(self.directory.path),
            state="restarting" if state.phase.restarting else states.get(self.status, "waiting"),
            workers=sum(job.workers for job in jobs),
            scheduler=contact.client if contact is not None and running else "",
            dashboard=self._dashboard_path if running else "",
            fabric=contact.fabric if contact is not None and running else "",
            manager="; ".join(filter(None, [str(manager or ""), self.reconciler.about()])) if running else "",
            detached=state.wanted.detached,
            restart=restart.sentences if restart is not None else [],
            warnings=[text for text in self.reconciler.warnings() if text != lost],
            end=lost,
            problem=state.phase.not_ours,
        )

    def _restart(self, jobs: Sequence[JobInfo]) -> Restart | None:
        """Return what happens until the next scheduler is there."""
        return between_schedulers(self.directory, jobs, now=self._state.now)

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        """Return a static picture of the cluster."""
        still = self.asynchronous or self._in_program
        return picture(self._snapshot([]) if still else self.snapshot())

    def _ipython_display_(self, **_: Any) -> None:
        """Show the cluster in a notebook; live if the notebook has widgets."""
        if self._cell is not None and self._cell == notebook.cell():  # this cell already shows its start
            return
        if self._live is None:
            self._live = notebook.widget_of(self)
        notebook.show(self, self._live)

    async def _begin(self) -> None:
        if not self.manager.begun and not self.options.cluster.quiet and (widget := notebook.widget_of(self)):
            self._live = widget
            self._cell = notebook.show(self, widget, now=True)
        await super()._begin()

    def report(self) -> Report:
        """Return the bill: the cost and use of the jobs, and what would have cost less. Works also after the end.

        It shows itself as a table; `report().as_json()` is its content, `report().page()` is an HTML page.

        An awaitable if the cluster is asynchronous.
        """
        if self.status == Status.closed and not self.asynchronous:  # its event loop has ended
            return report_of(self.directory)
        return self.sync(in_thread, report_of, self.directory)  # type: ignore[no-any-return]

    def scheduler_script(self) -> str:
        """Return the script of the scheduler job, as it is in the cluster directory."""
        if self.options.scheduler is None:
            raise ClusterError("scheduler='local': the scheduler runs in this process, so there is no scheduler job")
        return _script(self.directory.path / render.script_name(self.system, "scheduler"))

    def job_script(self) -> str:
        """Return the script of the worker jobs, as it is in the cluster directory."""
        return _script(self.directory.path / render.script_name(self.system, "worker"))

    def get_client(self) -> Client:
        """Return the current client of the cluster, or a new one.

        It is an awaitable if the cluster is asynchronous.

        Raises
        ------
        ClusterError
            The cluster has failed, was closed, or its directory was removed.
        """
        self._check_usable()
        if directory_exists(self.directory, self._state.dispatcher.token) is False:
            raise ClusterError(
                f"nothing can connect to cluster {self.name}, because its directory {self.directory.path} is gone, and "
                "the credentials with it. If it does not come back within minutes, the jobs of the cluster end"
            )
        return super().get_client()

    def settle(self) -> Awaitable[None] | None:
        """Wait until the requested jobs are submitted, and the draining jobs have finished and are cancelled.

        Raises
        ------
        ClusterError
            The cluster has failed, or a job was refused.
        """
        self._check_usable()
        return self.sync(self.manager.settle)  # type: ignore[no-any-return]

    async def _collect_logs(self, cluster: bool, scheduler: bool, workers: bool | Iterable[str]) -> Logs:
        return await in_thread(self._read_logs, cluster, scheduler, workers)

    def _read_logs(self, cluster: bool, scheduler: bool, workers: bool | Iterable[str]) -> Logs:
        logs, jobs = Logs(), dict(self._state.registry.jobs)
        if cluster:
            logs["Cluster"] = Log(self.manager.messages.text())
        chosen = None if isinstance(workers, bool) else {worker_names.job_of(w, jobs) or str(w) for w in workers}
        for job in jobs.values():
            wanted = scheduler if job.kind == "scheduler" else (workers if chosen is None else job.name in chosen)
            if wanted and job.job_id is not None:
                logs[f"{job.name} (job {job.job_id})"] = Log(_read(job.log))
        return logs

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True) -> Logs:
        """Return the logs of all jobs, also of jobs that have ended. Works also after the cluster was closed.

        Parameters
        ----------
        cluster : bool, default True
            The log of the cluster itself: the actions of this program, and its failures.
        scheduler : bool, default True
        workers : bool or iterable of str, default True
            All worker jobs, none, or the names of jobs or workers.

        Returns
        -------
        distributed.utils.Logs
            Text by job.
        """
        if self.status == Status.closed and not self.asynchronous:  # its event loop has ended
            return self._read_logs(cluster, scheduler, workers)
        return self.sync(self._collect_logs, cluster, scheduler, workers)

    def __repr__(self) -> str:
        if not hasattr(self, "manager"):
            return f"<{type(self).__name__}: not started>"
        if self.status == Status.failed:
            return f"{type(self).__name__}({self.name!r}, status=failed): {self._state.phase.lost}"
        if self.left:
            ended = self.same_directory and self.directory.closing
            status, why = ("closed", "it has ended") if ended else (self.status.name, self._state.phase.not_ours)
            return f"{type(self).__name__}({self.name!r}, status={status}): {why}"
        active = self.workers
        states = Counter(job.state for job in self.jobs if job.name in active)
        jobs = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        restarting = self._state.phase.restarting
        restart = self._restart(self.jobs) if restarting else None
        status = "restarting" if restarting else self.status.name
        text = f"{type(self).__name__}({self.name!r}, {self.scheduler_address!r}, status={status}"
        text += f", workers={len(self.scheduler_info['workers'])}/{len(self.plan)}, worker jobs: {jobs})"
        paused = [group.failures.paused for group in self._state.registry.groups.values() if group.failures.paused]
        notes = [
            text.split("\n", 1)[0]
            for text in (
                self._state.phase.lost,
                *(restart.sentences if restart is not None else ()),
                *paused,
                *self.reconciler.lost_jobs.shortages(),
                *self.reconciler.warnings(),
            )
            if text
        ]
        return "\n".join([text, *notes])


def _script(path: Path) -> str:
    return checked_files.read(path).decode()


def _read(path: Path) -> str:
    try:
        return printable(checked_files.end(path).decode(errors="replace"), None, lines=True)
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
