"""Which protocol and interface is chosen, and what scheduler and workers must have in common."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, Worker
from distributed.protocol.serialize import merge_and_deserialize, serialize

from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.fabric import connection_report, interface_addresses, measure_links, protocol_and_interface, ucx_settings
from hpcgpu.fabric.connection_report import Fabric, Link, Measurement
from hpcgpu.fabric.protocol_and_interface import Node, decide, incompatibility

GIB = 2**30
ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.3", "ib0": "10.1.0.3"}
INFINIBAND = Node(
    has_ucxx=True,
    ports=("mlx5_0/1",),
    transports=("rc_mlx5", "tcp", "cuda_copy"),
    infiniband=("ib0",),
    addresses=ADDRESSES,
)
SLINGSHOT = replace(
    INFINIBAND, ports=(), infiniband=(), addresses={"eth0": "10.0.0.3", "hsn1": "10.2.0.4", "hsn0": "10.2.0.3"}
)
PLAIN = Node(has_ucxx=True, addresses={"eth0": "10.0.0.3"})


def test_ucx_over_infiniband_is_chosen_where_all_that_it_needs_is_there() -> None:
    chosen = decide(INFINIBAND, "auto", None, gpu=True)
    assert (chosen.protocol, chosen.interface, chosen.network) == ("ucx", "ib0", "infiniband")
    assert chosen.why == "UCX over InfiniBand (mlx5_0/1) over ib0"
    assert decide(INFINIBAND, "auto", "eth0", gpu=True).interface == "eth0", "what the user names counts"


@pytest.mark.parametrize(
    ("node", "gpu", "why"),
    [
        (INFINIBAND, False, "TCP over ib0: the scheduler job has no GPU, which UCX needs"),
        (replace(INFINIBAND, has_ucxx=False), True, "TCP over ib0: distributed-ucxx is not installed"),
        (PLAIN, True, "TCP: this node has no active InfiniBand port"),
        (replace(INFINIBAND, transports=("tcp",)), True, "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"),
        (replace(INFINIBAND, transports=("rc_mlx5", "tcp")), True, "this UCX was built without CUDA"),
        (replace(INFINIBAND, transports=("rc_mlx5",), ucx_tls="rc"), True, "TCP over ib0: UCX_TLS=rc excludes CUDA"),
        (replace(INFINIBAND, locked_memory=64 * 1024), True, "a process may lock only 64 KiB of memory (ulimit -l)"),
        (replace(INFINIBAND, infiniband=()), True, "TCP: no interface of the InfiniBand card has an IPv4 address"),
        (SLINGSHOT, True, "TCP over hsn0: the network is Slingshot (hsn0), which UCX does not support"),
    ],
)
def test_tcp_is_chosen_with_the_reason_where_something_lacks(node: Node, gpu: bool, why: str) -> None:
    chosen = decide(node, "auto", None, gpu=gpu)
    assert chosen.protocol == "tcp" and why in chosen.why


def test_ucx_connects_by_the_interface_that_the_user_names() -> None:
    bond = replace(INFINIBAND, infiniband=(), addresses={"bond0": "10.1.0.3"})
    chosen = decide(bond, "auto", "bond0", gpu=True)
    assert (chosen.protocol, chosen.interface) == ("ucx", "bond0")
    assert "set the option interface to its name" in decide(bond, "auto", None, gpu=True).why
    assert "ib7 has no IPv4 address" in decide(INFINIBAND, "auto", "ib7", gpu=True).why


def test_much_locked_memory_is_enough() -> None:
    assert decide(replace(INFINIBAND, locked_memory=64 * GIB), "auto", None, gpu=True).protocol == "ucx"


@pytest.mark.parametrize(("protocol", "expected"), [("ucx", "ucx"), ("tcp", "tcp"), ("tls", "tcp")])
def test_what_is_asked_for_is_taken(protocol: str, expected: str) -> None:
    chosen = decide(PLAIN, protocol, None, gpu=True)
    assert (chosen.protocol, chosen.interface, chosen.why) == (
        expected,
        None,
        f"{protocol.upper()}: set by the option `protocol`",
    )
    assert decide(INFINIBAND, protocol, None, gpu=True).interface == "ib0", "TCP runs over IPoIB too"


def test_a_worker_s_node_that_cannot_do_what_was_decided_reports_why() -> None:
    ucx = decide(INFINIBAND, "auto", None, gpu=True)
    assert incompatibility(ucx, INFINIBAND, "auto", None) == ""
    down = incompatibility(ucx, replace(INFINIBAND, ports=()), "auto", None)
    assert (
        "the scheduler's node chose UCX over InfiniBand (mlx5_0/1)" in down
        and "this node has no active InfiniBand port" in down
    )
    assert "distributed-ucxx is not installed" in incompatibility(
        ucx, replace(INFINIBAND, has_ucxx=False), "auto", None
    )
    asked = decide(PLAIN, "ucx", None, gpu=True)
    assert incompatibility(asked, PLAIN, "ucx", None) == "", "who asks for UCX gets it, over whatever there is"
    assert "distributed-ucxx is not installed" in incompatibility(asked, replace(PLAIN, has_ucxx=False), "ucx", None)


def test_a_worker_s_node_without_the_scheduler_s_network_reports_it() -> None:
    tcp = decide(INFINIBAND, "tcp", None, gpu=True)
    why = incompatibility(tcp, PLAIN, "tcp", None)
    assert (
        "the scheduler listens on ib0, but this node does not have an InfiniBand interface" in why
        and "It has: eth0" in why
    )
    assert incompatibility(tcp, PLAIN, "tcp", "eth0") == "", "a named interface is checked by name"
    assert "a Slingshot interface" in incompatibility(decide(SLINGSHOT, "auto", None, gpu=True), PLAIN, "auto", None)
    assert incompatibility(decide(PLAIN, "auto", None, gpu=True), INFINIBAND, "auto", None) == "", (
        "who can do more does what was decided"
    )


def test_a_worker_takes_the_rail_that_reaches_the_scheduler() -> None:
    rails = replace(INFINIBAND, infiniband=("ib0", "ibp12s0"), addresses={"ib0": "10.1.0.4", "ibp12s0": "10.9.0.4"})
    assert protocol_and_interface.nearest(rails, "infiniband", "ib7", {"ibp12s0"}) == "ibp12s0", (
        "the one in the scheduler's network"
    )
    assert protocol_and_interface.nearest(rails, "infiniband", "ibp12s0", set()) == "ibp12s0", (
        "else that of the same name"
    )
    assert protocol_and_interface.nearest(rails, "infiniband", "ib7", set()) == "ib0"
    assert protocol_and_interface.nearest(SLINGSHOT, "slingshot", "hsn1", {"hsn1", "hsn0"}) == "hsn1"
    assert (
        interface_addresses.interfaces_of_network("127.0.0.1") == {"lo"}
        and interface_addresses.interfaces_of_network("a.name") == set()
    )


def test_ucx_that_does_not_start_is_reported_and_no_reason_against_a_worker() -> None:
    broken = replace(INFINIBAND, transports=(), ucx_error="ImportError: libucp.so.0")
    assert decide(broken, "auto", None, gpu=True).why == "TCP over ib0: UCX did not start: ImportError: libucp.so.0"
    assert incompatibility(decide(INFINIBAND, "auto", None, gpu=True), broken, "auto", None) == "", (
        "Dask tells better what is wrong"
    )


def test_a_node_is_read_from_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for card, state, layer, interface in [
        ("mlx5_0", "4: ACTIVE", "InfiniBand", "lo"),
        ("mlx5_1", "1: DOWN", "InfiniBand", "ib1"),
        ("mlx5_2", "4: ACTIVE", "Ethernet", "eth9"),
    ]:
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(layer + "\n")
        (tmp_path / card / "device" / "net" / interface).mkdir(parents=True)
    for interface, kind, state in [("lo", "32", "up"), ("eth2", "1", "up"), ("ib8", "32", "down")]:
        place = tmp_path / "mlx5_0" / "device" / "net" / interface
        place.mkdir(exist_ok=True)
        (place / "type").write_text(kind + "\n")
        (place / "operstate").write_text(state + "\n")
    addresses = interface_addresses.addresses()
    monkeypatch.setattr(
        protocol_and_interface.interface_addresses,
        "addresses",
        lambda: addresses | {"eth2": "10.0.0.3", "ib8": "10.1.0.8"},
    )
    node = protocol_and_interface.this_node(ucx=False, sysfs=tmp_path)
    assert node.ports == ("mlx5_0/1",) and node.infiniband == ("lo",), (
        "only cards and ports that are up, only InfiniBand, only with an address"
    )
    assert node.addresses["lo"] == "127.0.0.1"
    monkeypatch.setattr(protocol_and_interface.os, "geteuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda which: (8192, 8192))
    assert protocol_and_interface.locked_memory() == 8192
    monkeypatch.setattr(protocol_and_interface.os, "geteuid", lambda: 0)
    assert protocol_and_interface.locked_memory() is None, "root locks what it wants"


def test_asking_ucx_leaves_it_to_dask_to_start_it(tmp_path: Path) -> None:
    pytest.importorskip("distributed_ucxx")
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    code = f"""
from pathlib import Path
from hpcgpu.fabric.protocol_and_interface import this_node
print(this_node(sysfs=Path({str(tmp_path)!r})).transports)
from distributed_ucxx import ucxx
ucxx.init_once()
print("started")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"UCX_TLS": "tcp", "UCX_MODULES": "^cuda"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert [line for line in done.stdout.splitlines() if "UCX" not in line] == ["('tcp',)", "started"], done.stderr


