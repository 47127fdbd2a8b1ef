"""Who runs code at the ports of a cluster: somebody with nothing, and somebody with what is in a cluster directory.

    python knocks.py TIMEOUT [--with DIRECTORY]... PLACE...

A place is HOST:PORT, which is tried over each protocol, or PROTOCOL://HOST:PORT. A scheduler, worker or nanny there is
asked to run a function. It prints a line for each try: the place, the protocol, with what, and `ran` or the exceptions.
A program of its own, as it runs as any user on any host.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from distributed.comm import connect
from distributed.protocol import pickle

from hpcgpu.store import certificates_and_keys
from hpcgpu.store.directory import ClusterDirectory

PROTOCOLS = ("tcp", "tls", "authenticated")


async def ask(address: str, operation: str, timeout: float, arguments: dict[str, Any]) -> None:
    """Let the process at an address run a function; raise if it does not."""
    async with asyncio.timeout(2 * timeout):
        comm = await connect(address, timeout=timeout, **arguments)
        try:
            await comm.write({"op": operation, "function": pickle.dumps(socket.gethostname), "reply": True})
            answer = await comm.read()
        finally:
            comm.abort()
    if answer.get("status") != "OK":
        raise RuntimeError(str(answer)[:200])


async def knock(place: str, protocol: str, name: str, timeout: float, arguments: dict[str, Any]) -> str:
    """One line: whether a function ran."""
    operations = ("run", "run_function")  # of workers and nannies, and of schedulers
    asked = [ask(f"{protocol}://{place}", operation, timeout, arguments) for operation in operations]
    failures = [type(error).__name__ for error in await asyncio.gather(*asked, return_exceptions=True) if error]
    return f"{place} {protocol} with {name}: {' '.join(failures) if len(failures) == len(operations) else 'ran'}"


async def main(timeout: float, directories: list[str], places: list[str]) -> None:
    """Try all at once."""
    has: dict[str, dict[str, Any]] = {"nothing": {}}
    for directory in directories:
        security = certificates_and_keys.security(ClusterDirectory(Path(directory)))
        assert security is not None
        has[directory] = security.get_connection_args("client")
    for place in places:  # that nobody answers there would prove nothing
        host, port = place.rpartition("://")[2].rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=30).close()
        print(f"{place} is reached", flush=True)
    tries = [
        knock(place.rpartition("://")[2], protocol, name, timeout, arguments)
        for place in places
        for protocol in ([place.partition("://")[0]] if "://" in place else PROTOCOLS)
        for name, arguments in has.items()
    ]
    for line in await asyncio.gather(*tries):
        print(line)


if __name__ == "__main__":
    first = 2
    own = []
    while sys.argv[first] == "--with":
        own.append(sys.argv[first + 1])
        first += 2
    asyncio.run(main(float(sys.argv[1]), own, sys.argv[first:]))
