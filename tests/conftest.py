"""Fixtures that all layers share: a home of its own for each test, the fake GPUs, and the check that no job is left."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest

from hpcgpu.batch.base import JobState
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.dask_scheduler.keep_manager_running import LOG
from hpcgpu.errors import ClusterWarning
from tests.packed import Environment

HERE = Path(__file__).parent
#: Epoch seconds after which no further test begins.
UNTIL = float(os.environ.get("HPCGPU_TESTS_UNTIL", "inf"))
sys.path[:0] = [str(HERE / name) for name in ("gpu_stub", "slurm", "queue", "canaries", "browser", "local", "ssh")]

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as in tests/browser/missing

import browser  # noqa: E402
import fake_pbs  # noqa: E402

Until = Callable[..., None]

gc.disable()  # until all tests are collected: what is imported stays, and to scan it takes half of the time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no process that a test starts leaves a core dump

# An idle cluster computes for 0.07 s in each second: for Dask's statistics, which no test reads, and to read its
# memory ten times. So it does for 0.02 s. A client updates what `Client.scheduler_info` returns, without workers: a
# call at this moment, for all workers, returns none of them, and so some tests failed seldom.
SELDOM = {
    "CLIENT__SCHEDULER_INFO_INTERVAL": "1h",
    "ADMIN__TICK__INTERVAL": "500ms",
    "WORKER__PROFILE__ENABLED": "False",
    "WORKER__MEMORY__MONITOR_INTERVAL": "500ms",
}
for name, value in SELDOM.items():
    os.environ.setdefault(f"DASK_DISTRIBUTED__{name}", value)
dask.config.refresh()

# `nohup make test &` ignores these signals, and so would all that the tests start and interrupt.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left."""
    if time.time() > UNTIL:
        pytest.skip("no time is left for it (HPCGPU_TESTS_UNTIL)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Collect no garbage while pytest parses the source of a failed test: what a destructor warns of then is parsed
    too, and in Python 3.11 pytest ends with "AST constructor recursion depth mismatch" (cpython issue 106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def wait_until(condition: Callable[[], object], what: str | Callable[[], str], timeout: float = 150.0) -> None:
    """Wait for a state; the test fails if it does not come, and reports `what` was waited for, then."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout, f"{what() if callable(what) else what}: not within {timeout:g} s"
        time.sleep(0.05 if waited < 1 else 0.1)  # tests wait for most of their time, and each check costs


@contextmanager
def told(match: str, timeout: float = 120.0) -> Iterator[None]:
    """What runs inside makes hpcgpu warn of `match`, if not at once then soon: warnings come from the event loop's
    thread.
    """
    seen: list[str] = []
    said = threading.Event()

    def note(message: Warning | str, category: type[Warning], *_: Any) -> None:
        seen.append(str(message))
        if issubclass(category, ClusterWarning) and re.search(match, str(message)):
            said.set()

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", note)
        yield
        assert said.wait(timeout), f"no warning of {match!r} but of {seen}"


@pytest.fixture
def until() -> Until:
    return wait_until


@contextmanager
def home_in(place: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, dask.config.set({"hpcgpu.cluster-directory": str(place / "clusters")}):
        patch.setenv("HPCGPU_QUEUE_DIRECTORY", str(place / "queue"))
        patch.setenv("DASK_HPCGPU__CLUSTER_DIRECTORY", str(place / "clusters"))
        patch.setenv("DASK_TEMPORARY_DIRECTORY", str(place / "dask"))
        yield place
    broken = [path for path in place.glob(f"**/{LOG}") if "Traceback" in path.read_text(errors="replace")]
    assert not broken, f"the manager in the scheduler job raised an exception:\n{broken[0].read_text(errors='replace')}"


@contextmanager
def queue_in(home: Path) -> Iterator[LocalQueue]:
    queue = LocalQueue(home / "queue", gpus=4)
    queue.check()
    yield queue
    left = running(queue)
    queue.cancel(left)
    wait_until(lambda: not live(queue), "the jobs of a failed test end")
    assert not left, f"the test left the jobs {left}"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A queue directory and a directory of clusters that no other test sees; here and in the programs that the test
    starts.
    """
    with home_in(tmp_path) as home:
        yield home


@pytest.fixture
def queue(home: Path) -> Iterator[LocalQueue]:
    """The embedded queue with four pretended GPUs; the test fails if it leaves a job."""
    with queue_in(home) as queue:
        yield queue


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home as in `home`, for the tests of a module that share a cluster and leave it as it was."""
    with home_in(tmp_path_factory.mktemp("shared")) as home:
        yield home


@pytest.fixture(scope="module")
def shared_queue(shared_home: Path) -> Iterator[LocalQueue]:
    with queue_in(shared_home) as queue:
        yield queue


def live(queue: LocalQueue) -> list[str]:
    """Ids of the jobs of an embedded queue that have not ended."""
    ids = [path.stem for path in (queue.directory / "jobs").glob("*.json")]
    return sorted(i for i, status in queue.poll(ids).items() if not status.state.ended)


def running(queue: LocalQueue) -> list[str]:
    """Ids of those that are not about to end either."""
    return sorted(
        i
        for i, status in queue.poll(live(queue)).items()
        if not status.state.ended and status.state is not JobState.COMPLETING
    )


@pytest.fixture
def pbs(queue: LocalQueue, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_pbs.Site]:
    """A PBS that pretends, on the PATH; the test fails if it leaves a job."""
    of_nodes = (
        "PYTHONPATH",
        "DASK_DISTRIBUTED__",
        "DASK_TEMPORARY_DIRECTORY",
        "LD_LIBRARY_PATH",
        "UCX_",
        "DASK_CUDA_TEST_",
    )
    site = fake_pbs.Site(
        home / "pbs", queue, {name: value for name, value in os.environ.items() if name.startswith(of_nodes)}
    )
    monkeypatch.setenv("PATH", str(site.bin), prepend=os.pathsep)
    yield site
    site.set(faults={}, down=False)
    left = {job_id: state for job_id, state in site.alive().items() if state != "E"}
    if left:
        site.run("qdel", *left)
    wait_until(lambda: not site.alive(), "the jobs of a failed test end")
    assert not left, f"the test left the jobs {left}"


@contextmanager
def plain_install(place: Path) -> Iterator[None]:
    """Processes that start here find neither Bokeh nor what Dask imports if it is there, as after a plain
    `pip install hpcgpu`: each starts sooner.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bokeh", "jupyter_server_proxy", "rmm"):
            (place / f"{name}.py").write_text('raise ImportError("not in this environment")\n')
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment that can be packed, for the option `stage`."""
    return Environment(tmp_path)


@pytest.fixture(scope="session")
def fake_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """NVML and CUDA libraries that pretend, for the jobs that tests start."""
    import build

    if reason := build.why_not():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in build.environment(build.build(tmp_path_factory.mktemp("gpu_stub"))).items():
            patch.setenv(name, value)
        yield


@contextmanager
def servers_in(home: Path) -> Iterator[browser.Servers]:
    if reason := browser.why_not():
        pytest.skip(f"no browser test can run here: {reason}")
    with ExitStack() as stack:

        def start(base_url: str = "/", **settings: Any) -> browser.Jupyter:
            server = browser.Jupyter(home / f"jupyter-{time.monotonic_ns()}", base_url, **settings)
            stack.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def jupyter(home: Path) -> Iterator[browser.Servers]:
    """Starts JupyterLabs, whose kernels have the home of the test: ``jupyter("/user/ada/", theme=browser.DARK)``. The
    test fails if one leaves a process.
    """
    with servers_in(home) as start:
        yield start


@pytest.fixture(scope="module")
def shared_jupyter(shared_home: Path) -> Iterator[browser.Servers]:
    """The same, for the tests of a module that share servers and leave them as they were."""
    with servers_in(shared_home) as start:
        yield start


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """A page of a browser of its own; ``page.errors`` are the exceptions of its scripts."""
    if reason := browser.why_not():
        pytest.skip(f"no browser test can run here: {reason}")
    with browser.new_page(tmp_path / "browser") as page:
        yield page


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests were skipped for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        str(r.longrepr[2] if isinstance(r.longrepr, tuple) else r.longrepr).removeprefix("Skipped: ") for r in skipped
    )
    for reason, count in reasons.items():
        terminalreporter.write_line(f"Skipped tests: {count} ({reason})")


def pytest_collection_finish() -> None:
    """Collect garbage of the tests alone."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in tests/slurm; fast layers first."""
    order = {"unit": 0, "queue": 1, "local": 2, "docs": 3, "browser": 4, "slurm": 5, "ssh": 6, "site": 7}
    for item in items:
        layer = Path(item.fspath).parent.name
        if layer == "slurm":
            item.add_marker(pytest.mark.slurm)
    items.sort(key=lambda item: order.get(Path(item.fspath).parent.name, 8))
