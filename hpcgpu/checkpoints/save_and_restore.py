"""Saves data of a cluster as a checkpoint, and restores it: `hpcgpu.checkpoint` and `hpcgpu.restore`."""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client, Future, KilledWorker

from hpcgpu.checkpoints import pieces, structure, versions
from hpcgpu.checkpoints.versions import NewVersion, Version
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.display.progress import Progress
from hpcgpu.display.warn import warn
from hpcgpu.errors import CheckpointError, Damaged, HpcgpuError, OptionError
from hpcgpu.options import values
from hpcgpu.posix.full_disk import file_error
from hpcgpu.posix.threads import in_thread
from hpcgpu.ssh.tunnel import ADDRESSES
from hpcgpu.store import saved_datasets
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.saved_datasets import SavedDataset

#: How many versions are kept by default.
KEEP = 2
#: What to do if workers end while they write or read a result.
_MEMORY = (
    "If their memory was full: a text or `bytes` that Dask has moved to the disk needs twice its memory to be written, "
    "and each one to be read. Give the workers more memory, or make the pieces of the data smaller"
)
#: Of the tasks that write and read. Dask runs first what was submitted first, but a program waits for these.
_PRIORITY = 1_000_000
#: Seconds between two signs that this program still writes.
_SIGN = 60.0
#: Seconds between two lines that show how much is done.
_SHOW = 0.5
#: Seconds between two questions why no result is written or read: the answer has all workers.
_ASK = 5.0


@dataclass(frozen=True)
class Checkpoint:
    """What was saved.

    Attributes
    ----------
    path : Path
        The folder of this version.
    size : int
        Bytes of all its files.
    written : int
        Bytes that were written; the last version had the others already.
    """

    path: Path
    size: int
    written: int


