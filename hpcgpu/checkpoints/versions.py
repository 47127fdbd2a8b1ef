"""The directory of a checkpoint, ``PATH/NAME``: a folder for each version, which holds all that it needs.

A version gets its number, and so appears, in one step, when all of it is on the disk. Until then its folder has a
hidden name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import distributed

from hpcgpu.checkpoints import pieces
from hpcgpu.checkpoints.pieces import Piece
from hpcgpu.errors import Damaged, OptionError
from hpcgpu.options import values
from hpcgpu.posix import checked_files, json_records, ownership

#: Names that are one directory on each filesystem.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,199}")
_FILE = "checkpoint.json"
#: A hidden folder that nobody has changed for so many seconds was left by a program that was killed.
_LEFT = 3600.0


@dataclass(frozen=True, kw_only=True)
class Version:
    """What a version has: the content of its ``checkpoint.json``.

    Attributes
    ----------
    saved : float
        When it was complete, in epoch seconds.
    structure : Piece
        How the pieces form the data.
    pieces : list of Piece
    software : dict
        The versions of Python, Dask and distributed that wrote it.
    """

    saved: float
    structure: Piece
    pieces: list[Piece]
    software: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(piece.size for piece in {piece.digest: piece for piece in [self.structure, *self.pieces]}.values())


def software() -> dict[str, str]:
    """Return the versions of what the format of a piece depends on."""
    return {
        "python": platform.python_version(),
        "dask": dask.__version__,
        "distributed": distributed.__version__,
    }


def directory_of(path: str | Path, name: str) -> Path:
    """Return the directory of a checkpoint.

    Raises
    ------
    OptionError
        It has no valid path or name.
    """
    check_name(name)
    return values.directory("checkpoint: path", path) / name


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a checkpoint.

    Raises
    ------
    OptionError
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"checkpoint: name={name!r} cannot be the name of a directory: write letters, digits and _ . + = @ -, at "
            "most 200 of them, not . first"
        )


def numbered(directory: Path) -> list[Path]:
    """Return the folders of the versions, newest first; empty if there is none."""
    checked_files.refresh(directory)  # another machine may have added one
    with contextlib.suppress(FileNotFoundError):
        return sorted(
            (entry for entry in directory.iterdir() if entry.name.isdecimal()),
            key=lambda entry: int(entry.name),
            reverse=True,
        )
    return []


def read(folder: Path) -> Version:
    """Return what a version has. All its files exist and have their sizes; their content is checked when it is read.

    Raises
    ------
    OSError
        It cannot be read, or belongs to another user.
    Damaged
        A file is missing or damaged.
    """
    version = json_records.read(folder / _FILE, Version)
    sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}
    for piece in [version.structure, *version.pieces]:
        if sizes.get(piece.digest) != piece.size:
            raise Damaged(f"{folder / piece.digest} is missing or damaged: it must have {piece.size} bytes")
    return version


def write(value: Any, folder: Path, known: Sequence[Path]) -> tuple[Piece, bool]:
    """Write a piece of a new version, if it is in none of the known folders. See `hpcgpu.checkpoints.pieces.write`."""
    samples: dict[str, str] | None = None
    with contextlib.suppress(OSError, Damaged):  # a program was killed before a version was complete
        files = [other / _FILE for other in known]
        found = [_samples(file, file.stat().st_mtime_ns) for file in files]
        samples = dict(itertools.chain.from_iterable(each.items() for each in found))
    return pieces.write(value, folder, known, samples)


@functools.lru_cache(maxsize=4)
def _samples(file: Path, changed: int) -> dict[str, str]:
    """Return the digests of the pieces of a version, by sample; empty for a sample of several pieces."""
    found: dict[str, str] = {}
    for piece in json_records.read(file, Version).pieces:
        if found.setdefault(piece.sample, piece.digest) != piece.digest:
            found[piece.sample] = ""
    return found


def check(directory: Path) -> None:
    """Refuse a directory whose content other users can replace: to restore it runs code.

    Raises
    ------
    NotTrusted
        Somebody else can change it.
    """
    ownership.check(directory)


class NewVersion:
    """A version that is being written.

    Parameters
    ----------
    directory : Path
        Of the checkpoint; is made if it does not exist.

    Attributes
    ----------
    folder : Path
        Where its pieces are written.
    known : list of Path
        Folders whose pieces need not be written again: of the last version, and of programs that were killed.

    Raises
    ------
    OSError
        The folder cannot be made.
    NotTrusted
        Somebody else can change the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ownership.private_directory(directory)
        check(directory)
        self.known = [*numbered(directory)[:1], *self._hidden()]
        self.folder = directory / f".{secrets.token_hex(8)}"
        self.folder.mkdir(mode=0o700)

    def lives(self) -> None:
        """Show other programs that this one still writes."""
        os.utime(self.folder)

    def complete(self, structure: Piece, pieces: list[Piece], *, keep: int) -> tuple[Version, Path]:
        """Let the version appear, when all its pieces are written; remove older ones. Return it and its folder.

        Raises
        ------
        OSError
            It cannot be written.
        """
        version = Version(saved=time.time(), structure=structure, pieces=pieces, software=software())
        used = {piece.digest for piece in [structure, *pieces]}
        for entry in self.folder.iterdir():
            if entry.name not in used:  # a worker was killed while it wrote
                entry.unlink(missing_ok=True)
        with open(os.open(self.folder / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(dataclasses.asdict(version), file)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.folder)
        appeared = self._appear()
        _sync(self.directory)
        self._clean(keep)
        return version, appeared

    def discard(self) -> None:
        """Remove what was written, and let what still writes there fail."""
        for _ in range(5):  # a worker may finish a piece meanwhile
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                break

    def _appear(self) -> Path:
        while True:
            there = numbered(self.directory)
            target = self.directory / f"{int(there[0].name) + 1 if there else 1:06d}"
            try:
                return self.folder.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another program saves under the same name
                    raise

    def _clean(self, keep: int) -> None:
        """Remove old versions, and what killed programs have left. Nothing of it is needed, so no error is raised."""
        with contextlib.suppress(OSError):
            now = self.directory.stat().st_mtime  # by the clock of the filesystem: a folder was just renamed
            for folder in numbered(self.directory)[keep:]:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in self._hidden():
                with contextlib.suppress(OSError):
                    if now - folder.stat().st_mtime > _LEFT:
                        shutil.rmtree(folder, ignore_errors=True)

    def _hidden(self) -> list[Path]:
        return [entry for entry in self.directory.iterdir() if entry.name.startswith(".")]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
