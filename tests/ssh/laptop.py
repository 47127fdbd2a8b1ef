"""What the near side has: a terminal with somebody at it, a link that can be slow or down, and what `ps` shows."""

from __future__ import annotations

import asyncio
import os
import pty
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from bed import free_ports
from sshd_bed import LoginNode

from hpcgpu.batch.local.queue import LocalQueue

#: A machine that does much else is slow.
SECONDS = 150.0


def queue_of(node: LoginNode) -> LocalQueue:
    """The queue of the far side."""
    return LocalQueue(node.home / "queue")


class Terminal:
    """A program at a terminal of its own, and what it shows there."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        pid, self._screen = pty.fork()
        if not pid:
            try:
                os.execvpe(command[0], list(command), {**os.environ, **(environment or {})})
            finally:
                os._exit(127)
        self.pid = pid
        self.shown = ""
        self.exit_status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.exit_status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait()
        os.close(self._screen)

    def expect(self, text: str, timeout: float = SECONDS) -> str:
        """Wait until it shows a text; what it showed up to there, which no later call reads."""
        deadline = time.monotonic() + timeout
        while text not in self.shown:
            if not self._read(deadline):
                raise AssertionError(f"the terminal does not show {text!r} but {self.shown!r}")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._screen, f"{line}\n".encode())

    def end(self, timeout: float = SECONDS) -> str:
        """Wait for the end of the program; what it showed since the last text that was expected."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"the program does not end; the terminal shows {self.shown!r}")
        self._wait()
        return self.shown

    def _wait(self) -> None:
        self.exit_status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, deadline: float) -> bool:
        """Whether there was more to see before the deadline, and before all programs left the terminal."""
        if not select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._screen, 65536)
        except OSError:  # Linux reports it when the last program closed it
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


class Relay:
    """A way to ports of this machine, as a slow link that loses packets, and can be down.

    Parameters
    ----------
    ports : iterable of int
        Connections go to these in turn, as with a name that stands for several login nodes.
    delay : float
        Seconds that everything takes, in each direction.
    loss : float
        The share of packets that are lost. One that is lost comes, with all that follow it, when it is sent again.
    """

    RESENT_AFTER = 0.2

    def __init__(self, ports: Iterable[int], delay: float = 0.0, loss: float = 0.0) -> None:
        self._ports = list(ports)
        self._delay, self._loss = delay, loss
        self._random = random.Random(0)
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = free_ports(1)[0]  # no connection takes it while this is down
        self.connections = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.pass_on()
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()

    def up(self) -> None:
        """Accept connections."""
        self._do(self._listen())

    def down(self) -> None:
        """End all connections, and accept none."""
        self._do(self._end())

    def pass_nothing_on(self) -> None:
        """Keep connections open and accept new ones, but be silent, as a link that is cut."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def pass_on(self) -> None:
        """Pass on what came meanwhile, and all that comes."""
        self._loop.call_soon_threadsafe(self._passes.set)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    async def _start(self) -> None:
        self._passes = asyncio.Event()
        self._passes.set()
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _end(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        port = self._ports[(self.connections - 1) % len(self._ports)]
        self._open.add(writer)
        try:
            with suppress(OSError):
                there, to = await asyncio.open_connection("127.0.0.1", port)
                self._open.add(to)
                await asyncio.gather(self._pass(reader, to), self._pass(there, writer))
                self._open.discard(to)
        finally:
            writer.close()
            self._open.discard(writer)
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read at once and write later, so that what follows one another takes the delay only once."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(self._arrive(on_the_way, writer))
        with suppress(OSError):
            while data := await reader.read(2**16):
                lost = self.RESENT_AFTER if self._random.random() < self._loss else 0.0
                on_the_way.put_nowait((self._loop.time() + self._delay + lost, data))
        on_the_way.put_nowait((self._loop.time() + self._delay, b""))
        await arriving

    async def _arrive(self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                when, data = await on_the_way.get()
                await asyncio.sleep(max(0.0, when - self._loop.time()))
                await self._passes.wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()


class WhatPsShows:
    """Inside, it reads the command lines of all processes of this machine again and again. A process that lives for
    a few milliseconds may not be seen.
    """

    def __enter__(self) -> Self:
        self.lines: set[bytes] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def having(self, text: str) -> list[str]:
        """The command lines with this text."""
        found = [line.replace(b"\0", b" ").decode(errors="replace") for line in [*self.lines] if text.encode() in line]
        return sorted(found)

    def _look(self) -> None:
        own = str(os.getpid())
        while not self._end.wait(0.01):
            for entry in os.scandir("/proc"):
                if entry.name.isdigit() and entry.name != own:
                    with suppress(OSError):
                        self.lines.add(Path(f"/proc/{entry.name}/cmdline").read_bytes())


def agent(place: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """An ssh-agent of the near side, and its socket."""
    socket = place / "agent"
    started = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()  # it prints where it listens
    return started, socket
