"""Runs the tests of a real GPU in a limited time, the examples of libraries first, and writes what they measured.

    python tests/gpu/run.py [--seconds 540] [--results FILE] [-k WHICH]
    python tests/gpu/run.py --dry-run    # without a GPU: on pretended libraries, to find mistakes in the tests

Each test prints its outcome at once, so that a run which is cut off shows what it had reached. A test for which no
time is left is skipped.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def device() -> str:
    """GPU and driver, in the words of nvidia-smi."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown device ({error})"


def files() -> list[Path]:
    """The files of tests; that of the libraries first, because elsewhere stand-ins replace these."""
    return sorted(HERE.glob("test_*.py"), key=lambda path: (path.stem != "test_gpu_libraries", path.stem))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="after so long no further test begins")
    parser.add_argument("--results", type=Path, help="the file to write; it is printed too")
    parser.add_argument("-k", default="", metavar="WHICH", help="only these tests, in the words of pytest")
    arguments = parser.parse_args()
    results = (arguments.results or Path(f"gpu-results-{os.getpid()}.txt")).resolve()
    where = "a dry run: no GPU, nothing here is a measurement" if arguments.dry_run else device()
    results.write_text(f"{datetime.date.today()}, {where}, Python {sys.version.split()[0]}\n\n")
    environment = os.environ | {
        "HPCGPU_TESTS_UNTIL": str(time.time() + arguments.seconds),
        "HPCGPU_GPU_RESULTS": str(results),
        "HPCGPU_GPU_DRY_RUN": "yes" if arguments.dry_run else "",
        "PYTHONUNBUFFERED": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rs",
        "--durations=10",
        "-p",
        "no:cacheprovider",
        *map(str, files()),
        "-k",
        arguments.k,
    ]
    code = subprocess.run(command, cwd=HERE.parents[1], env=environment).returncode
    print(results.read_text())
    if arguments.results is None:
        results.unlink()
    sys.exit(code)


if __name__ == "__main__":
    main()
