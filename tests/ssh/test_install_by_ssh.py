"""`hpcgpu install --host` brings hpcgpu to a login node that lacks it, with the pip there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from sshd_bed import SYSTEM_PATH, Nodes

import hpcgpu
from tests import helpers

pytestmark = pytest.mark.shows("`hpcgpu install --host`: hpcgpu comes to a login node that lacks it")

INSTALL, LIST = ("install", "--host", "login1"), ("list", "--host", "login1")


def without_hpcgpu(place: Path) -> Path:
    """The interpreter of an environment that has the packages of the tests, pip too, but no hpcgpu."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    packages, shared = place / "venv" / f"lib/python{sysconfig.get_python_version()}/site-packages", place / "shared"
    shared.mkdir()
    for path in {*map(Path, map(sysconfig.get_path, ("purelib", "platlib")))}:
        for name in os.listdir(path):
            if "hpcgpu" not in name:
                (shared / name).symlink_to(path / name)
    (packages / "shared.pth").write_text(f"{shared}\n")
    return place / "venv/bin/python"


def test_it_is_installed_for_the_python_of_the_jobs_without_a_package_index(login_node: Nodes, home: Path) -> None:
    node = login_node(environment={"PATH": SYSTEM_PATH, "PIP_NO_INDEX": "1"})
    python = without_hpcgpu(home)
    done = helpers.hpcgpu(*INSTALL, "--python", str(python))
    assert done.stdout == f"login1: hpcgpu, version {hpcgpu.__version__}\n", done.stderr
    assert str(python) not in str(node.calls())
    left = {path.name for path in (node.home / ".local/share/hpcgpu").rglob("*")}
    assert left == {"environments", "python"}
    done = helpers.hpcgpu(*LIST)
    assert done.stdout == "No clusters.\n", done.stderr
    [there] = (home / "venv").rglob("site-packages/hpcgpu/errors.py")
    new = there.read_text()
    [record] = (home / "venv").rglob("site-packages/hpcgpu-*.dist-info/RECORD")
    there.write_text(f"{new}# from an earlier state of the same version\n")
    record.write_text(record.read_text().replace("hpcgpu/errors.py,sha256=", "hpcgpu/errors.py,sha256=earlier"))
    helpers.hpcgpu(*INSTALL, "--python", str(python))
    assert there.read_text() == new
    written = there.stat().st_ino
    helpers.hpcgpu(*INSTALL, "--python", str(python))
    assert there.stat().st_ino == written, "what is there already is not written again: clusters may use it"
    renders = [str(python), "-P", "-m", "hpcgpu", "render", "slurm", "-o", "demo", "--walltime", "1h"]
    subprocess.run([*renders, "--gpus-per-node", "1"], check=True, cwd=home)


def test_a_login_node_that_reaches_no_package_index_is_shown_what_to_do(login_node: Nodes, home: Path) -> None:
    """The private environment is made with the Python of the laptop, not with a newer one that is there too."""
    (home / "bin").mkdir()
    (home / f"bin/python{sysconfig.get_python_version()}").symlink_to(Path(sys.executable).resolve())
    (home / "bin/python3.14").write_text("#!/bin/sh\necho the newest Python >&2\n")
    (home / "bin/python3.14").chmod(0o755)
    node = login_node(environment={"PATH": f"{home / 'bin'}:{SYSTEM_PATH}", "PIP_NO_INDEX": "1"})
    done = helpers.hpcgpu(*INSTALL)
    assert done.returncode == 1 and "Error: hpcgpu is not installed on login1: " in done.stderr, done.stderr
    assert "No matching distribution found for dask==" in done.stderr and "the newest Python" not in done.stderr
    assert "by the site's own way (a module, conda), then run this again with --python" in done.stderr
    assert "hpcgpu is not found on login1" in helpers.hpcgpu(*LIST).stderr
    [environment] = (node.home / ".local/share/hpcgpu").glob("environments/python*")
    assert environment.name == f"python{sysconfig.get_python_version()}"  # another Python gets another one
    assert not environment.stat().st_mode & 0o077, "what is installed there runs as the user"
