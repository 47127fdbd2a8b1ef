"""A small environment that is packed as an archive, for the option `stage`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hpcgpu.errors import LaunchError
from hpcgpu.runtime import stage

__all__ = ["Environment", "content", "refusal"]


class Environment:
    """A virtual environment with a Python of its own, which finds the packages of the tests where they are.

    Parameters
    ----------
    directory : Path
        Where it is made.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "packed"
        base = Path(sys.executable).resolve()
        packages = self.path / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        packages.mkdir(parents=True)
        (self.path / "bin").mkdir()
        (self.path / "bin" / "python").symlink_to(base)
        (self.path / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
        for number, place in enumerate(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))):
            (packages / f"packages{number}.pth").write_text(f"import site; site.addsitedir({place!r})\n")

    def packed_by_venv_pack(self, name: str) -> Path:
        """Return the archive that venv-pack makes of a real virtual environment."""
        venv, archive = self.path.parent / "venv", self.path.parent / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        for link in self.path.glob("lib/*/site-packages/*.pth"):
            shutil.copy(link, venv / link.parent.relative_to(self.path))
        pack = [sys.executable, "-m", "venv_pack", "--prefix", venv, "--output", archive, "--quiet"]
        subprocess.run(pack, check=True)
        shutil.rmtree(venv)
        return archive

    def archive(self, name: str) -> Path:
        """Return an archive of it, beside it."""
        archive = self.path.parent / name
        compress = {".zst": ["--zstd"], ".gz": ["--gzip"], ".tar": []}[archive.suffix]
        subprocess.run(["tar", "-C", self.path, *compress, "-cf", archive, *sorted(os.listdir(self.path))], check=True)
        return archive


def content(base: Path) -> list[str]:
    """Return what is in the directory of the node."""
    return sorted(path.name for path in base.iterdir())


def refusal(archive: Path, base: Path, sha256: str = "") -> str:
    """Return why an archive is refused there."""
    found = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(LaunchError) as caught:
        stage.use(archive, found, [base])
    return str(caught.value)
