"""What a job of `hpcgpu check --in-job` answers to whoever connects."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgpu.checks.check_jobs import _meet
from hpcgpu.checks.judge_job_reports import Seen
from hpcgpu.runtime import job_check
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.directory import ClusterDirectory


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    made = create_directory.claim(tmp_path / "checked", lambda submits: [], system="local", security=True)
    certificates_and_keys.create(made)
    return made


@pytest.fixture
def port(directory: ClusterDirectory) -> Iterator[int]:
    listener, port = job_check.serve("127.0.0.1", directory)
    with listener:
        yield port


def meet(directory: ClusterDirectory, port: int) -> Seen:
    seen = Seen("worker")
    _meet(seen, {"token": directory.token(), "address": ("127.0.0.1", port)}, directory, waited=0)
    return seen


def test_strangers_that_stay_silent_do_not_delay_the_login_node(directory: ClusterDirectory, port: int) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(3):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        seen = meet(directory, port)
        assert not seen.unreachable and seen.skew is not None and abs(seen.skew) < 60


def test_when_too_many_strangers_are_silent_the_oldest_are_disconnected(
    directory: ClusterDirectory, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_check, "_PEER_TIMEOUT", 600.0)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(4 * job_check._SILENT)
        ]
        assert not meet(directory, port).unreachable
        for stranger in strangers[: 3 * job_check._SILENT]:
            assert stranger.recv(1) == b"", "disconnected"
        for stranger in strangers[3 * job_check._SILENT + 1 :]:
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)


def test_a_peer_that_is_slow_or_gone_ends_nothing(
    directory: ClusterDirectory, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_check, "_PEER_TIMEOUT", 0.1)
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01"):
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(said)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
        slow.sendall(b"\x16\x03\x01")
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b"", "disconnected by its time limit"
    monkeypatch.setattr(job_check, "_PEER_TIMEOUT", 60.0)
    assert not meet(directory, port).unreachable