def environment(**arguments: object) -> dict[str, str]:
    options = resolve("slurm", arguments)
    assert options.scheduler is not None
    scheduler, worker = (
        ucx_settings.environment(options.worker, job.ucx_env) for job in (options.scheduler, options.worker)
    )
    assert scheduler == worker
    return scheduler


CODE = """
import json, sys
from dask_cuda.utils import get_ucx_config
keys = ["tcp", "infiniband", "nvlink", "rdmacm", "cuda-copy"]
for flags in json.loads(sys.argv[1]):
    config = get_ucx_config(**flags)
    print(json.dumps({key.upper().replace("-", "_"): str(config[key]) for key in keys if config[key] is not None}))
"""


def test_the_scheduler_gets_the_settings_of_ucx_that_dask_cuda_makes_of_the_flags_of_the_workers() -> None:
    pytest.importorskip("distributed_ucxx")
    names = ["enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink", "enable_rdmacm"]
    workers = [
        resolve("slurm", dict(zip(names, values, strict=True))).worker
        for values in itertools.product([None, True, False], repeat=4)
    ]
    flags = [{flag.lstrip("-").replace("-", "_"): value for flag, value in w.passed_on()} for w in workers]
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(flags)], capture_output=True, text=True, timeout=100)
    theirs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(theirs) == 81, done.stderr
    for worker, given, expected in zip(workers, flags, theirs, strict=True):
        variables = ucx_settings.environment(worker, ())
        ours = {key.removeprefix("DASK_DISTRIBUTED_UCXX__"): value for key, value in variables.items()}
        assert ours == expected, given
    [infiniband_off] = [w for w in workers if w.enable_infiniband is False and len(list(w.passed_on())) == 3][:1]
    assert dict(infiniband_off.passed_on())["--enable-nvlink"] is True, "what is not switched off is on"


