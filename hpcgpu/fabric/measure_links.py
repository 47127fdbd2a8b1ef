"""Functions that run on workers and describe the connections between them: their transports and their speed."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from distributed.comm import connect
from distributed.protocol import to_serialize

from hpcgpu.fabric import interface_addresses, ucx_endpoints
from hpcgpu.fabric.node_gpus import first_device, nvml

if TYPE_CHECKING:
    from distributed.comm import Comm
    from distributed.worker import Worker


#: Number of round trips (their median is the latency), and of transfers (the fastest gives the bandwidth).
_ROUND_TRIPS, _TRANSFERS = 100, 5
_NVLINKS = 18


class Description(TypedDict):
    """What `describe` returns."""

    #: The transports, by peer.
    transports: dict[str, list[str]]
    #: Why a peer cannot be connected to, by peer.
    errors: dict[str, str]
    #: Active NVLinks of the worker's GPU.
    nvlinks: int
    #: The result of `line_rates`.
    rates: dict[str, float]


class Speeds(TypedDict, total=False):
    """What `measure` returns: all results, or those before an error."""

    #: Seconds, half a round trip.
    latency: float
    #: Bytes per second, by size of a message in bytes.
    bandwidth: dict[int, float]
    error: str


async def describe(peers: Sequence[str], dask_worker: Worker) -> Description:
    """Connect to other workers, as for a transfer of data, and return the transports of each connection."""
    transports, errors = {}, {}
    for peer in peers:
        try:
            comm = await connect(peer, **dask_worker.security.get_connection_args("worker"))
        except OSError as error:
            errors[peer] = str(error)
            continue
        try:
            transports[peer] = _transports(comm)
        finally:
            await comm.close()
    return {"transports": transports, "errors": errors, "nvlinks": _nvlinks(), "rates": line_rates()}


def _transports(comm: Comm) -> list[str]:
    scheme = comm.peer_address.split("://", 1)[0]
    if scheme == "ucx":
        return list(ucx_endpoints.query(comm.ep).transports)
    address = comm.local_address.split("://", 1)[-1].rsplit(":", 1)[0]
    name = next((name for name, own in interface_addresses.addresses().items() if own == address), address)
    return [f"{scheme}/{name}"]


def _nvlinks() -> int:
    """Count the active NVLinks of the first GPU that this process sees."""
    active = 0
    with nvml() as library, contextlib.suppress(Exception):  # no driver, no NVLink, no permission
        device = first_device(library, os.environ.get("CUDA_VISIBLE_DEVICES"))
        for link in range(_NVLINKS):
            active += library.nvmlDeviceGetNvLinkState(device, link)
    return active


def line_rates(sysfs: Path = Path("/sys/class")) -> dict[str, float]:
    """Return the rates of the network cards from sysfs, in Gbit/s by card or interface."""
    rates = {}
    for rate in sorted(sysfs.glob("infiniband/*/ports/*/rate")):  # "200 Gb/sec (4X HDR)"
        with contextlib.suppress(OSError, ValueError, IndexError):
            rates[f"{rate.parents[2].name}:{rate.parent.name}"] = float(rate.read_text().split()[0])
    for speed in sorted(sysfs.glob("net/*/speed")):  # in Mbit/s; -1, or an error, if there is no rate
        with contextlib.suppress(OSError, ValueError):
            if (megabits := float(speed.read_text())) > 0:
                rates[speed.parent.name] = megabits / 1000
    return rates


def receive(dask_worker: Worker) -> None:
    """Let this worker receive what `measure` sends."""

    async def hpcgpu_receive(data: Any = None) -> None:
        """Receive data; deserialization has already put it into the right memory."""

    dask_worker.handlers["hpcgpu_receive"] = hpcgpu_receive


def speed(size: int, transfer: float, trip: float) -> float:
    """Return bytes per second of a transfer.

    Parameters
    ----------
    size : int
        Bytes.
    transfer, trip : float
        Seconds of the fastest transfer, and of the fastest round trip without data, which is part of a transfer. On a
        busy machine the transfer can be faster than the round trip: then its whole time counts.
    """
    return size / (transfer - trip if transfer > trip else transfer)


async def measure(peer: str, sizes: Sequence[int], device: bool, dask_worker: Worker) -> Speeds:
    """Measure the connection to another worker, which `receive` has prepared, as Dask's transfers use it.

    Parameters
    ----------
    peer : str
        Its address.
    sizes : sequence of int
        Bytes of one message.
    device : bool
        Whether the buffers are in GPU memory.
    """
    try:
        make = _device_buffer() if device else _host_buffer
        buffers = [make(size) for size in sizes]
    except Exception as error:  # each library has its own exception for a missing GPU
        return {"error": f"GPU memory cannot be used: {error}"}
    other = dask_worker.rpc(peer)
    bandwidth: dict[int, float] = {}
    result: Speeds = {"bandwidth": bandwidth}
    try:
        await other.hpcgpu_receive()
        trips = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            await other.hpcgpu_receive()
            trips.append(time.perf_counter() - began)
        trip = statistics.median(trips)
        result["latency"] = trip / 2
        for size, buffer in zip(sizes, buffers, strict=True):
            fastest = min([await _transfer(other, buffer) for _ in range(_TRANSFERS)])
            bandwidth[size] = speed(size, fastest, min(trips))
    # the receiver may lack memory, or a library to rebuild a buffer: any library may raise any error
    except Exception as error:
        result["error"] = f"not measured: {str(error) or repr(error)}"
    return result


async def _transfer(other: Any, buffer: Any) -> float:
    began = time.perf_counter()
    await other.hpcgpu_receive(data=to_serialize(buffer))
    return time.perf_counter() - began


def _host_buffer(size: int) -> memoryview:
    """Return memory that distributed handles like that of arrays. It would copy a received `bytearray` once more."""
    return memoryview(bytearray(size))


def _device_buffer() -> Callable[[int], Any]:
    import rmm

    return lambda size: rmm.DeviceBuffer(size=size)
