"""First step in a container: ``python3 .../hpcgpu/runtime/inside.py MODULE ...`` becomes ``python3 -P -m MODULE ...``.

hpcgpu comes from the image. If the image lacks it, it comes from the copy of the host's that this file is in, where
nothing else is. This file imports nothing of hpcgpu, and says what is wrong on older Pythons too.
"""

import importlib.util
import os
import sys

#: What hpcgpu imports. An image that lacks hpcgpu may lack these too.
_NEEDED = ("dask", "distributed", "click", "cryptography", "jinja2", "psutil", "rich", "yaml")
_ADVICE = "Use an image with hpcgpu (pip install hpcgpu), or another interpreter in the image (option python)"


def main() -> None:
    """Choose which hpcgpu runs, and start Python again with it."""
    beside = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  this file imports little
    sys.path[:] = [path for path in sys.path if path != beside]
    copy = os.path.dirname(os.path.dirname(beside))  # noqa: PTH120
    host = os.path.basename(copy)[len("python") :]  # noqa: PTH119
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    where = f"hpcgpu: {sys.executable} in the container"
    if sys.version_info < (3, 11):  # noqa: UP036  the image may have any
        sys.exit(f"{where} is Python {version}, and hpcgpu needs 3.11 or later. {_ADVICE}")
    environment = dict(os.environ, HPCGPU_INSIDE="image")
    if importlib.util.find_spec("hpcgpu") is None:
        if version != host:
            sys.exit(f"{where} is Python {version} without hpcgpu, and the host's is for Python {host}. {_ADVICE}")
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            sys.exit(f"{where} lacks {', '.join(missing)}. {_ADVICE}")
        environment["HPCGPU_INSIDE"] = "host"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (copy, os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, "-P", "-m", *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
