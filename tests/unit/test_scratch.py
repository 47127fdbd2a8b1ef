"""Dask's temporary files are in a directory that is fresh, the user's alone, and gone in the end."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest

from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import LaunchError, NotTrusted, OptionError
from hpcgpu.manager.start_cluster import check_local_directory
from hpcgpu.runtime import scratch

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

PROGRAM = """
import sys, pathlib
from hpcgpu.runtime import scratch
with scratch.made(pathlib.Path(sys.argv[1])) as path:
    (path / "spilled").write_text("data")
    print(path, flush=True)
    sys.stdin.read()
"""


def start(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, base], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_is_the_users_alone_and_goes_with_what_is_in_it(tmp_path: Path) -> None:
    with scratch.made(tmp_path) as path:
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
        (path / "dask-scratch-space").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_when_the_next_one_starts_and_no_other(tmp_path: Path) -> None:
    killed, left = start(tmp_path)
    living, used = start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (tmp_path / "hpcgpu-of-another-user").mkdir()
    assert (left / "spilled").exists()
    with scratch.made(tmp_path):
        assert not left.exists() and (used / "spilled").exists() and (tmp_path / "hpcgpu-of-another-user").exists()
    living.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["hpcgpu-of-another-user"]


def test_nothing_is_removed_where_others_could_put_something_in_its_place(tmp_path: Path) -> None:
    left = tmp_path / f"hpcgpu-{os.getuid()}-{socket.gethostname()}-a1b2c3d4"
    left.mkdir()
    tmp_path.chmod(0o777)
    with scratch.made(tmp_path):
        assert left.exists()
    tmp_path.chmod(0o700)
    with scratch.made(tmp_path):
        assert not left.exists()


def test_one_that_another_process_swept_away_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, swept = tempfile.mkdtemp, list[str]()

    def swept_once(**arguments: Any) -> str:
        path = make(**arguments)
        if not swept:
            swept.append(path)
            os.rmdir(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", swept_once)
    with scratch.made(tmp_path) as path:
        assert path.is_dir() and str(path) not in swept


def test_the_place_is_what_was_given_else_dasks_else_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with dask.config.set({"temporary-directory": None}):
        assert scratch.temporary_directory() == tmp_path
    with dask.config.set({"temporary-directory": str(tmp_path / "configured")}):
        assert scratch.temporary_directory() == tmp_path / "configured"
        assert scratch.temporary_directory(str(tmp_path / "given" / "here")) == tmp_path / "given" / "here"
    assert (tmp_path / "given").stat().st_mode & 0o777 == 0o700


def test_a_place_where_everybody_can_replace_it_is_refused_and_one_like_tmp_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NotTrusted, match="chmod o-w"):
        scratch.temporary_directory(str(tmp_path))
    tmp_path.chmod(0o1777)
    assert scratch.temporary_directory(str(tmp_path)) == tmp_path


def test_a_tmpdir_of_the_site_that_others_can_replace_is_not_used_and_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch" / "job-7"))
    (tmp_path / "scratch" / "job-7").mkdir(mode=0o700)
    with dask.config.set({"temporary-directory": None}):
        assert scratch.temporary_directory() == Path("/tmp")
    assert "Dask's temporary files are in /tmp" in capsys.readouterr().err


def test_files_of_a_node_whose_name_begins_like_this_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-01")
    other = tmp_path / f"hpcgpu-{os.getuid()}-gpu-01-abcd1234"
    other.mkdir()
    monkeypatch.setattr("socket.gethostname", lambda: "gpu")
    with scratch.made(tmp_path):
        assert other.exists()


def refused(given: str, *, everywhere: bool = True) -> str:
    with pytest.raises(OptionError) as caught:
        check_local_directory(
            resolve("local", {"local_directory": given}).worker.local_directory or "", everywhere=everywhere
        )
    return str(caught.value)


def refused_in_a_job(given: str) -> str:
    with pytest.raises(LaunchError) as caught:
        scratch.temporary_place(argparse.Namespace(command=["dask", "worker", "--local-directory", given]))
    return str(caught.value)


OTHER = "set local_directory to another directory, such as '$TMPDIR'"


@pytest.mark.parametrize("look", [refused, refused_in_a_job])
def test_a_refused_local_directory_is_reported_with_why_and_what_to_write(
    look: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for name, why in (("file", ""), ("file/below", "Not a directory")):
        said = look(f"{tmp_path}/{name}")
        assert (
            said.startswith(f"local_directory='{tmp_path}/{name}': {tmp_path}/file")
            and why in said
            and "Errno" not in said
        )
        assert f"cannot be made on {socket.gethostname()}" in said and said.endswith(f"Please {OTHER}")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    said = look(f"{tmp_path}/open")
    assert "other users can change it" in said and said.endswith(f"chmod o-w {tmp_path}/open; or {OTHER}")


@needs_root
@pytest.mark.parametrize("look", [refused, refused_in_a_job])
def test_a_local_directory_of_another_user_is_refused_by_whose_it_is(
    look: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 64321, 64321)
    said = look(f"{tmp_path}/theirs/mine")
    assert f"{tmp_path}/theirs belongs to uid 64321" in said and said.endswith(OTHER)


def test_a_relative_local_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("scratch/dask", "../dask", "."):
        assert refused(given) == (
            f"local_directory={given!r} is a relative path: write one that begins with '/', or with a variable such as "
            "'$TMPDIR'"
        )
    monkeypatch.setenv("SCRATCH", "here")
    assert refused_in_a_job("$SCRATCH/dask") == (
        "local_directory='$SCRATCH/dask' must be an absolute path, but in this job it is the relative path 'here/dask'"
    )


def test_a_local_directory_in_the_home_directory_is_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert f"{tmp_path}/open belongs to" in refused("~/open")
    assert "there is no home directory for ~nobody-of-that-name" in refused("~nobody-of-that-name/x")
