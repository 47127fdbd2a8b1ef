"""The page for support staff: an environment that all users share has the options of the system."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import textwrap
import venv
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "site.rst").read_text()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with the packages of this one, and the configuration that the page shows."""
    folder = tmp_path / "sw"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = sysconfig.get_path("purelib", scheme="venv", vars={"base": str(folder)})
    hpcgpu = Path(__file__).parents[2]
    Path(packages, "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{hpcgpu}\n")
    block = re.search(r"code-block:: yaml\n\n((?:   .*\n|\n)+)", PAGE)
    assert block
    (folder / "etc" / "dask").mkdir(parents=True)
    (folder / "etc" / "dask" / "hpcgpu.yaml").write_text(textwrap.dedent(block[1]))
    return folder


def options(environment: Path, home: Path, *arguments: str, **variables: str) -> dict[str, tuple[Any, str]]:
    """Value and origin of each option, as a user of this environment sees them."""
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-m", "hpcgpu", "config", "--system", "slurm", "--json", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
    )
    assert done.returncode == 0, done.stderr
    return {name: (found["value"], found["source"]) for name, found in json.loads(done.stdout).items()}


def test_users_of_the_environment_get_the_options_of_the_page(environment: Path, tmp_path: Path) -> None:
    found = options(environment, tmp_path)
    file = str(environment / "etc" / "dask" / "hpcgpu.yaml")
    assert found["queue"] == ("gpu", file) and found["scheduler.queue"] == ("shared", file)
    assert found["cluster_directory"] == (f"{tmp_path}/.hpcgpu/clusters", file), "each user has a home of his own"


def test_what_is_stronger_wins_in_the_order_of_the_page(environment: Path, tmp_path: Path) -> None:
    """From the weakest to the strongest: each changes the queue, and the one after it changes it again."""

    def write(folder: Path, queue: str) -> Path:
        folder.mkdir(parents=True)
        (folder / "more.yaml").write_text(f"hpcgpu: {{slurm: {{queue: {queue}}}}}")
        return folder

    home = tmp_path / "home"
    given = {"DASK_ROOT_CONFIG": str(write(tmp_path / "etc", "one"))}
    assert options(environment, home, **given)["queue"][0] == "gpu", "2: the environment"
    write(home / ".config" / "dask", "three")
    assert options(environment, home, **given)["queue"][0] == "three", "3: the user"
    given["DASK_CONFIG"] = str(write(tmp_path / "project", "four"))
    assert options(environment, home, **given)["queue"][0] == "four", "4: the project"
    given["DASK_HPCGPU__SLURM__QUEUE"] = "five"
    assert options(environment, home, **given)["queue"][0] == "five", "5: the variable"
    assert options(environment, home, "--queue", "six", **given)["queue"][0] == "six", "6: the command line"


def test_a_profile_of_the_environment_is_for_all_its_users_and_their_own_wins(
    environment: Path, tmp_path: Path
) -> None:
    def write(folder: Path, queue: str) -> Path:
        folder.mkdir(parents=True)
        path = folder / "big.yaml"
        path.write_text(f"system: slurm\nneeds: [account]\noptions: {{queue: {queue}, constraint: h100}}\n")
        return path

    write(environment / "etc" / "hpcgpu" / "profiles", "big")
    (environment / "etc" / "dask" / "hpcgpu.yaml").unlink()
    found = options(environment, tmp_path, "--profile", "big", "--account", "a")
    assert (found["queue"][0], found["constraint"][0]) == ("big", "h100")
    write(tmp_path / ".config" / "hpcgpu" / "profiles", "mine")
    assert options(environment, tmp_path, "--profile", "big", "--account", "a")["queue"][0] == "mine"
