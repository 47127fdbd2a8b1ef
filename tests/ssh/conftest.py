"""Login nodes that are reached by a real ssh, for one test each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sshd_bed
from laptop import queue_of
from sshd_bed import LoginNode, Nodes

from hpcgpu.client.reached_by_ssh import close_tunnels
from tests.conftest import live, plain_install


@pytest.fixture(scope="module", autouse=True)
def without_bokeh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Only this module reads Dask's dashboard."""
    if request.path.stem == "test_notebook_by_ssh":
        yield
    else:
        with plain_install(tmp_path_factory.mktemp("plain")):
            yield


@pytest.fixture
def login_node(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Starts login nodes: ``login_node(lines=["MaxSessions 1"])``. From then on `ssh` on the PATH reaches it as login1.
    The near side has the home of the test, the far side another one.
    """
    if reason := sshd_bed.why_not():
        pytest.skip(f"no login node can run here: {reason}")
    with ExitStack() as stack:

        def start(name: str = "node", **settings: Any) -> LoginNode:
            if (settings.get("as_host") or settings.get("code")) and (reason := sshd_bed.why_not_as_host()):
                pytest.skip(reason)
            node = stack.enter_context(LoginNode(home / name, **settings))
            for variable, value in node.environment().items():
                monkeypatch.setenv(variable, value)
            return node

        yield start


@pytest.fixture
def node(login_node: Nodes) -> Iterator[LoginNode]:
    """A login node whose clusters this program uses by ssh. They end before the test does."""
    node = login_node()
    yield node
    close_tunnels()
    left = live(queue_of(node))
    queue_of(node).cancel(left)
    assert not left, f"the test left the jobs {left}"


def pytest_configure() -> None:
    """Ask nobody for a password in a window, and use no agent of whoever runs the tests."""
    for name in ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY"):
        os.environ.pop(name, None)
