"""What a cluster does in a notebook, by real kernels: they show what they wait for, are interrupted, restarted and shut
down.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live
from tests.helpers import block_queue, in_queue

pytestmark = pytest.mark.shows("Notebooks and the page of JupyterLab")

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
KernelManager = pytest.importorskip("jupyter_client", reason="jupyter_client is not installed").KernelManager

Until = Callable[..., None]
Message = dict[str, Any]

CELL = """
from hpcgpu import LocalGPUCluster
cluster = LocalGPUCluster(
    name="analysis", if_exists="connect", gpus_per_node={gpus}, scheduler={{"gpus_per_node": {scheduler}}}, cores=1,
    jobs=1, protocol="tcp", poll_interval=0.5{more},
)
"""
ON_CPUS = {"gpus": 0, "scheduler": 0, "more": ""}
KEPT = ON_CPUS | {"more": ", shutdown_on_close=False"}


class Kernel:
    """A kernel of a notebook, and what a user does with it."""

    def __init__(self) -> None:
        self.manager = KernelManager(shutdown_wait_time=20.0)  # other tests run beside these
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self._connect()

    def _connect(self) -> None:
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code: str, shown: Callable[[Message], None] = lambda message: None) -> str:
        """Run a cell; return the name of the exception that it raised, or what its last line is as text."""
        result: list[str] = []

        def hook(message: Message) -> None:
            shown(message)
            if message["msg_type"] == "execute_result":
                result.append(message["content"]["data"]["text/plain"])

        reply = self.client.execute_interactive(code, output_hook=hook, timeout=240)["content"]
        return str(reply["ename"]) if reply["status"] == "error" else "".join(result)

    def restart(self, *, killed: bool = False) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=killed)
        self.client = self.manager.blocking_client()
        self._connect()

    def interrupt_when(self, code: str, words: str) -> str:
        """Run a cell, and interrupt it once it shows these words; return the name of the exception."""
        there = threading.Event()

        def shown(message: Message) -> None:
            if words in str(message["content"]) and not there.is_set():
                there.set()
                self.manager.interrupt_kernel()

        raised = self.run(code, shown)
        assert there.is_set(), f"the cell never showed {words!r}, and came to {raised!r}"
        return raised

    def shut_down(self) -> None:
        """End it as a Jupyter server does: it asks, waits for some seconds, and kills."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)


@pytest.fixture
def kernel(queue: LocalQueue, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(home / name.lower()))
    kernel = Kernel()
    yield kernel
    if kernel.manager.has_kernel:
        kernel.shut_down()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("hpcgpu.LocalGPUCluster(name='x y')", "OptionError: name='x y' is not a valid name"),
        ("hpcgpu.connect('nothing')", "NoCluster: "),
        ("hpcgpu.LocalGPUCluster(queue_directory='/proc/none')", "OptionError: "),
    ],
)
def test_the_traceback_of_an_error_of_ours_ends_at_the_users_line(kernel: Kernel, call: str, error: str) -> None:
    told: list[str] = []

    def shown(message: Message) -> None:
        if message["msg_type"] == "error":
            plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(message["content"]["traceback"]))
            told[:] = plain.splitlines()

    code = f"import dask, hpcgpu\n\ndef mine():\n    return {call}\n\n"
    assert kernel.run(f"{code}mine()", shown) == error.partition(":")[0]
    assert len(told) <= 25 and any(line.startswith("---->") and call in line for line in told), "\n".join(told)
    assert not any("site-packages" in line or "hpcgpu/" in line for line in told[:-2]), "\n".join(told)
    assert any(line.startswith(error) for line in told[-3:]), told[-3:]
    shortened = len(told)
    kernel.run("dask.config.set({'admin.traceback.shorten': []})")
    kernel.run("mine()", shown)
    assert len(told) > 2 * shortened, "Dask's own setting shows all of it"


def test_one_line_gets_or_makes_a_cluster_that_outlives_the_kernel(
    kernel: Kernel, queue: LocalQueue, until: Until
) -> None:
    assert (
        kernel.run(CELL.format(**KEPT) + "cluster.wait_for_workers(); cluster.get_client().publish_dataset(x=42)") == ""
    )
    jobs, where = live(queue), kernel.run("cluster.scheduler_address")
    for killed in (False, True):
        kernel.restart(killed=killed)
        assert kernel.run(CELL.format(**KEPT) + "cluster.wait_for_workers(); cluster.scheduler_address") == where
        assert live(queue) == jobs, "the same jobs, and no second set"
        assert kernel.run("cluster.get_client().get_dataset('x')") == "42"
    kernel.shut_down()
    assert live(queue) == jobs, "the cluster continues without a kernel"
    queue.cancel(jobs)
    until(lambda: live(queue) == [], "its jobs end")


