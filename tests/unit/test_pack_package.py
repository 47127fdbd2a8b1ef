"""What `upload_package` takes from a wheel, a source tree or a package directory, and what it refuses."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgpu.client import pack_package
from hpcgpu.client.pack_package import pack
from hpcgpu.errors import NotTrusted, OptionError


def tree(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"# {name}\n")
    return place


def files(path: Path) -> list[str]:
    return sorted(zipfile.ZipFile(io.BytesIO(pack(path).archive)).namelist())


def wheel(place: Path, name: str, *names: str) -> Path:
    with zipfile.ZipFile(place / name, "w") as archive:
        for one in names:
            archive.writestr(one, f"# {one}\n")
    return place / name


def test_a_package_directory_has_its_files_without_what_is_hidden_or_made(tmp_path: Path) -> None:
    package = tree(
        tmp_path / "mine",
        *("__init__.py", "code.py", "deep/more.py", "data/table.csv", ".hidden.py", ".git/config", "__pycache__/a.pyc"),
        *("old.pyc", "env/lib/thing.py", "env/pyvenv.cfg", ".venv/lib/other.py", "mine.egg-info/PKG-INFO"),
    )
    assert files(package) == ["mine/__init__.py", "mine/code.py", "mine/data/table.csv", "mine/deep/more.py"]
    assert pack(package).modules == ("mine",) and pack(package).name == "mine"


def test_a_source_tree_has_the_packages_in_src(tmp_path: Path) -> None:
    tree(
        tmp_path, "src/mine/__init__.py", "src/space/part/__init__.py", "src/single.py", "tests/__init__.py", "setup.py"
    )
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "My.Own_thing"\nversion = "1.2"\n')
    package = pack(str(tmp_path))
    assert (package.name, package.modules) == ("my-own-thing", ("mine", "single", "space.part"))
    assert files(tmp_path) == [
        "mine/__init__.py",
        "my_own_thing-1.2.dist-info/METADATA",
        "single.py",
        "space/part/__init__.py",
    ]


def test_a_source_tree_without_src_has_the_packages_at_its_top_else_its_modules(tmp_path: Path) -> None:
    tree(tmp_path, "single.py", "setup.py", "conftest.py", "src/code.c", "docs/conf.py")
    assert files(tmp_path) == ["single.py"]
    tree(tmp_path, "mine/__init__.py", "tests/__init__.py", "other/__init__.py")
    assert files(tmp_path) == ["mine/__init__.py", "other/__init__.py"]


def test_src_is_a_package_if_it_has_an_init_file(tmp_path: Path) -> None:
    tree(tmp_path, "src/__init__.py", "src/model.py", "src/deep/__init__.py", "tests/__init__.py")
    assert files(tmp_path) == ["src/__init__.py", "src/deep/__init__.py", "src/model.py"]
    assert pack(tmp_path).modules == ("src",), "its tasks write: import src.model"


def test_an_init_file_in_src_beside_the_project_s_own_package_is_no_module(tmp_path: Path) -> None:
    tree(tmp_path, "src/__init__.py", "src/my_own/__init__.py")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "My-Own"\n')
    assert files(tmp_path) == ["my_own/__init__.py"] and pack(tmp_path).modules == ("my_own",)


def test_a_tree_whose_version_is_not_written_has_that_of_this_environment(tmp_path: Path) -> None:
    tree(tmp_path, "mine/__init__.py")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "pytest"\ndynamic = ["version"]\n')
    assert f"pytest-{pytest.__version__}.dist-info/METADATA" in files(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "not-installed"\ndynamic = ["version"]\n')
    assert files(tmp_path) == ["mine/__init__.py"]


def test_a_wheel_has_its_files_and_metadata_as_they_are_installed(tmp_path: Path) -> None:
    names = ("mine/__init__.py", "mine-1.dist-info/METADATA", "mine-1.data/purelib/more.py", "mine-1.data/scripts/run")
    path = wheel(tmp_path, "mine-1-py2.py3-none-any.whl", *names)
    assert files(path) == ["mine-1.dist-info/METADATA", "mine/__init__.py", "more.py"]
    assert pack(path).modules == ("mine", "more")


@pytest.mark.parametrize(
    ("name", "names", "words"),
    [
        ("mine-1-cp311-cp311-linux_x86_64.whl", ["mine.py"], "this wheel has compiled code"),
        ("mine-1-py2-none-any.whl", ["mine.py"], "this wheel is for py2, and this is Python 3"),
        ("mine-1-py399-none-any.whl", ["mine.py"], "this wheel is for py399"),
        ("mine-1-py3-none-any.whl", ["mine/fast.abi3.so"], "mine/fast.abi3.so is compiled code"),
        ("mine-1-py3-none-any.whl", ["../mine.py"], "leads out of the wheel"),
        ("mine-1-py3-none-any.whl", ["/mine.py"], "leads out of the wheel"),
        ("mine-1-py3-none-any.whl", ["mine-1.dist-info/METADATA"], "it has no package"),
        ("mine.whl", ["mine.py"], "the name of a wheel is"),
    ],
)
def test_a_wheel_that_does_not_fit_is_refused(tmp_path: Path, name: str, names: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        pack(wheel(tmp_path, name, *names))


def test_a_file_that_is_no_zip_or_a_link_in_a_wheel_is_refused(tmp_path: Path) -> None:
    broken = tree(tmp_path, "mine-1-py3-none-any.whl") / "mine-1-py3-none-any.whl"
    with pytest.raises(OptionError, match="it cannot be read"):
        pack(broken)
    with zipfile.ZipFile(broken, "w") as archive:
        link = zipfile.ZipInfo("mine.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(OptionError, match=r"mine.py leads out of the wheel"):
        pack(broken)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: (p / "a.py").symlink_to("code.py"), r"a.py is a symbolic link, which is not followed"),
        (lambda p: (p / "more").symlink_to(p.parent), r"more is a symbolic link, which is not followed"),
        (lambda p: os.mkfifo(p / "pipe"), "pipe is no regular file"),
        (lambda p: (p / "fast.so").touch(), r"fast.so is compiled code"),
        (lambda p: (p / "libfast.so.2").touch(), r"libfast.so.2 is compiled code"),
        (lambda p: (p.parent / "__init__.py").touch(), "it is a part of a package. Upload"),
        (lambda p: (p / "large").write_bytes(bytes(2 << 20)), r"have more than 1 MiB; large has 2 MiB"),
    ],
)
def test_what_a_directory_must_not_have_is_refused(
    tmp_path: Path, change: Callable[[Path], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_package, "LIMIT", 1 << 20)
    package = tree(tmp_path / "mine", "__init__.py", "code.py")
    change(package)
    with pytest.raises(OptionError, match=words):
        pack(package)


@pytest.mark.parametrize("name", ["json", "distributed", "hpcgpu"])
def test_a_package_that_workers_use_themselves_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=f"workers use the module {name} themselves"):
        pack(tree(tmp_path / name, "__init__.py"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "nowhere: No such file or directory"),
        ("module.py", "it is no wheel and no directory. For a single module use client.upload_file"),
        ("empty", "it has no package. Build a wheel and upload it"),
    ],
)
def test_what_is_no_package_is_refused(tmp_path: Path, path: str, words: str) -> None:
    tree(tmp_path, "module.py", "empty/notes.txt")
    with pytest.raises(OptionError, match=words):
        pack(tmp_path / path)


def test_a_damaged_project_file_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "mine/__init__.py").joinpath("pyproject.toml").write_text("[project\n")
    with pytest.raises(OptionError, match=r"pyproject.toml: "):
        pack(tmp_path)


def test_a_directory_that_other_users_can_change_is_not_used(tmp_path: Path) -> None:
    package = tree(tmp_path / "mine", "__init__.py")
    package.chmod(0o777)
    with pytest.raises(NotTrusted):
        pack(package)
