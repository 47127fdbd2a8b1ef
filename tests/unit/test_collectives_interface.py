"""NCCL and Gloo use the interface of the workers, unless the user has chosen another one."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcgpu.fabric import collectives_interface, interface_addresses
from hpcgpu.fabric.collectives_interface import effective, variables


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's files of the site and of the user are in a directory of the test."""
    monkeypatch.setattr(collectives_interface, "_OF_SITE", tmp_path / "site.conf")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(tmp_path)))


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {"10.1.0.1": "ib0", "127.0.0.1": "lo"}
    monkeypatch.setattr(interface_addresses, "towards", reached.get)


@pytest.mark.usefixtures("networks")
def test_the_chosen_interface_is_taken_else_that_of_the_way_to_the_scheduler() -> None:
    assert variables({}, "eth0", "10.1.0.1") == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert variables({}, None, "10.1.0.1") == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.usefixtures("networks")
def test_what_the_user_has_set_stays_and_nothing_is_set_where_nothing_is_known() -> None:
    own = {"NCCL_SOCKET_IFNAME": "hsn"}
    assert variables(own, "eth0", "") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert effective(own, "eth0", "") == "GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=hsn"
    assert variables({}, None, "node7") == variables({}, None, "127.0.0.1") == {} and effective({}, None, "") == ""


def test_a_scheduler_behind_a_router_is_reached_by_an_interface_too() -> None:
    """No network of this machine has that address, which is for documentation (RFC 5737)."""
    far = "203.0.113.77"
    assert not interface_addresses.interfaces_of_network(far)
    name = interface_addresses.default_interface(interface_addresses.addresses())
    if name is None:
        pytest.skip("this machine has no default route")
    assert variables({}, None, far) == {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name}


def test_the_files_of_nccl_are_those_of_the_user_or_the_site_and_stay(tmp_path: Path) -> None:
    def found(environ: dict[str, str] | None = None) -> str:
        return effective(environ or {}, "hsn0", "")

    (tmp_path / "site.conf").write_text("NCCL_DEBUG=WARN\n#NCCL_SOCKET_IFNAME=no\nNCCL_SOCKET_IFNAME=hsn\n")
    assert found() == "GLOO_SOCKET_IFNAME=hsn0, NCCL_SOCKET_IFNAME=hsn"
    assert variables({}, "hsn0", "") == {"GLOO_SOCKET_IFNAME": "hsn0"}, "else hsn0 alone would be used"
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME==hsn1,hsn2")
    assert found() == "GLOO_SOCKET_IFNAME=hsn0, NCCL_SOCKET_IFNAME==hsn1,hsn2", "the user's comes first"
    (tmp_path / "other").write_text("NCCL_SOCKET_IFNAME=ib")
    (tmp_path / "link").symlink_to("other")
    assert found({"NCCL_CONF_FILE": str(tmp_path / "link")}).endswith("NCCL_SOCKET_IFNAME=ib")
    assert found({"NCCL_CONF_FILE": str(tmp_path / "missing")}).endswith("NCCL_SOCKET_IFNAME=hsn")
    assert found({"NCCL_SOCKET_IFNAME": "eth"}).endswith("NCCL_SOCKET_IFNAME=eth")


def test_a_file_of_nccl_that_is_none_delays_no_worker(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".nccl.conf")
    (tmp_path / "site.conf").symlink_to("site.conf")
    assert variables({}, "hsn0", "")["NCCL_SOCKET_IFNAME"] == "=hsn0"


def test_ucx_keeps_its_own_choice() -> None:
    assert not [name for name in collectives_interface.variables({}, "eth0", "") if name.startswith("UCX")]
