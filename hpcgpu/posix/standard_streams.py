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
        """Write all that can be written, and report all as written."""
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[super().write(rest) or rest.nbytes :]
        return size


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
    # A buffer of bytes has a lock: a thread that prints while the process ends, or forks, would hold it (Python aborts
    # with `_enter_buffered_busy`, and the fork waits for ever). Without it, text is buffered as well.
    return io.TextIOWrapper(
        log,  # as with `python -u`
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


def write_stderr(text: object) -> None:
    """Write a line that says that it is hpcgpu's: to the user, or into the log of a job."""
    print(f"hpcgpu: {text}", file=sys.stderr, flush=True)
