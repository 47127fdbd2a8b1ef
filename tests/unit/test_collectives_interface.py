"""NCCL and Gloo use the interface of the workers, unless the user has chosen another one."""

from __future__ import annotations

import pytest

from hpcgpu.fabric import collectives_interface, interface_addresses
from hpcgpu.fabric.collectives_interface import effective, variables


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {"10.1.0.1": {"ib1", "ib0"}, "127.0.0.1": {"lo"}}
    monkeypatch.setattr(interface_addresses, "reaching", lambda address: reached.get(address, set()))


def test_the_chosen_interface_is_taken_else_one_that_reaches_the_scheduler() -> None:
    assert variables({}, "eth0", "10.1.0.1") == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert variables({}, None, "10.1.0.1") == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}


def test_what_the_user_has_set_stays_and_nothing_is_set_where_nothing_is_known() -> None:
    own = {"NCCL_SOCKET_IFNAME": "hsn"}
    assert variables(own, "eth0", "") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert effective(own, "eth0", "") == "GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=hsn"
    assert variables({}, None, "node7") == variables({}, None, "127.0.0.1") == {} and effective({}, None, "") == ""


def test_ucx_keeps_its_own_choice() -> None:
    assert not [name for name in collectives_interface.variables({}, "eth0", "") if name.startswith("UCX")]
