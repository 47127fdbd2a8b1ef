"""Standard output and error of a job: a line that the log cannot hold, as on a full disk, is no reason to end the job.

Python raises an error where a program prints, or later: what could not be written stays in the buffer, and the end of
the process fails with exit code 120.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Log(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def drop_what_cannot_be_written() -> None:
    """Let `print`, logging and tracebacks of this process drop what cannot be written now.

    Forks inherit it. A stream that the program has replaced stays as it is.
    """
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _dropping(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _dropping(sys.stderr)


def _dropping(stream: TextIO) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()
    assert isinstance(stream, io.TextIOWrapper)
    log = _Log(stream.fileno(), "wb", closefd=False)
    log.name = stream.name  # else its representation shows a number
    return io.TextIOWrapper(
        io.BufferedWriter(log),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )
