"""`hpcgpu far-side`: carries out one command for a program on another machine, which runs this one by ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping

import click

from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.ssh.far_side import ALIVE, INTERRUPT, SIGN_OF_LIFE, Request, decode, error_line, first_line

#: Exit code of a command that Ctrl-C ended.
_INTERRUPTED = 130
#: Seconds without a check after which a wait counts as one that hangs. Commands of the queue take less.
_HANGS = 300.0


@click.command("far-side", hidden=True)
def far_side() -> None:
    """Read a request from the input, and carry it out."""
    request = decode(_first_line())
    sys.stdout.buffer.write(first_line(request.nonce))
    sys.stdout.buffer.flush()
    if not request.raw:
        threading.Thread(target=_pass_on_interrupts, daemon=True).start()
        threading.Thread(target=_show_life, daemon=True).start()
    sys.exit(_carry_out(request))


def _first_line() -> bytes:
    """Read a line of the input, and no byte more: the rest may belong to the command."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return bytes(line)


def _pass_on_interrupts() -> None:
    """Do what the terminal of the near side would do at Ctrl-C.

    A broken connection is none: a command that changes a cluster goes on to its end.
    """
    while data := os.read(0, 1024):  # not sys.stdin: Python cannot end while a thread reads it
        if INTERRUPT in data:
            os.kill(os.getpid(), signal.SIGINT)


def _show_life() -> None:
    """Show the near side that this process is neither stopped nor lost, as long as its wait does not hang."""
    with contextlib.suppress(OSError):  # nobody is there any more
        while True:
            time.sleep(SIGN_OF_LIFE)
            if not _hangs():
                os.write(2, ALIVE)


def _hangs() -> bool:
    """Whether this process waits for something, and has not checked it for long: a file system may not answer."""
    from hpcgpu.display.progress import Progress

    return Progress.last_check is not None and time.monotonic() - Progress.last_check > _HANGS


def _check_software(near: Mapping[str, str]) -> None:
    """Compare the software of the two machines, before anything is submitted.

    Raises
    ------
    ClusterError
        It does not work together.
    """
    from hpcgpu.software.compare_environments import Grade, collect, compare, table

    here = socket.gethostname()
    found = [one for one in compare(near, None, {here: collect()}) if one.grade is not Grade.NOTE]
    if any(one.grade is Grade.FATAL for one in found):
        raise ClusterError(
            f"the software of this machine (client) and of {here} does not work together. Nothing was submitted; "
            f"environment_check='warn' makes this a warning:\n{table(found)}"
        )


def _carry_out(request: Request) -> int:
    """Run the command; return its exit code. Its error goes to stderr in a form that the near side reads."""
    main = click.get_current_context().find_root().command
    with tempfile.NamedTemporaryFile("w", prefix="hpcgpu-", suffix=".json") as config:
        arguments = [*request.arguments]
        if request.config is not None:
            config.write(request.config_text())
            config.flush()
            arguments[1:1] = ["--config", config.name]
        try:
            if request.software is not None:
                _check_software(request.software)
            code = main.main(arguments, prog_name="hpcgpu", standalone_mode=False, obj=request)
        except click.Abort:
            return _INTERRUPTED
        except ClusterError as error:
            _report(request, type(error).__name__, str(error))
            return 1
        except click.ClickException as error:
            cause = error.__cause__
            if isinstance(cause, HpcgpuError | TimeoutError):
                _report(request, type(cause).__name__, str(cause))
            else:
                _report(request, "UsageError" if error.exit_code == 2 else "", error.format_message())
            return error.exit_code
    return code if isinstance(code, int) else 0


def _report(request: Request, kind: str, text: str) -> None:
    """Send an error: the name of its class, and its text."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stderr.buffer.write(error_line(request.nonce, kind, text))
    sys.stderr.buffer.flush()


@click.command(hidden=True)
@click.argument("session")
@click.argument("seconds", type=float)
@click.argument("node", default="")
def relay(session: str, seconds: float, node: str) -> None:
    """Carry the connections of a program on another machine. Do nothing on another login node than that of a name."""
    from hpcgpu.ssh.relay import carry

    if node in ("", socket.gethostname()):
        carry(session, seconds)
