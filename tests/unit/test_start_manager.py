"""The manager in the scheduler job learns why it ends."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from hpcgpu.dask_scheduler.start_manager import ManagerProcess
from hpcgpu.store import create_directory


@pytest.mark.parametrize(("replaced", "heard"), [(True, "another follows"), (False, "the cluster ends")])
async def test_a_manager_that_another_follows_does_not_tell_the_user_that_the_cluster_ends(
    tmp_path: Path, replaced: bool, heard: str
) -> None:
    manager = ManagerProcess(create_directory.claim(tmp_path / "demo", None), "1")
    code = "trap 'echo another follows; exit' HUP; trap 'echo the cluster ends; exit' TERM; echo up; "
    manager._process = process = await asyncio.create_subprocess_exec(
        "bash", "-c", code + "while :; do sleep 0.1; done", stdout=subprocess.PIPE
    )
    assert process.stdout is not None and await process.stdout.readline() == b"up\n"
    await manager.stop(replaced=replaced)
    assert (await process.stdout.read()).decode() == f"{heard}\n"
