"""One command that ssh runs on another host: its request, its output, and its error."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from hpcgpu import errors
from hpcgpu.errors import ClusterError, HpcgpuError, OptionError
from hpcgpu.posix.printable import printable
from hpcgpu.ssh.far_side import ALIVE, ERROR, INTERRUPT, Beginning, FarSide, Request

_PIECE = 1 << 16
#: For an ssh that Ctrl-C in the terminal must not end. The flag is that of Windows, and opens no window there.
APART: dict[str, Any] = {"start_new_session": True, "creationflags": getattr(subprocess, "CREATE_NO_WINDOW", 0)}
#: Seconds in which somebody answers: Python may start slowly there.
BEGINS_WITHIN = 120.0
#: Seconds without a sign of life before a command counts as lost, and after Ctrl-C.
SILENCE, AFTER_INTERRUPT = 60.0, 15.0
#: Seconds between two checks.
_CHECK = 1.0


class RemoteCommand:
    """A command of hpcgpu on another host.

    Parameters
    ----------
    command : sequence of str
        The ssh that runs hpcgpu there.
    request : Request
    python : str
        The interpreter there; empty if it is found there.
    output : callable, optional
        Gets what the command prints, piece by piece. Default: `received` keeps it.
    show_errors : bool
        Whether what the command prints on stderr is printed here.
    """

    def __init__(
        self,
        command: Sequence[str],
        request: Request,
        python: str,
        output: Callable[[bytes], object] | None,
        *,
        show_errors: bool,
    ) -> None:
        self._input, self._nonce, self._shown = request.encoded(python), request.nonce, show_errors
        self._beginning = Beginning(request.nonce)
        self._lines = list[str]()
        self.received = list[bytes]()
        self._keep: Callable[[bytes], object] = output or self.received.append
        #: Whether Ctrl-C was pressed while it ran.
        self.interrupted = False
        #: Whether nobody answered in time.
        self.late = False
        #: Seconds after which nothing had come any more; 0 if something came.
        self.silent = 0.0
        self._pieces = queue.SimpleQueue[bytes]()
        #: Whether nobody wants more of the output: it may come without end.
        self._unwanted = False
        #: When something came last, and when this program checked that last.
        self._last_received = self._last_check = 0.0
        #: The error that the command has reported.
        self.error: Exception | None = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **APART,  # Ctrl-C must not end ssh before the command has ended
        )

    @property
    def far_side(self) -> FarSide | None:
        """Who has answered; None if nobody did."""
        return self._beginning.far_side

    @property
    def greeting(self) -> str:
        """What was printed in place of an answer."""
        return self._beginning.greeting

    @property
    def errors(self) -> str:
        """What ssh and the command have printed on stderr, without the error that the command has reported."""
        return "\n".join(self._lines)

    def run(self, answers: Callable[[FarSide], object]) -> int:
        """Wait for the end, and return the exit code of ssh. `answers` is called with who has answered.

        Raises
        ------
        PrintsWithoutEnd
            Nobody answers.
        """
        process, shown = self._process, threading.Thread(target=self._read_errors, daemon=True)
        assert process.stdin is not None
        self._last_received = self._last_check = time.monotonic()
        shown.start()
        threading.Thread(target=self._read_output, daemon=True).start()
        try:
            self._write(process.stdin, self._input)
            while self._goes_on(answers):
                pass
            return process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            self._unwanted = process.wait() < 0
            # if ssh was ended, the process that shares its connection may keep these open
            shown.join(_CHECK if self._unwanted else None)
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _goes_on(self, answers: Callable[[FarSide], object]) -> bool:
        """Take the next piece of the output, or Ctrl-C; return whether more may come."""
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(queue.Empty):
                if not (piece := self._pieces.get(timeout=_CHECK)):
                    return False
                self._receive(piece, answers)
            if self._is_lost():
                self._process.kill()
                return False
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.interrupted, self._last_received = True, time.monotonic()
            self._write(self._process.stdin, INTERRUPT)
        return True

    def _receive(self, piece: bytes, answers: Callable[[FarSide], object]) -> None:
        if self.far_side is None:
            piece = self._beginning.feed(piece)
            if self.far_side is not None:
                answers(self.far_side)
        if self.far_side is not None:
            self._last_received = time.monotonic()
        if piece:
            self._keep(piece)

    def _is_lost(self) -> bool:
        """Whether nobody answers, or nothing comes any more: the far side may be stopped, or the network gone."""
        now, answered = time.monotonic(), self.far_side is not None
        if now - self._last_check > 5 * _CHECK:  # this program was stopped: what came meanwhile is not read yet
            self._last_received = now
        self._last_check = now
        limit = AFTER_INTERRUPT if self.interrupted else SILENCE if answered else BEGINS_WITHIN
        if now - self._last_received <= limit:
            return False
        self.late, self.silent = not answered, limit if answered else 0.0
        return True

    @staticmethod
    def _write(stream: IO[bytes], data: bytes) -> None:
        with contextlib.suppress(OSError):  # ssh has ended: its exit code shows more
            stream.write(data)
            stream.flush()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while not self._unwanted and (piece := stream.read1(_PIECE)):  # type: ignore[attr-defined]
                self._pieces.put(piece)
        self._pieces.put(b"")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._last_received = time.monotonic() if self.far_side is not None else self._last_received
                if rest := line.removesuffix(ALIVE):
                    self._receive_error(rest)
                if self._unwanted:
                    return

    def _receive_error(self, line: bytes) -> None:
        if line.startswith(ERROR):
            self.error = reported_error(line, self._nonce) or self.error
            return
        text = printable(line.decode(errors="replace").rstrip("\r\n"))
        self._lines.append(text)
        if self._shown and self.far_side is not None:  # not of a start-up file
            print(text, file=sys.stderr, flush=True)


def reported_error(line: bytes, nonce: str) -> Exception | None:
    """Return the error that a command has reported in a line on stderr, with its class; None if the line is another."""
    if not line.startswith(ERROR):
        return None
    try:
        report = json.loads(line.removeprefix(ERROR))
        if report["nonce"] != nonce:
            return None
        text, name = printable(str(report["text"]), None, lines=True), str(report["kind"])
    except (ValueError, KeyError, TypeError):
        return None
    if name == "TimeoutError":
        return TimeoutError(text)
    cls = getattr(errors, name) if name in errors.__all__ else None
    if isinstance(cls, type) and issubclass(cls, HpcgpuError):
        return cls(text)
    return OptionError(text) if name == "UsageError" else ClusterError(text)
