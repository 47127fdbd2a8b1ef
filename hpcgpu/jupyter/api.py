"""The API: clusters, their state and logs, and what changes them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hpcgpu.batch import registry
from hpcgpu.cluster import requests
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.display.words import listed
from hpcgpu.errors import HpcgpuError, OptionError
from hpcgpu.jupyter import starting
from hpcgpu.jupyter.handling import Handler, answering, cluster, failure
from hpcgpu.jupyter.snapshots import Snapshots
from hpcgpu.options import profiles
from hpcgpu.posix.threads import in_thread
from hpcgpu.remote.logs import end_of
from hpcgpu.remote.lookup import directories, renamed, stop_all, unclosed
from hpcgpu.remote.snapshot import SnapshotJSON
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["Clusters", "Logs", "OneCluster", "Profiles", "Request"]

#: What `scale` and `adapt` take.
_SIZES = ("jobs", "gpus")
_LIMITS = ("minimum_jobs", "maximum_jobs", "minimum_gpus", "maximum_gpus", "idle_timeout", "maximum_gpu_hours")


class _WithSnapshots(Handler):
    def initialize(self, snapshots: Snapshots) -> None:
        self.snapshots = snapshots

    async def snapshot(self, directory: ClusterDirectory) -> SnapshotJSON:
        """Return a snapshot with the dashboard's address on this server."""
        taken = await self.snapshots.get(directory)
        link = f"{self.base_url.rstrip('/')}/hpcgpu/dashboard/{directory.path.name}/status"
        return {**taken, "dashboard": link if taken["dashboard"] else ""}


class Clusters(_WithSnapshots):
    """All clusters of this user that are not closed; and a new one."""

    @answering
    async def get(self) -> Any:
        """Return the clusters without their jobs and GPUs, and what is wrong with those that cannot be read."""
        found, refused = await in_thread(_open_clusters)
        rows = await asyncio.gather(*(self._row(directory) for directory in found))
        return {"clusters": sorted([*rows, *refused], key=lambda row: row["name"])}

    async def _row(self, directory: ClusterDirectory) -> dict[str, Any]:
        try:
            taken = await self.snapshot(directory)
        except (HpcgpuError, OSError) as error:
            return _refused(directory, error)
        return {key: value for key, value in taken.items() if key not in ("jobs", "devices")}

    @answering
    async def post(self) -> Any:
        """Start a cluster by name and options, as ``hpcgpu start --no-wait`` does."""
        argv = starting.arguments(self.body())
        started = await in_thread(starting.run, argv)
        self.set_status(201)
        return started


def _open_clusters() -> tuple[list[ClusterDirectory], list[dict[str, Any]]]:
    found, refused = list[ClusterDirectory](), list[dict[str, Any]]()
    for directory in (one for root in cluster_directories() for one in directories(root) if not renamed(one)):
        try:
            if (there := unclosed(directory)) is not None:
                found.append(there)
        except (HpcgpuError, OSError) as error:
            refused.append(_refused(directory, error))
    return found, refused


def _refused(directory: ClusterDirectory, error: Exception) -> dict[str, Any]:
    return {"name": directory.path.name, "directory": str(directory.path), "state": "", "problem": failure(error)[1]}


class OneCluster(_WithSnapshots):
    """One cluster."""

    @answering
    async def get(self, name: str) -> Any:
        """Return its snapshot."""
        return await self.snapshot(await cluster(name))


class Request(_WithSnapshots):
    """What changes a cluster."""

    @answering
    async def post(self, name: str, what: str) -> Any:
        """Scale it, let it adapt, or stop it."""
        directory, given = await cluster(name, any_format=what == "stop"), self.body()
        try:
            if what == "stop":
                await in_thread(stop_all, directory)
            else:
                await in_thread(_resize, directory, what, given)
        finally:
            self.snapshots.changed(directory)
        return {"name": directory.path.name}


def _resize(directory: ClusterDirectory, what: str, given: dict[str, Any]) -> None:
    change, allowed = (requests.scale, _SIZES) if what == "scale" else (_adapt, _LIMITS)
    if unknown := set(given) - {*allowed, "worker_group"}:
        known = listed((*allowed, "worker_group"))
        raise OptionError(f"a request to {what} cannot have {listed(map(ascii, sorted(unknown)))}. It can have {known}")
    if wrong := [key for key, value in given.items() if not isinstance(value, int | float | str)]:
        raise OptionError(f"{wrong[0]} must be a number, or text in quotes")
    change(directory, **given)


def _adapt(directory: ClusterDirectory, **limits: Any) -> None:
    """Scale it by its work; a person who clicks works with it."""
    requests.adapt(directory, interactive=True, **limits)


class Logs(Handler):
    """The end of a job's log."""

    @answering
    async def get(self, name: str) -> Any:
        """Return its last lines."""
        directory = await cluster(name)
        return {"text": await in_thread(end_of, directory, self.get_argument("job"))}


class Profiles(Handler):
    """The profiles from which a cluster is started: of sites, and the forms that the user saved."""

    @answering
    async def get(self) -> Any:
        """Return them."""
        return await in_thread(_profiles)

    @answering
    async def post(self) -> Any:
        """Save a form as a profile of the user's."""
        content = self.body()
        await in_thread(starting.save, content)
        self.set_status(201)
        return {"name": content["name"]}


def _profiles() -> dict[str, Any]:
    found, problems = list[dict[str, Any]](), list[str]()
    for name in profiles.names():
        try:
            one = profiles.load(name)
        except OptionError as error:
            problems.append(str(error))
            continue
        yours = one.path.parent == profiles.user_directory()
        about = {"name": name, "system": one.system, "about": one.about, "needs": list(one.needs), "yours": yours}
        found.append(about | {"options": json.loads(json.dumps(dict(one.options), default=str))})
    return {"profiles": found, "systems": registry.names(), "problems": problems}
