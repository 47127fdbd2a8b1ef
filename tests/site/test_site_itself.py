"""The site in containers has what it claims: hosts, users, limits, a late home, enforced GPUs and memory."""

from __future__ import annotations

import json
import re
import time

import pytest
from site_bed import CLOCK, LOGINS, NODES, USERS, Site, wait_for

pytestmark = pytest.mark.shows(
    "The site itself: users, networks, accounting, limits, a filter, memory and GPUs enforced, a late home"
)

GPUS = """\
for i in 0 1 2 3; do (: < /dev/pretended/nvidia$i) 2>&1 | sed "s/.*: /$i /"; done
echo "visible $CUDA_VISIBLE_DEVICES"
echo thrown away > /dev/null && echo "null works"
"""
CLUSTER = """\
import json, socket, sys
from hpcgpu import SlurmGPUCluster
from dask.distributed import Client

def where(number):
    return socket.gethostname(), number

with SlurmGPUCluster(
    queue="gpu", walltime="00:20:00", gpus_per_node=4, gpu_type="a100", cores=8, memory="4GB", jobs=2, protocol="tcp",
    scheduler={"queue": "shared", "prefer": "t4"}, poll_interval=2, quiet=True,
) as cluster:
    cluster.wait_for_workers(timeout=200)
    client = cluster.get_client()
    workers = sorted(client.sync(client.scheduler.identity, n_workers=-1)["workers"])
    tasks = [client.submit(where, number, workers=[workers[number % len(workers)]]) for number in range(40)]
    nodes = [job.node for job in cluster.jobs if job.kind == "worker"]
    print(json.dumps({"results": client.gather(tasks), "nodes": nodes}))
"""


#: Seconds for which a host asks nobody again whether a file is there; see `mount_home` in ci/slurm-docker/entry.
KEPT = 5


def batch(site: Site, script: str, *options: str, user: str = "ada") -> tuple[str, str]:
    """State and output of a job that has ended; its output is on node-local disk, which is not late."""
    site.put("login1", "job.sh", f"#!/bin/bash\n{script}", user=user)
    at = "/var/tmp/%j.out"
    job = site.slurm("sbatch", "--parsable", f"--output={at}", *options, "job.sh", user=user).strip()
    described = ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job, "--format=State,NodeList,End"]
    ended = lambda: (row := site.slurm(*described).strip()) and not row.endswith("|Unknown") and row  # noqa: E731
    wait_for(lambda: job not in site.jobs() and ended(), f"the job {job} ends, and accounting knows it", 120)
    state, node, _ = site.slurm(*described).strip().split("|")
    return state.split()[0], site.exec(node, f"cat {at.replace('%j', job)}", user=user).out


def test_all_hosts_have_the_same_users_and_home(site: Site) -> None:
    for host in (*LOGINS, *NODES):
        for uid, user in enumerate(USERS, 2001):
            assert site.exec(host, "id -u; stat -c %U .; findmnt -no FSTYPE /home", user=user).out.split() == [
                str(uid), user, "fuse.glusterfs",
            ]  # fmt: skip


def test_login_nodes_have_no_gpu_and_no_network_of_the_workers(site: Site) -> None:
    for host, gpus in (("login1", 0), ("login2", 0), ("n0", 4), ("s0", 1)):
        assert site.exec(host, "ls /dev/pretended 2> /dev/null | wc -l").out.strip() == str(gpus)
        assert bool(site.exec(host, "getent hosts n1-workers", check=False).out) == (gpus > 0)
        assert ("libnvidia-ml" in site.exec(host, "/sbin/ldconfig -p").out) == (gpus > 0)


def test_a_file_of_one_host_appears_on_another_after_seconds(site: Site) -> None:
    for number in range(10):
        late = f"late-{number}"
        began = time.monotonic()
        site.exec("login2", f"rm -f {late}; ! test -e {late}")
        site.exec("login1", f"touch {late}; test -e {late}")
        seen = site.exec("login2", f"test -e {late}", check=False).code == 0
        if time.monotonic() - began < KEPT:
            break
    else:
        pytest.fail(f"no two looks within {KEPT} s: this machine is too busy to tell")
    assert not seen, "what login2 has just looked up is not asked again"
    wait_for(lambda: site.exec("login2", f"test -e {late}", check=False).code == 0, "the file appears", 60)
    site.exec("login1", "rm -f late-*")


def test_a_job_has_its_gpu_and_no_other_and_the_usual_devices(site: Site) -> None:
    state, out = batch(site, GPUS, "--gpus-per-node=a100:1", "--mem=200M", "--time=5")
    assert state == "COMPLETED"
    lines = out.splitlines()
    assert lines[-2:] == ["visible 0", "null works"]
    denied = [line for line in lines if "Operation not permitted" in line]
    assert len(denied) == 3, out
    assert sum("No such device or address" in line for line in lines) == 1, out  # no driver has its number


