"""Fake NVIDIA libraries, so that the real `dask cuda worker` runs without a GPU over tcp and over ucx."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES: dict[str, Path] = {
    "libnvidia-ml.so.1": HERE / "nvml_stub.c",
    "libcuda.so.1": HERE / "cuda_stub.c",
}


def why_not() -> str | None:
    """Why this machine cannot compile the libraries, or None if it can."""
    if shutil.which("gcc") is None:
        return "gcc is not installed, and the pretended GPUs are compiled with it"
    if subprocess.run(["gcc", "-E", "-"], input=b"#include <stdio.h>\n", capture_output=True).returncode:
        return "gcc has no C headers (libc6-dev), and the pretended GPUs are compiled with them"
    return None


def build(directory: Path) -> Path:
    """Compile the libraries into `directory`, those that are missing or out of date, and return it."""
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in LIBRARIES.items():
        library = directory / name
        if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
            continue
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            new = Path(scratch) / name
            command = ["gcc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-o", str(new), str(source), "-ldl"]
            subprocess.run(command, check=True)
            new.replace(library)  # in one step: other processes may be building or using it
    return directory


def environment(directory: Path) -> dict[str, str]:
    """What `dask cuda worker`, and a scheduler or client over ucx, need in the environment to use the libraries."""
    path = [str(Path(directory).resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": ":".join(filter(None, path)),
        "UCX_MODULES": "^cuda",
        "UCX_TLS": "tcp",
        "DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC": "1",
        "DASK_CUDA_TEST_SINGLE_GPU": "1",
    }


if __name__ == "__main__":
    for variable, value in environment(build(Path(sys.argv[1]))).items():
        print(f"export {variable}='{value}'")