def test_scheduler_and_workers_get_the_same_settings_of_ucx() -> None:
    assert environment() == {}, "UCX chooses"
    assert environment(enable_infiniband=True, enable_nvlink=False, ucx_env={"UCX_IB_GPU_DIRECT_RDMA": "n"}) == {
        "DASK_DISTRIBUTED_UCXX__INFINIBAND": "True",
        "DASK_DISTRIBUTED_UCXX__NVLINK": "False",
        "DASK_DISTRIBUTED_UCXX__CUDA_COPY": "True",
        "UCX_IB_GPU_DIRECT_RDMA": "n",
    }
    with dask.config.set({"distributed-ucxx.multi-buffer": True}):
        assert environment() == {"DASK_DISTRIBUTED_UCXX__MULTI_BUFFER": "True"}


def test_only_variables_of_ucx_are_taken_for_ucx() -> None:
    with pytest.raises(OptionError, match=r"ucx_env: 'PATH' is not a variable of UCX \(UCX_...\): use the option env"):
        resolve("slurm", {"ucx_env": {"PATH": "/"}})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ""),
        ({"enable_infiniband": True}, "enable_infiniband without enable_nvlink: NVLink is not used"),
        (
            {"enable_infiniband": True, "enable_tcp_over_ucx": True},
            "enable_tcp_over_ucx and enable_infiniband without enable_nvlink",
        ),
        ({"enable_infiniband": True, "enable_nvlink": True}, ""),
        ({"enable_infiniband": True, "enable_nvlink": False}, ""),
        ({"enable_rdmacm": True}, "enable_rdmacm alone has no effect"),
        ({"enable_rdmacm": True, "enable_infiniband": False}, ""),
        ({"enable_infiniband": False}, ""),
        ({"enable_rdmacm": True, "enable_infiniband": True, "enable_nvlink": True}, ""),
    ],
)
def test_what_silently_leaves_nvlink_out_is_reported(arguments: dict[str, bool], expected: str) -> None:
    said = " ".join(ucx_settings.warnings(resolve("slurm", arguments).worker))
    assert expected in said and bool(expected) == bool(said)


