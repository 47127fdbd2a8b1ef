"""`hpcgpu dashboard`: the ways to a dashboard for a browser on another computer."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.runtime.scheduler_connection import scheduler_of
from tests.conftest import live
from tests.helpers import CPU, command, hpcgpu


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster that tests share."""
    with LocalGPUCluster(name="demo", **CPU) as cluster:
        yield cluster


def opened(link: str) -> tuple[int, str]:
    """Open a link as a browser does that keeps cookies; return status and page."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        with browser.open(link, timeout=150) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_prints_the_ssh_command_and_the_link_through_it(cluster: LocalGPUCluster) -> None:
    done = hpcgpu("dashboard", "demo")
    contact, token = cluster.directory.contact(), cluster.directory.dashboard_token()
    assert contact is not None
    host, _, port = contact.dashboard.rpartition(":")
    assert done.stdout == f"{cluster.dashboard_link}?token={token}\n"
    assert f"  ssh -N -L {port}:{host}:{port} {getpass.getuser()}@{socket.getfqdn()}\n" in done.stderr
    assert f"http://localhost:{port}/status?token={token}" in done.stderr
    wrong = hpcgpu("dashboard", "demo", "--port", "1")
    assert wrong.returncode == 2 and "--port needs --forward" in wrong.stderr


def test_it_forwards_until_it_is_interrupted_and_other_users_of_the_machine_need_the_token(
    cluster: LocalGPUCluster,
) -> None:
    program = subprocess.Popen(
        command("dashboard", "demo", "--forward"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stderr is not None
    link = program.stdout.readline().strip()
    assert "until Ctrl-C" in program.stderr.readline()
    plain = link.partition("?")[0]
    assert opened(plain)[0] == 403, "without the token"
    assert opened(link)[0] == 200 and "Dask" in opened(link)[1]

    contact = cluster.directory.contact()
    assert contact is not None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster.directory.publish(replace(contact, dashboard=f"127.0.0.1:{silent.getsockname()[1]}"))
        silent.listen(0)
        with pytest.raises(OSError, match=r"\w"):
            opened(link)
    cluster.directory.publish(contact)
    assert opened(link)[0] == 200, "the contact is read anew"

    program.send_signal(signal.SIGINT)
    _, told = program.communicate(timeout=150)
    assert program.returncode == 0 and re.fullmatch(r"the dashboard of cluster demo at .* does not answer: .*\n", told)
    port = int(plain.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_a_port_that_another_program_has_is_reported(cluster: LocalGPUCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = hpcgpu("dashboard", "demo", "--forward", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1 and "address already in use" in done.stderr.lower()


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a cluster whose scheduler imports Bokeh until a program opens ``imported``; then an error comes."""
    os.mkfifo(tmp_path / "imported")
    (tmp_path / "modules" / "bokeh").mkdir(parents=True)
    slow = f"open({str(tmp_path / 'imported')!r}).close(); raise {request.param}"
    (tmp_path / "modules" / "bokeh" / "__init__.py").write_text(slow)
    prologue = [f"export PYTHONPATH={tmp_path}/modules"]
    return CPU | {"scheduler": {"gpus_per_node": 0, "job_script_prologue": prologue}}


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ("ImportError", 200, "for the dashboard.*bokeh"),
        ("AttributeError('np.bool8')", 503, "The cluster works, but has no dashboard: AttributeError: np.bool8\n"),
    ],
    indirect=["options"],
)
def test_workers_connect_before_the_scheduler_has_imported_its_dashboard_for_which_requests_wait(
    queue: LocalQueue, tmp_path: Path, options: dict[str, Any], code: int, why: str
) -> None:
    with LocalGPUCluster(jobs=1, **options) as cluster, Client(cluster) as client, ThreadPoolExecutor() as pool:
        assert client.submit(sum, [1, 2]).result(timeout=250) == 3
        opens = pool.submit(opened, cluster.dashboard_link_with_token())
        assert client.submit(sum, [3, 4]).result(timeout=250) == 7
        assert not opens.done()
        end_import = os.open(tmp_path / "imported", os.O_RDWR)  # it waits for nobody, as a program that writes would
        status, page = opens.result(timeout=250)
        os.close(end_import)
        assert status == code and re.search(why, page, re.DOTALL), page
        pages = cluster.dashboard_link_with_token().replace("/status", "/hpcgpu")
        assert code == 200 or opened(pages) == (status, page)
        assert opened(pages.replace("/hpcgpu", "/info/main/workers.html"))[0] == 200, "it needs no Bokeh"
        assert client.submit(sum, [5, 6]).result(timeout=250) == 11
        [log] = cluster.directory.logs.glob("*-scheduler-*.log")
        assert "the cluster works, but has no dashboard: " in log.read_text()


@pytest.mark.parametrize("options", ["ImportError"], indirect=True)
def test_a_scheduler_that_imports_its_dashboard_ends_at_once(
    queue: LocalQueue, options: dict[str, Any], until: Callable[..., None]
) -> None:
    with LocalGPUCluster(**options) as cluster:
        cluster.detach()  # now nobody cancels the scheduler job
        contact = cluster.directory.contact()
        assert contact is not None

        async def end() -> None:
            async with scheduler_of(cluster.directory, contact) as scheduler:
                await scheduler.hpcgpu_end(manager=99)

        asyncio.run(end())
        until(lambda: not live(queue), "its job has left the queue, although the import has not ended")
