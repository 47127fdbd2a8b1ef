"""How a package that a program uploads is installed in the process of a Dask server."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Client, Nanny, Scheduler

from hpcgpu.client.pack_package import pack
from hpcgpu.dask_worker import uploaded_package
from hpcgpu.dask_worker.uploaded_package import Package, UploadedPackage, install, plugin_name
from hpcgpu.store import create_directory, uploaded_packages


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(uploaded_package, "_here", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def packed(place: Path, version: int, *names: str) -> Package:
    place.mkdir()
    for name in names:
        (place / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "src" / name).write_text(f"VERSION = {version}\n")
    return pack(place)


async def test_a_part_of_a_namespace_package_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    await install(packed(tmp_path / "first", 1, "own_space/part/__init__.py", "own_space/part/sub.py"), str(tmp_path))
    await install(packed(tmp_path / "other", 1, "own_space/other.py"), str(tmp_path))
    part, other = (importlib.import_module(f"own_space.{name}") for name in ("part.sub", "other"))
    new = packed(tmp_path / "second", 2, "own_space/part/__init__.py", "own_space/part/sub.py")
    assert await install(new, str(tmp_path)) == ["first"]
    from own_space import other as now_other
    from own_space import part as now_part
    from own_space.part import sub as now_sub

    assert now_other is other and (now_part.VERSION, now_sub.VERSION, part.VERSION) == (2, 2, 1)
    assert sum(str(tmp_path) in place for place in sys.path) == 2 == len([*tmp_path.glob("package-*")])


def test_the_next_scheduler_gets_no_package_that_was_replaced(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", None)
    for name in ("old", "other"):
        uploaded_packages.keep(directory, Package(name=name, modules=(f"own_{name}",), archive=b"1"))
    uploaded_packages.keep(directory, Package(name="new", modules=("own_old",), archive=b"2"), ["old"])
    assert [package.name for package in uploaded_packages.kept(directory)] == ["new", "other"]


async def test_code_that_runs_keeps_the_modules_that_it_has(tmp_path: Path) -> None:
    await install(packed(tmp_path / "first", 1, "own_kept/__init__.py", "own_kept/sub.py"), str(tmp_path))
    importlib.import_module("own_kept.sub")
    running = importlib.import_module("own_kept")
    await install(packed(tmp_path / "second", 2, "own_kept/__init__.py", "own_kept/sub.py"), str(tmp_path))
    assert (running.VERSION, running.sub.VERSION, importlib.import_module("own_kept.sub").VERSION) == (1, 1, 2)


async def test_a_package_whose_name_begins_alike_stays(tmp_path: Path) -> None:
    await install(packed(tmp_path / "first", 1, "own_name.py"), str(tmp_path))
    await install(packed(tmp_path / "longer", 1, "own_names.py"), str(tmp_path))
    longer = importlib.import_module("own_names")
    assert await install(packed(tmp_path / "second", 2, "own_name.py"), str(tmp_path)) == ["first"]
    assert importlib.import_module("own_names") is longer and importlib.import_module("own_name").VERSION == 2


async def test_what_was_unpacked_before_an_error_is_removed(tmp_path: Path) -> None:
    """Else the rest of a package keeps a disk full."""
    whole = packed(tmp_path / "first", 1, "own_rest/__init__.py", "own_rest/data.py")
    spoiled = whole.archive.replace(b"own_rest/data.py", b"own_rest/else.py", 1)
    with pytest.raises(zipfile.BadZipFile):
        await install(replace(whole, archive=spoiled), str(tmp_path))
    assert not [*tmp_path.glob("package-*")]


async def test_a_worker_that_cannot_unpack_a_package_goes_on_if_it_runs_and_ends_with_its_nanny_if_it_starts(
    tmp_path: Path,
) -> None:
    preload = tmp_path / "preload.py"  # as hpcgpu.dask_worker.worker_preload, which needs a cluster directory
    preload.write_text("from hpcgpu.dask_worker.uploaded_package import require_packages as dask_setup\n")
    broken = UploadedPackage(Package(name="own_broken", modules=("own_broken",), archive=b"no zip file"))
    options = {"preload": str(preload), "nthreads": 1, "dashboard": False, "death_timeout": 60}
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Nanny(scheduler.address, **options) as nanny,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        with pytest.raises(zipfile.BadZipFile):
            await client.register_plugin(broken, name=plugin_name("own_broken"))
        assert await client.submit(sum, [1, 2]) == 3
        task = client.submit(sum, [3, 4], resources={"X": 1})
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Nanny failed to start"):
                await Nanny(scheduler.address, resources={"X": 1}, **options)
        assert len(scheduler.workers) == 1
        assert scheduler.tasks[task.key].suspicious == 0, "the task had nothing to do with it"
        os.kill(nanny.pid, signal.SIGKILL)
        await nanny.finished()
        assert not scheduler.workers
