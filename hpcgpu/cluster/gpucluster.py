"""The user's cluster object: a Dask cluster whose scheduler and workers are jobs of a batch queue.

This module starts, attaches, scales and detaches. `hpcgpu.cluster.cluster_inspection` shows the cluster,
`hpcgpu.manager.reconciler` manages its jobs, and `hpcgpu.cluster.spec_cluster` makes it a SpecCluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

from distributed import Client, futures_of
from distributed.deploy.spec import NoOpAwaitable

from hpcgpu.batch import batch_system
from hpcgpu.batch.base import BatchSystem
from hpcgpu.checkpoints import save_and_restore, versions
from hpcgpu.checkpoints.save_and_restore import KEEP, Checkpoint, Destination
from hpcgpu.client import futures_to_replay
from hpcgpu.client.connect import directory_of
from hpcgpu.client.hold import Hold, check_size
from hpcgpu.client.replay import check
from hpcgpu.client.upload_package import upload
from hpcgpu.cluster import notebook
from hpcgpu.cluster.adaptive_state import GPUAdaptive
from hpcgpu.cluster.cluster_by_ssh import ClusterBySSH
from hpcgpu.cluster.cluster_inspection import ClusterInspection
from hpcgpu.cluster.saved_results import chosen, with_client
from hpcgpu.configuration.login_node import on_login_node
from hpcgpu.configuration.resolve import resolve, resolve_group
from hpcgpu.errors import BatchError, ClusterExists, OptionError
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.jobs.adaptive_record import AdaptiveRecord
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.manager import start_cluster
from hpcgpu.manager.cancel_all import CLOSE_TIMEOUT
from hpcgpu.manager.manager import Manager
from hpcgpu.manager.worker_groups import script_of
from hpcgpu.notify import Callbacks
from hpcgpu.options import values
from hpcgpu.options.method_arguments import checked
from hpcgpu.options.shared_options_and_defaults import DEFAULT, Options
from hpcgpu.scaling import sizes_to_jobs
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, DeleteGroup, Scale, check_new
from hpcgpu.state.cluster_phases import Ownership
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory


class GPUCluster(ClusterInspection):
    """A Dask cluster of batch jobs; use the subclass of your batch system.

    Parameters
    ----------
    scheduler : dict or "local", optional
        Options of the scheduler job, or "local" to run the scheduler in this process.
    host : str, optional
        A login node, as `ssh` knows it: the cluster is there, and this program uses it by ssh. See the page on laptops.
    asynchronous : bool, default False
        Use from a running event loop, with ``await`` and ``async with``.
    on_ending : callable, optional
        Is called with the cluster, in a thread, before the walltime of the scheduler job ends; see `ending_notice`.
    **options
        See the page on options.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed. Nothing was submitted.
    ClusterExists
        A cluster of this name has jobs in the queue; see `if_exists`.
    BatchError
        The batch system is not installed here, or it does not answer.
    NotTrusted
        Another user can write to the cluster directory, or to a file that the jobs run.
    ClusterError
        The batch system refused a job, or the scheduler job ended before its scheduler answered. No job is left then.
    """

    def __new__(cls, *_: Any, host: str | None = None, **options: Any) -> Any:
        """Return a cluster of this machine; with ``host=`` a `ClusterBySSH` of a login node."""
        there = on_login_node(cls.system, host, options)
        return super().__new__(cls) if there is None else ClusterBySSH(cls.system, *there)

    def __init__(
        self,
        *given: Any,
        host: str | None = None,
        scheduler: dict[str, Any] | str | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        on_ending: Callable[[Any], object] | None = None,
        **options: Any,
    ) -> None:
        del host  # it is empty, or there is none: see `__new__`
        if given:
            cls = type(self).__name__
            raise OptionError(f"{cls} takes options by their names: write {cls}(name={str(given[0])[:60]!r}, ...)")
        self._callbacks = Callbacks.from_options(options, on_ending)
        requested: Options = resolve(self.system, {"scheduler": scheduler, **options})
        batch: BatchSystem = batch_system(self.system)
        batch.check()
        self._check(requested)
        if (there := start_cluster.existing(requested, batch)) is None:
            start_cluster.warn_of_options(requested)
            try:
                directory, number = start_cluster.claim(requested, batch)
            except ClusterExists:  # another program made it after the check above
                if (there := start_cluster.existing(requested, batch)) is None:
                    raise
        if there is not None:
            kept = requested.cluster
            self._attach(
                there, kept.shutdown_on_close, wait=kept.wait, asynchronous=asynchronous, loop=loop, notify=kept.notify
            )
            start_cluster.warn_of_differences(requested, self.options, self.manager.messages.log)
            return
        ends = requested.cluster.shutdown_on_close
        self.directory = directory
        try:
            manager = Manager(
                requested,
                Dispatcher(batch, directory, number),
                Ownership(ends, ends),
                callbacks=self._callbacks,
                cluster=self,
            )
            super().__init__(manager, asynchronous=asynchronous, loop=loop)
        except BaseException:
            # Ctrl-C, SIGTERM's SystemExit and errors alike: the event loop's thread may still be submitting.
            self._undo_start()
            raise

    @classmethod
    def _check(cls, options: Options) -> None:
        """Refuse options that cannot work on this machine."""
        start_cluster.check(options)

    def _undo_start(self) -> None:
        """Clean up after a constructor that raises."""
        if not hasattr(self, "manager"):
            return
        dispatcher = self._state.dispatcher
        with suppress(BatchError):
            dispatcher.cancel_all(CLOSE_TIMEOUT)
        with suppress(Exception):
            self.close(timeout=CLOSE_TIMEOUT)
        with suppress(BatchError, OSError):
            dispatcher.check_manager()
            if all(submit.refused for submit in self.directory.submits()):
                create_directory.abandon(self.directory, dispatcher.token)

    # Clusters that exist

    @classmethod
    def from_name(  # noqa: PLR0913  # users write these names
        cls,
        name: str | Path,
        *,
        shutdown_on_close: bool = True,
        wait: bool = True,
        asynchronous: bool = False,
        loop: Any = None,
        notify: str | Callable[[Any], object] | None = None,
        on_ending: Callable[[Any], object] | None = None,
        quiet: bool | None = None,
    ) -> Self:
        """Attach to a cluster that another program started, on this login node or on another.

        The cluster was detached, its program died, or its program still runs; a program that still runs stops scaling
        it. If this program ends without `close`, a detached cluster continues.

        Parameters
        ----------
        name : str or Path
            Name of the cluster, or the path of its directory, such as one that ``hpcgpu render`` has made.
        shutdown_on_close : bool, default True
            Whether `close` ends its jobs. `detach` leaves them in any case.
        wait : bool, default True
            Wait for a scheduler job that has not started yet. A scheduler that runs must answer in any case.
        asynchronous : bool, default False
            Use from a running event loop: ``await`` it.
        notify : str or callable, optional
            Default: the command with which the cluster was started.
        on_ending : callable, optional
            As with a new cluster.
        quiet : bool, optional
            Show nothing. Default: as the cluster was started.

        Raises
        ------
        NoCluster
            There is no cluster of that name.
        OtherFormat
            Another version of hpcgpu made the cluster.
        NotTrusted
            Another user can write to its directory.
        Damaged
            A file of its directory does not hold what hpcgpu writes.
        BatchError
            The batch system does not answer, or the cluster is in another queue.
        ClusterError
            It was closed, or none of its jobs is left. Or its scheduler does not answer, or has other software than
            this program: then the cluster keeps its present manager.
        """
        self, options = object.__new__(cls), dict[str, Any](notify=notify, quiet=quiet)
        self._callbacks = Callbacks.from_options(options, on_ending)
        self._attach(locate(name), shutdown_on_close, wait=wait, asynchronous=asynchronous, loop=loop, **options)
        return self

    def _attach(
        self,
        directory: ClusterDirectory,
        ends_jobs: bool,
        *,
        wait: bool,
        asynchronous: bool,
        loop: Any,
        **given: Any,
    ) -> None:
        """Become the manager of a cluster that exists. The options in `given` replace its own."""
        self.directory = directory
        manager = Manager.of_existing(
            directory,
            batch_system(self.system),
            ends_jobs=ends_jobs,
            wait=wait,
            callbacks=self._callbacks,
            cluster=self,
            **given,
        )
        try:
            super().__init__(manager, asynchronous=asynchronous, loop=loop)
        except BaseException:
            manager.state.ownership.ends_jobs = False
            with suppress(Exception):
                if not asynchronous:  # it was not attached yet, so it keeps the lease that it had
                    self.sync(manager.close, release=False, callback_timeout=CLOSE_TIMEOUT)
                self.close(timeout=CLOSE_TIMEOUT)
            raise

    def detach(self) -> Awaitable[None] | None:
        """Leave the cluster: its jobs continue without this program. `from_name` attaches to it again.

        Jobs that wait in the queue stay there. The cluster ends by ``idle_timeout`` if it has one, by its walltime, by
        ``hpcgpu stop NAME``, or when a program that attached to it closes it.

        Raises
        ------
        ClusterError
            The scheduler runs in this program (``scheduler="local"``), or another program manages the cluster.
        """
        self._check_usable()
        detached: Awaitable[None] | None = self.sync(self._detach)
        if not self.asynchronous:
            super().close()  # this program has left the cluster, so this ends only the event loop
        return detached

    # Work that is not tasks

    def hold(
        self,
        n_workers: int | None = None,
        *,
        jobs: int | None = None,
        resources: Mapping[str, float] | None = None,
        timeout: float | str | None = None,
    ) -> Hold:
        """Hold workers for a block of a program: ``with cluster.hold(8) as workers:``. See `hpcgpu.hold`.

        A cluster that adapts requests the jobs for it. Before the block begins, it is shown which job ends first.

        Parameters
        ----------
        n_workers : int, optional
        jobs : int, optional
            So many workers as this number of jobs of the default group has. They may be in other jobs and groups.
        resources : mapping, optional
            The Dask resources that each of them must have. Default: workers with a GPU.
        timeout : number or str, optional
            Seconds to wait, or a text with a unit. Default: none; the queue may take days.

        Raises
        ------
        OptionError
            A value that is not allowed, or neither or both of `n_workers` and `jobs`.
        ClusterError
            The cluster will not have so many workers, or a worker was lost.
        TimeoutError
            Not so many workers were free within `timeout`.
        """
        check_size(n_workers, jobs)
        self._check_usable()
        number = n_workers or (jobs or 0) * self.options.worker.workers_per_job
        return Hold(
            self,
            number,
            resources=resources,
            timeout=values.time_limit("hold: timeout", timeout),
            quiet=self.options.cluster.quiet,
        )

    # Packages

    def upload_package(self, path: str | Path) -> list[str] | Awaitable[list[str]]:
        """Give a package of your own to all workers, present and later, and to the scheduler.

        See `hpcgpu.upload_package`.

        Parameters
        ----------
        path : str or Path
            A wheel, a source tree, or the directory of a package.

        Returns
        -------
        list of str
            What tasks can import now.

        Raises
        ------
        OptionError
            There is no package, it is too large, or it has what cannot be uploaded. Nothing was uploaded.
        NotTrusted
            Other users can change it.
        ClusterError
            The cluster has failed, was closed, or its directory was removed.
        """
        self._check_usable()
        return self.sync(self._upload_package, path)  # type: ignore[no-any-return]

    async def _upload_package(self, path: str | Path) -> list[str]:
        async with Client(self, asynchronous=True, set_as_default=False) as client:
            return await upload(client, path)

    # Scaling

    @checked(n_workers="write scale(n): it counts Dask workers", workers="write scale(n): it counts Dask workers")
    def scale(
        self,
        n: int | None = None,
        memory: str | int | None = None,
        cores: int | None = None,
        *,
        jobs: int | None = None,
        gpus: int | None = None,
        worker_group: str = DEFAULT,
    ) -> Awaitable[None] | None:
        """Set the size of a group of workers, in one of these units, and end its adaptive scaling.

        The size is rounded up to whole jobs.

        Data moves to the jobs that stay. If none stays, after ``scale(0)``, it is lost.

        Parameters
        ----------
        n : int, optional
            Dask workers: one per GPU.
        memory : str or int, optional
            Memory of all workers, such as "1TB"; needs the option `memory`.
        cores : int, optional
            Threads of all workers.
        jobs : int, optional
            Worker jobs.
        gpus : int, optional
            GPUs of all workers.
        worker_group : str, optional
            See `add_worker_group`.

        Raises
        ------
        OptionError
            A negative number, no unit at all, or no such group.
        ClusterError
            The cluster has failed or is closed, or another program manages it.
        """
        group = self._state.registry.group_named(worker_group)
        target = sizes_to_jobs.jobs_for(group.options, n=n, memory=memory, cores=cores, jobs=jobs, gpus=gpus)
        self._order(Scale(group.name, target))
        return NoOpAwaitable() if self.asynchronous else None

    scale_up = scale

    @checked(
        Adaptive="leave it out, because hpcgpu has its own rules (see the page on adaptive scaling)",
        interval="leave it out, because hpcgpu decides every second, and whenever something has changed",
        wait_count="write idle_timeout, which says how long a job without work is kept",
        worker_key="leave it out, because hpcgpu keeps and releases whole jobs",
        jobs="write minimum_jobs and maximum_jobs",
        n="write minimum and maximum",
    )
    def adapt(  # noqa: PLR0913  # users write these names
        self,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        minimum_gpus: int | None = None,
        maximum_gpus: int | None = None,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        minimum_memory: str | int | None = None,
        maximum_memory: str | int | None = None,
        backlog: int | None = None,
        idle_timeout: float | str | None = None,
        interactive: bool | None = None,
        target_duration: float | str | None = None,
        maximum_gpu_hours: float | None = None,
        worker_group: str = DEFAULT,
    ) -> GPUAdaptive:
        """Let the amount of work determine the size of a worker group, in whole jobs; see the page on scaling.

        Jobs stay while they are needed to hold results that clients still want.

        Parameters
        ----------
        minimum, maximum : int, optional
            Dask workers. A maximum is needed, in one of these units; it is rounded down to whole jobs, the minimum up.
        minimum_jobs, maximum_jobs : int, optional
            Worker jobs.
        minimum_gpus, maximum_gpus : int, optional
            GPUs.
        minimum_cores, maximum_cores : int, optional
            Threads of workers.
        minimum_memory, maximum_memory : str or int, optional
            Memory of all workers; needs the option `memory`.
        backlog : int, optional
            Jobs that may wait in the queue at a time. Default: as many as the maximum.
        idle_timeout : float or str, optional
            How long a job without work is kept, seconds or "5m". Default: as long as it would have paid in the
            gaps between work so far; in the first gaps 2 s, or minutes if `interactive`.
        interactive : bool, optional
            Whether a person works with the cluster, and reads and thinks between two pieces of work. Default: whether
            this Python is a notebook, IPython or a prompt.
        target_duration : float or str, optional
            The time in which the known work should be done: a longer time means fewer jobs. Default: dask's
            ``distributed.adaptive.target-duration``.
        maximum_gpu_hours : float, optional
            Budget of the group's GPUs, counted from the starts and ends of its jobs, also before this call. You are
            warned when 80 % are used. When it is used up, all its jobs end: running tasks get 20 s, and the futures of
            results that no other worker can hold raise an error.
        worker_group : str, optional
            See `add_worker_group`.

        Returns
        -------
        GPUAdaptive

        Raises
        ------
        OptionError
            Numbers that are not allowed, or there is no such group.
        ClusterError
            The cluster has failed or is closed, or another program manages it.
        """
        group = self._state.registry.group_named(worker_group)
        limits = sizes_to_jobs.limits(
            group.options,
            minimum=minimum,
            maximum=maximum,
            minimum_jobs=minimum_jobs,
            maximum_jobs=maximum_jobs,
            minimum_gpus=minimum_gpus,
            maximum_gpus=maximum_gpus,
            minimum_cores=minimum_cores,
            maximum_cores=maximum_cores,
            minimum_memory=minimum_memory,
            maximum_memory=maximum_memory,
            backlog=backlog,
            idle_timeout=idle_timeout,
            interactive=notebook.interactive() if interactive is None else interactive,
            maximum_gpu_hours=maximum_gpu_hours,
        )
        seconds = sizes_to_jobs.target_duration(target_duration)
        self._order(Adapt(group.name, limits, seconds))
        return GPUAdaptive(group, group.adaptive or AdaptiveRecord(limits, seconds), self._order)

    def add_worker_group(self, name: str, *, jobs: int = 0, **options: Any) -> None:
        """Add a group of worker jobs with other options: GPUs of another type, much memory, another queue.

        Dask's own ``resources`` annotations choose the tasks that run there.

        Parameters
        ----------
        name : str
        jobs : int, default 0
            Worker jobs to begin with.
        **options
            Options of a worker job. The group takes account, walltime, environment and all other inherited options from
            the default group, unless you give them.

        Raises
        ------
        OptionError
            An unknown option, a value that is not allowed, or a group of that name exists.
        ClusterError
            The cluster has failed or is closed, or another program manages it.
        """
        self._check_usable()
        check_new(name, self._state.registry.groups)
        worker = resolve_group(name, options, self.options)
        start_cluster.warn_of_end(self.options, worker)
        target = sizes_to_jobs.jobs_for(worker, jobs=jobs, call="add_worker_group: {}")
        command = AddGroup(name, target, script=script_of(name, worker, self.options, self.directory.path))
        self._act(lambda: self.manager.groups.add(command, worker))

    def delete_worker_group(self, name: str) -> None:
        """Drain all jobs of a group, and delete the group.

        A job whose data fits nowhere else stays until the data is released.

        Raises
        ------
        OptionError
            There is no such group, or it is the default group.
        ClusterError
            The cluster has failed or is closed, or another program manages it.
        """
        self._act(lambda: self.manager.groups.delete(DeleteGroup(name)))

    # Results

    def checkpoint(
        self, data: Any, path: str | Path | None = None, *, name: str, keep: int = KEEP
    ) -> Checkpoint | Awaitable[Checkpoint]:
        """Save results of this cluster on the shared disk, for this cluster and for later ones.

        See `hpcgpu.checkpoint`. A dataset that is published under this name is published again by the next scheduler,
        if the scheduler is restarted.

        Parameters
        ----------
        data : dask collection, future, list, tuple or dict
            Collections and futures, also in lists, tuples and dictionaries.
        path : str or Path, optional
            The directory in which the checkpoint is. Default: the option `checkpoint_directory`.
        name : str
        keep : int, default 2
            How many versions are kept.

        Raises
        ------
        OptionError
            `name` cannot be the name of a directory, or there is neither `path` nor `checkpoint_directory`.
        CheckpointError
            It was not saved. The last version stays.
        ClusterError
            The cluster has failed, or was closed.
        """
        options, keep = self.options.cluster, values.positive("checkpoint: keep", keep)
        place = versions.directory_of(chosen(path, options.checkpoint_directory), name)
        self._check_usable()
        to = Destination(directory=place, keep=keep, quiet=options.quiet, cluster=self.directory)
        return with_client(self, futures_of(data), save_and_restore.save, data, to)  # type: ignore[no-any-return]

    def restore(
        self, name: str, path: str | Path | None = None, *, resources: Mapping[str, float] | None = None
    ) -> Any:
        """Return the data of a checkpoint, which this cluster or an earlier one has saved. See `hpcgpu.restore`.

        Parameters
        ----------
        name : str
        path : str or Path, optional
            The directory in which the checkpoint is. Default: the option `checkpoint_directory`.
        resources : mapping, optional

        Raises
        ------
        OptionError
            There is neither `path` nor `checkpoint_directory`.
        ClusterError
            The cluster has failed, or was closed.
        """
        place = chosen(path, self.options.cluster.checkpoint_directory)
        self._check_usable()
        more = {"name": name, "resources": resources, "quiet": self.options.cluster.quiet}
        return with_client(self, [], save_and_restore.restore, place, **more)

    def replay(self) -> AbstractContextManager[None]:
        """Let the futures of a block outlive the scheduler: ``with cluster.replay():``, also if it is asynchronous.

        If the scheduler ends and another one follows it, what the clients of this program hold then and have submitted
        in the block is submitted again, under the same keys. See `hpcgpu.replay`.

        Raises
        ------
        OptionError
            The cluster does not have ``on_scheduler_end="restart"``.
        ClusterError
            The cluster has failed, or was closed.
        """
        self._check_usable()
        check(self.options.cluster.on_scheduler_end)
        path = self.directory.path
        return futures_to_replay.keep(lambda client: client.cluster is self or directory_of(client) == path)
