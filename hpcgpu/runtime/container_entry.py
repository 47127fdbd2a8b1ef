"""First step in a container: ``python3 .../container_entry.py MODULE ...`` becomes ``python3 -P -m MODULE ...``.

It runs the hpcgpu of the image. If the image has none, it runs the copy of the host's hpcgpu that this file belongs to.
This file imports nothing of hpcgpu. Older Pythons can run it too, so that they can report what is wrong.
"""

import importlib.util
import os
import sys

#: Modules that hpcgpu imports. An image that lacks hpcgpu may lack them too. A job with GPUs also runs dask-cuda.
_NEEDED = ("dask", "distributed", "click", "cryptography", "jinja2", "psutil", "rich", "yaml")
_ADVICE = "Use an image with hpcgpu (pip install hpcgpu), or another interpreter in the image (option python)"


def main() -> None:
    """Choose the hpcgpu of the image or of the host, and start Python again with it."""
    beside = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  this file imports little
    sys.path[:] = [path for path in sys.path if path != beside]
    copy = os.path.dirname(os.path.dirname(beside))  # noqa: PTH120
    host = os.path.basename(copy)[len("python") :]  # noqa: PTH119
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    where = f"hpcgpu: {sys.executable} in the container"
    if sys.version_info < (3, 11):  # noqa: UP036  the image may have any
        sys.exit(f"{where} is Python {version}, and hpcgpu needs 3.11 or later. {_ADVICE}")
    environment = dict(os.environ, HPCGPU_INSTALLED_IN="image")
    if importlib.util.find_spec("hpcgpu") is None:
        if version != host:
            why = (
                f"{where} is Python {version} and has no hpcgpu, and the copy of the host's hpcgpu needs Python {host}"
            )
            sys.exit(f"{why}. {_ADVICE}")
        needed = _NEEDED if _gpus(sys.argv) == "0" else (*_NEEDED, "dask_cuda")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            sys.exit(f"{where} lacks {', '.join(missing)}. {_ADVICE}")
        environment["HPCGPU_INSTALLED_IN"] = "host"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (copy, os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, "-P", "-m", *sys.argv[1:]], environment)


def _gpus(words: "list[str]") -> str:
    """Return the value of ``--gpus``; 0 if it is not there."""
    return words[words.index("--gpus") + 1] if "--gpus" in words[:-1] else "0"


if __name__ == "__main__":
    main()
