"""Connections that are authenticated but not encrypted: where they listen, and who may not use plain TCP."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed.comm import listen
from distributed.comm.addressing import parse_host_port
from tornado.tcpclient import TCPClient

from hpcgpu.errors import AuthenticationError
from hpcgpu.fabric import authenticated_tcp, ucx_authentication
from hpcgpu.fabric.ucx_authentication import ARGUMENT, OWN_HOST, VARIABLE, signed_address

KEY = bytes(range(32))


async def handle(comm: Any) -> None:
    await comm.close()


@pytest.mark.parametrize(("given", "announced"), [(None, "127.0.0.66"), ("127.0.0.77", "127.0.0.77")])
async def test_a_worker_that_listens_on_all_addresses_announces_the_one_of_its_interface(
    given: str | None, announced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticated_tcp.install()
    monkeypatch.setenv(OWN_HOST, "127.0.0.66")
    listener = await listen("authenticated://0.0.0.0", handle, default_host=given, **{ARGUMENT: KEY})
    try:
        assert listener.contact_address.rpartition(":")[0] == f"authenticated://{announced}"
    finally:
        listener.stop()


@pytest.mark.parametrize(
    ("of_process", "of_connection", "encrypts", "refused"),
    [
        (False, False, None, False),
        (True, False, None, True),
        (True, False, True, False),  # of a cluster with TLS
        (False, True, None, True),
        (False, True, True, True),
    ],
)
async def test_who_has_the_key_may_not_use_plain_tcp(
    of_process: bool, of_connection: bool, encrypts: bool | None, refused: bool, tmp_path: Path
) -> None:
    authenticated_tcp.install()
    (tmp_path / "ucx.key").write_text(KEY.hex())
    arguments = {ARGUMENT: KEY} if of_connection else {}
    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set({"distributed.comm.require-encryption": encrypts}),
        pytest.raises(RuntimeError, match="are authenticated, refusing") if refused else contextlib.nullcontext(),
    ):
        if of_process:
            patch.setenv(VARIABLE, str(tmp_path / "ucx.key"))
        listener = await listen("tcp://127.0.0.1", handle, require_encryption=False, **arguments)
        listener.stop()


async def test_a_proof_that_was_made_for_ucx_opens_no_tcp_connection() -> None:
    authenticated_tcp.install()
    listener = await listen("authenticated://127.0.0.1", handle, **{ARGUMENT: KEY})
    host, port = parse_host_port(listener.contact_address.partition("://")[2])
    stream = await TCPClient().connect(host, port)
    try:
        dialled = signed_address(*stream.socket.getpeername())
        with pytest.raises(AuthenticationError):
            await ucx_authentication.connect(authenticated_tcp._Stream(stream), KEY, dialled)
    finally:
        stream.close()
        listener.stop()
