"""Most of these clusters are without Bokeh, as after a plain `pip install hpcgpu`. Those of tests/browser
have Dask's dashboard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import plain_install

#: Modules that read the dashboard, or at what an environment has.
WITH_BOKEH = {
    "test_check",
    "test_dashboard_command",
    "test_gpu_usage",
    "test_in_containers",
    "test_jupyter_server",
    "test_listeners",
    "test_plain_install",
    "test_whole_demo",
    "test_worker_pages",
    "test_worker_start",
}


@pytest.fixture(scope="module", autouse=True)
def without_bokeh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if request.path.stem in WITH_BOKEH:
        yield
    else:
        with plain_install(tmp_path_factory.mktemp("plain")):
            yield


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[list[Path]]:
    """Packages that do to a client and to ranks what libraries of GPUs do: this process imports them, and only here."""
    from dask.backends import detect_entrypoints
    from dask.dataframe.dask_expr._backends import dataframe_creation_dispatch

    folder = Path(__file__).parent / "stand_ins"
    packages = sorted(path for path in folder.iterdir() if (path / "__init__.py").exists())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        detect_entrypoints.cache_clear()
        yield packages
    for name in [name for name in sys.modules if name.split(".")[0] in {path.name for path in packages}]:
        del sys.modules[name]
    dataframe_creation_dispatch._lookup.pop("cudf", None)
    detect_entrypoints.cache_clear()
