"""The near side of connections through ssh: ports of this machine that lead to addresses that a login node reaches.

One ssh carries all connections, in both directions. If it breaks, because the machine slept or the network changed, it
is started again, and the connections go on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hpcgpu.display.counts_and_durations import duration
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterWarning, HostError, HpcgpuError
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.ssh.failures import endless, failure, late
from hpcgpu.ssh.far_side import Beginning, PrintsWithoutEnd, Request
from hpcgpu.ssh.login import Login, check_version
from hpcgpu.ssh.remote_command import APART, BEGINS_WITHIN, reported_error
from hpcgpu.ssh.streams import SIGN_OF_LIFE, Stream, Streams

_T = TypeVar("_T")
#: Addresses of this machine that lead to schedulers behind login nodes.
ADDRESSES = set[str]()
#: Seconds that the far side waits for this machine to come back.
KEEP = 12 * 3600.0
#: Seconds before each attempt to connect again: the last of these pauses repeats until `_OFTEN` seconds are over.
_PAUSES, _OFTEN = (0.5, 2.0, 5.0, 10.0, 30.0), 3600.0
#: Seconds between two attempts after that. This program checks more often whether this machine has slept, or a person
#: has opened a connection: then it tries at once.
_SELDOM, _CHECKS = 300.0, 30.0
#: Attempts before it is reported that the connection is broken.
_QUIET = 3
#: Seconds after which it is reported in any case: each attempt may take minutes.
_QUIET_FOR = 60.0
#: Seconds without a sign of life before the connection counts as broken.
_SILENCE = 4.0 * SIGN_OF_LIFE
#: Seconds for an answer of the login node; the first one of a command waits until Python has started there.
_ANSWER = 60.0


class _OtherNode(HostError):
    """The name of the login node stands for several, and another one answers."""


class Tunnel:
    """Connections through a login node.

    Parameters
    ----------
    login : Login
    """

    def __init__(self, login: Login) -> None:
        self.login = login
        self._session = secrets.token_hex(16)
        # on Windows, Dask and Jupyter choose another kind of loop, which starts no processes
        self._loop = getattr(asyncio, "ProactorEventLoop", asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"hpcgpu-ssh-{login.host}", daemon=True)
        self._servers = dict[int, asyncio.Server]()
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._streams = Streams()
        self._asking = asyncio.Lock()
        #: Leads to the command that answers questions.
        self._answers: Stream | None = None
        #: The real name of the login node that carries the connections.
        self.node = ""
        #: Why there is no connection now; empty while there is one.
        self.problem = ""

    def open(self) -> None:
        """Connect.

        Raises
        ------
        HostError
            ssh fails, or hpcgpu is not there.
        """
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.close()
            raise

    def forward(self, target: Callable[[], tuple[str, int]]) -> int:
        """Return a port of 127.0.0.1 that leads to an address, which is looked up for each connection."""
        return self._call(self._forward(target))

    def stop_forwarding(self, port: int) -> None:
        """Close a port. The connections that exist stay."""
        if (server := self._servers.pop(port, None)) is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(server.close)

    def ask(self, command: str, question: bytes) -> bytes:
        """Return the line with which a command of hpcgpu on the login node answers a line.

        The command waits there for the next question, so no ssh is started for one.

        Raises
        ------
        HostError
            There is no answer.
        """
        return self._call(self._ask(command, question))

    def ask_alone(self, command: str, question: bytes) -> bytes:
        """Return the same, of a command that answers this question alone: other questions do not wait for it."""
        return self._call(self._ask_alone(command, question))

    def close(self) -> None:
        """End all connections."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if not self._loop.is_closed():
            with contextlib.suppress(concurrent.futures.CancelledError):
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        coroutine.close()
        raise HostError(f"the connection to {self.login.host} is closed")

    async def _open(self) -> None:
        using = await self._connected()
        self._keeping = asyncio.ensure_future(self._keep(using))

    async def _connected(self) -> asyncio.Task[None]:
        """Connect; return the task that uses the connection.

        The relay with our streams is on one login node, and ssh may reach another one of the same name.
        """
        command = await in_thread(functools.partial(self.login.command, asks=not self._streams.begun))
        try:
            return await self._connected_by(command, self.node)
        except _OtherNode:
            with contextlib.suppress(HpcgpuError, OSError):
                return await self._connected_by(await in_thread(self.login.command_on, self.node), self.node)
        return await self._connected_by(command)

    async def _connected_by(self, command: list[str], node: str = "") -> asyncio.Task[None]:
        """Start ssh, and wait until both sides have greeted; return the task that uses it.

        Raises
        ------
        _OtherNode
            It reaches another login node than `node`.
        """
        nonce = secrets.token_hex(16)
        request = Request(nonce=nonce, arguments=["relay", self._session, str(KEEP), node], raw=True)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            **APART,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        words = asyncio.ensure_future(_last_words(process.stderr))
        beginning, rest = Beginning(nonce), b""
        try:
            process.stdin.write(request.encoded(self.login.python))
            async with asyncio.timeout(BEGINS_WITHIN):
                while beginning.far_side is None:
                    if not (piece := await process.stdout.read(4096)):
                        code = await process.wait()
                        why = failure(self.login.host, code, await words, beginning.greeting, self.login.to_log_in)
                        raise HostError(why)
                    rest = beginning.feed(piece)
                check_version(self.login.host, beginning.far_side)
                if node not in ("", beginning.far_side.node):
                    raise _OtherNode(f"{beginning.far_side.node} has no relay of this program")
                self.node = beginning.far_side.node
                reader = asyncio.StreamReader()
                reader.feed_data(rest)
                using = asyncio.ensure_future(self._use(process, reader))
                connected = asyncio.ensure_future(self._streams.connected.wait())
                await asyncio.wait([using, connected], return_when=asyncio.FIRST_COMPLETED)
                connected.cancel()
                if using.done():
                    raise HostError(f"{self.login.host} ended the connection: {_reason(await words, nonce)}")
        except TimeoutError:
            await _end(process)
            raise HostError(late(self.login.host, BEGINS_WITHIN, await words, beginning.greeting)) from None
        except PrintsWithoutEnd:
            await _end(process)
            raise HostError(endless(self.login.host, beginning.greeting)) from None
        except BaseException:
            await _end(process)
            raise
        self._process = process
        return using

    async def _use(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        """Use a connection until it breaks."""
        assert process.stdin is not None and process.stdout is not None

        async def feed() -> None:
            assert process.stdout is not None
            while data := await process.stdout.read(1 << 16):
                reader.feed_data(data)
            reader.feed_eof()

        feeding, watching = asyncio.ensure_future(feed()), asyncio.ensure_future(self._watch(process))
        try:
            await self._streams.run(reader, process.stdin)
        finally:
            feeding.cancel()
            watching.cancel()
            await _end(process)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """End an ssh that brings nothing any more: it may not notice that the network is another one."""
        last = self._loop.time()
        while True:
            await asyncio.sleep(5)
            now = self._loop.time()
            if now - last > 2 * SIGN_OF_LIFE:  # this program was suspended: what came meanwhile is not read yet
                self._streams.last_received = now
            last = now
            if now - self._streams.last_received > _SILENCE:
                _kill(process)

    async def _keep(self, using: asyncio.Task[None]) -> None:
        """Connect again whenever the connection breaks."""
        while True:
            with contextlib.suppress(ValueError, OSError):
                await using
            using = await self._connected_again()
            self.problem = ""

    async def _connected_again(self) -> asyncio.Task[None]:
        """Try to connect until it succeeds, and report why it does not."""
        began, often = self._loop.time(), True
        for attempt in itertools.count():
            try:
                return await self._connected()
            except (HpcgpuError, OSError) as error:
                if often and attempt >= len(_PAUSES) and self._loop.time() - began > _OFTEN:
                    often = False
                    self._warn(f"is tried again every {duration(_SELDOM)} from now on: {error}")
                known = attempt >= _QUIET or self._loop.time() - began > _QUIET_FOR
                if often and known and str(error) != self.problem:
                    self._warn(f"is tried again: {error}")
                self.problem = str(error) if known else ""
            await (asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)]) if often else self._pause_long())
        raise AssertionError

    async def _pause_long(self) -> None:
        """Wait until the next attempt, or until the machine has slept or a person has opened a connection."""
        for _ in range(round(_SELDOM / _CHECKS)):
            before = time.time()
            await asyncio.sleep(_CHECKS)
            with contextlib.suppress(HpcgpuError, OSError):
                if time.time() - before > 2 * _CHECKS or await in_thread(self.login.is_open):
                    return

    def _warn(self, what: str) -> None:
        with contextlib.suppress(ClusterWarning):  # a program may turn it into an error
            warn(f"the connection to {self.login.host} is broken, and {what}")

    async def _forward(self, target: Callable[[], tuple[str, int]]) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # cancelled at the end: Python 3.11 prints a traceback for each connection that is cancelled
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._streams.open({"connect": list(target())}).copy(reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        self._servers[port] = server
        return port

    async def _ask(self, command: str, question: bytes) -> bytes:
        async with self._asking:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER):
                    for _ in range(2):  # a command that was asked nothing for a time has ended
                        if self._answers is None:
                            self._answers = self._streams.open({"run": command})
                        if answer := await _answer(self._answers, question):
                            return answer
                        self._stop_asking()
            self._stop_asking()
        raise HostError(f"{self.login.host} does not answer: {self.problem or 'the connection may be broken'}")

    async def _ask_alone(self, command: str, question: bytes) -> bytes:
        stream = self._streams.open({"run": command})
        try:
            if answer := await _answer(stream, question):
                return answer
        finally:
            stream.close()
        raise HostError(f"{self.login.host} has not answered: {stream.reason or 'the command there has ended'}")

    def _stop_asking(self) -> None:
        if self._answers is not None:
            self._answers.close()
            self._answers = None

    async def _close(self) -> None:
        for server in self._servers.values():
            server.close()
        if self._keeping is not None:
            self._keeping.cancel()
        process = self._process
        if process is not None and process.returncode is None and self._streams.connected.is_set():
            self._streams.end_session()
            assert process.stdin is not None
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    await process.stdin.drain()
                    await process.wait()  # the far side ends the connection
        if process is not None:
            _kill(process)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(stream: Stream, question: bytes) -> bytes:
    """Send a line, and return the line that comes back; empty if the other end is gone."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        await stream.write(question + b"\n")
        while not answer.endswith(b"\n"):
            if not (piece := await stream.read()):
                return b""
            answer += piece
    return answer


async def _last_words(stream: asyncio.StreamReader) -> str:
    """Return the end of what ssh prints on stderr."""
    text = b""
    while data := await stream.read(4096):
        text = (text + data)[-8192:]
    return text.decode(errors="replace")


def _reason(words: str, nonce: str) -> str:
    """Return why the far side has ended the connection: the error that it has reported, or what it has printed."""
    errors = (reported_error(line.encode(), nonce) for line in words.split("\n"))
    return str(next(filter(None, errors), "")) or printable(words, 600).strip() or "no reason is known"


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process)
    await process.wait()
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.transport.abort()
    with contextlib.suppress(OSError):  # Python 3.11 prints an error of its pipe for which nobody waits
        await process.stdin.wait_closed()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is not None:
            return
        if hasattr(signal, "SIGKILL"):
            # `kill` may take the exit code away from asyncio, which then warns of an unknown child
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.kill()
