"""The source distribution, and the wheel made of it, which finds its templates and the files that a page loads."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(place)], check=True, cwd=ROOT)
    [sdist] = place.glob("hpcgpu-*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that is made of the source distribution, as a release does."""
    place = sdist.parent
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(place), str(sdist)], check=True)
    [wheel] = place.glob("hpcgpu-*.whl")
    return wheel


def test_the_source_distribution_has_what_the_wheel_is_made_of_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name.partition("/")[0] for name in names} == {
        *("hpcgpu", "templates", "jupyter-config", "jupyter-data"),
        *("pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"),
    }
    assert [name for name in names if name.endswith(".pyc")] == []


def test_a_wheel_enables_the_extension_of_a_jupyter_server_and_the_card_of_jupyterlab(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        installed = {name.partition(".data/data/")[2]: name for name in archive.namelist()}
        enabled = archive.read(installed["etc/jupyter/jupyter_server_config.d/hpcgpu.json"])
        card = "share/jupyter/labextensions/hpcgpu"
        about = json.loads(archive.read(installed[f"{card}/package.json"]))["jupyterlab"]["_build"]
        static = {Path(name).suffix for name in archive.namelist() if name.startswith("hpcgpu/jupyter/static/")}
    assert json.loads(enabled) == {"ServerApp": {"jpserver_extensions": {"hpcgpu.jupyter": True}}}
    assert f"{card}/{about['load']}" in installed and static == {".css", ".html", ".js", ".svg"}


def test_an_installed_wheel_finds_its_templates_and_what_a_page_loads(tmp_path: Path, wheel: Path) -> None:
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import pathlib, hpcgpu.batch.system_registry, hpcgpu.configuration.resolve, hpcgpu.scripts.render\n"
        "print(hpcgpu.batch.system_registry.common_templates())\n"
        "import hpcgpu.widget\n"
        "print(*sorted(path.name for path in pathlib.Path(hpcgpu.widget.__file__).parent.glob('static/*')))\n"
        "print(hpcgpu.scripts.render.render('slurm', 'worker', hpcgpu.configuration.resolve.resolve('slurm', {}), "
        "pathlib.Path('/x')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "notebook.js panel.js stored.js widget.css" in done.stdout
    assert done.stdout.startswith(str(tmp_path / "site")) and "dask cuda worker" in done.stdout
