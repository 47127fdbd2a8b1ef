"""A built wheel, installed elsewhere, finds its templates, and the files that a page loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(place), str(ROOT)], check=True)
    [wheel] = place.glob("hpcgpu-*.whl")
    return wheel


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
        "import pathlib, hpcgpu.batch.registry, hpcgpu.configuration.resolve, hpcgpu.scripts.render\n"
        "print(hpcgpu.batch.registry.common_templates())\n"
        "import hpcgpu.widget\n"
        "print(*sorted(path.name for path in pathlib.Path(hpcgpu.widget.__file__).parent.glob('static/*')))\n"
        "print(hpcgpu.scripts.render.render('slurm', 'worker', hpcgpu.configuration.resolve.resolve('slurm', {}), "
        "pathlib.Path('/x')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "draw.js stored.js widget.css widget.js" in done.stdout
    assert done.stdout.startswith(str(tmp_path / "site")) and "dask cuda worker" in done.stdout
