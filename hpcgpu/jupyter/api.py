"""The API: clusters, their state and logs, and the requests that change them."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from hpcgpu.batch import system_registry
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.errors import HpcgpuError, OptionError
from hpcgpu.existing_clusters.logs import end_of
from hpcgpu.existing_clusters.lookup import directories, renamed, unclosed
from hpcgpu.existing_clusters.stop import stop_all
from hpcgpu.jupyter import start_from_form
from hpcgpu.jupyter.base_handler import Handler, answering, cluster, failure
from hpcgpu.jupyter.snapshots import Snapshots
from hpcgpu.orders import change_size
from hpcgpu.posix.threads import in_thread
from hpcgpu.profiles import site_profiles
from hpcgpu.store.directory import ClusterDirectory

#: The arguments of `scale` and `adapt`.
_SIZES = ("jobs", "gpus")
_LIMITS = ("minimum_jobs", "maximum_jobs", "minimum_gpus", "maximum_gpus", "idle_timeout", "maximum_gpu_hours")


class _WithSnapshots(Handler):
    def initialize(self, snapshots: Snapshots) -> None:
        self.snapshots = snapshots

    async def snapshot(self, directory: ClusterDirectory) -> dict[str, Any]:
        """Return a snapshot with the dashboard's address on this server."""
        snapshot = await self.snapshots.get(directory)
        link = f"{self.base_url.rstrip('/')}/hpcgpu/dashboard/{directory.path.name}/status"
        return {**snapshot, "dashboard": link if snapshot["dashboard"] else ""}


class Clusters(_WithSnapshots):
    """All clusters of this user that are not closed; starts new clusters too."""

    @answering
    async def get(self) -> Any:
        """Return the clusters without their jobs and GPUs, and the problems of clusters that cannot be read."""
        found, refused = await in_thread(_open_clusters)
        rows = await asyncio.gather(*(self._row(directory) for directory in found))
        return {"clusters": sorted([*rows, *refused], key=lambda row: row["name"])}

    async def _row(self, directory: ClusterDirectory) -> dict[str, Any]:
        try:
            snapshot = await self.snapshot(directory)
        except (HpcgpuError, OSError) as error:
            return _refused(directory, error)
        return {key: value for key, value in snapshot.items() if key not in ("jobs", "devices")}

    @answering
    async def post(self) -> Any:
        """Start a cluster by name and options, as ``hpcgpu start --no-wait`` does."""
        argv = start_from_form.arguments(self.body())
        started = await in_thread(start_from_form.run, argv)
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
    """Requests that change a cluster."""

    @answering
    async def post(self, name: str, what: str) -> Any:
        """Scale, adapt, detach or stop the cluster."""
        directory, given = await cluster(name, any_format=what == "stop"), self.body()
        try:
            if what == "stop":
                await in_thread(stop_all, directory)
            elif what == "detach":
                await in_thread(change_size.detach, directory)
            else:
                await in_thread(_resize, directory, what, given)
        finally:
            self.snapshots.changed(directory)
        return {"name": directory.path.name}


def _resize(directory: ClusterDirectory, what: str, given: dict[str, Any]) -> None:
    adapt = partial(change_size.adapt, interactive=True)  # a person has clicked
    change, allowed = (change_size.scale, _SIZES) if what == "scale" else (adapt, _LIMITS)
    if unknown := set(given) - {*allowed, "worker_group"}:
        known = listed((*allowed, "worker_group"))
        raise OptionError(f"a request to {what} cannot have {listed(map(ascii, sorted(unknown)))}. It can have {known}")
    if wrong := [key for key, value in given.items() if not isinstance(value, int | float | str)]:
        raise OptionError(f"{wrong[0]} must be a number, or text in quotes")
    change(directory, **given)


class Logs(Handler):
    """The end of a job's log."""

    @answering
    async def get(self, name: str) -> Any:
        """Return the last lines of the log."""
        directory = await cluster(name)
        return {"text": await in_thread(end_of, directory, self.get_argument("job"))}


class Profiles(Handler):
    """The profiles from which a cluster is started: of sites, and the forms that the user saved."""

    @answering
    async def get(self) -> Any:
        """Return the profiles."""
        return await in_thread(_profiles)

    @answering
    async def post(self) -> Any:
        """Save a form as a profile of the user."""
        content = self.body()
        await in_thread(start_from_form.save, content)
        self.set_status(201)
        return {"name": content["name"]}


def _profiles() -> dict[str, Any]:
    found, problems = list[dict[str, Any]](), list[str]()
    for name in site_profiles.names():
        try:
            one = site_profiles.load(name)
        except OptionError as error:
            problems.append(str(error))
            continue
        yours = one.path.parent == site_profiles.user_directory()
        about = {"name": name, "system": one.system, "about": one.about, "needs": list(one.needs), "yours": yours}
        found.append(about | {"options": json.loads(json.dumps(dict(one.options), default=str))})
    return {"profiles": found, "systems": system_registry.names(), "problems": problems}
