"""What a job of `hpcgpu check --in-job` answers to whoever connects."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgpu.checks.check_jobs import _record_report
from hpcgpu.checks.judge_job_reports import Seen
from hpcgpu.fabric import interface_addresses, protocol_and_interface
from hpcgpu.fabric.protocol_and_interface import Node
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
    _record_report(seen, {"token": directory.token(), "address": ("127.0.0.1", port)}, directory, waited=0)
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


def test_the_collectives_of_a_worker_job_are_those_under_the_scheduler_of_the_other_job(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's node has no InfiniBand, so the workers of a cluster speak TCP on the way to it."""
    addresses = interface_addresses.addresses()
    default = interface_addresses.default_interface(addresses)
    if default is None:
        pytest.skip("this machine has no default route")
    here = {"here": Node(addresses=addresses)}
    monkeypatch.setattr(protocol_and_interface, "this_node", lambda: here["here"])
    given = {"system": "local", "protocol": "auto", "interface": None, "client_interface": None, "gpus": 0}
    given |= {"whole_nodes": False, "local_directory": None, "container": None}
    directory.intend("checked-scheduler", "scheduler")
    report = job_check.examine(argparse.Namespace(**given, kind="scheduler"), directory)
    directory.write("scheduler.json", json.dumps(report))
    here["here"] = Node(ports=("mlx5_0/1",), infiniband=("ib0",), addresses=addresses | {"ib0": "10.1.0.3"})
    report = job_check.examine(argparse.Namespace(**given, kind="worker"), directory)
    assert report["transport"]["interface"] == "ib0"
    assert report["collectives"] == f"GLOO_SOCKET_IFNAME={default}, NCCL_SOCKET_IFNAME=={default}"
