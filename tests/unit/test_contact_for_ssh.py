"""What a login node reports of a scheduler to programs of other machines: its keys only to those that request them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpcgpu.configuration.resolve import resolve
from hpcgpu.store import certificates_and_keys, create_directory, saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from tests.helpers import command, hpcgpu


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    directory = create_directory.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    certificates_and_keys.create(directory)
    saved_options.write(directory, resolve("slurm", {"name": "demo", "gpus_per_node": 1}))
    directory.publish(Contact(token=directory.token(), job_id="7", workers="tls://a:1", client="tls://a:1"))
    return directory


def test_only_who_requests_the_keys_gets_them(directory: ClusterDirectory) -> None:
    names = {"certificate": "cert.pem", "key": "key.pem", "ucx_key": "ucx.key"}
    secrets = {name: (directory.tls / file).read_text() for name, file in names.items()}
    with_keys = json.loads(hpcgpu("contact", str(directory.path)).stdout)
    assert {name: with_keys[name] for name in secrets} == secrets
    without = json.loads(hpcgpu("contact", "--no-keys", str(directory.path)).stdout)
    assert without["contact"]["client"] == "tls://a:1"
    assert {name: without[name] for name in secrets} == dict.fromkeys(secrets, "")


def test_no_terminal_shows_the_keys(directory: ClusterDirectory) -> None:
    screen, terminal = os.openpty()
    try:
        done = subprocess.run(
            command("contact", str(directory.path)), stdout=terminal, stderr=subprocess.PIPE, text=True, timeout=100
        )
        assert done.returncode == 2 and "the keys are not printed on a terminal" in done.stderr
        os.set_blocking(screen, False)
        with pytest.raises(BlockingIOError):
            os.read(screen, 1)
    finally:
        os.close(screen)
        os.close(terminal)
