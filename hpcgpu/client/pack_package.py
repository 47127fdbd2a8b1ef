"""Packs a pure Python package of the user for `hpcgpu.upload_package`: a wheel, a source tree or a package directory.

Only modules and the files beside them are packed. What could lead out of the tree, or would not work on another
machine, is refused: symbolic links, FIFOs, devices, compiled code.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import stat
import sys
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from hpcgpu.errors import OptionError
from hpcgpu.posix import checked_files, ownership
from hpcgpu.store.uploaded_packages import Package

#: The most bytes of all files together. The scheduler keeps them in memory, and each worker gets them.
LIMIT = 64 << 20
_COMPILED = (".so", ".pyd", ".dylib", ".dll")
#: Folders and modules beside a package that are not part of it.
_BESIDE = {
    *("benchmark", "benchmarks", "build", "ci", "dist", "doc", "docs", "example", "examples", "scripts", "test"),
    *("tests", "tools", "conftest", "noxfile", "setup", "tasks", "versioneer"),
}
#: The packages by which workers receive tasks: a worker cannot replace them.
_IN_USE = {"cloudpickle", "dask", "dask_cuda", "distributed", "hpcgpu"}
_NAME = re.compile(r"[A-Za-z0-9._+!-]+")


def pack(given: str | Path) -> Package:
    """Read a wheel, a source tree or a package directory.

    Parameters
    ----------
    given : str or Path

    Raises
    ------
    OptionError
        There is no package, it is too large, or it has what cannot be uploaded.
    NotTrusted
        Other users can change it.
    """
    path = Path(given).expanduser().absolute()
    try:
        ownership.check(path, group_may_write=True)
        if path.suffix == ".whl":
            name, files = _wheel(path)
        elif path.is_dir() and (path / "__init__.py").exists():
            if (path.parent / "__init__.py").exists():
                raise _refused(path, f"it is a part of a package. Upload {path.parent}, or the package above it")
            name, files = path.name, {f"{path.name}/{at}": content for at, content in _read_tree(path, path)}
        elif path.is_dir():
            name, files = _source_tree(path)
        else:
            raise _refused(path, "it is no wheel and no directory. For a single module use client.upload_file")
    except OSError as error:
        raise _refused(path, f"{error.filename or path}: {error.strerror or error}") from error
    modules = _modules(files)
    if not modules:
        raise _refused(
            path, f"it has no package. Build a wheel and upload it: python -m pip wheel --no-deps --wheel-dir . {path}"
        )
    for module in modules:
        first = module.partition(".")[0]
        if first in _IN_USE or first in sys.stdlib_module_names:
            raise _refused(path, f"workers use the module {first} themselves, so it cannot be replaced there")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for at, content in files.items():
            packed.writestr(at, content)
    return Package(name=_normal(name), modules=modules, archive=archive.getvalue())


def _refused(path: Path, why: str) -> OptionError:
    return OptionError(f"upload_package: {path}: {why}")


def _normal(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower())


class _Size:
    """Counts the bytes of all files, and refuses too many."""

    def __init__(self, path: Path) -> None:
        self._path, self._left, self._largest = path, LIMIT, (0, "")

    def add(self, name: str, size: int) -> None:
        self._left -= size
        self._largest = max(self._largest, (size, name))
        if self._left < 0:
            raise _refused(
                self._path,
                f"its files have more than {LIMIT >> 20} MiB; {self._largest[1]} has {self._largest[0] >> 20} MiB. "
                "Leave data out, and let tasks read it from the shared filesystem",
            )


def _wheel(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the name of the distribution, and the files as they are installed."""
    parts = path.stem.split("-")
    if len(parts) not in (5, 6):
        raise _refused(path, "the name of a wheel is NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    python, abi, platform = parts[-3:]
    if (abi, platform) != ("none", "any"):
        raise _refused(path, "this wheel has compiled code. Install it on the cluster, for all workers")
    own = {f"py{sys.version_info[0]}", "cp{}{}".format(*sys.version_info)}
    own |= {f"py{sys.version_info[0]}{minor}" for minor in range(sys.version_info[1] + 1)}
    if own.isdisjoint(python.split(".")):
        raise _refused(path, f"this wheel is for {python}, and this is Python {sys.version.split()[0]}")
    files, size = dict[str, bytes](), _Size(path)
    try:
        with zipfile.ZipFile(path) as wheel:
            for entry in wheel.infolist():
                at = PurePosixPath(entry.filename)
                if at.is_absolute() or ".." in at.parts or stat.S_ISLNK(entry.external_attr >> 16):
                    raise _refused(path, f"{entry.filename} leads out of the wheel")
                if at.parts and at.parts[0].endswith(".data"):
                    if at.parts[1:2] not in (("purelib",), ("platlib",)):
                        continue  # scripts and headers
                    at = PurePosixPath(*at.parts[2:])
                if entry.is_dir():
                    continue
                _check_compiled(path, str(at))
                size.add(str(at), entry.file_size)
                files[str(at)] = wheel.read(entry)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    return parts[0], files


def _source_tree(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the name of the project, and the files of its packages, in the folder ``src`` or beside it."""
    project = {}
    if (path / "pyproject.toml").is_file():
        try:
            project = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        except ValueError as error:
            raise _refused(path / "pyproject.toml", str(error)) from error
    files: dict[str, bytes] = {}
    name = str(project.get("name", path.name))
    beside = (path / "src" / _normal(name).replace("-", "_") / "__init__.py").exists()
    if (path / "src").is_dir() and (beside or not (path / "src/__init__.py").exists()):  # else ``src`` is a package
        files = dict(_read_tree(path / "src", path))
        files.pop("__init__.py", None)
    if not _modules(files):
        packages = {one.parent.name for one in path.glob("*/__init__.py")} - _BESIDE
        names = packages or {one.name for one in path.glob("*.py") if one.stem not in _BESIDE}
        files = dict(_read_tree(path, path, only=names))
    version = str(project.get("version", ""))
    if not version and "name" in project:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)  # in this environment, often in editable mode
    if version and _NAME.fullmatch(name) and _NAME.fullmatch(version):
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files[f"{_normal(name).replace('-', '_')}-{version}.dist-info/METADATA"] = about.encode()
    return name, files


def _read_tree(top: Path, path: Path, only: Collection[str] | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the files below a directory, without what is hidden, made by Python, or a virtual environment.

    Each folder and file is opened below the folder that was read, so no symbolic link is followed.
    """
    size = _Size(path)
    for folder, folders, files, descriptor in _walk(top):
        relative = PurePosixPath(Path(folder).relative_to(top).as_posix())
        inside = Path() if descriptor is not None else Path(folder)
        if relative == PurePosixPath() and only is not None:
            folders[:], files = [one for one in folders if one in only], [one for one in files if one in only]
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(one for one in folders if not _left_out(one))
        for name in folders:
            if stat.S_ISLNK(os.stat(inside / name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                raise _refused(
                    path, f"{relative / name} is a symbolic link, which is not followed. Replace it by a copy"
                )
        for name in sorted(one for one in files if not _left_out(one)):
            at = str(relative / name)
            _check_compiled(path, at)
            mode = os.stat(inside / name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode):
                what = "a symbolic link, which is not followed" if stat.S_ISLNK(mode) else "no regular file"
                raise _refused(path, f"{at} is {what}. Replace it by a copy, or remove it")
            opened = os.open(inside / name, os.O_RDONLY | checked_files.SAFE, dir_fd=descriptor)
            with open(opened, "rb") as file:
                size.add(at, os.fstat(opened).st_size)
                yield at, file.read(LIMIT)


def _walk(top: Path) -> Iterable[tuple[str, list[str], list[str], int | None]]:
    """Walk a tree as `os.fwalk` does. Windows lacks it: there a folder could be replaced meanwhile."""
    if hasattr(os, "fwalk"):
        return os.fwalk(top)
    return ((folder, folders, files, None) for folder, folders, files in os.walk(top))


def _left_out(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or name.endswith((".pyc", ".egg-info"))


def _check_compiled(path: Path, name: str) -> None:
    if name.endswith(_COMPILED) or ".so." in PurePosixPath(name).name:
        raise _refused(path, f"{name} is compiled code. Install the package on the cluster, for all workers")


def _modules(files: Iterable[str]) -> tuple[str, ...]:
    """Return what can be imported, without what is inside it: ``name``, or ``space.name`` in a namespace package."""
    there, found = set(files), set[str]()
    for file in there:
        if not file.endswith(".py"):
            continue
        parts = PurePosixPath(file).with_suffix("").parts
        if not all(part.isidentifier() for part in parts):
            continue
        depths = range(1, len(parts))
        depth = next((n for n in depths if "/".join((*parts[:n], "__init__.py")) in there), len(parts))
        found.add(".".join(parts[:depth]))
    return tuple(sorted(found))
