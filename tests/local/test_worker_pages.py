"""The pages of a worker: Bokeh is imported when one of them is requested, and not before the first task."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU, GPU, travels

pytestmark = [pytest.mark.usefixtures("fake_gpus")]


@travels
def imported() -> bool:
    """Whether this process has imported Bokeh."""
    return "bokeh" in sys.modules


@pytest.mark.parametrize(
    ("kind", "options", "prefix"),
    [
        ("CPU", CPU, ""),
        ("CPU", CPU | {"worker_extra_args": ["--dashboard-prefix=/here"]}, "/here"),
        ("GPU", GPU | {"worker_extra_args": ["--dashboard-prefix", "/here"]}, "/here"),
    ],
)
def test_the_pages_of_a_worker_are_there_when_one_is_requested(
    queue: LocalQueue, kind: str, options: Mapping[str, Any], prefix: str, until: Callable[..., None]
) -> None:
    with LocalGPUCluster(**options, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers()
        assert set(client.run(imported).values()) == {False}
        address, worker = next(iter(cluster.scheduler_info["workers"].items()))
        place = f"http://127.0.0.1:{worker['services']['dashboard']}{prefix}"
        header = {"Authorization": f"token {cluster.directory.dashboard_token()}"}
        for _ in range(2):
            with urllib.request.urlopen(urllib.request.Request(f"{place}/status", headers=header), timeout=150) as page:
                assert page.status == 200 and b"bokeh" in page.read().lower()
        assert client.run(imported, workers=[address]) == {address: True}
        assert client.submit(sum, [1, 2]).result(timeout=150) == 3


@pytest.mark.parametrize(
    ("argument", "begins_with_pages", "code"), [("--dashboard", True, 200), ("--no-dashboard", False, 404)]
)
def test_a_user_chooses_whether_workers_have_pages(
    queue: LocalQueue, argument: str, begins_with_pages: bool, code: int
) -> None:
    with LocalGPUCluster(**CPU, jobs=1, worker_extra_args=[argument]) as cluster, Client(cluster) as client:
        cluster.wait_for_workers()
        assert set(client.run(imported).values()) == {begins_with_pages}
        [worker] = cluster.scheduler_info["workers"].values()
        page = f"http://127.0.0.1:{worker['services']['dashboard']}/status"
        header = {"Authorization": f"token {cluster.directory.dashboard_token()}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(page, headers=header), timeout=150) as answer:
                assert answer.status == code
        except urllib.error.HTTPError as error:
            assert error.code == code
