"""Runs hpcgpu on another host through one connection of the system's ssh.

If the user has a connection that can be shared (ControlMaster), it is used. Else hpcgpu opens one of its own, which
ends by itself ten minutes after its last use. A password or a second factor is only asked for where a person can
answer: in a terminal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcgpu
from hpcgpu.errors import ClusterError, HostError, HpcgpuError, NotTrusted, OptionError
from hpcgpu.posix.printable import printable
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.ssh import remote_command
from hpcgpu.ssh.failures import endless, failure, late, lost_connection, silent
from hpcgpu.ssh.far_side import COMMAND, FarSide, PrintsWithoutEnd, Request
from hpcgpu.ssh.remote_command import RemoteCommand

#: Nothing of the user's configuration but what leads to the host: no agent, no display, no forwards of its own.
_SAFE = ("-a", "-x", "-T", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no", "-o", "RemoteCommand=none")
_TIMES = ("-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
_BATCH = ("-o", "BatchMode=yes", "-o", "ControlMaster=no")
#: Seconds that our own connection stays open after its last use.
_PERSIST = 600
#: OpenSSH for Windows shares no connections.
_SHARES = sys.platform != "win32"
_PIECE = 1 << 16
#: Seconds between two attempts to connect again, and how long it is tried.
_PAUSE, _TRIED_FOR = 5.0, 900.0
#: Seconds for which an attempt counts at most: the machine may have slept meanwhile.
_LONGEST = 60.0
#: How many connections may break before a host that has never answered is given up.
_MOST_BROKEN = 3


def check_host(host: object) -> str:
    """Return the name of a host as the user typed it.

    Raises
    ------
    OptionError
        It cannot be one: ssh would take it for an option.
    """
    if not isinstance(host, str) or not re.fullmatch(r"[^\s\x00-\x20\x7f-][^\s\x00-\x20\x7f]*", host):
        raise OptionError(f"host: write what `ssh` understands, such as login1 or ada@login.example.org, not {host!r}")
    return host


class BrokenConnection(HostError):
    """The connection broke while a command ran; the command may go on."""


@dataclass(frozen=True)
class Answer:
    """What a command on the other host printed on stdout, and who ran it."""

    output: bytes
    far_side: FarSide


class Login:
    """A host, reached by ssh.

    Parameters
    ----------
    host : str
        What is typed after ``ssh``.
    python : str, optional
        Interpreter on the host that has hpcgpu. Default: hpcgpu is found there.
    """

    def __init__(self, host: str, python: str = "") -> None:
        self.host = check_host(host)
        if not python.isprintable():
            raise OptionError(f"python: write the path of an interpreter on {host}, not {python!r}")
        self.python = python
        self._options: tuple[str, ...] | None = None
        self._reached = False
        #: Why a person must open the connection; empty if none must.
        self._needs_person = ""

    # The connection

    @property
    def to_log_in(self) -> str:
        """What a person does if ssh asks for a password or a code: open our connection in a terminal."""
        if not _SHARES:
            return "The ssh of Windows cannot share a connection: use hpcgpu in WSL"
        return f"In a terminal of this machine, run once: {shlex.join(self._opens(persist='8h'))}"

    def _socket(self) -> Path:
        # ssh's own %C makes the path of a socket too long where temporary directories have long names, as on macOS
        return _private_directory() / hashlib.sha256(self.host.encode(errors="surrogateescape")).hexdigest()[:16]

    def _own_socket_option(self) -> tuple[str, ...]:
        return ("-o", f"ControlPath={str(self._socket()).replace('%', '%%')}")

    def _opens(self, *more: str, persist: object = _PERSIST) -> list[str]:
        options = ("-o", "ControlMaster=yes", "-o", f"ControlPersist={persist}")
        return ["ssh", "-fN", *_SAFE, *_TIMES, *options, *self._own_socket_option(), *more, "--", self.host]

    def _shared(self, *options: str) -> bool:
        """Whether there is a connection that can be used."""
        check = ["ssh", "-O", "check", *options, "--", self.host]
        return _quiet(check).returncode == 0

    def is_open(self) -> bool:
        """Whether there is a connection that can be shared; the network is not asked."""
        return _SHARES and (self._shared() or self._shared(*self._own_socket_option()))

    def connect(self, *, asks: bool = True) -> None:
        """Find or open the connection.

        Parameters
        ----------
        asks : bool, default True
            Whether ssh may ask a person, if one is there. If not, a host that has asked for a password or a code is not
            tried again before a person has opened a connection: it might lock the account.

        Raises
        ------
        HostError
            It cannot be opened; the message says why.
        """
        if shutil.which("ssh") is None:
            raise HostError("there is no program `ssh` on the PATH. Install OpenSSH's client")
        if not _SHARES:
            self._options = ("-o", "ControlPath=none")
            return
        if self._shared():
            self._options = ()
            return
        self._options = self._own_socket_option()
        if self._shared(*self._options):
            return
        if self._needs_person and not asks:
            raise HostError(self._needs_person)
        with _alone(self._socket().with_suffix(".lock")):  # one that cannot be shared would stay for ever
            if not self._shared(*self._options):
                self._open(asks)

    def _open(self, asks: bool) -> None:
        code, words = _run_in_background(self._opens("-o", "BatchMode=yes"))
        needs_person = _needs_a_person(words)
        if code and needs_person and asks and _person():
            write_stderr(f"logging in to {printable(self.host)}")
            code, words = _run_in_background(self._opens(), asks=True)
        why = failure(self.host, code, words, "", self.to_log_in) if code else ""
        self._needs_person = why if needs_person else ""
        if why:
            raise HostError(why)

    def command(self, remote: str = COMMAND, *, asks: bool = True) -> list[str]:
        """Return the command that runs hpcgpu, or another fixed command line, on the host.

        It reads what it needs from its input.

        It never asks anybody anything: the connection is there already; `asks` is that of `connect`.
        """
        if self._options is None or (_SHARES and not self._shared(*self._options)):
            self.connect(asks=asks)
        return ["ssh", *_SAFE, *_TIMES, *_BATCH, *(self._options or ()), "--", self.host, remote]

    def command_on(self, node: str) -> list[str]:
        """Return the command that runs hpcgpu on another login node of the same name, through the one that is reached.

        That node must have a host key that ssh accepts for `host`: it may be any that the reached one reports.

        Raises
        ------
        HostError
            Its name is not that of a host.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", node):
            raise HostError(f"{node!r} is not the name of a host")
        known = dict(
            line.partition(" ")[::2]
            for line in _quiet(["ssh", "-G", "--", self.host]).stdout.decode(errors="replace").splitlines()
        )
        name, port = known.get("hostname", self.host), known.get("port", "22")
        alias = known.get("hostkeyalias") or (name if port == "22" else f"[{name}]:{port}")
        to = shlex.join(["ssh", *_SAFE, *_TIMES, *_BATCH, *(self._options or ())]).replace("%", "%%")
        through = f"{to} -W %h:%p -- {shlex.quote(self.host).replace('%', '%%')}"
        lead = ("-o", f"HostName={node}", "-o", f"HostKeyAlias={alias}", "-o", f"ProxyCommand={through}")
        return ["ssh", *_SAFE, *_TIMES, *_BATCH, "-o", "ControlPath=none", *lead, "--", self.host, COMMAND]

    # Commands

    def call(
        self,
        arguments: Sequence[str],
        *,
        output: Callable[[bytes], object] | None = None,
        show_errors: bool = True,
        **more: Any,
    ) -> Answer:
        """Run a command of hpcgpu on the host, and return what it printed.

        Ctrl-C is passed on, and its end is awaited: a command that starts a cluster cancels its jobs.

        Parameters
        ----------
        arguments : sequence of str
            Such as ``["status", "demo", "--json"]``.
        output : callable, optional
            Gets what the command prints, piece by piece; then the answer has no output.
        show_errors : bool, default True
            Whether what the command prints on stderr is printed here.
        **more
            Other attributes of the `Request`.

        Raises
        ------
        HostError
            ssh failed, or hpcgpu is missing there or has another version.
        OptionError
            An argument is not UTF-8.
        HpcgpuError
            The error of the command, of the same class.
        KeyboardInterrupt
            The command has ended after Ctrl-C.
        """
        words = [self._sendable(word) for word in arguments]
        request = Request(nonce=secrets.token_hex(16), arguments=words, **more)
        command = RemoteCommand(self.command(), request, self.python, output, show_errors=show_errors)
        try:
            code = command.run(self._answers)
        except PrintsWithoutEnd:
            raise HostError(endless(self.host, command.greeting)) from None
        lost = ""
        if command.silent:
            why = silent(self.host, command.silent, shlex.join(words), command.errors)
            lost = f"{why}. {self._may_go_on}"
        if command.interrupted:
            if lost:
                write_stderr(lost)
            raise KeyboardInterrupt
        if lost:
            raise BrokenConnection(lost)
        if command.late:
            raise HostError(late(self.host, remote_command.BEGINS_WITHIN, command.errors, command.greeting))
        if command.far_side is None:
            why = failure(self.host, code, command.errors, command.greeting, self.to_log_in)
            if lost_connection(code, command.errors):  # the command may have begun
                raise BrokenConnection(f"{why}. {self._may_go_on}")
            raise HostError(why)
        if command.error is not None:
            raise command.error
        if code:
            raise self._lost(code, command.errors)
        return Answer(b"".join(command.received), command.far_side)

    def _sendable(self, word: str) -> str:
        with contextlib.suppress(UnicodeEncodeError):
            word.encode()
            return word
        raise OptionError(f"{word!r}: it is not UTF-8, so it cannot be sent to {self.host}")

    def _answers(self, far_side: FarSide) -> None:
        check_version(self.host, far_side)
        self._reached = True

    def call_again(self, arguments: Sequence[str], **more: Any) -> Answer:
        """Run a command that may run again: if the connection breaks, open another one, and run it again.

        The arguments are those of `call`.

        Raises
        ------
        HostError
            No connection could be opened for a quarter of an hour; or the host was never reached.
        HpcgpuError
            The error of the command, of the same class.
        """
        left, broken = _TRIED_FOR, 0
        latest: HostError
        printed = ""
        try:
            while True:
                began = time.monotonic()
                try:
                    return self.call(arguments, **more)
                except BrokenConnection as error:
                    left, latest, broken = _TRIED_FOR, error, broken + 1
                    if not self._reached and broken == _MOST_BROKEN:
                        raise
                except HostError as error:
                    left, latest = left - min(time.monotonic() - began + _PAUSE, _LONGEST), error
                    if not (self._reached or broken):
                        raise
                    if left < 0:
                        raise HostError(f"{error}. {self._may_go_on}" if broken else str(error)) from error
                if str(latest) != printed:
                    write_stderr(f"{printable(str(latest))}. It is tried again")
                printed = str(latest)
                time.sleep(_PAUSE)
        except KeyboardInterrupt:
            if broken:
                write_stderr(self._may_go_on)
            raise

    @property
    def _may_go_on(self) -> str:
        return f"The command may go on there. To see your clusters, run: hpcgpu list --host {shlex.quote(self.host)}"

    def _lost(self, code: int, text: str) -> HpcgpuError:
        """Return the error for a command that ended without reporting its own error."""
        if code == 255:
            why = f"the connection to {self.host} broke: {failure(self.host, code, text, '')}"
            return BrokenConnection(f"{why}. {self._may_go_on}")
        return ClusterError(f"the command on {self.host} ended with exit code {code}. {printable(text, 600)}".strip())


