"""What the workers really talk over, asked of real connections, and how fast they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import ClusterError, ClusterWarning
from tests.helpers import CPU, GPU, hpcgpu, printed


@pytest.mark.parametrize(("protocol", "spoken", "transport"), [("ucx", "ucx", "tcp/"), ("tcp", "tls", "tls/")])
def test_a_cluster_reports_what_its_workers_talk_over(
    queue: LocalQueue, fake_gpus: None, protocol: str, spoken: str, transport: str
) -> None:
    if protocol == "ucx":
        pytest.importorskip("distributed_ucxx")
    options = GPU | {"protocol": protocol, "scheduler": {"gpus_per_node": 1}, "name": "woven"}
    with LocalGPUCluster(jobs=1, **options) as cluster:
        cluster.wait_for_workers(2)
        fabric = cluster.fabric
        assert (fabric.protocol, fabric.why) == (spoken, f"{protocol.upper()}: set by the option `protocol`")
        [link] = fabric.links
        assert {link.first, link.second} == {"woven-0-0", "woven-0-1"} and link.same_node
        assert link.transports and all(name.startswith(transport) for name in link.transports), (
            "as UCX says of the connection"
        )
        assert (fabric.rdma, fabric.nvlink) == (None, False)
        done = hpcgpu("bench-fabric", "woven", "--size", "64KiB", "--size", "1MiB", "--json")
        assert done.returncode == 0, done.stderr
        host, device = printed("bench-fabric", done.stdout)
        assert host["buffer"] == "host" and host["latency"] > 0
        assert all(host["bandwidth"][size] > 0 for size in ("65536", "1048576")) and host["link"]["transports"] == list(
            link.transports
        )
        assert device["buffer"] == "device" and device["error"].startswith("GPU memory cannot be used"), (
            "the GPUs pretend"
        )
        done = hpcgpu("bench-fabric", "woven", "--size", "64KiB", "--host-only")
        assert "same node  host" in done.stdout and "GB/s" in done.stdout and done.stdout.count("\n") == 2


def test_it_takes_two_workers_to_measure(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, jobs=1, name="alone") as cluster:
        cluster.wait_for_workers(1)
        assert cluster.fabric.links == [] and "not known" in repr(cluster.fabric)
        done = hpcgpu("bench-fabric", "alone")
        assert done.returncode == 1 and "a measurement needs two" in done.stderr
    with pytest.raises(ClusterError):
        _ = cluster.fabric


async def test_an_asynchronous_cluster_gives_an_awaitable(queue: LocalQueue) -> None:
    async with LocalGPUCluster(**CPU, asynchronous=True) as cluster:
        assert (await cluster.fabric).protocol == "tls"  # type: ignore[misc]


def test_a_worker_s_node_that_cannot_do_what_was_decided_reports_why(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, name="split", worker_restarts=0) as cluster:
        contact = cluster.directory.contact()
        assert contact is not None
        cluster.directory.publish(
            replace(contact, network="infiniband", interface="ib0")
        )  # as a scheduler's node with InfiniBand decides
        cluster.scale(jobs=1)
        with (
            pytest.warns(ClusterWarning),
            pytest.raises(
                ClusterError, match="the scheduler listens on ib0, but this node does not have an InfiniBand interface"
            ),
        ):
            cluster.wait_for_workers(1)
