"""Where the ranks of a stand-in meet: each step ends when all of them have taken it, as with NCCL, Gloo and UCX."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from typing import Any

import psutil

#: Seconds after which a rank that waits for another one fails.
PATIENCE = 30.0
#: What this process took part in: the library, its rank, how many ranks there were, and its GPU.
took_part: list[tuple[str, int, int, str]] = []


def gpu(index: int = 0) -> str:
    """The GPU behind a device of this process."""
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[index]


def own_host() -> str:
    """The address of the interface that NCCL uses."""
    interface = os.environ["NCCL_SOCKET_IFNAME"].removeprefix("=")
    return next(one.address for one in psutil.net_if_addrs()[interface] if one.family is socket.AF_INET)


def listen(host: str, port: int = 0) -> tuple[str, int]:
    """Let ranks meet here; return where."""
    server = socket.create_server((host, port))
    server.settimeout(PATIENCE)
    threading.Thread(target=_relay, args=(server,), daemon=True).start()
    return host, int(server.getsockname()[1])


def _relay(server: socket.socket) -> None:
    """Give what each rank sends to all of them, again and again. Ranks that do not fit lose their connections."""
    ranks: dict[int, Any] = {}
    world = 1
    try:
        with server:
            while len(ranks) < world:
                connection, _ = server.accept()
                connection.settimeout(PATIENCE)
                with connection:
                    file = connection.makefile("rwb")
                rank, world = pickle.load(file)
                if rank in ranks or not 0 <= rank < world:
                    file.close()
                    raise ValueError(f"rank {rank} of {world} came, and {[*ranks]} were there")
                ranks[rank] = file
        while True:
            parts = pickle.dumps([pickle.load(ranks[rank]) for rank in range(world)])
            for file in ranks.values():
                file.write(parts)
                file.flush()
    except (OSError, EOFError, ValueError):
        for file in ranks.values():
            file.close()


class Group:
    """One rank among the others."""

    def __init__(self, library: str, place: tuple[str, int], rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        until = time.monotonic() + PATIENCE
        while True:
            try:
                connection = socket.create_connection(place, timeout=PATIENCE)
                break
            except ConnectionRefusedError:  # the first rank does not listen yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        with connection:
            self.file = connection.makefile("rwb")
        self._send((rank, world))
        self.exchange(None)  # all are there
        took_part.append((library, rank, world, gpu()))

    def _send(self, what: Any) -> None:
        self.file.write(pickle.dumps(what))
        self.file.flush()

    def exchange(self, own: Any) -> list[Any]:
        """What all ranks send, by rank."""
        self._send(own)
        return list(pickle.load(self.file))

    def close(self) -> None:
        self.file.close()
