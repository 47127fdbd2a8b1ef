"""A home that does not answer for a while, and one that is full."""

from __future__ import annotations

import time

import pytest
from site_bed import Site, wait_for

from tests.site.programs import SMALL, Program

HANGS = 60.0  # seconds


@pytest.mark.shows("A home filesystem that does not answer for a minute")
def test_a_home_that_hangs_for_a_while_costs_no_job_and_no_work(site: Site) -> None:
    """Scheduler and worker log a line meanwhile, and their logs are in the home."""
    program = Program(
        "login1",
        f"""
import logging
def logged(numbers):
    logging.getLogger("distributed.worker").warning("added on the home")
    print("added", flush=True)
    return sum(numbers)
def log(dask_scheduler):
    logging.getLogger("distributed.scheduler").warning("asked on the home")
with SlurmGPUCluster(**{SMALL | {"name": "hangs", "jobs": 1}!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    say("up")
    listen()
    client.run_on_scheduler(log)
    until = time.monotonic() + {HANGS / 2}  # the host forgets what it knows of the home, and the queue is polled
    while time.monotonic() < until:
        result = client.submit(logged, [1, 2], pure=False).result(timeout=60)
    say("during:", result)
    listen()
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    logs = "".join(path.read_text() for path in cluster.directory.logs.iterdir())
    say("after:", len(cluster.workers), "added on the home" in logs, "asked on the home" in logs)
    listen()
""",
    )
    program.hears("up\n")
    before = set(site.jobs())
    site.pause("files")
    until = time.monotonic() + HANGS
    program.send()
    program.hears("during: 3")
    wait_for(lambda: time.monotonic() > until, "it hangs", 2 * HANGS)
    site.unpause("files")
    program.send()
    program.hears("after: 2 True True\n")
    assert before < set(site.jobs()), "the same jobs, and one more"
    program.send()
    program.ends()


@pytest.mark.shows("A home filesystem that is full")
def test_a_full_home_is_reported_and_costs_no_work_and_the_cluster_grows_when_there_is_room(
    site: Site,
) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "full", "jobs": 1}!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    kept = client.submit(os.urandom, 8)
    value = kept.result(timeout=60)
    say("up")
    listen()
    try:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(2, timeout=60)
    except hpcgpu.ClusterError as error:
        say("told:", error)
    same = kept.result(timeout=60) == value
    say("during:", client.submit(sum, [3, 4]).result(timeout=60), same, len(cluster.workers))
    listen()
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    say("after:", len(cluster.workers))
    listen()
""",
    )
    program.hears("up\n")
    before = set(site.jobs())
    site.fill_home()
    program.send()
    program.hears(r"told: .*No space left on device.*during: 7 True 1\n")
    site.empty_home()
    program.send()
    program.hears("after: 2\n")
    assert before < set(site.jobs()), "the same jobs, and one more"
    site.fill_home()
    program.send()
    program.ends()
    assert not site.jobs() or set(site.jobs().values()) == {"COMPLETING"}, "it ends its jobs on a full home too"


@pytest.mark.shows("A home filesystem that is full")
def test_a_cluster_that_begins_on_a_full_home_reports_it_and_submits_nothing(site: Site) -> None:
    site.fill_home()
    program = Program(
        "login1",
        f"""
try:
    SlurmGPUCluster(**{SMALL | {"name": "nowhere", "jobs": 1}!r})
except hpcgpu.OptionError as error:
    say("told:", error)
""",
    )
    assert "cannot be written: No space left on device. Make room there" in program.ends()
    assert not site.jobs()


@pytest.mark.shows("A report on a login node, of a file that the scheduler's node replaces")
def test_a_report_on_another_host_reads_the_file_that_the_scheduler_replaces(site: Site) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "bill", "jobs": 1}!r}) as cluster:
    cluster.wait_for_workers(1)
    say("up", cluster.directory.path)
    listen()
""",
    )
    file = program.hears(r"up (\S+)\n")[1] + "/usage.jsonl"
    seen: set[str] = set()
    for _ in range(2):

        def replaced() -> bool:
            number = site.exec("login2", ["stat", "-c", "%i", file], check=False)
            return not number.code and number.out not in seen

        wait_for(replaced, "the scheduler writes what its workers used", 240)
        seen.add(site.exec("login2", ["stat", "-c", "%i", file]).out)
        said = site.exec("login2", "hpcgpu report bill", env={"COLUMNS": "200"})
        assert "Stale file handle" not in said.out + said.err and "cannot be read" not in said.out + said.err
    program.send()
    program.ends()


#: Replaces what a cluster directory has again and again, until it must end.
WRITES = """
import threading
from pathlib import Path
from hpcgpu.scaling.wanted_state import AddGroup, Wanted, apply
from hpcgpu.store import create_directory, usage_file
from hpcgpu.store.contact import Contact
directory = create_directory.claim(Path("replaced").absolute(), lambda earlier: [], system="slurm")
end = threading.Event()
threading.Thread(target=lambda: (listen(), end.set()), daemon=True).start()
number = 0
while not end.wait(0.3) or not number:
    number += 1
    directory.write(usage_file.FILE, usage_file.line(usage_file.JobUsage(id=str(number))))
    directory.publish(Contact(token=directory.token(), job_id=str(number), workers="tls://a:1", client="tls://a:1"))
    directory.want(apply(Wanted(), AddGroup("default", number)))
    directory.intend(f"demo-{number}", "worker")
    if number == 1:
        say("there", directory.path)
"""
#: Reads it on another host, and counts how often a plain read of the same files fails.
READS = """
from pathlib import Path
from hpcgpu.store import usage_file
from hpcgpu.store.directory import ClusterDirectory
directory, plain = ClusterDirectory(Path({path!r})), 0
until = time.monotonic() + 12
while time.monotonic() < until:
    for name in (usage_file.FILE, "contact.json", "wanted.json"):
        try:
            Path(directory.path / name).read_bytes()
        except OSError:
            plain += 1
    kept = usage_file.read(directory.path)
    assert kept.jobs and not kept.problems, kept.problems
    assert directory.contact() is not None and directory.wanted().groups and directory.submits()
    assert not (damage := directory.damage()), damage
    os.listdir(directory.path)  # the names are known now, until the other host replaces them
    time.sleep(0.4)
say("plain reads that failed:", plain)
"""


@pytest.mark.shows("Files of a cluster that one host replaces while another reads them")
def test_files_that_one_host_replaces_are_read_on_another_where_a_plain_read_fails(site: Site) -> None:
    writer = Program("login1", WRITES)
    path = writer.hears(r"there (\S+)\n")[1]
    wait_for(lambda: not site.exec("login2", ["test", "-d", path], check=False).code, "the other host has it", 60)
    reader = Program("login2", READS.format(path=path))
    assert int(reader.hears(r"plain reads that failed: (\d+)\n")[1]) > 0, "the test has read no file that was replaced"
    reader.ends()
    writer.send()
    writer.ends()
