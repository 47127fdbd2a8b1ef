"""What a release has in several files: the version, what conda's recipe has of pyproject.toml, and the date."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import hpcgpu

ROOT = Path(__file__).parents[2]
#: Names that conda-forge has instead of those of PyPI.
CONDA = {"dask": "dask-core", "jupyter-server": "jupyter_server"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())


def conda(requirements: Iterable[str]) -> set[str]:
    """What these requirements of PyPI are on conda-forge."""
    found = set()
    for requirement in requirements:
        split = re.fullmatch(r"([\w-]+?)(?:-cu\d+)?(?:\[\w+\])?(>=[\d.]+)?(?:; sys_platform == 'linux')?", requirement)
        assert split is not None, f"{requirement}: this test knows a lower bound and Linux"
        found.add(f"{CONDA.get(split[1], split[1])} {split[2] or ''}".strip())
    return found


def test_all_files_name_the_version_of_the_package(recipe: dict[str, Any]) -> None:
    assert recipe["context"]["version"] == hpcgpu.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == hpcgpu.__version__
    assert newest()[0] == hpcgpu.__version__


def test_the_citation_has_the_date_of_the_changelog() -> None:
    date = yaml.safe_load((ROOT / "CITATION.cff").read_text()).get("date-released", "not released")
    assert newest()[1] == str(date)


def newest() -> tuple[str, str]:
    """Version and date of the top entry of the changelog."""
    found = re.search(
        r"^## (\S+) \((not released|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1], found[2]


def test_the_recipe_requires_what_the_package_does(project: dict[str, Any], recipe: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    requirements = recipe["requirements"]
    python = recipe["context"]["python_min"]
    assert project["project"]["requires-python"] == f">={python}"
    assert set(requirements["run"]) == {
        "python >=${{ python_min }}",
        "__linux",
        *conda(project["project"]["dependencies"]),
    }
    assert set(requirements["run_constraints"]) == conda([*extras["cu12"], *extras["jupyter"]])
    assert conda(extras["cu12"]) == conda(extras["cu13"])
    assert set(requirements["host"]) == {
        "python ${{ python_min }}.*",
        "pip",
        *conda(project["build-system"]["requires"]),
    }


def test_the_recipe_describes_what_the_package_does(project: dict[str, Any], recipe: dict[str, Any]) -> None:
    scripts = project["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {where}" for name, where in scripts]
    assert recipe["about"]["summary"] == project["project"]["description"]
    assert recipe["about"]["license"] == project["project"]["license"]
    assert [recipe["about"]["license_file"]] == project["project"]["license-files"]


def test_the_recipe_names_files_that_exist(project: dict[str, Any], recipe: dict[str, Any]) -> None:
    [contents] = [test["package_contents"] for test in recipe["tests"] if "package_contents" in test]
    moved = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {installed: here for here, installed in (moved["shared-data"] | moved["force-include"]).items()}
    for name in contents["files"] + contents["site_packages"]:
        [(installed, here)] = [place for place in places.items() if name.startswith(f"{place[0]}/")]
        assert (ROOT / here / name.removeprefix(f"{installed}/")).is_file(), name
