"""The part of a cluster that saves results on the shared disk, and restores them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from distributed import Future, futures_of

from hpcgpu.checkpoints import save_and_restore, versions
from hpcgpu.checkpoints.save_and_restore import KEEP, Checkpoint, Destination
from hpcgpu.client import futures_to_replay
from hpcgpu.client.connect import directory_of
from hpcgpu.client.replay import check
from hpcgpu.cluster.cluster_inspection import ClusterInspection
from hpcgpu.errors import OptionError
from hpcgpu.options import values


class SavedResults(ClusterInspection):
    """The part of `hpcgpu.cluster.gpucluster.GPUCluster` that has to do with checkpoints."""

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
        place, quiet = versions.directory_of(self._checkpoint_directory(path), name), self.options.cluster.quiet
        to = Destination(
            directory=place, keep=values.positive("checkpoint: keep", keep), quiet=quiet, cluster=self.directory
        )
        return self._with_client(futures_of(data), save_and_restore.save, data, to)  # type: ignore[no-any-return]

    def restore(
        self, name: str, path: str | Path | None = None, *, resources: Mapping[str, float] | None = None
    ) -> Any:
        """Return the data of a checkpoint, which this cluster or an earlier one has saved.

        All but the default of `path` is as in `hpcgpu.restore`.

        Parameters
        ----------
        name : str
        path : str or Path, optional
            The directory in which the checkpoint is. Default: the option `checkpoint_directory`.
        resources : mapping, optional

        Returns
        -------
        dask collection, future, list, tuple or dict

        Raises
        ------
        OptionError
            There is neither `path` nor `checkpoint_directory`.
        ClusterError
            The cluster has failed, or was closed.
        """
        place, quiet = self._checkpoint_directory(path), self.options.cluster.quiet
        return self._with_client([], save_and_restore.restore, place, name=name, resources=resources, quiet=quiet)

    def replay(self) -> AbstractContextManager[None]:
        """Let the futures of a block outlive the scheduler: ``with cluster.replay():``.

        If the scheduler ends and another one follows it, what the clients of this program hold then and have submitted
        in the block is submitted again, under the same keys. See `hpcgpu.replay`.

        Returns
        -------
        context manager
            ``with``, also for an asynchronous cluster.

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

    def _checkpoint_directory(self, path: str | Path | None) -> str | Path:
        return chosen(path, self.options.cluster.checkpoint_directory)

    def _with_client(self, futures: list[Future], function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function with the client of these futures, or else with the client of this cluster."""
        self._check_usable()
        return with_client(self, futures, function, *arguments, **named)


def chosen(path: str | Path | None, of_cluster: str | Path | None) -> str | Path:
    """Return the directory of checkpoints.

    Raises
    ------
    OptionError
        There is none.
    """
    if (place := path or of_cluster) is None:
        raise OptionError(
            "checkpoint: write where it is, as path=... or for the cluster as checkpoint_directory=..., for "
            "example '$SCRATCH/checkpoints': a directory that all nodes see, with room for the data"
        )
    return place


def with_client(
    cluster: Any, futures: list[Future], function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call a function with the client of these futures, or else with the client of a cluster."""
    client = futures[0].client if futures else cluster.get_client()
    if not cluster.asynchronous:
        return function(client, *arguments, **named)

    async def call() -> Any:
        return await function(await client, *arguments, **named)

    return call()