def test_a_job_with_more_memory_than_it_asked_for_is_killed_and_accounting_reports_it(site: Site) -> None:
    program = "python -c 'bytearray(600 << 20)' && echo not killed"
    state, out = batch(site, program, "--mem=200M", "--time=5")
    assert state == "OUT_OF_MEMORY"
    assert "not killed" not in out


def test_the_filter_refuses_in_its_own_words(site: Site) -> None:
    refused = site.exec("login1", "sbatch --constraint=p100 --wrap=true", check=False)
    assert refused.code
    assert "The P100 nodes were switched off in March" in refused.err


def test_limits_of_the_qos_hold_jobs_back(site: Site) -> None:
    for _ in range(3):
        site.exec("login1", "sbatch --qos=few --time=5 --output=/dev/null --wrap='sleep 300'")
    waits = "squeue --noheader --format=%r --states=PENDING"
    wait_for(
        lambda: site.exec("login1", waits).out.split() == ["QOSMaxJobsPerUserLimit"], "two of three jobs start", 120
    )
    assert "AssocGrp" not in site.exec("login1", waits).out
    site.slurm("scancel", "--user=ada")
    site.exec("login1", "sbatch --qos=budget --gpus-per-node=4 --time=60 --output=/dev/null --wrap='sleep 300'")
    wait_for(lambda: re.search("QOSGrpGRES", site.exec("login1", waits).out), "too many minutes of GPUs wait", 120)
    site.slurm("scancel", "--user=ada")


def test_the_epilog_cleans_tmp_of_a_user_s_last_job(site: Site) -> None:
    state, out = batch(site, "touch /tmp/of-job; hostname", "--time=5", "--nodelist=n2", user="bob")
    assert (state, out) == ("COMPLETED", "n2\n")
    wait_for(lambda: site.exec("n2", "test -e /tmp/of-job", check=False).code, "the epilog cleans", 60)


def test_a_node_that_was_switched_off_comes_back_as_it_was(site: Site) -> None:
    networks = "ip -o -4 address show | awk '{print $2, $4}' | grep -o '^eth[01] [0-9]*[.][0-9]*' | sort"
    before = site.exec("n3", networks).out
    assert before.split()[::2] == ["eth0", "eth1"]
    site.kill("n3")
    site.boot("n3")
    assert site.exec("n3", networks).out == before
    assert site.exec("n3", "stat -c %U .").out == "ada\n"
    state, out = batch(site, "hostname", "--time=5", "--nodelist=n3", "--gpus-per-node=4")
    assert (state, out) == ("COMPLETED", "n3\n")


def test_a_user_gets_results_from_workers_on_two_nodes_and_nothing_stays(site: Site) -> None:
    done = site.python("login1", CLUSTER, timeout=400)
    result = json.loads(done.out.splitlines()[-1])
    hosts, numbers = zip(*result["results"], strict=True)
    assert list(numbers) == list(range(40))
    assert len(set(result["nodes"])) == 2 and set(result["nodes"]) <= set(NODES)
    assert {host: hosts.count(host) for host in hosts} == dict.fromkeys(result["nodes"], 20), "four workers on each"
    wait_for(lambda: not site.jobs(), "no job is left in the queue", 60)
    for host in NODES:
        wait_for(
            lambda host=host: not site.exec(host, "pgrep -u ada -f '[d]ask|[h]pcgpu'", check=False).out,
            f"no process is left on {host}",
            60,
        )


def test_a_reset_undoes_what_a_test_has_left(site: Site) -> None:
    for host in ("n1", "login2"):
        site.exec(host, f"touch {' '.join(CLOCK)}", "root")
    site.slurm("scontrol", "update", "PartitionName=gpu", "State=DOWN", host="ctl")
    site.set_budget("gres/gpu=0")
    site.exec("login2", "chmod 777 /home/ada", "root")
    site.fill_home()
    assert site.reset() == {}
    for host in ("n1", "login2"):
        assert site.exec(host, f"ls {' '.join(CLOCK)}", "root", check=False).out == ""
    assert set(site.slurm("sinfo", "-h", "-o", "%a").split()) == {"up"}
    limit = ("sacctmgr", "-nP", "show", "qos", "where", "name=budget", "format=GrpTRESMins")
    assert site.slurm(*limit) == "gres/gpu=60\n"
    assert site.exec("login1", "stat -c %a /home/ada; echo text > .full; cat .full; rm .full").out == "750\ntext\n"
