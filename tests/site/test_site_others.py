"""Another user, who tries to get in from other hosts; a home and clocks that are not the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from site_bed import NODES, Site, wait_for

from tests.site.programs import SMALL, Program
from tests.slurm import strangers as strangers_module

#: The clocks of these hosts, in seconds beside the truth.
CLOCKS = dict.fromkeys(NODES, 120) | {"s0": -120}


@pytest.mark.shows("Attacks of another user from other hosts")
def test_another_user_gets_in_neither_by_files_nor_by_ports_from_any_host(site: Site) -> None:
    site.exec("login1", "chmod 755 /home/ada")  # as many sites have it: the cluster directory protects itself
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "mine", "jobs": 1}!r}) as cluster:
    cluster.wait_for_workers(1)
    say("directory", cluster.directory.path)
    say("addresses", cluster.scheduler_address, cluster.contact.address if hasattr(cluster, "contact") else "-",
        *cluster.scheduler_info["workers"])
    listen()
    with cluster.get_client() as client:
        say("still", client.submit(sum, [1, 2]).result())
""",
    )
    directory = program.hears(r"directory (\S+)\n")[1]
    addresses = [word for word in program.hears(r"addresses (.+?)\n")[1].split() if "://" in word]
    assert len(addresses) >= 2
    seen = site.exec("login2", f"ls {directory}; cat {directory}/contact.json", "bob", check=False)
    assert "Permission denied" in seen.err and not seen.out
    connect = f"import hpcgpu; hpcgpu.connect({directory!r}, timeout=20)"
    refused = site.python("login2", connect, user="bob", check=False)
    assert refused.code and "3" not in refused.out, refused
    strangers = f"""
import sys
from pathlib import Path
sys.path.append("/tmp/others-of-bob")
from strangers import attempts, other_clusters
others = other_clusters(Path("/tmp/others-of-bob"))
for address in {addresses!r}:
    print(attempts(address, others), end="")
"""
    for host in ("login2", "n3"):
        site.exec(host, "mkdir -p /tmp/others-of-bob", "bob")
        site.put(host, "/tmp/others-of-bob/strangers.py", Path(strangers_module.__file__).read_text(), "bob")
        tried = site.python(host, strangers, user="bob", timeout=240)
        assert tried.out == "all strangers were refused\n" * len(addresses), tried
        site.exec(host, "rm -rf /tmp/others-of-bob", "bob")
    program.send()
    assert "still 3" in program.ends()


@pytest.mark.shows("Logs and contact that appear late, on a home filesystem with caches")
def test_the_log_of_a_job_that_failed_is_in_the_message_although_it_appears_late() -> None:
    broken = 'if [ "$SLURM_JOB_PARTITION" = gpu ]; then echo "no such module: cuda/99" >&2; exit 3; fi'
    options = SMALL | {"job_script_prologue": [broken], "worker_restarts": 0, "jobs": 1, "name": "fails"}
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{options!r}) as cluster:
    until(lambda: "a worker job failed; it is not replaced" in repr(cluster), "it fails")
    try:
        cluster.wait_for_workers(1)
    except hpcgpu.ClusterError as error:
        say("error:", error)
""",
    )
    said = program.ends()
    assert "its script failed" in said and "none of its workers had connected" in said
    assert "no such module: cuda/99" in said


@pytest.mark.by_hand
@pytest.mark.shows("A home filesystem that does not answer for half a minute")
def test_a_home_that_hangs_for_a_while_costs_no_job_and_no_work(site: Site) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "hangs", "jobs": 1}!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    say("up")
    listen()
    say("during:", client.submit(sum, [1, 2]).result(timeout=60))
    listen()
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    say("after:", len(cluster.workers))
""",
    )
    program.hears("up\n")
    job = next(iter(site.jobs()))
    elapsed = lambda: int(site.slurm("squeue", "-h", "-j", job, "-o", "%M", host="ctl").strip()[-2:])  # noqa: E731
    site.pause("files")
    program.send()
    program.hears("during: 3")
    begin = elapsed()
    wait_for(lambda: (elapsed() - begin) % 60 >= 30, "half a minute", 60)
    site.unpause("files")
    program.send()
    assert "after: 2" in program.ends()


@pytest.fixture
def other_clocks(site: Site) -> Iterator[None]:
    """The clocks of the compute nodes are two minutes off; Slurm's own daemons there keep the time that they had."""
    for host, seconds in CLOCKS.items():
        library = "$(ls /usr/lib/*/faketime/libfaketimeMT.so.1)"
        site.exec(host, f"echo {seconds:+d} > /etc/faketimerc; echo {library} > /etc/ld.so.preload", "root")
    yield
    for host in CLOCKS:
        site.exec(host, "rm -f /etc/ld.so.preload /etc/faketimerc", "root")


@pytest.mark.shows("Clocks of nodes that are two minutes off")
def test_a_cluster_works_on_nodes_whose_clocks_are_two_minutes_off(site: Site, other_clocks: None) -> None:
    options = SMALL | {"name": "clocks", "jobs": 2, "env": {"DONT_FAKE_MONOTONIC": "1"}}
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{options!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(2)
    off = [round(other - time.time(), -1) for other in client.run(time.time).values()]
    say("workers are off by", *off, "the scheduler by", round(client.run_on_scheduler(time.time) - time.time(), -1))
    say("works:", sum(client.gather(client.map(abs, range(100)))))
    cluster.scale(jobs=1)
    until(lambda: len(cluster.scheduler_info["workers"]) == 1, "one drains")
    say("works on:", client.submit(sum, [1, 2], pure=False).result())
""",
    )
    program.hears(r"workers are off by 120\.0 120\.0 the scheduler by -120\.0")
    said = program.ends()
    assert "works: 4950" in said and "works on: 3" in said
    assert "Warning" not in said, "nothing is reported that is not so"
