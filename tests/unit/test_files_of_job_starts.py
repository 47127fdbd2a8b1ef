"""A job opens no file at its start that it does not need: on a slow filesystem each one delays the first worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcgpu.errors import Damaged
from hpcgpu.runtime import launch
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.directory import ClusterDirectory

#: Prints what `python -m dask ARGUMENTS` prints in a job, and which files of a kind were opened for it.
COMMAND = """
import contextlib, sys
from pathlib import Path
import dask.sizeof
from hpcgpu.runtime.run_dask import run_dask

opened = []
sys.addaudithook(lambda event, found: opened.append(str(found[0])) if event == "open" else None)
try:
    run_dask(["python", "-m", "dask", *sys.argv[2:]], Path(sys.argv[1]), contextlib.ExitStack())
finally:
    print(vars(sys.modules["__main__"]).keys() & {"cli", "main", "opened"}, file=sys.stderr)
    print([name for name in opened if name.endswith("entry_points.txt")], file=sys.stderr)
"""
CERTIFICATE = """
import sys, time
from pathlib import Path
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.directory import ClusterDirectory

print([certificates_and_keys.problem(ClusterDirectory.existing(Path(sys.argv[1])), now=time.time())])
print("cryptography" in sys.modules)
"""


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", program, *arguments], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("words", [("worker",), ("cuda", "worker")])
def test_a_worker_job_runs_the_command_of_dask_and_reads_no_entry_points(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    command = [*words, "--help"]
    there = subprocess.run([sys.executable, "-m", "dask", *command], capture_output=True, text=True, check=True)
    here = python(COMMAND, str(tmp_path), *command)
    assert there.stdout.startswith(f"Usage: python -m dask {' '.join(words)} [OPTIONS]")
    assert here.stdout == there.stdout
    assert here.stderr.splitlines()[-2:] == ["set()", "[]"]


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    found = create_directory.claim(tmp_path / "demo", None)
    certificates_and_keys.create(found)
    return found


def test_a_job_checks_its_certificate_by_what_python_brings(directory: ClusterDirectory) -> None:
    assert python(CERTIFICATE, str(directory.path)).stdout.splitlines() == ["['']", "False"]


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"\xff"])
def test_a_damaged_certificate_is_named(directory: ClusterDirectory, content: bytes) -> None:
    path = directory.tls / "cert.pem"
    path.write_bytes(content)
    with pytest.raises(Damaged, match=f"{path} is damaged"):
        launch.open_directory(directory.path)