def checkpoint(
    client: Client, data: Any, path: str | Path, *, name: str, keep: int = KEEP, quiet: bool = False
) -> Checkpoint | Awaitable[Checkpoint]:
    """Save results of a cluster on the shared disk. Each result is written by a worker that has it.

    The new version appears when all of it is on the disk. If it fails, or if the program is killed, the last version
    stays. Results that the last version has too are not written again.

    Parameters
    ----------
    client : distributed.Client
        If it is asynchronous, await what this function returns.
    data : dask collection, future, list, tuple or dict
        Collections and futures, also in lists, tuples and dictionaries. What is not computed yet is computed.
    path : str or Path
        A directory that this program and all workers see, with room for the data. It need not exist. If the cluster is
        reached by ssh, the scheduler job must see it, and this program need not; ``~`` and variables are those there.
    name : str
        The directory of the checkpoint in `path`.
    keep : int, default 2
        How many versions are kept.
    quiet : bool, default False
        Show no progress.

    Raises
    ------
    OptionError
        `name` cannot be the name of a directory, `keep` is no number, or a future belongs to another client.
    CheckpointError
        A result could not be computed, pickled or written, because the disk is full for example.
    NotTrusted
        Other users can change the directory.
    """
    keep = values.positive("checkpoint: keep", keep)
    return save(client, data, Destination(directory=_directory(client, path, name), keep=keep, quiet=quiet))


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where data are saved, and how.

    Attributes
    ----------
    directory : Path
        Of the checkpoint.
    keep : int, default 2
        How many versions are kept.
    quiet : bool, default False
        Show no progress.
    at_a_time : int, optional
        How many pieces are written at the same time. Default: as many as the workers have threads.
    cluster : ClusterDirectory, optional
        If a dataset is published under the name of the checkpoint, it is recorded here: the next scheduler publishes it
        again.
    """

    directory: Path
    keep: int = KEEP
    quiet: bool = False
    at_a_time: int | None = None
    cluster: ClusterDirectory | None = None


def _far(client: Client) -> bool:
    """Whether the cluster is reached by ssh: this program does not see its disk."""
    return getattr(client.scheduler, "address", "") in ADDRESSES


def _directory(client: Client, path: str | Path, name: str) -> Path:
    """Return the directory of a checkpoint; one on another machine is expanded there."""
    if not _far(client):
        return versions.directory_of(path, name)
    if sys.platform == "win32":
        raise OptionError("checkpoint: on Windows it does not work for clusters that are reached by ssh")
    versions.check_name(name)
    return Path(path) / name


async def _expanded(client: Client, directory: Path) -> Path:
    """Return the directory of a checkpoint with the variables of the machine where it is."""
    if not _far(client):
        return directory
    there: Path = await _disk(client)(versions.directory_of, str(directory.parent), directory.name)
    return there


def _disk(client: Client) -> Callable[..., Awaitable[Any]]:
    """Return what calls a function where the disk is: beside this event loop, or beside that of the scheduler."""
    return functools.partial(client.run_on_scheduler, in_thread) if _far(client) else in_thread


def save(client: Client, data: Any, to: Destination) -> Checkpoint | Awaitable[Checkpoint]:
    """Do what `checkpoint` does."""
    form, futures = structure.take_apart(data, client)
    saved: Any = client.sync(_save, client, form, futures, to)
    return saved  # type: ignore[no-any-return]


def restore(
    client: Client,
    path: str | Path,
    *,
    name: str,
    resources: Mapping[str, float] | None = None,
    quiet: bool = False,
) -> Any:
    """Return the data of a checkpoint: on any later cluster, of any size.

    The results are read by the workers, and are in their memory then. A version that is damaged is left out with a
    warning, and the version before it is restored.

    Parameters
    ----------
    client : distributed.Client
        If it is asynchronous, await what this function returns.
    path : str or Path
        As in `checkpoint`.
    name : str
    resources : mapping, optional
        The Dask resources that a worker must have to read a result. With groups of workers without GPUs, results of
        GPU libraries need it.
    quiet : bool, default False
        Show no progress.

    Returns
    -------
    dask collection, future, list, tuple or dict
        As it was saved; the collections are persisted.

    Raises
    ------
    CheckpointError
        There is no checkpoint of this name, or no version of it can be restored.
    NotTrusted
        Other users can change the directory: what is restored may run code.
    """
    return client.sync(_restore, client, _directory(client, path, name), resources, quiet)


async def _save(client: Client, form: Any, futures: list[Future], to: Destination) -> Checkpoint:
    disk = _disk(client)
    directory = await _expanded(client, to.directory)
    try:
        new = await disk(NewVersion, directory)
    except OSError as error:
        raise await _not_saved(disk, directory, error) from error
    step, writes, answers = to.at_a_time or max(len(futures), 1), list[Future](), list[Any]()
    try:
        await _raise_if_cancelled(futures)
        pickled = structure.pickled(form)
        with Progress(to.quiet) as progress:
            for begin in range(0, len(futures), step):
                writes = client.map(
                    versions.write,
                    futures[begin : begin + step],
                    folder=new.folder,
                    known=new.known,
                    key=f"{pieces.WRITES}-{secrets.token_hex(8)}",
                    priority=_PRIORITY,
                    pure=False,
                )
                gathering = asyncio.ensure_future(client.gather(writes))
                answers += await _done(gathering, writes, progress, f"saving {directory.name}", lambda: disk(new.lives))
            of_structure = await disk(pieces.write, pickled, new.folder)
            found, structure_piece = [piece for piece, _ in answers], of_structure[0]
            complete = functools.partial(new.complete, structure_piece, found, keep=to.keep)
            version, folder = await disk(complete)
    except BaseException as error:
        await client.cancel(writes)
        with suppress(OSError):  # the scheduler may be gone
            await disk(new.discard)
        if isinstance(error, Exception):
            raise await _not_saved(disk, directory, error) from error
        raise
    if to.cluster is not None:
        try:
            if directory.name in await client.list_datasets():
                await disk(saved_datasets.record, to.cluster, SavedDataset(directory.name, str(directory)))
        except OSError as error:
            warn(f"{folder} was saved, but a next scheduler will not publish it again: {_why(error)}")
    written = {piece.digest: piece.size for piece, fresh in [*answers, of_structure] if fresh}
    return Checkpoint(folder, version.size, sum(written.values()))


async def _restore(client: Client, directory: Path, resources: Mapping[str, float] | None, quiet: bool) -> Any:
    problems, disk = [], _disk(client)
    directory = await _expanded(client, directory)
    try:
        folders = await disk(_trusted, directory)
    except OSError as unreadable:
        raise CheckpointError(f"{directory} cannot be restored: {_why(unreadable)}") from unreadable
    with Progress(quiet) as progress:
        for folder in folders:
            try:
                data, futures = await load(client, folder, resources)
                what = f"restoring {directory.name}"
                read = asyncio.gather(*(future.exception() for future in futures))
                for error in await _done(read, futures, progress, what):
                    if error is not None:
                        raise error
                await _raise_if_cancelled(futures)
            except Exception as error:
                problems.append(f"{folder} cannot be restored: {_why(error)}{await disk(_other_software, folder)}")
                if not _damaged(error):  # nothing shows that an older version is what the user wants
                    raise CheckpointError(". ".join(problems)) from error
                continue
            if problems:
                warn(f"{'. '.join(problems)}. Version {folder.name} was restored instead")
            return data
    raise CheckpointError(". ".join(problems) or f"there is no checkpoint {directory}")


async def load(
    client: Client,
    folder: Path,
    resources: Mapping[str, float] | None = None,
    *,
    known: Container[Any] | None = None,
) -> tuple[Any, list[Future]]:
    """Return the data of a version, and its futures, which are not waited for.

    Parameters
    ----------
    client : distributed.Client
    folder : Path
        Of the version.
    resources : mapping, optional
        The Dask resources that a worker must have to read a result.
    known : container, optional
        The keys that the cluster has. What was saved with other keys gets those. Default: all results get new keys.

    Raises
    ------
    OSError
        A file cannot be read.
    Damaged
        A file is missing or damaged.
    """
    version, form = await _disk(client)(_read, folder)
    remaining, futures = iter(version.pieces), list[Future]()

    def submit(keys: Sequence[Any]) -> list[Future]:
        read = [next(remaining) for _ in keys]
        submitted: list[Future] = client.map(
            functools.partial(pieces.read, folder),
            [piece.digest for piece in read],
            [piece.size for piece in read],
            key=list(keys),
            priority=_PRIORITY,
            resources=dict(resources) if resources else None,
        )
        futures.extend(submitted)
        return submitted

    return structure.put_together(await in_thread(cloudpickle.loads, form), submit, known=known), futures


def _read(folder: Path) -> tuple[Version, bytes]:
    version = versions.read(folder)
    return version, pieces.read(folder, version.structure.digest, version.structure.size)


def _trusted(directory: Path) -> list[Path]:
    """Return the folders of the versions, newest first, if nobody else can change them."""
    with suppress(FileNotFoundError):
        versions.check(directory)
    return versions.numbered(directory)


async def _done(
    waiting: asyncio.Future[Any],
    futures: Sequence[Future],
    progress: Progress,
    what: str,
    sign: Callable[[], Awaitable[Any]] | None = None,
) -> Any:
    """Wait, show how many futures are done, and give a sign of life from time to time."""
    began = signed = time.monotonic()
    before, idle, asked = 0, "", -math.inf
    while not waiting.done():
        now = time.monotonic()
        if sign is not None and now - signed > _SIGN:
            await sign()
            signed = now
        done = sum(future.done() for future in futures)
        if done != before:
            idle = ""
        elif now - asked > _ASK:
            idle, asked = await _why_idle(futures), now
        progress.update(what, f"{done} of {counted(len(futures), 'piece')} for {duration(now - began)}{idle}")
        before = done
        await asyncio.wait([waiting], timeout=_SHOW)
    return await waiting


async def _raise_if_cancelled(futures: Sequence[Future]) -> None:
    """Raise why a future was cancelled, with its scheduler for example: `Future.exception` does not return that."""
    for future in futures:
        if future.cancelled():
            await future.result()


async def _why_idle(futures: Sequence[Future]) -> str:
    """Return what keeps the workers from these tasks; empty if nothing does."""
    with suppress(OSError):  # the scheduler is gone: the futures fail
        workers = (await futures[0].client.scheduler.identity(n_workers=-1))["workers"].values() if futures else [None]
        if not workers:
            return ", no worker is connected"
        if paused := sum(worker["status"] == "paused" for worker in workers if worker):
            return f", {counted(paused, 'worker')} paused because the memory is full"
    return ""


def _damaged(error: Exception) -> bool:
    """Whether an error is about the files of a version, and not about the cluster or its software."""
    about_a_file = isinstance(error, OSError) and error.errno is not None
    return isinstance(error, Damaged) or (about_a_file and not isinstance(error, ConnectionError | TimeoutError))


async def _not_saved(disk: Callable[..., Awaitable[Any]], directory: Path, error: Exception) -> CheckpointError:
    if isinstance(error, OSError) and isinstance(error.filename, str):
        # not the hidden folder: it is removed, and has another name each time
        if Path(error.filename).is_relative_to(directory):
            error.filename = str(directory)
    stays = ""
    with suppress(OSError):
        last = (await disk(versions.numbered, directory))[:1]
        stays = f" The last version stays: {last[0]}" if last else " There is no earlier version"
    return CheckpointError(f"checkpoint {directory} was not saved: {_sentence(_why(error))}{stays}")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file_error(error)}. Do all nodes see it?"
    if isinstance(error, OSError):
        return file_error(error)
    if isinstance(error, KilledWorker):
        return f"{_sentence(str(error))} {_MEMORY}"
    return str(error) if isinstance(error, HpcgpuError) else f"{type(error).__name__}: {error}"


def _other_software(folder: Path) -> str:
    """Return which other versions of what the format depends on have saved a version; empty if they are the same."""
    with suppress(OSError, Damaged):
        here = versions.software()
        there = versions.read(folder).software
        if other := [
            f"{name} {there[name]}, not {here[name]}" for name in here if there.get(name, here[name]) != here[name]
        ]:
            return f" (it was saved with {', '.join(other)})"
    return ""