def test_without_that_option_a_restart_ends_the_cluster_and_the_cell_makes_a_new_one(
    kernel: Kernel, queue: LocalQueue, until: Until
) -> None:
    assert kernel.run(CELL.format(**ON_CPUS)) == ""
    jobs = live(queue)
    kernel.restart()
    until(lambda: live(queue) == [], "the cluster ends with the kernel that started it")
    assert kernel.run(CELL.format(**ON_CPUS) + "cluster.wait_for_workers()") == ""
    assert len(live(queue)) == 2 and not set(live(queue)) & set(jobs)
    kernel.shut_down()
    until(lambda: live(queue) == [], "a kernel that is shut down leaves no job")


def test_a_kernel_that_was_killed_gets_its_cluster_back(kernel: Kernel, queue: LocalQueue, until: Until) -> None:
    assert kernel.run(CELL.format(**ON_CPUS) + "cluster.wait_for_workers()") == ""
    jobs, where = live(queue), kernel.run("cluster.scheduler_address")
    kernel.restart(killed=True)
    assert kernel.run(CELL.format(**ON_CPUS) + "cluster.scheduler_address") == where
    assert live(queue) == jobs
    kernel.shut_down()
    until(lambda: live(queue) == [], "it owns the cluster again, which ends with it")


def test_a_cell_that_is_interrupted_while_it_waits_for_workers_leaves_the_cluster_usable(
    kernel: Kernel, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    code = CELL.format(gpus=1, scheduler=0, more="") + "cluster.wait_for_workers()"
    assert kernel.interrupt_when(code, "waiting for 1 worker") == "KeyboardInterrupt"
    assert kernel.run("cluster.status.name") == "'running'"
    assert len(in_queue(queue, "analysis")) == 2, "what it started still waits"
    assert kernel.run("cluster.close()") == ""
    queue.cancel([blocker])
    until(lambda: live(queue) == [], "nothing is left")


def test_a_cell_that_is_interrupted_while_it_starts_the_cluster_leaves_no_job(
    kernel: Kernel, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    code = CELL.format(gpus=1, scheduler=1, more="")
    assert kernel.interrupt_when(code, "waiting for the scheduler") == "KeyboardInterrupt"
    until(lambda: in_queue(queue, "analysis") == [], "its jobs are cancelled")
    queue.cancel([blocker])
    assert kernel.run(CELL.format(**ON_CPUS) + "cluster.wait_for_workers(); cluster.close()") == "", (
        "the cell runs again"
    )
    until(lambda: live(queue) == [], "nothing is left")


def test_a_kernel_that_is_shut_down_while_a_cell_waits_leaves_no_job(
    kernel: Kernel, queue: LocalQueue, home: Path, until: Until
) -> None:
    blocker = block_queue(queue, home)
    kernel.client.execute(CELL.format(gpus=1, scheduler=0, more="") + "cluster.wait_for_workers()")
    until(lambda: len(in_queue(queue, "analysis")) == 2, "its jobs are in the queue")
    kernel.shut_down()
    until(lambda: in_queue(queue, "analysis") == [], "its jobs are cancelled")
    queue.cancel([blocker])
    until(lambda: live(queue) == [], "nothing is left")


def test_the_cell_shows_in_one_line_what_it_waits_for(kernel: Kernel, queue: LocalQueue) -> None:
    messages: list[Message] = []
    # the first worker may be there already when the scheduler answers
    more = "cluster.scale(jobs=2); cluster.wait_for_workers(2)"
    assert kernel.run(CELL.format(**ON_CPUS) + more, messages.append) == ""
    lines: dict[str, list[str]] = {}
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            if "text/html" in content["data"]:
                shown.append(content["data"])
                continue
            lines.setdefault(content["transient"]["display_id"], []).append(content["data"]["text/plain"])
    start, workers = lines.values()
    assert start[0] == "hpcgpu: cluster analysis: starting the scheduler"
    assert any("waiting for the scheduler: scheduler job" in line for line in start)
    assert any("waiting for 2 workers: " in line and " connected" in line for line in workers)
    assert all(", after " in line and ": done" in line for line in (start[-1], workers[-1])), "what stays is true"
    assert [m["content"] for m in messages if m["msg_type"] == "stream"] == [], "no line is printed besides"
    assert shown[0]["application/vnd.jupyter.widget-view+json"]["model_id"], "the start shows the cluster"
    assert "<b>analysis</b>: waiting" in shown[0]["text/html"] and "Workers: 0" in shown[0]["text/html"]
    assert kernel.run("cluster.close()") == ""


def test_a_quiet_cluster_shows_nothing_in_the_cell(kernel: Kernel, queue: LocalQueue) -> None:
    messages: list[Message] = []
    options = ON_CPUS | {"more": ", quiet=True"}
    assert kernel.run(CELL.format(**options) + "cluster.wait_for_workers(); cluster.close()", messages.append) == ""
    shown = ("display_data", "update_display_data", "stream")
    assert [message["content"] for message in messages if message["msg_type"] in shown] == []
