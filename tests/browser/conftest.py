"""The tests of a file share JupyterLabs with the same settings, and so a home. No test leaves a kernel, a notebook or a
job for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Jupyter, Servers

from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import queue_in


@pytest.fixture
def home(shared_home: Path) -> Path:
    """The home that the servers of a file have too."""
    return shared_home


@pytest.fixture
def queue(home: Path) -> Iterator[LocalQueue]:
    """Its queue; the test fails if it leaves a job."""
    with queue_in(home) as queue:
        yield queue


@pytest.fixture(scope="module")
def kept_servers(shared_jupyter: Servers) -> Servers:
    """As `shared_jupyter`; those that have the same settings are one."""
    started: dict[str, Jupyter] = {}

    def start(base_url: str = "/", **settings: Any) -> Jupyter:
        key = repr((base_url, sorted(settings.items())))
        if key not in started:
            started[key] = shared_jupyter(base_url, **settings)
        return started[key]

    return start


@pytest.fixture
def servers(kept_servers: Servers) -> Iterator[Servers]:
    """The same, for a test that leaves them as it found them."""
    used: list[Jupyter] = []

    def start(base_url: str = "/", **settings: Any) -> Jupyter:
        used.append(kept_servers(base_url, **settings))
        return used[-1]

    yield start
    for server in used:
        server.clear()
