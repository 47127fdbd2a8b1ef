"""Most of these clusters are without Bokeh, as after a plain `pip install hpcgpu`. Those of tests/browser
have Dask's dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import plain_install

#: Modules that look at the dashboard, or at what an environment has.
WITH_BOKEH = {
    "test_check",
    "test_dashboard_command",
    "test_gpu_usage",
    "test_in_containers",
    "test_jupyter_server",
    "test_listeners",
    "test_plain_install",
    "test_whole_demo",
    "test_worker_start",
}


@pytest.fixture(scope="module", autouse=True)
def without_bokeh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if request.path.stem in WITH_BOKEH:
        yield
    else:
        with plain_install(tmp_path_factory.mktemp("plain")):
            yield
