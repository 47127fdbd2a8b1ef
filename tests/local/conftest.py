"""Most of these clusters are without Bokeh, as after a plain `pip install hpcgpu`. Those of tests/slurm and
tests/browser have Dask's dashboard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

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
    """Schedulers and workers of the other modules find neither Bokeh nor what Dask imports if it is there: each process
    starts sooner.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in WITH_BOKEH:
            place = tmp_path_factory.mktemp("plain")
            for name in ("bokeh", "jupyter_server_proxy", "rmm"):
                (place / f"{name}.py").write_text('raise ImportError("not in this environment")\n')
            patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield
