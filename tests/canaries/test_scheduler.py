"""What `hpcgpu.runtime` relies on in distributed's scheduler, in its HTTP server, and in dask-cuda."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import dask
import distributed.node
import distributed.scheduler
import distributed.stealing
import pytest
from canary import canary
from distributed import Client, Nanny, Scheduler, Worker
from distributed.active_memory_manager import ActiveMemoryManagerExtension
from distributed.client import FutureCancelledError
from distributed.comm.registry import backends
from distributed.core import Status, rpc
from distributed.process import AsyncProcess
from distributed.protocol.serialize import deserialize, serialize
from distributed.scheduler import KilledWorker

import hpcgpu.client.connect
import hpcgpu.dask_scheduler.scheduler_extension
from hpcgpu.dask_scheduler import data_recipients, lost_results
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.dask_worker import count_calls, start_again
from hpcgpu.dask_worker.gpu_metrics import GPUS
from hpcgpu.errors import ClusterError
from hpcgpu.fabric import unauthenticated_connections
from hpcgpu.fabric.authenticating_listener import HAS_GPU
from hpcgpu.fabric.security import ClusterSecurity
from hpcgpu.runtime import dashboard_access, results_in_host_memory
from hpcgpu.runtime.complete_dask_commands import NO_LIMIT
from hpcgpu.store import create_directory

TIMEOUT = 60.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.01)


try:
    from distributed.dashboard.components import scheduler as pages
except ImportError:  # no Bokeh, and so no dashboard
    pages = None


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hpcgpu replaces in this process is put back."""
    places = (
        (ActiveMemoryManagerExtension, "_find_recipient"),
        (distributed.node, "HTTPServer"),
        (pages, "HTMLTemplateFormatter"),
        (distributed.scheduler, "error_message"),
    )
    for place, name in places:
        if hasattr(place, name):  # else the canary reports it
            monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(dashboard_access, "_of_process", [])


@asynccontextmanager
async def scheduler(**arguments: Any) -> AsyncIterator[Scheduler]:
    async with Scheduler(host="127.0.0.1", port=0, **{"dashboard": False, **arguments}) as running:
        yield running


@asynccontextmanager
async def workers(scheduler: Scheduler, *names: str, gpus: tuple[int, ...] = ()) -> AsyncIterator[list[Worker]]:
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for number, name in enumerate(names):
            worker = Worker(scheduler.address, nthreads=1, name=name, dashboard=False)
            if gpus:
                worker.startup_information[GPUS] = lambda worker, count=gpus[number]: count
            made.append(await stack.enter_async_context(worker))
        yield made


@asynccontextmanager
async def client(scheduler: Scheduler) -> AsyncIterator[Client]:
    async with Client(scheduler.address, asynchronous=True, set_as_default=False) as connected:
        yield connected


#: Ends the tasks that `held` runs.
RELEASE = threading.Event()


def held(number: int) -> None:
    """A task that takes a thread of its worker until the test ends it."""
    RELEASE.wait(TIMEOUT)


async def work_hard() -> None:
    """Take the event loop for some time, again and again."""
    while True:
        time.sleep(0.03)
        await asyncio.sleep(0)


async def blocked() -> None:
    """A task that waits until it is cancelled with its worker."""
    await asyncio.sleep(600)


@canary
async def test_a_lost_worker_is_charged_to_its_tasks_only_when_hpcgpu_reports_it() -> None:
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with (
            scheduler(allowed_failures=NO_LIMIT) as s,
            workers(s, "left", "lost") as (left, lost),
            client(s) as c,
        ):
            extension = hpcgpu.dask_scheduler.scheduler_extension.install(s)
            task = c.submit(blocked, workers=["lost"], allow_other_workers=True)
            await until(lambda: s.workers[lost.address].processing)
            lost.batched_stream.comm.abort()
            await until(lambda: lost.address not in s.workers)
            await until(lambda: s.tasks[task.key].state == "processing" and s.workers[left.address].processing)
            assert task.status == "pending", "the limit of the scheduler does not keep a task"
            await extension.lost_workers.ended(["lost"], crashed=["lost"])
            error = await asyncio.wait_for(task.exception(), TIMEOUT)
            assert isinstance(error, KilledWorker), (
                f"the task that is charged fails with {error!r}: no event had the processing-tasks of the lost worker"
            )
            assert error.allowed_failures == 0
            leaves = c.submit(blocked, key="leaves")
            await until(lambda: s.workers[left.address].processing)
            await s.remove_worker(left.address, stimulus_id="test", expected=True)
            await extension.lost_workers.ended(["left"], crashed=["left"])
            assert leaves.key not in extension.lost_workers._suspicious, "an expected end is no loss"


