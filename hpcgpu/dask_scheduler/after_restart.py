"""What the next scheduler of a cluster gets: uploaded packages, and published datasets that were saved.

It runs in a thread with a client of its own, because data of the user are unpickled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from distributed import Client
from distributed.scheduler import Scheduler

from hpcgpu.dask_scheduler.published_datasets import client_of
from hpcgpu.dask_worker.uploaded_package import send_package
from hpcgpu.store import saved_datasets, uploaded_packages
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.saved_datasets import SavedDataset
from hpcgpu.store.uploaded_packages import Package

logger = logging.getLogger("distributed.hpcgpu")


@dataclass(frozen=True)
class Kept:
    """What is kept of a cluster for its next scheduler."""

    packages: list[Package]
    datasets: list[SavedDataset]

    @classmethod
    def read(cls, directory: ClusterDirectory) -> Kept:
        """Return what is kept in a cluster directory."""
        return cls(uploaded_packages.kept(directory), saved_datasets.read(directory))

    def __bool__(self) -> bool:
        return bool(self.packages or self.datasets)

    def restore(self, scheduler: Scheduler, directory: ClusterDirectory) -> None:
        """Restore it in a scheduler that has started. Workers read the datasets when they come.

        What cannot be restored is logged: it must not keep the scheduler from starting.
        """
        with client_of(scheduler, directory) as client:
            for package in self.packages:  # first: the datasets may need them
                try:
                    client.sync(send_package, client, package)
                except Exception as error:
                    logger.warning("hpcgpu: cannot install the package %s again: %r", package.name, error)
            for dataset in self.datasets:
                _publish(client, dataset)


def _publish(client: Client, dataset: SavedDataset) -> None:
    """Publish the newest version of a dataset that can be read.

    Its results get the keys that they had, so that a program that holds them finds them.
    """
    from hpcgpu.checkpoints import versions
    from hpcgpu.checkpoints.save_and_restore import load

    for folder in versions.numbered(Path(dataset.checkpoint)):
        try:
            versions.check(folder.parent)
            data, _ = client.sync(load, client, folder, known=set(client.who_has()))
            client.publish_dataset(data, name=dataset.name)
        except Exception as error:
            logger.warning("hpcgpu: cannot publish dataset %s again from %s: %r", dataset.name, folder, error)
        else:
            logger.info("hpcgpu: published dataset %s again, from %s", dataset.name, folder)
            return
    logger.warning("hpcgpu: dataset %s is not published again", dataset.name)
