"""A package of the user, which is not installed where the jobs run, is given to all workers and to the scheduler."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import hpcgpu
from hpcgpu import LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import GPU, travels

pytestmark = [pytest.mark.shows("A package of the user's own on all workers"), pytest.mark.usefixtures("fake_gpus")]

CODE = """
class Point:
    def __init__(self, x):
        self.x = x

def twice(point):
    import sys
    return (VERSION, type(point) is Point, 2 * point.x, __file__, sys.path[0])

VERSION = {version}
"""


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster with two forked workers and one spawned one, which tests leave as it was but for its packages."""
    with LocalGPUCluster(**GPU, jobs=1) as cluster:
        cluster.add_worker_group("spawned", jobs=1, worker_start="spawn", gpus_per_node=1)
        cluster.wait_for_workers(3)
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture(autouse=True)
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of a test can be imported in this process, and only here."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def package(place: Path, name: str, version: int = 1) -> Any:
    """Write a package; return it as this process imports it first."""
    (place / name).mkdir(exist_ok=True)
    (place / name / "__init__.py").write_text(f"from {name}.code import Point, twice\n")
    (place / name / "code.py").write_text(CODE.format(version=version))
    (place / name / "data.txt").write_text("beside the code")
    return importlib.import_module(name)


@travels
def forked() -> bool:
    from multiprocessing.forkserver import get_inherited_fds

    return get_inherited_fds() is not None


def everywhere(client: Client, own: Any) -> dict[str, Any]:
    """What a function of the package returns on each worker, called by a task with an object of the package."""
    workers = client.scheduler_info()["workers"]
    calls = {w: client.submit(own.twice, own.Point(4), workers=[w], pure=False) for w in workers}
    return dict(client.gather(calls))


def test_present_and_later_workers_and_the_scheduler_have_the_package(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path
) -> None:
    own = package(tmp_path, "own_first")
    with pytest.raises(ModuleNotFoundError, match="own_first"):
        client.run_on_scheduler(own.twice, own.Point(1))
    with pytest.raises(RuntimeError, match="Error during deserialization of the task graph"):
        client.submit(own.twice, own.Point(1)).result()
    assert cluster.upload_package(tmp_path / "own_first") == ["own_first"]
    found = everywhere(client, own)
    assert [answer[:3] for answer in found.values()] == 3 * [(1, True, 8)]
    assert client.run_on_scheduler(own.twice, own.Point(3))[:3] == (1, True, 6)
    assert sorted(client.run(forked).values()) == [False, True, True]
    for *_, file, first in found.values():
        assert str(tmp_path) not in file and file.startswith(first) and Path(file).with_name("data.txt").exists()
        assert Path(first).stat().st_mode & 0o777 == 0o700
    assert len({first for *_, first in found.values()}) == 3

    cluster.scale(jobs=2, worker_group="spawned")
    cluster.wait_for_workers(4)
    client.restart_workers([next(iter(found))])
    later = everywhere(client, own)
    assert [answer[:3] for answer in later.values()] == 4 * [(1, True, 8)]
    assert len(later.keys() - found.keys()) == 2, "one is new, and one has started again"
    cluster.scale(jobs=1, worker_group="spawned")
    cluster.settle()


def test_a_second_upload_replaces_the_first_also_on_later_workers(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path
) -> None:
    own = package(tmp_path, "own_second")
    (tmp_path / "own_second" / "early.py").write_text("")
    hpcgpu.upload_package(client, tmp_path / "own_second")
    before = everywhere(client, own)
    assert {answer[0] for answer in before.values()} == {1}

    package(tmp_path, "own_second", version=2)
    (tmp_path / "own_second" / "early.py").unlink()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "Another.Name"\nversion = "2.5"\n')
    assert hpcgpu.upload_package(client, tmp_path) == ["own_second"]
    after = everywhere(client, own)
    assert {answer[:3] for answer in after.values()} == {(2, True, 8)}
    assert client.run_on_scheduler(own.twice, own.Point(3))[0] == 2
    assert not [first for *_, first in before.values() if Path(first).exists()]

    def version() -> str:
        import importlib.metadata

        return importlib.metadata.version("another-name")

    assert set(client.run(travels(version)).values()) == {"2.5"}
    client.restart_workers([next(iter(after))])
    assert {answer[0] for answer in everywhere(client, own).values()} == {2}


def test_a_wheel_and_a_program_that_connects_to_the_cluster(cluster: LocalGPUCluster, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    package(tmp_path, "own_wheel")
    (tmp_path / "own_wheel").rename(project / "src" / "own_wheel")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "own-wheel"\nversion = "3.1"\n[project.entry-points.own]\nit = "own_wheel:twice"\n'
    )
    line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", ".", str(project)]
    subprocess.run(line, check=True, cwd=tmp_path)
    program = f"""
import hpcgpu
from importlib import metadata
client = hpcgpu.connect({cluster.name!r}, quiet=True)
print(hpcgpu.upload_package(client, {str(next(tmp_path.glob("*.whl")))!r}))
def look():
    [entry] = metadata.entry_points(group="own")
    return metadata.version("own-wheel"), entry.load().__module__
print(set(client.run(look).values()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "['own_wheel']\n{('3.1', 'own_wheel.code')}\n", done.stderr


def test_what_cannot_be_uploaded_is_refused_before_anything_is_sent(
    cluster: LocalGPUCluster, client: Client, tmp_path: Path
) -> None:
    package(tmp_path, "own_refused")
    (tmp_path / "own_refused" / "link.py").symlink_to("/etc/hostname")
    for call in (lambda path: hpcgpu.upload_package(client, path), cluster.upload_package):
        with pytest.raises(OptionError, match=r"upload_package: .*own_refused: link.py is a symbolic link"):
            call(tmp_path / "own_refused")
    assert not client.run_on_scheduler(travels(lambda dask_scheduler: [*dask_scheduler.worker_plugins])).count(
        "hpcgpu-package-own-refused"
    )


def test_an_asynchronous_program_uploads_too(cluster: LocalGPUCluster, tmp_path: Path) -> None:
    own = package(tmp_path, "own_async")

    async def program() -> Any:
        async with await hpcgpu.connect(cluster.name, asynchronous=True, quiet=True) as client:
            assert await hpcgpu.upload_package(client, tmp_path / "own_async") == ["own_async"]
            return await client.submit(own.twice, own.Point(2))

    assert asyncio.run(program())[:3] == (1, True, 4)


def test_a_scheduler_in_the_program_leaves_what_the_program_has_imported(queue: LocalQueue, tmp_path: Path) -> None:
    own = package(tmp_path, "own_here")
    with LocalGPUCluster(**{**GPU, "scheduler": "local"}, jobs=1) as cluster, Client(cluster) as client:
        cluster.upload_package(tmp_path / "own_here")
        assert sys.modules["own_here"] is own and own.__file__ == str(tmp_path / "own_here" / "__init__.py")
        assert client.submit(own.twice, own.Point(2)).result()[:3] == (1, True, 4)
        back = client.submit(own.Point, 5).result()
        assert type(back) is own.Point and back.x == 5
