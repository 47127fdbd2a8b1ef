"""Print what a host of the site installs from PyPI: what hpcgpu and its extra cu12 need, and hatchling."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["cu12"], "hatchling", sep="\n")