@canary
async def test_a_worker_that_loses_the_scheduler_closes_by_the_method_that_hpcgpu_replaces_and_reports_why() -> None:
    async with scheduler() as s, workers(s, "broken", "removed") as started:
        reasons = dict[str, str]()

        def replace(worker: Worker) -> None:
            close = worker.close

            async def replaced(*, reason: str = "", **options: Any) -> Any:
                reasons.setdefault(worker.name, reason)
                return await close(reason=reason, **options)

            worker.close = replaced

        for worker in started:
            replace(worker)
        broken, removed = started
        s.stream_comms[broken.address].comm.abort()
        await s.remove_worker(removed.address, stimulus_id="test", close=False)
        await until(lambda: all(worker.status is Status.closed for worker in started))
        assert reasons == {"broken": start_again._BROKEN, "removed": start_again._REMOVED}


@canary
@pytest.mark.parametrize("ends", ["by itself", "on request"])
async def test_a_nanny_ends_whose_worker_starts_again_and_finds_no_scheduler(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(Nanny, "kill", Nanny.kill)
    start_again.replace_kill()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with scheduler() as s:
            nannies = [Nanny(s.address, nthreads=1, dashboard=False, death_timeout=60) for _ in range(3)]
            await asyncio.gather(*nannies)
            for nanny in nannies:
                nanny.process.worker_kwargs["scheduler_ip"] = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
                nanny.death_timeout = 3 if ends == "by itself" else 60
                os.kill(nanny.pid, signal.SIGKILL)
            await until(lambda: all(nanny.process.status is Status.starting for nanny in nannies))
            busy = asyncio.ensure_future(work_hard())
            if ends == "on request":
                await asyncio.wait_for(asyncio.gather(*(nanny.close() for nanny in nannies)), TIMEOUT)
            await asyncio.wait_for(asyncio.gather(*(nanny.finished() for nanny in nannies)), TIMEOUT)
            busy.cancel()
            assert not any(nanny.is_alive() for nanny in nannies)


@canary
@pytest.mark.parametrize("waits", [False, True], ids=["distributed", "hpcgpu"])
async def test_a_restart_waits_for_a_worker_that_ends_later_than_a_second_after_sigkill(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    async def ends_late(self: AsyncProcess, timeout: float | None = None) -> None:
        raise TimeoutError

    monkeypatch.setattr(Nanny, "kill", Nanny.kill)
    if waits:
        start_again.replace_kill()
    async with scheduler() as s, Nanny(s.address, nthreads=1, dashboard=False) as nanny, client(s) as c:
        before = nanny.pid
        monkeypatch.setattr(AsyncProcess, "join", ends_late)
        refused = pytest.raises(TimeoutError, match="did not shut down within")
        with nullcontext() if waits else refused:
            await c.restart_workers([nanny.worker_address], timeout=TIMEOUT)
        monkeypatch.undo()
        await until(lambda: nanny.pid not in (None, before))
        await until(lambda: nanny.worker_address in s.workers)


@canary
async def test_a_task_runs_on_valid_workers_alone_and_waits_while_there_are_none() -> None:
    RELEASE.clear()
    async with scheduler() as s, Worker(s.address, nthreads=1, dashboard=False) as one, client(s) as c:
        try:
            upstream = s.valid_workers
            s.valid_workers = lambda task: {s.workers[one.address]} if "stays" in task.key else upstream(task)
            result = c.submit(int, 7)
            for kind in ("stays", "moves"):  # the first ones wait behind each other
                tasks = c.map(held, [result] * 2, key=kind, pure=False)
                await until(lambda kind=kind: sum(kind in ts.key for ts in s.workers[one.address].processing) == 2)
                for ts in s.workers[one.address].processing:
                    ts.prefix.duration_average = 10.0
                if kind == "stays":
                    stays = tasks
            async with Worker(s.address, nthreads=1, dashboard=False) as other:
                await until(lambda: s.workers[other.address] in s.running)
                s.extensions["stealing"].balance()
                moving = {ts.key for ts in s.extensions["stealing"].in_flight}
                assert moving and not any("stays" in str(key) for key in moving), f"stealing moves {moving}"
                RELEASE.set()
                await asyncio.wait_for(c.gather([*stays, *tasks], direct=False), TIMEOUT)
        finally:
            RELEASE.set()
    async with (
        scheduler() as s,
        Worker(s.address, nthreads=1, dashboard=False, memory_limit=0) as holds,
        Worker(s.address, nthreads=1, dashboard=False),
        client(s) as c,
    ):
        result = c.submit(int, 7, workers=[holds.address])
        await c.gather(result, direct=False)
        upstream = s.valid_workers
        s.valid_workers = lambda task: (
            set() if task.key == "needs" and holds.status == Status.paused else upstream(task)
        )
        holds.status = Status.paused
        await until(lambda: s.workers[holds.address] not in s.running)
        needs = c.submit(int, result, key="needs")
        await until(lambda: "needs" in s.tasks)
        assert s.tasks["needs"].state == "no-worker"
        holds.status = Status.running
        assert await asyncio.wait_for(c.gather(needs, direct=False), TIMEOUT) == 7


@canary
async def test_stealing_moves_a_task_that_waits_for_resources_when_hpcgpu_asks_for_it() -> None:
    def worker(name: str) -> Worker:
        return Worker(s.address, nthreads=4, name=name, dashboard=False, resources={"MEMORY": 100})

    RELEASE.clear()
    async with scheduler() as s, worker("busy") as busy, client(s) as c:
        try:
            tasks = c.map(held, range(2), pure=False, resources={"MEMORY": 70})
            await until(lambda: len(busy.state.executing) == 1 and len(s.workers[busy.address].processing) == 2)
            async with worker("free") as free:
                await until(lambda: s.workers[free.address] in s.running)
                stealing = s.extensions["stealing"]
                stealing.balance()
                assert not stealing.in_flight, (
                    "distributed itself moves tasks that wait for resources: hpcgpu need not do it"
                )
                victim, thief = s.workers[busy.address], s.workers[free.address]
                for task in list(victim.processing):
                    stealing.move_task_request(task, victim, thief)
                    assert stealing.move_task_request(task, victim, thief) == "in-flight", "it is requested twice"
                assert {info["thief"] for info in stealing.in_flight.values()} == {thief}
                await until(lambda: not stealing.in_flight)
                assert [ts.key for ts in victim.processing] == [ts.key for ts in busy.state.executing], (
                    "a task that runs moved, or one that waits did not"
                )
                await until(lambda: len(free.state.executing) == 1)
                RELEASE.set()
                await asyncio.wait_for(c.gather(tasks, direct=False), TIMEOUT)
        finally:
            RELEASE.set()


@canary
async def test_results_that_are_lost_are_reported_by_what_hpcgpu_sets_and_sends() -> None:
    async with scheduler() as s, workers(s, "one"), client(s) as c:
        result = c.submit(abs, -1, key="result")
        assert await asyncio.wait_for(result.result(), TIMEOUT) == 1
        [sent] = await c.scatter([[1, 2, 3]])
        await lost_results.lose(s, set(s.workers.values()), "the money is spent")
        with pytest.raises(ClusterError, match="the money is spent"):  # by TaskState.exception_blame
            await asyncio.wait_for(result.result(), TIMEOUT)
        with pytest.raises(FutureCancelledError, match=r"(?s)hpcgpu-lost.*the money is spent"):  # by cancelled-keys
            await asyncio.wait_for(sent.result(), TIMEOUT)


class Unreadable:
    """An object that the scheduler cannot rebuild, as one of a library that it lacks."""

    def __reduce__(self) -> Any:
        return unreadable, ()


def unreadable() -> None:
    raise ImportError("libcuda.so.1 is missing, which cupy needs")


@canary
async def test_a_graph_that_cannot_be_rebuilt_is_reported_by_the_function_that_hpcgpu_replaces() -> None:
    async with scheduler() as s, client(s) as c:
        hpcgpu.dask_scheduler.scheduler_extension.install(s)
        with pytest.raises(RuntimeError) as caught:
            await asyncio.wait_for(c.submit(len, Unreadable()).result(), TIMEOUT)
        assert "the graph holds GPU objects (cupy)" in str(caught.value), (
            f"distributed.scheduler.error_message is not called: {caught.value}"
        )


@canary
async def test_results_and_broadcasts_go_through_the_handlers_that_hpcgpu_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for scheme in ("tcp", "tls", "ucx"):
        monkeypatch.setitem(backends, scheme, backends.get(scheme))
    security = ClusterSecurity(bytes(range(32)))
    async with (
        scheduler(protocol="authenticated", security=security) as s,
        Worker(s.address, nthreads=1, dashboard=False, security=security) as one,
    ):
        seen: list[tuple[str, Any, str]] = []

        class Noting(Extension):
            def _serializers(self, comm: Any, chosen: list[str] | None) -> list[str] | None:
                seen.append((inspect.stack()[1].function, comm.remote_info.get(HAS_GPU), comm.local_address))
                return ["dask", "pickle", "error"]

        Noting(s, None)
        arguments = {**security.get_connection_args("client"), HAS_GPU: True}
        async with Client(s.address, asynchronous=True, set_as_default=False, security=security) as c:
            future = c.submit(abs, -7, key="seven")
            assert await c.gather(future, direct=False) == 7
            assert await c.run(abs, -8) == {one.address: 8}
            async with rpc(s.address, connection_args=arguments) as raw:
                assert (await raw.gather(keys=["seven"]))["data"] == {"seven": 7}
        assert [(name, has) for name, has, _ in seen] == [("gather", False), ("broadcast", False), ("gather", True)], (
            f"handlers.gather and handlers.broadcast saw {seen}; a client says what it has in Comm.remote_info"
        )
        assert all(address.startswith("authenticated://") for *_, address in seen)


@canary
async def test_calls_are_counted_by_what_hpcgpu_replaces() -> None:
    async with scheduler() as s, workers(s, "one") as (one,):
        extension = Extension(s, None)
        count_calls.count(one)
        ws = s.workers[one.address]
        one.ended = ended = asyncio.Event()

        async def wait(dask_worker: Any) -> None:
            await dask_worker.ended.wait()

        async with client(s) as c:
            running = asyncio.ensure_future(c.run(wait))
            await until(lambda: extension.calls.running(ws) == 1)
            assert extension.works(), "a call does not keep the scheduler"
            ended.set()
            await running
            assert extension.calls.running(ws) == 0
            ended.clear()
            await c.run(wait, wait=False)
            assert one.metrics[count_calls.METRIC](one) == 1, "a call is not continued in a new task"
            await until(lambda: extension.calls.running(ws) == 1)
            ended.set()
            await until(lambda: one.metrics[count_calls.METRIC](one) == 0)


class OnDevice:
    """An object in GPU memory, as `results_in_host_memory` sees it."""

    def get(self) -> dict[str, int]:
        return {"on the host": 1}


OnDevice.__module__ = "gpu_library.canary"


@canary
def test_a_host_copy_is_read_by_distributed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(results_in_host_memory._COPIES, "gpu_library", ("get", lambda value: value.get()))
    results_in_host_memory.register()
    for value, expected in ((OnDevice(), {"on the host": 1}), ({"holds": OnDevice()}, {"holds": {"on the host": 1}})):
        header, frames = serialize(value, serializers=results_in_host_memory.SERIALIZERS, on_error="raise")
        assert header["serializer"] in ("dask", "pickle"), f"the header names the serializer {header['serializer']!r}"
        assert deserialize(header, frames) == expected


@canary
async def test_data_of_a_retiring_worker_goes_where_the_method_that_hpcgpu_replaces_chooses() -> None:
    data_recipients.install()
    data_recipients.install()  # once more changes nothing
    with dask.config.set({"distributed.scheduler.active-memory-manager.measure": "managed"}):
        async with (
            scheduler() as s,
            workers(s, "retires", "cpu", "gpu", gpus=(1, 0, 1)) as (retires, _, gpu),
            client(s) as c,
        ):
            assert s.workers[gpu.address].extra[GPUS] == 1, "Worker.startup_information does not reach the scheduler"
            filling = c.submit(bytes, 10_000, workers=["gpu"])  # distributed itself takes the worker that has least
            data = c.submit(bytes, 1000, workers=["retires"])
            await asyncio.wait_for(c.gather([filling, data], direct=False), TIMEOUT)
            await s.retire_workers(workers=[retires.address])
            [holder] = s.tasks[data.key].who_has
            assert holder.name == "gpu", f"the data went to {holder.name!r}: _find_recipient did not choose"


def policy(page: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT) as answer:
            return str(answer.headers["Content-Security-Policy"])
    except urllib.error.HTTPError as error:
        return str(error.headers["Content-Security-Policy"])


def code(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@canary
async def test_scheduler_and_worker_serve_their_dashboards_by_the_class_that_hpcgpu_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 1)
    dashboard_access.require_token_in_this_process()
    served = {"dashboard": True, "dashboard_address": "127.0.0.1:0"}
    async with contextlib.AsyncExitStack() as stack:
        s = await stack.enter_async_context(scheduler(**served))
        worker = await stack.enter_async_context(Worker(s.address, nthreads=1, **served))
        for server in (s, worker):
            url = f"http://127.0.0.1:{server.http_server.port}"
            assert isinstance(server.http_server, dashboard_access.ServerWithToken)
            for path, expected in (("/health", 200), ("/info/metrics", 403), ("/", 403)):
                assert await asyncio.to_thread(code, url + path) == expected, f"{path} of {type(server).__name__}"
            token = f"{url}/sitemap.json?token={directory.dashboard_token()}"
            assert await asyncio.to_thread(code, token) in (200, 302, 403)
            page = urllib.request.Request(
                f"{url}/info/main/workers.html", headers={"Authorization": f"token {directory.dashboard_token()}"}
            )
            assert "sandbox" in await asyncio.to_thread(policy, page)
            silent = [await asyncio.open_connection("127.0.0.1", server.http_server.port) for _ in range(2)]
            ended = await asyncio.wait_for(silent[0][0].read(), 60)
            assert ended == b"", f"handle_stream of {type(server).__name__} is not called: strangers are not limited"
            assert "more than 1 at a time do not authenticate themselves" in caplog.text, "handle_stream is not called"
            caplog.clear()
            for _, writer in silent:
                writer.close()


@pytest.mark.skipif(pages is None, reason="there is no Bokeh, and so no dashboard")
@canary
async def test_the_table_of_exceptions_makes_its_cells_by_the_class_that_hpcgpu_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = pytest.importorskip("bokeh.models")
    monkeypatch.setattr(pages, "HTMLTemplateFormatter", models.HTMLTemplateFormatter)  # another test may have run

    def templates(made: Any) -> list[str]:
        return [one.template for one in made.root.select({"type": models.HTMLTemplateFormatter})]

    async with scheduler() as unguarded:
        assert any("<%= value" in text for text in templates(pages.ExceptionsTable(unguarded))), "Dask escapes it now"
    dashboard_access.escape_text()
    async with scheduler(dashboard=True, dashboard_address="127.0.0.1:0") as protected:
        for made in (pages.ExceptionsTable(protected), pages.WorkerTable(protected)):
            assert templates(made) and not any("<%=" in text for text in templates(made))


@canary
async def test_a_client_shows_the_link_of_the_property_that_hpcgpu_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler() as s, Client(s.address, asynchronous=True, set_as_default=False) as client:
        assert client.cluster is None and client.scheduler.address == s.address
        assert client.dashboard_link.startswith("http://")
        monkeypatch.setitem(hpcgpu.client.connect._connected_to, s.address, Path("/clusters/demo"))
        monkeypatch.setattr(hpcgpu.client.jupyter_dashboard_link, "dashboard_link", lambda path: f"/hpcgpu/{path.name}")
        assert client.dashboard_link == "/hpcgpu/demo"
        assert 'href="/hpcgpu/demo"' in client._repr_html_()
