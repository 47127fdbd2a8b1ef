"""A package of the user on workers and scheduler: unpacked into a private directory, first on `sys.path`."""

from __future__ import annotations

import asyncio
import importlib
import io
import logging
import os
import secrets
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin
from distributed.worker import Worker

from hpcgpu.errors import HpcgpuError
from hpcgpu.posix.full_disk import cannot_be_written
from hpcgpu.store import uploaded_packages
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.uploaded_packages import Package

logger = logging.getLogger("distributed.hpcgpu")

#: Of this process: the scheduler may run in the user's program.
PROCESS = secrets.token_hex(8)

#: The packages that this process has, by their names, with their directories.
_here: dict[str, tuple[Package, Path]] = {}


#: Seconds in which the scheduler answers a worker that ends.
_TIMEOUT = 10.0
#: What the names of the plugins begin with.
_PLUGIN = "hpcgpu-package-"
#: RPC of a worker: it answers once it has unpacked what it got when it joined.
UNPACKED = "hpcgpu_unpacked"


def plugin_name(package: str) -> str:
    """Return the name of the plugin of a package on the workers."""
    return f"{_PLUGIN}{package}"


def uploaded(plugins: Iterable[str]) -> bool:
    """Whether any of the plugins of these names is a package."""
    return any(name.startswith(_PLUGIN) for name in plugins)


class UploadedPackage(WorkerPlugin):  # type: ignore[misc]
    """Gives a package to each worker, also to those that start later.

    Parameters
    ----------
    package : Package
    """

    def __init__(self, package: Package) -> None:
        self.package = package

    async def setup(self, worker: Worker) -> None:
        """Unpack the package before the worker takes tasks.

        Raises
        ------
        OSError
            It cannot be unpacked; its `strerror` is the whole message.
        """
        try:
            await install(self.package, worker.local_directory)
        except OSError as error:
            why, package = cannot_be_written(worker.local_directory, error), self.package.name
            words = f"worker {worker.name} cannot unpack the uploaded package {package}: {why}"
            raise OSError(error.errno, words) from error


def require_packages(worker: Worker) -> None:
    """Let a worker that starts end if it cannot unpack a package. distributed would only log that, and give it tasks.

    A worker that runs already reports the error to the program that uploads, as distributed does.
    """
    add, setups = worker.plugin_add, set[asyncio.Future[Any]]()

    async def add_and_record(plugin: Any, name: str | None = None, **options: bool) -> Any:
        setup = asyncio.ensure_future(add_or_end(plugin, name, **options))
        setups.add(setup)
        try:
            return await setup
        finally:
            setups.discard(setup)

    async def unpacked() -> str:
        await asyncio.gather(*setups, return_exceptions=True)
        return "OK"

    async def add_or_end(plugin: Any, name: str | None = None, **options: bool) -> Any:
        if name is None or not name.startswith(_PLUGIN):  # dask-cuda's plugins come without names
            return await add(plugin=plugin, name=name, **options)
        try:
            return await add(plugin=plugin, name=name, catch_errors=False)
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) else f"{name} on worker {worker.name}: {error!r}"
            logger.error("hpcgpu: %s", why)
            with suppress(OSError, TimeoutError):  # an end that is expected is not charged to the tasks that it has got
                end = {"stimulus_id": "hpcgpu-package", "expected": True, "close": False}
                await asyncio.wait_for(worker.scheduler.unregister(address=worker.contact_address, **end), _TIMEOUT)
            if worker.nanny:  # else a nanny that runs would start it again and again; one that starts answers nothing
                async with worker.rpc(worker.nanny) as nanny:
                    await nanny.close_gracefully(reason="hpcgpu-package", reply=False)
            await worker.close(nanny=False, reason="hpcgpu-package")
            raise

    worker.handlers[UNPACKED] = unpacked
    worker.plugin_add = add_and_record  # it adds the plugins when the worker starts; later ones come to a handler


async def send_package(client: Client, package: Package) -> None:
    """Send a package to the scheduler, which unpickles the graphs of programs, and to all workers.

    Raises
    ------
    OSError
        A worker or the scheduler cannot unpack it.
    """
    replaced = await client.run_on_scheduler(_install_on_scheduler, package, PROCESS)
    await client.register_plugin(UploadedPackage(package), name=plugin_name(package.name))
    for name in replaced:
        with suppress(ValueError):  # its own upload failed before it had a plugin
            await client.unregister_worker_plugin(plugin_name(name))


async def _install_on_scheduler(package: Package, process: str, dask_scheduler: Any) -> list[str]:
    """Install a package in the process of the scheduler; return the names of other packages that it replaces."""
    own = process == PROCESS  # the scheduler may run in the user's program
    replaced = await install(package, dask_scheduler.local_directory, own=own)
    if not own:
        try:
            await asyncio.to_thread(_keep, package, replaced)
        except (HpcgpuError, OSError) as error:
            logger.warning("hpcgpu: the next scheduler will not have the package %s: %s", package.name, error)
    return replaced


def _keep(package: Package, replaced: list[str]) -> None:
    from hpcgpu.store import saved_options  # no other process of a job reads them

    directory = ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"]))
    if saved_options.read(directory).options.cluster.on_scheduler_end == "restart":
        uploaded_packages.keep(directory, package, replaced)


async def install(package: Package, local_directory: str, *, own: bool = False) -> list[str]:
    """Install a package in this process, in place of those that have the same modules.

    Parameters
    ----------
    package : Package
    local_directory : str
        The directory of the Dask server, for temporary files.
    own : bool, default False
        Whether this process is the program that uploads: what it has imported stays.

    Returns
    -------
    list of str
        Names of other packages that were replaced.
    """
    place = await asyncio.to_thread(_unpack, package, local_directory)
    replaced = [
        name
        for name, (earlier, _) in _here.items()
        if name == package.name or not set(earlier.modules).isdisjoint(package.modules)
    ]
    gone = [_here.pop(name) for name in replaced]
    for _, there in gone:
        if str(there) in sys.path:
            sys.path.remove(str(there))
    if own:
        sys.path.append(str(place))
    else:
        sys.path.insert(0, str(place))
        _forget({*package.modules, *(module for earlier, _ in gone for module in earlier.modules)})
    importlib.invalidate_caches()
    _here[package.name] = package, place
    for _, there in gone:
        await asyncio.to_thread(shutil.rmtree, there, ignore_errors=True)
    return [name for name in replaced if name != package.name]


def _unpack(package: Package, local_directory: str) -> Path:
    place = Path(tempfile.mkdtemp(prefix=f"package-{package.name}-", dir=local_directory))
    try:
        with zipfile.ZipFile(io.BytesIO(package.archive)) as archive:
            archive.extractall(place)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return place


def _forget(modules: set[str]) -> None:
    """Let the next import of these modules read them anew. Code that runs keeps what it has imported."""
    gone = [name for name in sys.modules if any(f"{name}.".startswith(f"{module}.") for module in modules)]
    for name in gone:
        parent, _, own = name.rpartition(".")
        if parent in sys.modules and parent not in gone:  # a namespace package
            vars(sys.modules[parent]).pop(own, None)
    for name in gone:
        del sys.modules[name]