def check_version(host: str, far_side: FarSide) -> None:
    """Refuse to work with another version of hpcgpu: what the two exchange may differ.

    Raises
    ------
    HostError
    """
    if far_side.version != hpcgpu.__version__:
        raise HostError(
            f"{host} has hpcgpu {printable(far_side.version, 40)}, and this machine has {hpcgpu.__version__}. To "
            f"install the version of this machine there, run: hpcgpu install --host {shlex.quote(host)}"
        )


def _private_directory() -> Path:
    """Return the directory of our connections, which only this user can use."""
    from hpcgpu.posix.ownership import check, private_directory

    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "hpcgpu" if runtime else Path(tempfile.gettempdir()) / f"hpcgpu-ssh-{os.getuid()}"
    private_directory(path)
    try:
        check(path)
    except NotTrusted as error:
        raise NotTrusted(f"{error}: set {'XDG_RUNTIME_DIR' if runtime else 'TMPDIR'} to one") from error
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait while another thread or program of this user is in this context."""
    import fcntl  # not on Windows, where no connection is shared

    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a close alone would not free it if another thread has forked meanwhile
        os.close(lock)


def _person() -> bool:
    """Whether a person can answer questions: the program runs in a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _needs_a_person(words: str) -> bool:
    return re.search(r"Permission denied|Host key verification failed", words) is not None


def _quiet(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _run_in_background(command: Sequence[str], *, asks: bool = False) -> tuple[int, str]:
    """Run an ssh that goes on in the background; return its exit code and what it printed.

    It keeps its stderr for as long as it lives, so that is a file. If it `asks`, it uses the terminal.
    """
    with tempfile.TemporaryFile() as words:
        code = subprocess.run(
            command,
            stdin=None if asks else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if asks else words,
            start_new_session=not asks,
            check=False,
        ).returncode
        words.seek(0)
        return code, words.read().decode(errors="replace")
