"""A host outside of the site's networks, which reaches its login nodes by ssh and nothing else: a user's laptop."""

from __future__ import annotations

import json
import re

import pytest
from site_bed import LAPTOP, Site, wait_for

from tests.site.programs import SMALL, Program

#: On the login node: an environment in the home that has all that hpcgpu needs, but not hpcgpu.
WITHOUT_HPCGPU = """
set -e
rm -rf environment .local/share/hpcgpu
/usr/bin/python3 -m venv --without-pip environment
find /opt/hpcgpu/lib/python3*/site-packages -mindepth 1 -maxdepth 1 -not -name '*hpcgpu*' \
    -exec ln -st environment/lib/python3*/site-packages {} +
"""
#: On the laptop: a key, and those of the login nodes, which both have the same name too.
KEYS = """
set -e
mkdir -p -m 700 .ssh
[ -e .ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519
ssh-keyscan -t ed25519 login login1 login2 > .ssh/known_hosts 2> /dev/null
cat .ssh/id_ed25519.pub
"""


@pytest.fixture
def laptop(site: Site) -> Site:
    """The site, whose login nodes have the key of ada's laptop."""
    site.exec("login1", "mkdir -p -m 700 .ssh")
    site.put("login1", ".ssh/authorized_keys", site.exec(LAPTOP, KEYS).out)
    for host in ("login1", "login2"):
        reached = lambda: not site.exec(LAPTOP, ["ssh", host, "true"], check=False).code  # noqa: B023, E731
        wait_for(reached, f"the laptop reaches {host}", 60)
    return site


def hpcgpu(laptop: Site, *arguments: str) -> str:
    return laptop.exec(LAPTOP, ["hpcgpu", *arguments], timeout=200).out


@pytest.mark.shows("A cluster of a login node, from a laptop over a real ssh")
def test_the_whole_life_of_a_cluster(laptop: Site) -> None:
    laptop.exec("login1", WITHOUT_HPCGPU)
    assert laptop.exec(LAPTOP, "getent hosts n0", check=False).code, "the laptop knows a compute node"
    hpcgpu(laptop, "install", "--host", "login1", "--python", "/home/ada/environment/bin/python")
    first = Program(
        LAPTOP,
        f"""
options = {SMALL | {"name": "demo", "jobs": 1, "checkpoint_directory": "~/saved"}!r}
cluster = SlurmGPUCluster(host="login1", **options)
client = cluster.get_client()
say("first:", client.submit(sum, [1, 2]).result(), cluster.snapshot().manager)
cluster.scale(jobs=2)
cluster.wait_for_workers(2)
say("scaled")
listen()
until(lambda: "demo-2" in [job.name for job in cluster.jobs if job.state == "running"], "the lost job is replaced")
cluster.wait_for_workers(2)
futures = client.map(pow, range(4), [2] * 4)
say("saved:", cluster.checkpoint({{"squares": futures}}, name="numbers").path)
cluster.adapt(minimum_jobs=1, maximum_jobs=2)
client.publish_dataset(left="by the first")
client.close()
cluster.detach()
""",
    )
    first.hears(r"first: 3 .*scheduler job.*scaled\n", 200)
    assert "demo on slurm: running" in hpcgpu(laptop, "status", "demo", "--host", "login1")
    second = Program(
        LAPTOP,
        """
client = hpcgpu.connect("login1:demo", quiet=True)
say("second:", client.submit(sum, [2, 3]).result())
listen()
say("found:", client.get_dataset("left"), client.gather(hpcgpu.restore(client, "~/saved", name="numbers", quiet=True)))
""",
    )
    second.hears("second: 5\n")
    [lost] = re.findall(r"(\d+) demo-1\n", laptop.slurm("squeue", "-h", "-o", "%i %j"))
    laptop.slurm("scancel", lost)
    first.send()
    assert "saved: /home/ada/saved/numbers" in first.ends()
    second.send()
    assert "found: by the first {'squares': [0, 1, 4, 9]}" in second.ends()
    assert [one["name"] for one in json.loads(hpcgpu(laptop, "list", "--json", "--host", "login1"))] == ["demo"]
    assert lost in hpcgpu(laptop, "report", "demo", "--host", "login1")
    assert "Scheduler at" in hpcgpu(laptop, "logs", "demo", "--host", "login1")
    assert "no job is left" in hpcgpu(laptop, "stop", "demo", "--host", "login1")
    wait_for(lambda: not laptop.jobs(), "the queue is empty", 60)


@pytest.mark.shows("A laptop reaches a cluster by ssh; its connection breaks")
def test_one_name_of_two_login_nodes(laptop: Site) -> None:
    """The node that was reached refuses the laptop later; the other one leads there, so futures stay."""
    program = Program(
        LAPTOP,
        f"""
from hpcgpu.client.reached_by_ssh import tunnel_of
from hpcgpu.ssh.login import Login
with SlurmGPUCluster(host="login", **{SMALL | {"name": "two", "jobs": 1}!r}) as cluster:
    client = cluster.get_client()
    future = client.submit(pow, 2, 10)
    say("reached:", tunnel_of(Login("login")).node, future.result())
    listen()
    say("still:", future.result(), client.submit(sum, [1, 2]).result())
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
say("closed")
""",
    )
    host = program.hears(r"reached: (login[12]) 1024\n", 200)[1]
    address = laptop.exec(LAPTOP, "hostname -i").out.strip()
    laptop.exec(host, f"iptables -A INPUT -s {address} -p tcp -j REJECT --reject-with tcp-reset", "root")
    try:
        refused = laptop.exec(LAPTOP, ["ssh", host, "true"], check=False)
        assert "refused" in refused.err, refused
        program.send()
        said = program.ends()
    finally:
        laptop.exec(host, "iptables -F INPUT", "root")
    assert "still: 1024 3\n" in said and "closed" in said
    wait_for(lambda: not laptop.jobs(), "the queue is empty", 60)
