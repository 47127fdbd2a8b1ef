"""What `hpcgpu.runtime` relies on in distributed's scheduler, in its HTTP server, and in dask-cuda."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import distributed.scheduler
import distributed.versions
import pytest
from canary import canary
from distributed import Client, Scheduler, Worker
from distributed.active_memory_manager import ActiveMemoryManagerExtension
from distributed.core import Status, rpc
from distributed.node import ServerNode
from distributed.protocol.serialize import deserialize, serialize
from distributed.scheduler import KilledWorker

import hpcgpu.remote.connection
import hpcgpu.runtime.extension
from hpcgpu.fabric import strangers
from hpcgpu.fabric.security import HAS_GPU
from hpcgpu.runtime import calls, dashboard, hostcopy, recipients
from hpcgpu.runtime.extension import Extension
from hpcgpu.store import claims

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
        (ServerNode, "start_http_server"),
        (pages, "HTMLTemplateFormatter"),
        (distributed.scheduler, "error_message"),
        (distributed.versions, "error_message"),
    )
    for place, name in places:
        if hasattr(place, name):  # else the canary says so
            monkeypatch.setattr(place, name, getattr(place, name))


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
                worker.startup_information[recipients.GPUS] = lambda worker, count=gpus[number]: count
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


async def blocked() -> None:
    """A task that waits until it is cancelled with its worker."""
    await asyncio.sleep(600)


@canary
async def test_the_scheduler_removes_lost_workers_by_the_method_that_hpcgpu_replaces() -> None:
    async with scheduler() as s, workers(s, "left", "lost") as (left, lost), client(s) as c:
        removed: list[str] = []
        original = s.remove_worker

        async def remove(address: str, *, stimulus_id: str, expected: bool = False, close: bool = True) -> Any:
            removed.append(address)
            return await original(address, stimulus_id=stimulus_id, expected=True, close=close)

        s.remove_worker = s.handlers["unregister"] = remove
        task = c.submit(blocked, workers=["lost"], allow_other_workers=True)
        await until(lambda: s.workers[lost.address].processing)
        lost.batched_stream.comm.abort()
        await until(lambda: lost.address not in s.workers)
        assert removed == [lost.address], (
            "a worker whose connection broke is removed in another way than by Scheduler.remove_worker"
        )
        assert s.tasks[task.key].suspicious == 0, "Scheduler.remove_worker charges the loss though it is expected"
        await left.close(nanny=False)
        await until(lambda: left.address not in s.workers)
        assert removed[-1] == left.address, (
            "a worker that closes is removed in another way than by Scheduler.handlers['unregister']"
        )


@canary
async def test_a_lost_worker_can_be_charged_to_its_tasks_later() -> None:
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with scheduler() as s, workers(s, "other", "lost") as (_, lost), client(s) as c:
            extension = Extension(s, None)
            task = c.submit(blocked, workers=["lost"], allow_other_workers=True)
            await until(lambda: s.workers[lost.address].processing)
            lost.batched_stream.comm.abort()
            await until(lambda: lost.address not in s.workers and s.tasks[task.key].state == "processing")
            assert s.tasks[task.key].suspicious == 0
            await extension.ended(["lost"], crashed=["lost"])
            assert s.tasks[task.key].suspicious == 1
            error = await asyncio.wait_for(task.exception(), TIMEOUT)
            assert isinstance(error, KilledWorker), f"the task that is charged fails with {error!r}"


@canary
async def test_a_worker_whose_job_has_ended_is_removed_once_it_sends_no_heartbeats() -> None:
    async with scheduler() as s, workers(s, "other", "frozen") as (other, frozen), client(s) as c:
        extension = Extension(s, None)
        task = c.submit(blocked, workers=["frozen"], allow_other_workers=True)
        await until(lambda: s.workers[frozen.address].processing)
        frozen.periodic_callbacks["heartbeat"].stop()
        s.workers[frozen.address].last_seen -= 3600
        await extension.remove_silent()
        assert frozen.address in s.workers, "its job runs: it may only be slow"
        await extension.ended(["other", "frozen"], crashed=["frozen"])
        assert s.tasks[task.key].suspicious == 0, "it may still work"
        await extension.remove_silent()
        assert list(s.workers) == [other.address], "a worker with heartbeats stays until its connection ends"
        assert s.tasks[task.key].processing_on.address == other.address
        assert s.tasks[task.key].suspicious == 1, "the loss is charged, as its job crashed"


@canary
async def test_a_task_that_has_not_begun_moves_to_another_worker() -> None:
    async with scheduler() as s, workers(s, "busy") as (busy,), client(s) as c:
        tasks = c.map(held, range(2), pure=False, workers=["busy"], allow_other_workers=True)
        await until(lambda: len(busy.state.executing) == 1 and len(s.workers[busy.address].processing) == 2)
        async with workers(s, "free") as (free,):
            [executing] = busy.state.executing
            [waiting] = [task.key for task in tasks if task.key != executing.key]
            s.set_restrictions({waiting: {free.address}})
            s._reschedule(waiting, busy.address, stimulus_id="canary")
            await until(lambda: s.tasks[waiting].processing_on is s.workers[free.address])
            RELEASE.set()
            await asyncio.wait_for(c.gather(tasks, direct=False), TIMEOUT)


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
                    "distributed itself moves tasks that wait for resources: hpcgpu.runtime.resources need not"
                )
                victim, thief = s.workers[busy.address], s.workers[free.address]
                for task in list(victim.processing):
                    stealing.move_task_request(task, victim, thief)
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
async def test_the_scheduler_estimates_how_long_a_task_takes() -> None:
    async with scheduler() as s, client(s) as c:
        task = c.submit(blocked)
        await until(lambda: task.key in s.tasks)
        with dask.config.set({"distributed.scheduler.unknown-task-duration": "7s"}):
            assert s._get_prefix_duration(s.tasks[task.key].prefix) > 0
        assert [ts.key for ts in (*s.queued, *s.unrunnable)] == [task.key], (
            "tasks without workers are neither queued nor unrunnable"
        )


@canary
async def test_a_worker_that_was_to_leave_can_be_told_to_stay() -> None:
    async with scheduler() as s, workers(s, "stays", "other") as (stays, _):
        await s.retire_workers(workers=[stays.address], close_workers=False, remove=False)
        state = s.workers[stays.address]
        assert state.status is Status.closing_gracefully, f"a worker that retires is {state.status.name}"
        await Extension(s, None).resume(["stays"])
        await until(lambda: state.status is Status.running and stays.status is Status.running)


class Unreadable:
    """An object that the scheduler cannot rebuild, as one of a library that it lacks."""

    def __reduce__(self) -> Any:
        return unreadable, ()


def unreadable() -> None:
    raise ImportError("libcuda.so.1 is missing, which cupy needs")


@canary
async def test_a_graph_that_cannot_be_rebuilt_is_reported_by_the_function_that_hpcgpu_replaces() -> None:
    async with scheduler() as s, client(s) as c:
        hpcgpu.runtime.extension.install(s)
        with pytest.raises(RuntimeError) as caught:
            await asyncio.wait_for(c.submit(len, Unreadable()).result(), TIMEOUT)
        assert "the graph holds GPU objects (cupy)" in str(caught.value), (
            "distributed.scheduler.error_message is not asked, or the text is not 'deserialization of the task "
            f"graph': {caught.value}"
        )


@canary
async def test_the_scheduler_compares_versions_by_the_function_that_hpcgpu_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scheduler() as s:
        compared: list[list[str]] = []
        original = hpcgpu.runtime.extension._all_version_differences

        def compare(scheduler: Any, workers: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            compared.append(sorted(s.workers[address].name for address in workers))
            return original(scheduler, workers, *arguments, **options)

        monkeypatch.setattr(hpcgpu.runtime.extension, "_all_version_differences", compare)
        hpcgpu.runtime.extension.install(s)
        async with workers(s, "one", "two", "three"):
            assert [len(names) for names in compared] == [1, 1, 1], (
                "Scheduler.add_worker does not compare WorkerState.versions by distributed.versions.error_message, "
                f"after it has called the plugins: it compared {compared}"
            )
    monkeypatch.setattr(hpcgpu.runtime.extension, "_all_version_differences", original)
    ones, others = {"packages": {"msgpack": "1"}}, {"packages": {"msgpack": "2"}}
    differ = distributed.versions.error_message(ones, {"a": ones, "b": others, "c": ones}, ones)
    assert differ == original(ones, {"a": ones, "b": others, "c": ones}, ones) and "msgpack" in differ["warning"]


@canary
async def test_results_and_broadcasts_go_through_the_handlers_that_hpcgpu_replaces() -> None:
    async with scheduler() as s, workers(s, "one") as (one,):
        seen: list[tuple[str, Any, str]] = []

        class Noting(Extension):
            def _serializers(self, comm: Any, chosen: list[str] | None) -> list[str] | None:
                seen.append((inspect.stack()[1].function, comm.remote_info.get(HAS_GPU), comm.local_address))
                return ["dask", "pickle", "error"]

        Noting(s, None)
        arguments = {"handshake_overrides": {HAS_GPU: True}}
        async with client(s) as c:
            future = c.submit(abs, -7, key="seven")
            assert await c.gather(future, direct=False) == 7
            assert await c.run(abs, -8) == {one.address: 8}
            async with rpc(s.address, connection_args=arguments) as raw:
                assert (await raw.gather(keys=["seven"]))["data"] == {"seven": 7}
        assert [(name, has) for name, has, _ in seen] == [("gather", None), ("broadcast", None), ("gather", True)], (
            f"handlers.gather and handlers.broadcast saw {seen}; the third has handshake_overrides, which "
            "Comm.remote_info holds"
        )
        assert all(address.startswith("tcp://") for *_, address in seen)


@canary
async def test_calls_are_counted_and_keep_the_scheduler_by_what_hpcgpu_replaces() -> None:
    async with scheduler(idle_timeout="1 hour") as s, workers(s, "one") as (one,):
        extension = Extension(s, None)
        calls.count(one)
        ws = s.workers[one.address]
        one.ended = ended = asyncio.Event()

        async def wait(dask_worker: Any) -> None:
            await dask_worker.ended.wait()

        async with client(s) as c:
            running = asyncio.ensure_future(c.run(wait))
            await until(lambda: extension.calls.running(ws) == 1)
            await until(lambda: s.idle_since is None)
            assert s.periodic_callbacks["idle-timeout"].callback() is None, "Scheduler.check_idle"
            ended.set()
            await running
            assert extension.calls.running(ws) == 0, "Scheduler.broadcast"
            await until(s.check_idle)
            ended.clear()
            await c.run(wait, wait=False)
            assert one.metrics[calls.METRIC](one) == 1, "_ongoing_background_tasks, _ongoing_tasks"
            await until(lambda: extension.calls.running(ws) == 1)
            ended.set()
            await until(lambda: one.metrics[calls.METRIC](one) == 0)
            ws.last_seen = 0.0
            await s.periodic_callbacks["worker-ttl"].callback()
            assert not s.workers, "Scheduler.check_worker_ttl removes a worker without a nanny that is silent"


class OnDevice:
    """An object in GPU memory, as `hostcopy` sees it."""

    def get(self) -> dict[str, int]:
        return {"on the host": 1}


OnDevice.__module__ = "gpu_library.canary"


@canary
def test_a_host_copy_is_read_by_distributed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hostcopy._COPIES, "gpu_library", ("get", lambda value: value.get()))
    hostcopy.register()
    for value, expected in ((OnDevice(), {"on the host": 1}), ({"holds": OnDevice()}, {"holds": {"on the host": 1}})):
        header, frames = serialize(value, serializers=hostcopy.SERIALIZERS, on_error="raise")
        assert header["serializer"] in ("dask", "pickle"), f"the header names the serializer {header['serializer']!r}"
        assert deserialize(header, frames) == expected


@canary
async def test_data_of_a_retiring_worker_goes_where_the_method_that_hpcgpu_replaces_says() -> None:
    recipients.install()
    recipients.install()  # once more changes nothing
    with dask.config.set({"distributed.scheduler.active-memory-manager.measure": "managed"}):
        async with (
            scheduler() as s,
            workers(s, "retires", "cpu", "gpu", gpus=(1, 0, 1)) as (retires, _, gpu),
            client(s) as c,
        ):
            assert s.workers[gpu.address].extra[recipients.GPUS] == 1, (
                "Worker.startup_information does not reach the scheduler"
            )
            filling = c.submit(bytes, 10_000, workers=["gpu"])  # distributed itself takes the worker that has least
            data = c.submit(bytes, 1000, workers=["retires"])
            await asyncio.wait_for(c.gather([filling, data], direct=False), TIMEOUT)
            await s.retire_workers(workers=[retires.address])
            [holder] = s.tasks[data.key].who_has
            assert holder.name == "gpu", f"the data went to {holder.name!r}: _find_recipient did not choose"


def code(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@canary
async def test_each_server_of_a_scheduler_starts_by_the_method_that_hpcgpu_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = claims.claim(tmp_path / "demo", lambda submits: [], system="local")
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    monkeypatch.setattr(strangers, "_MOST", 1)
    dashboard.guard_servers_of_this_process()
    served = {"dashboard": True, "dashboard_address": "127.0.0.1:0"}
    async with contextlib.AsyncExitStack() as stack:
        s = await stack.enter_async_context(scheduler(**served))
        worker = await stack.enter_async_context(Worker(s.address, nthreads=1, **served))
        for server in (s, worker):
            url = f"http://127.0.0.1:{server.http_server.port}"
            assert isinstance(server.http_server.request_callback, dashboard.Guard)
            limits = server.http_server.conn_params
            assert limits.header_timeout < 60 and limits.max_header_size < 2**16
            for path, expected in (("/health", 200), ("/info/metrics", 403), ("/", 403)):
                assert await asyncio.to_thread(code, url + path) == expected, f"{path} of {type(server).__name__}"
            token = f"{url}/sitemap.json?token={directory.dashboard_token()}"
            assert await asyncio.to_thread(code, token) in (200, 302, 403)
            silent = [await asyncio.open_connection("127.0.0.1", server.http_server.port) for _ in range(2)]
            ended = await asyncio.wait_for(silent[0][0].read(), 60)
            assert ended == b"", f"handle_stream of {type(server).__name__} is not called: strangers are not limited"
            for _, writer in silent:
                writer.close()


@pytest.mark.skipif(pages is None, reason="there is no Bokeh, and so no dashboard")
@canary
async def test_the_table_of_exceptions_makes_its_cells_by_the_class_that_hpcgpu_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pytest.importorskip("bokeh.models")
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(claims.claim(tmp_path / "demo", list, system="local").path))

    def templates(made: Any) -> list[str]:
        return [one.template for one in made.root.select({"type": models.HTMLTemplateFormatter})]

    async with scheduler() as unguarded:
        assert any("<%= value" in text for text in templates(pages.ExceptionsTable(unguarded))), "Dask escapes it now"
    dashboard.guard_servers_of_this_process()
    async with scheduler(dashboard=True, dashboard_address="127.0.0.1:0") as guarded:
        for made in (pages.ExceptionsTable(guarded), pages.WorkerTable(guarded)):
            assert templates(made) and not any("<%=" in text for text in templates(made))


@canary
async def test_a_client_shows_the_link_of_the_property_that_hpcgpu_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler() as s, Client(s.address, asynchronous=True, set_as_default=False) as client:
        assert client.cluster is None and client.scheduler.address == s.address
        assert client.dashboard_link.startswith("http://")
        monkeypatch.setitem(hpcgpu.remote.connection._connected_to, s.address, Path("/clusters/demo"))
        monkeypatch.setattr(hpcgpu.remote.jupyter_server, "dashboard_link", lambda path: f"/hpcgpu/{path.name}")
        assert client.dashboard_link == "/hpcgpu/demo"
        assert 'href="/hpcgpu/demo"' in client._repr_html_()
