"""CPU time of receiving 400 MB over TLS as Dask does: with Python's own socket, and with hpcgpu's.

One process sends and receives in turn, and only what the receiver does is counted. So other load on the machine changes
little.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import socket
import ssl
import tempfile
import time
from pathlib import Path

from tornado.iostream import SSLIOStream

from hpcgpu.fabric import tls_connections
from hpcgpu.store import certificates_and_keys, create_directory

MESSAGE, MESSAGES = 512 * 1024, 150


def contexts(place: Path, receiver: type[ssl.SSLSocket]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the sender and of the receiver."""
    both = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in both:
        context.check_hostname = False
        context.load_cert_chain(place / "tls" / "cert.pem", place / "tls" / "key.pem")
        context.load_verify_locations(place / "tls" / "cert.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    both[1].sslsocket_class = receiver
    return both


def connected(sending: ssl.SSLContext, receiving: ssl.SSLContext) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return both ends of a connection, with buffers that hold a message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * MESSAGE)
        plain = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MESSAGE)
    near = sending.wrap_socket(plain, do_handshake_on_connect=False)
    far = receiving.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
    for end in (near, far):
        end.setblocking(False)
    done: set[ssl.SSLSocket] = set()
    while len(done) < 2:
        for end in (near, far):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                done.add(end)
    near.setblocking(True)
    return near, far


async def receive(place: Path, receiver: type[ssl.SSLSocket]) -> float:
    """Return the seconds of CPU for 400 MB: those of the fastest tenth of the messages."""
    near, far = connected(*contexts(place, receiver))
    stream = SSLIOStream(far)
    await stream.wait_for_handshake()
    data, buffer, seconds = bytes(MESSAGE), bytearray(MESSAGE), list[float]()
    for _ in range(MESSAGES):
        near.sendall(data)
        began = time.process_time()
        await stream.read_into(buffer)
        seconds.append(time.process_time() - began)
    stream.close()
    near.close()
    return sorted(seconds)[MESSAGES // 10] * 400e6 / MESSAGE


def main() -> None:
    """Measure and print."""
    place = Path(tempfile.mkdtemp()) / "cluster"
    certificates_and_keys.create(create_directory.claim(place, lambda submits: [], system="local"))
    print(f"Python {platform.python_version()}, {ssl.OPENSSL_VERSION}; CPU seconds to receive 400 MB")
    for name, receiver in (
        ("ssl.SSLSocket", ssl.SSLSocket),
        ("hpcgpu's socket", tls_connections.Socket),
    ):
        found = [asyncio.run(receive(place, receiver)) for _ in range(5)]
        print(f"{name:26}{min(found):.2f} to {max(found):.2f}")


if __name__ == "__main__":
    main()
