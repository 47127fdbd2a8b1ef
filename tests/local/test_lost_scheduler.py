"""A scheduler whose job ends: who waits for its results gets at once which job it was, and what the queue reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from distributed import Client, wait
from distributed.client import FutureCancelledError

import hpcgpu
from hpcgpu import ClusterWarning, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import Until
from tests.helpers import CPU
from tests.helpers import hpcgpu as command_line


def waits(get: Callable[[], Any]) -> tuple[Thread, list[BaseException]]:
    """Begin to wait for results in a thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            get()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    return thread, errors


def test_a_program_receives_the_reason_why_the_scheduler_of_its_cluster_is_gone(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with (
        pytest.warns(ClusterWarning, match="the scheduler of cluster demo is gone"),
        LocalGPUCluster(name="demo", jobs=1, **CPU) as cluster,
        cluster.get_client() as client,
    ):
        hears(queue, client, home, until)


def test_a_client_from_connect_receives_the_reason_why_its_scheduler_is_gone(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    LocalGPUCluster(name="demo", jobs=1, **CPU).detach()
    with hpcgpu.connect("demo", quiet=True) as client:
        hears(queue, client, home, until)
    assert command_line("stop", "demo").returncode == 0


def slow() -> type:
    """A result that its worker cannot send yet; its class travels by value."""

    class Slow:
        def __init__(self, place: str) -> None:
            self.place = place

        def __reduce__(self) -> tuple[type, tuple[str]]:
            Path(self.place, "fetched").touch()
            time.sleep(1000)
            return str, (self.place,)

    return Slow


def hears(queue: LocalQueue, client: Client, home: Path, until: Until) -> None:
    client.wait_for_workers(1)
    fetched = client.submit(slow(), str(home))
    wait(fetched)
    future, scheduler = client.submit(time.sleep, 1000), queue.find("demo-scheduler")
    waiting = [waits(future.result), waits(lambda: client.gather([fetched]))]
    until((home / "fetched").exists, "a result is fetched")
    queue.cancel(scheduler)
    for thread, errors in waiting:
        thread.join(250)
        [error] = errors
        assert isinstance(error, FutureCancelledError) and error.reason == "the scheduler is gone", error
        assert f"scheduler job {scheduler[0]}" in str(error) and "cancelled" in str(error), error
