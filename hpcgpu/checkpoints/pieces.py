"""The pieces of a checkpoint: one file for each result, which the worker that has the result writes.

The name of a file is the hash of its content. So a piece that another checkpoint has already is not written again, and
a reader notices each change.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import secrets
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.actor import Actor
from distributed.protocol import deserialize, serialize

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked_files

#: The prefix of the keys of the tasks that write.
WRITES = "hpcgpu-checkpoint"
#: Results of GPU libraries are written as what they are in host memory ("dask"); "cuda" would need a GPU to read.
_SERIALIZERS = ("dask", "pickle")
#: The size of the head is written in so many bytes, at the beginning.
_SIZE = 8
#: The head and each buffer end at a multiple of so many bytes, because libraries read numbers that are aligned.
_ALIGNED = 64
#: So many bytes are hashed and written at a time: they fit into the cache of a processor.
_BLOCK = 256 << 10
#: A sample of a piece are so many parts of so many bytes.
_SAMPLES, _SAMPLE = 64, 4096
#: After so many bytes the disk begins to write.
_BEGIN = 8 << 20


@dataclass(frozen=True)
class Piece:
    """A file of a checkpoint.

    Attributes
    ----------
    digest : str
        SHA-256 of its content, and its name.
    size : int
        Bytes.
    sample : str
        Hash of small parts of its content. If another piece has the same sample, it is likely to be the same.
    """

    digest: str
    size: int
    sample: str = ""


@contextlib.contextmanager
def _frees_views() -> Iterator[None]:
    """Let an error keep no views of a value: CPython may crash when it collects a cycle of garbage that has some."""
    before = sys.exception()
    try:
        yield
    except BaseException as error:
        found: BaseException | None = error
        while found is not None and found is not before:
            traceback.clear_frames(found.__traceback__)
            found = found.__context__
        raise


@_frees_views()
def write(
    value: Any, directory: Path, known: Sequence[Path] = (), samples: Mapping[str, str] | None = None
) -> tuple[Piece, bool]:
    """Write a value into a directory. It is there whole, or not at all.

    Return the piece, and whether it was written: a checkpoint may have it already.

    Parameters
    ----------
    value : object
    directory : Path
    known : sequence of Path
        Directories that may have the piece already. It becomes a hard link then.
    samples : mapping, optional
        The digests of all pieces that these directories have, by sample; empty for a sample of several pieces. If this
        is given, a value is mostly not hashed before it is written or found there.

    Raises
    ------
    OSError
        It cannot be written.
    """
    if isinstance(value, Actor):
        raise TypeError("an actor cannot be saved: save what its methods return")
    parts = _parts(value)
    hashed, size, sample = hashlib.sha256(), sum(map(len, parts)), _sample(parts)
    old = samples.get(sample) if samples is not None else "" if known else None
    if old == "":
        for block in _blocks(parts):
            hashed.update(block)
    if old is not None and _linked(directory / (digest := old or hashed.hexdigest()), parts, known):
        return Piece(digest, size, sample), False
    temporary = directory / f".{secrets.token_hex(8)}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            done = begun = 0
            for block in _blocks(parts):
                if old != "":  # the block is in the processor's cache for both
                    hashed.update(block)
                file.write(block)
                done += len(block)
                if done - begun >= _BEGIN:
                    # the disk begins to write while the next blocks are hashed; otherwise it would wait for `fsync`
                    os.posix_fadvise(file.fileno(), begun, done - begun, os.POSIX_FADV_DONTNEED)
                    begun = done
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(directory / hashed.hexdigest())
    except OSError as error:
        error.filename = str(directory)  # that of a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return Piece(hashed.hexdigest(), size, sample), True


def _parts(value: Any) -> list[bytes | memoryview]:
    """Return the content of the file of a value. The buffers of the value are not copied."""
    try:
        header, frames = serialize(value, serializers=_SERIALIZERS, on_error="raise")
    except TypeError:  # Dask's serializer of PyTorch's tensors fails for those on a GPU, which can be pickled
        header, frames = serialize(value, serializers=["pickle"], on_error="raise")
    views = [pickle.PickleBuffer(frame).raw() for frame in frames]
    head = pickle.dumps((header, [len(view) for view in views]))
    parts: list[bytes | memoryview] = [len(head).to_bytes(_SIZE, "little") + head + bytes(_gap(_SIZE + len(head)))]
    for view in views:
        parts += [view, bytes(_gap(len(view)))]
    return parts


def _blocks(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for begin in range(0, len(part), _BLOCK):
            yield memoryview(part)[begin : begin + _BLOCK]


def _sample(parts: Sequence[bytes | memoryview]) -> str:
    hashed, step = hashlib.sha256(), max(_SAMPLE, sum(map(len, parts)) // _SAMPLES)
    for part in parts:
        hashed.update(len(part).to_bytes(_SIZE, "little"))
        for begin in range(0, len(part), step):
            hashed.update(part[begin : begin + _SAMPLE])
    return hashed.hexdigest()[:32]


def _linked(target: Path, parts: Sequence[bytes | memoryview], known: Sequence[Path]) -> bool:
    """Whether a piece is in its directory now without being written: it was there, or in another one.

    The file is read: otherwise damage to it would become damage to each later version.
    """
    for directory in (target.parent, *known):
        there = directory / target.name
        with contextlib.suppress(OSError):
            with checked_files.opened(there) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                if any(file.read(len(block)) != bytes(block) for block in _blocks(parts)) or file.read(1):
                    continue
            if directory != target.parent:
                os.link(there, target)
            return True
    return False


@_frees_views()
def read(directory: Path, digest: str, size: int) -> Any:
    """Return the value of a piece.

    If its version was removed, another version may have the piece. Dask reads it again when a worker is lost, perhaps
    much later.

    Raises
    ------
    OSError
        It cannot be read, or belongs to another user.
    Damaged
        It is not what was written.
    """
    path, content = directory / digest, bytearray(size)
    if not directory.exists():
        checked_files.refresh(directory.parent)
        path = next(directory.parent.glob(f"*/{digest}"), path)
    with checked_files.opened(path) as file:
        complete = file.readinto(content) == size and not file.read(1)
    if not complete or hashlib.sha256(content).hexdigest() != digest:
        raise Damaged(f"{path} is damaged: it is not what was written")
    whole = memoryview(content)
    begin = _SIZE + int.from_bytes(whole[:_SIZE], "little")
    header, lengths = pickle.loads(whole[_SIZE:begin])  # of this user, and unchanged
    frames = []
    for length in lengths:
        begin += _gap(begin)
        frames.append(whole[begin : begin + length])
        begin += length
    return deserialize(header, frames)


def _gap(size: int) -> int:
    """Return how many bytes are left out after so many."""
    return -size % _ALIGNED
