"""What authentication adds to making a UCX connection: medians of connections that are made in turn with and without
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import time
from typing import Any

from distributed.comm import connect, listen

from hpcgpu.fabric import ucx_authentication

RUNS = 300


async def handle(comm: Any) -> None:
    """Hold a connection until the other side closes it."""
    with contextlib.suppress(OSError):
        await comm.read()


async def measure() -> dict[str, list[float]]:
    """Return the seconds that each connection took."""
    key = secrets.token_bytes(32)
    ucx_authentication.install()
    ways: dict[str, dict[str, Any]] = {"without": {}, "with": {ucx_authentication.ARGUMENT: key}}
    listeners = {name: await listen("ucx://127.0.0.1", handle, **arguments) for name, arguments in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(RUNS + 10):
        for name, arguments in ways.items():
            started = time.perf_counter()
            comm = await connect(listeners[name].contact_address, **arguments)
            if run >= 10:  # the first ones load what all need
                seconds[name].append(time.perf_counter() - started)
            await comm.close()
    for listener in listeners.values():
        listener.stop()
    return seconds


def main() -> None:
    """Measure and print."""
    seconds = asyncio.run(measure())
    medians = {name: 1000 * statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:8} authentication {median:6.2f} ms for a connection")
    print(
        f"it adds {medians['with'] - medians['without']:.2f} ms, ratio {medians['with'] / medians['without']:.2f}; "
        "nothing to each message"
    )


if __name__ == "__main__":
    main()
