"""A job that fails because the disk of its log is full: the message says so, for the log cannot."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A directory whose disk is full."""
    directory = tmp_path / "full"
    directory.mkdir()
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "hpcgpu-full", str(directory)])
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        with pytest.raises(OSError), open(directory / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_the_message_says_that_the_disk_is_full(queue: LocalQueue, full: Path) -> None:
    with pytest.raises(ClusterError) as failed:
        LocalGPUCluster(**CPU, log_directory=str(full))
    said = str(failed.value)
    assert f"the disk of {full} is full, so its log may lack the reason. Log: {full}/" in said
