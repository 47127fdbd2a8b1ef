"""A built wheel, installed elsewhere, finds its templates, and the files that a page loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_installed_wheel_finds_its_templates_and_what_a_page_loads(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheel"), str(ROOT)], check=True
    )
    [wheel] = (tmp_path / "wheel").glob("hpcgpu-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
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
    assert "draw.js widget.css widget.js" in done.stdout
    assert done.stdout.startswith(str(tmp_path / "site")) and "dask cuda worker" in done.stdout
