"""Print what a host of the site installs from PyPI: what hpcgpu, its examples, UCX and the tests of a Slurm need."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = project["optional-dependencies"]
tests = [need for need in extras["fast"] + extras["test"] if need.startswith(("hatchling", "pytest", "venv-pack"))]
print(*project["dependencies"], *extras["cu12"], *extras["examples"], *tests, sep="\n")
