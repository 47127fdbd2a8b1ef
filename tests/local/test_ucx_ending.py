"""A process that spoke UCX ends with its own exit status, and UCX's objects are not destroyed under UCX's own
thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue

Until = Callable[..., None]

# UCX's functions that destroy, which report it and do nothing.
SPY = """
#include <unistd.h>
void ucp_worker_destroy(void *worker) { write(2, "spy: worker\\n", 12); }
void ucp_cleanup(void *context) { write(2, "spy: context\\n", 13); }
"""

PROGRAM = """
import asyncio, sys
from hpcgpu.fabric import ucx_authentication
ucx_authentication.install()
from distributed.comm import connect, listen

async def main():
    async def serve(comm):
        await comm.write(await comm.read())
    listener = await listen("ucx://127.0.0.1:0", serve)
    comm = await connect(listener.contact_address)
    await comm.write("hello")
    assert await comm.read() == "hello"
    if sys.argv[1] == "closed":
        await comm.close()
        listener.stop()
    return comm, listener

loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
kept = loop.run_until_complete(main())
print("spoke", flush=True)
if sys.argv[2] == "error":
    raise RuntimeError("the program failed")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spy")
    (directory / "spy.c").write_text(SPY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", directory / "spy.so", directory / "spy.c"], check=True)
    return directory / "spy.so"


@pytest.mark.parametrize("connections", ["open", "closed"])
@pytest.mark.parametrize(("end", "status"), [("0", 0), ("3", 3), ("error", 1)])
def test_a_process_that_spoke_ucx_ends_without_destroying_what_its_thread_works_on(
    fake_gpus: None, spy: Path, tmp_path: Path, connections: str, end: str, status: int
) -> None:
    (tmp_path / "key").write_text("00" * 32)
    environment = os.environ | {"LD_PRELOAD": str(spy), "HPCGPU_UCX_KEY": str(tmp_path / "key")}
    command = [sys.executable, "-c", PROGRAM, connections, end]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "spoke" in done.stdout, done.stderr
    assert "spy: " not in done.stderr
    assert done.returncode == status, done.stderr
    if end == "error":
        assert "the program failed" in done.stderr


def test_scheduler_nanny_and_worker_of_a_cluster_end_so(
    queue: LocalQueue, fake_gpus: None, spy: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(spy))
    gpus: dict[str, Any] = {"gpus_per_node": 1, "scheduler": {"gpus_per_node": 1}, "poll_interval": 0.5, "quiet": True}
    with LocalGPUCluster(jobs=2, protocol="ucx", **gpus) as cluster:
        cluster.wait_for_workers(2)
        assert all(address.startswith("ucx://") for address in cluster.scheduler_info["workers"])
        with Client(cluster) as client:
            futures = client.map(lambda x: x + 1, range(8))
            assert client.submit(sum, futures).result() == 36
            assert set(client.run(lambda: os.environ["LD_PRELOAD"]).values()) == {str(spy)}
        cluster.scale(0)  # the workers retire and end by themselves
        until(
            lambda: [job.kind for job in cluster.jobs if job.state == "running"] == ["scheduler"],
            "the worker jobs have ended",
        )
        logs = cluster.directory.logs
    found = {log.name: log.read_text() for log in logs.iterdir()}
    assert len(found) >= 3
    for name, text in found.items():
        assert "spy: " not in text, f"{name}: a process destroyed UCX's objects:\n{text}"
        assert "killed by signal 11" not in text, f"{name}: {text}"