def test_auto_is_the_same_as_no_interface() -> None:
    assert resolve("slurm", {"interface": "auto", "client_interface": "auto"}).worker.interface is None


# What really runs


def workers(nodes: int, gpus: int) -> dict[str, str]:
    return {f"ucx://n{node}:{gpu}": f"n{node}" for node in range(nodes) for gpu in range(gpus)}


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (1, 4), (2, 1), (3, 4), (40, 8)])
def test_pairs_of_all_kinds_are_asked_and_none_twice(nodes: int, gpus: int) -> None:
    there = workers(nodes, gpus)
    pairs = connection_report.choose(there, most=32)
    assert len({frozenset(pair[:2]) for pair in pairs}) == len(pairs)
    assert all((there[first] == there[second]) == same_node for first, second, same_node in pairs)
    within, across = sum(same for *_, same in pairs), sum(not same for *_, same in pairs)
    assert within == min(32, nodes * gpus * (gpus - 1) // 2) and across == min(32, nodes * (nodes - 1) // 2)


RC, IPC, TCP = ("rc_mlx5/mlx5_0:1",), ("cuda_ipc/cuda", "tcp/lo"), ("tcp/ib0",)


@pytest.mark.parametrize(
    ("found", "rdma", "nvlink"),
    [
        ([], None, None),
        ([Link("a", "b", False, RC)], True, None),
        ([Link("a", "b", False, RC), Link("a", "c", False, TCP)], False, None),
        ([Link("a", "b", True, IPC, nvlinks=12)], None, True),
        ([Link("a", "b", True, IPC, nvlinks=0)], None, False),
        ([Link("a", "b", True, TCP, nvlinks=12), Link("a", "c", False, RC)], True, False),
    ],
)
def test_rdma_and_nvlink_are_what_ucx_reports_not_what_was_asked_for(
    found: list[Link], rdma: bool | None, nvlink: bool | None
) -> None:
    fabric = Fabric("ucx", "UCX: set by the option `protocol`", "ib0", found)
    assert (fabric.rdma, fabric.nvlink) == (rdma, nvlink)
    words = {True: "yes", False: "no", None: "not known"}
    assert f"RDMA across nodes: {words[rdma]}" in repr(fabric) and f"NVLink within nodes: {words[nvlink]}" in repr(
        fabric
    )
    assert all(link.transports[0] in repr(fabric) for link in found)


def test_it_shows_itself_in_a_notebook() -> None:
    page = Fabric("tls", "TCP: <reason>", links=[Link("a", "b", True, ("tls/eth0",))])._repr_html_()
    assert "TCP: &lt;reason&gt;" in page and "<td>tls/eth0</td>" in page


def test_line_rates_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, content in (
        ("infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)"),
        ("net/eth0/speed", "25000"),
        ("net/lo/speed", "-1"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content + "\n")
    rates = measure_links.line_rates(tmp_path)
    assert rates == {"mlx5_0:1": 200.0, "eth0": 25.0}
    assert (
        connection_report.line_rate(RC, rates) == 25e9
        and connection_report.line_rate(("tls/eth0",), rates) == 25e9 / 8
        and connection_report.line_rate(IPC, rates) == 0
    )


def test_measurements_are_a_table_against_the_line_rate() -> None:
    fast = Measurement(Link("a", "b", False, RC), "device", 5e-6, {2**20: 1e9, 2**28: 20e9}, 25e9)
    none = Measurement(Link("a", "c", True, IPC), "device", error="GPU memory cannot be used: no device")
    head, first, second = connection_report.bench_table([fast, none], 1000).splitlines()
    assert "1 MiB" in head and "256 MiB" in head
    assert first.split() == [
        "across",
        "nodes",
        "device",
        "5",
        "µs",
        "1.00",
        "GB/s",
        "20.00",
        "GB/s",
        "25.0",
        "GB/s,",
        "80%",
        "used",
        "rc_mlx5/mlx5_0:1",
    ]
    assert second.endswith("GPU memory cannot be used: no device") and "not known" in second


async def test_a_worker_that_is_gone_does_not_hide_the_others() -> None:
    async def broadcast(msg: dict[str, Any], workers: list[str]) -> dict[str, Any]:
        if workers == ["ucx://gone"]:
            raise OSError("Timed out trying to connect")
        told = {"transports": {"ucx://b": ["tcp/eth0"]}, "errors": {}, "nvlinks": 0, "rates": {}}
        return {workers[0]: {"status": "OK", "result": told}}

    there = {
        address: {"name": address[6:], "host": host}
        for address, host in (("ucx://gone", "n0"), ("ucx://a", "n1"), ("ucx://b", "n2"))
    }
    found, _ = await connection_report.query_links(SimpleNamespace(broadcast=broadcast), there)
    told = {(link.first, link.second): link.error or link.transports for link in found}
    assert told["a", "b"] == ("tcp/eth0",) and told["gone", "b"] == "Timed out trying to connect"
    assert Fabric("ucx", "", links=found).rdma is False, "what is not known says nothing"


def test_shared_memory_that_a_group_can_attach_to_is_left_out_unless_transports_were_chosen() -> None:
    assert ucx_settings.private_transports({}, {}) == {"UCX_TLS": "^sysv"}
    assert ucx_settings.private_transports({}, {"tcp": None, "create-cuda-context": True}) == {"UCX_TLS": "^sysv"}
    assert ucx_settings.private_transports({"UCX_TLS": "rc,cuda"}, {}) == {}
    assert ucx_settings.private_transports({}, {"infiniband": True}) == {}, "the variable would win over the flags"
    assert ucx_settings.private_transports({}, {"environment": {"tls": "rc"}}) == {}


def test_ucx_gets_what_ucxx_sets_too_late_unless_it_was_set() -> None:
    assert ucx_settings.memory_type_cache({}, {}) == {"UCX_MEMTYPE_CACHE": "n"}
    assert ucx_settings.memory_type_cache({}, {"environment": {"tls": "rc"}}) == {"UCX_MEMTYPE_CACHE": "n"}
    assert ucx_settings.memory_type_cache({"UCX_MEMTYPE_CACHE": "y"}, {}) == {}
    for name in ("memtype-cache", "memtype_cache", "MEMTYPE-CACHE"):
        assert ucx_settings.memory_type_cache({}, {"environment": {name: "y"}}) == {}


def test_what_bench_fabric_sends_is_not_copied_once_more_when_it_is_received() -> None:
    header, frames = serialize(measure_links._host_buffer(1000))
    received = bytearray(b"".join(frames))
    data = merge_and_deserialize(header, [memoryview(received)])
    received[0] = 7
    assert bytes(data) == b"\7" + bytes(999)


def test_the_bandwidth_of_a_transfer_that_was_faster_than_a_round_trip_can_be_believed() -> None:
    assert measure_links.speed(1000, transfer=3.0, trip=1.0) == 500
    assert measure_links.speed(1000, transfer=2.0, trip=2.5) == 500


async def test_a_worker_measures_its_connection_to_another_one() -> None:
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, name="one", dashboard=False) as one,
        Worker(scheduler.address, nthreads=1, name="two", dashboard=False) as two,
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        here = {"workers": [one.address]}
        [told] = (await client.run(measure_links.describe, peers=[two.address], **here)).values()
        assert told["transports"] == {two.address: ["tcp/lo"]} and not told["errors"], told
        await client.run(measure_links.receive, workers=[two.address])
        [speed] = (
            await client.run(measure_links.measure, peer=two.address, sizes=[1000], device=False, **here)
        ).values()
        assert speed.get("latency", 0) > 0 and "error" not in speed, speed
