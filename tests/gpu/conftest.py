"""What the tests of a real GPU share: whether there is one, the imitations of a dry run, and what they measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcgpu.software.compare_environments import collect
from tests.conftest import plain_install

#: Whether the tests run on imitations, to find mistakes of their own before a GPU is there: see run.py.
DRY_RUN = os.environ.get("HPCGPU_GPU_DRY_RUN") == "yes"

Measured = Callable[[str, str], None]


@pytest.fixture(scope="session", autouse=True)
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The model of the GPU; the tests are skipped where there is none."""
    if DRY_RUN:
        request.getfixturevalue("fake_gpus")
        with plain_install(tmp_path_factory.mktemp("plain")), pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent / "imitations"), prepend=os.pathsep)
            patch.syspath_prepend(str(Path(__file__).parent / "imitations"))
            yield "no GPU: dry run on imitations"
        return
    found = collect().get("GPU", "Fake GPU")
    if found == "Fake GPU":
        pytest.skip("there is no GPU here (NVML sees none, or one that pretends)")
    yield found


@pytest.fixture(scope="session")
def measured(gpu: str) -> Measured:
    """Adds a line to the file of results that run.py names: ``measured("start, ucx", "12.1 s")``."""

    def add(what: str, value: str) -> None:
        if path := os.environ.get("HPCGPU_GPU_RESULTS"):
            with Path(path).open("a") as file:
                file.write(f"{what:60} {value}\n")

    return add
