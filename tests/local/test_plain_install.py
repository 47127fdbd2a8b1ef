"""What `pip install .` brings, without any extra, is enough for workers on GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from hpcgpu.batch.local.queue import LocalQueue

ROOT = Path(__file__).parents[2]
PROGRAM = """
from hpcgpu import LocalGPUCluster

if __name__ == "__main__":
    options = {"gpus_per_node": 2, "jobs": 1, "scheduler": {"gpus_per_node": 0}, "quiet": True, "poll_interval": 0.5}
    with LocalGPUCluster(**options) as cluster:
        cluster.wait_for_workers(timeout=200)
        with cluster.get_client() as client:
            workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
            print(len(workers), client.submit(sum, [1, 2, 3]).result())
"""


def distributions(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements bring, by name, each with the extras that are asked for and
    no others.
    """
    found: dict[str, metadata.Distribution] = {}
    wanted = [Requirement(text) for text in requirements]
    done: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for extra in ("", *requirement.extras):
            if (name, extra) in done:
                continue
            done.add((name, extra))
            found[name] = metadata.distribution(name)
            more = [Requirement(text) for text in found[name].requires or ()]
            wanted += [r for r in more if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def plain_environment(folder: Path) -> Path:
    """Make an environment with the dependencies of the project and nothing else, from what is installed; return its
    Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for distribution in distributions(project["dependencies"]).values():
        for file in distribution.files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                link = site / file
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(Path(str(file.locate())).resolve())
    (site / "hpcgpu.pth").write_text(f"{ROOT}\n")
    info = next(file for file in metadata.files("hpcgpu") or () if file.name == "entry_points.txt")
    (site / info.parent.name).symlink_to(Path(str(info.locate())).resolve().parent)  # batch systems are entry points
    return folder / "bin" / "python"


def test_workers_on_gpus_start_without_an_extra(queue: LocalQueue, home: Path, fake_gpus: None) -> None:
    python = plain_environment(home / "environment")
    program = home / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(program)], capture_output=True, text=True, timeout=300, env=environment, cwd=home
    )
    assert done.stdout.split() == ["2", "6"], done.stderr
