"""The far side of connections through ssh: ``python -m hpcgpu.ssh.relay SOCKET SECONDS`` on a login node.

It keeps the connections to a scheduler while the ssh connection is broken or the laptop sleeps. It listens on a Unix
socket that only its user can reach, and ends some hours after the last connection, or when the other side ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from hpcgpu.errors import HostError
from hpcgpu.posix.ownership import check, private_directory
from hpcgpu.ssh.streams import Stream, Streams

#: Seconds for a connection to a scheduler.
_CONNECT = 20.0
_PIECE = 1 << 16
_READY = b"ready\n"


def socket_of(session: str) -> Path:
    """Return the socket of a session, in a directory of this user alone.

    The name of a session is not known to others, so nobody can make its directory first.

    Raises
    ------
    NotTrusted
        Other users can change the directory.
    """
    if not re.fullmatch("[0-9a-f]{16,64}", session):
        raise HostError("the name of the session is damaged")
    directory = Path(tempfile.gettempdir()) / f"hpcgpu-relay-{session}"
    private_directory(directory)
    check(directory)
    return directory / "socket"


def carry(session: str, keep: float) -> None:
    """Carry the bytes of stdin and stdout to the relay of a session; start it if it is not there.

    Raises
    ------
    HostError
        It does not start.
    """
    path = socket_of(session)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        _start(path, keep)
        connection.connect(str(path))

    def send() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, _PIECE):
                connection.sendall(data)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=send, name="hpcgpu-relay", daemon=True).start()
    with contextlib.suppress(OSError):
        while data := connection.recv(_PIECE):
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]


def _start(path: Path, keep: float) -> None:
    command = [sys.executable, "-P", "-m", "hpcgpu.ssh.relay", str(path), str(keep)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != _READY:
        words = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise HostError(f"the connection cannot be carried on {socket.gethostname()}: {'; '.join(words[-2:])}")


async def _serve(stream: Stream, wanted: Any) -> None:
    """Connect a stream with what the near side wants: an address, or a command of hpcgpu."""
    if "run" in wanted:
        await _run(stream, str(wanted["run"]))
        return
    host, port = str(wanted["connect"][0]), int(wanted["connect"][1])
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT)
    await stream.copy(reader, writer)


async def _run(stream: Stream, command: str) -> None:
    """Let a command of hpcgpu read what the near side sends, and send what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "hpcgpu", command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        await stream.copy(process.stdout, process.stdin)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def relay(path: Path, keep: float) -> None:
    """Serve a session until the near side leaves for good, or does not come back for `keep` seconds."""
    streams = Streams(_serve)
    writers = set[asyncio.StreamWriter]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            with contextlib.suppress(ValueError):
                await streams.run(reader, writer)
        finally:
            writers.discard(writer)

    previous = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(connected, str(path))
    finally:
        os.umask(previous)
    about = path.stat()
    os.write(1, _READY)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    loop = asyncio.get_running_loop()
    last = loop.time()
    try:
        while not streams.near_side_left.is_set() and loop.time() - last < keep:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(streams.near_side_left.wait(), min(keep, 60.0))
            if writers:
                last = loop.time()
    finally:
        server.close()
        with contextlib.suppress(OSError):
            if path.stat().st_ino == about.st_ino:
                path.unlink()
                path.parent.rmdir()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(relay(Path(sys.argv[1]), float(sys.argv[2])))
