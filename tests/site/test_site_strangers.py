"""Another user, who tries from other hosts to use, read, stop or replace a cluster.

Whatever bob is refused, ada may do from the same host: so what refuses him is not that nothing is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from site_bed import LOGINS, NODES, PYTHON, Site, wait_for

from tests.site import knocks as knocks_module
from tests.site.programs import SMALL, Program
from tests.slurm import strangers as strangers_module

pytestmark = pytest.mark.shows("Attacks of another user from other hosts")

#: Where bob tries: a login node, and a compute node on which ada has no job.
FROM = ("login2", "n3")
#: Everybody may write there, as in the scratch directories of many sites.
SCRATCH = "/home/scratch"
CONFIGURED = {"DASK_HPCGPU__CLUSTER_DIRECTORY": SCRATCH}
MINE = f"{SCRATCH}/mine"
#: Where what bob runs is, and what he has of clusters of his own.
OWN = "/tmp/of-bob"
CLUSTER = """
with SlurmGPUCluster(**{options!r}) as cluster:
    cluster.wait_for_workers(1)
    contact = cluster.directory.contact()
    say("places", contact.client, contact.workers, *[
        address for worker in cluster.scheduler_info["workers"].items() for address in (worker[0], worker[1]["nanny"])
    ])
    say("dashboard", contact.dashboard)
    say("jobs", *[job.id for job in cluster.jobs])
    listen()
    with cluster.get_client() as client:
        say("still", client.submit(sum, [1, 2]).result())
"""


@pytest.fixture
def scratch(site: Site) -> Iterator[None]:
    """A directory in which everybody may make files, on all hosts."""
    site.exec("login1", f"rm -rf {SCRATCH}; mkdir {SCRATCH}; chmod 1777 {SCRATCH}", "root")
    for host in (*FROM, "s0", *NODES):
        there = lambda host=host: site.exec(host, f"touch {SCRATCH}", "root", check=False).code == 0  # noqa: E731
        wait_for(there, f"{SCRATCH} appears on {host}", 60)
    yield
    site.exec("login1", f"rm -rf {SCRATCH}", "root")


def started(**options: object) -> Program:
    """A program of ada with the cluster `mine` in the scratch directory."""
    return Program(
        "login1", CLUSTER.format(options=SMALL | {"name": "mine", "jobs": 1, "cluster_directory": SCRATCH} | options)
    )


def ports(places: Iterable[str]) -> set[str]:
    return {place.rpartition(":")[2] for place in places}


def listening(site: Site) -> set[str]:
    """Each port on which a process of ada listens for other hosts, whether an address of it is published or not."""
    found = set()
    for host in NODES:
        for line in site.exec(host, "ss -Hltne | grep uid:2001", "root", check=False).out.splitlines():
            address, port = line.split()[3].rsplit(":", 1)
            if not address.startswith("127."):
                found.add(f"{host if address in ('0.0.0.0', '*', '[::]') else address}:{port}")
    return found


def tries(site: Site, host: str, user: str, directories: list[str], places: list[str]) -> list[str]:
    """What `knocks` prints: a line for each try."""
    own = [word for directory in directories for word in ("--with", directory)]
    done = site.python(host, Path(knocks_module.__file__).read_text(), "10", *own, *places, user=user, timeout=240)
    lines = done.out.splitlines()
    assert lines[: len(places)] == [f"{place} is reached" for place in places]
    return lines[len(places) :]


@pytest.mark.parametrize("security", [True, "authenticated"], ids=["TLS", "the challenge"])
def test_another_user_runs_code_through_no_port_from_any_host(site: Site, scratch: None, security: bool | str) -> None:
    program = started(security=security)
    named = program.hears(r"places (.+?)\n")[1].split()
    protocol = "tls" if security is True else "authenticated"
    assert len(named) >= 4 and {address.partition("://")[0] for address in named} == {protocol}
    places = list(dict.fromkeys(address.partition("://")[2] for address in named))
    every = listening(site)
    assert ports(places) <= ports(every) and len(every) >= len(places)
    for host in FROM:
        others = others_of_bob(site, host)
        refused = tries(site, host, "bob", others, sorted({*places, *every}))
        assert not [line for line in refused if line.endswith(": ran")]
        allowed = tries(site, host, "ada", [MINE], [f"{protocol}://{place}" for place in places])
        ran = [line for line in allowed if line.endswith(": ran")]
        assert ran == [f"{place} {protocol} with {MINE}: ran" for place in places]
    program.send()
    assert "still 3" in program.ends()


def others_of_bob(site: Site, host: str) -> list[str]:
    """Directories of clusters of bob's own, with their credentials."""
    site.exec(host, f"rm -rf {OWN}; mkdir {OWN}", "bob")
    site.put(host, f"{OWN}/strangers.py", Path(strangers_module.__file__).read_text(), "bob")
    make = f"import sys; sys.path.append({OWN!r}); from strangers import *; print(*other_clusters(Path({OWN!r})))"
    return site.python(host, make, user="bob").out.split()


DASHBOARD = """
import sys, urllib.error, urllib.request
address, *tokens = sys.argv[1:]
for token in ["", *tokens]:
    for path in ("status", "info/main/workers.html", "json/counts.json"):
        headers = {"Authorization": f"token {token}"} if token else {}
        try:
            page = urllib.request.Request(f"http://{address}/{path}", headers=headers)
            print(urllib.request.urlopen(page, timeout=60).status)
        except urllib.error.HTTPError as error:
            print(error.code)
"""
#: What a user could see of the processes and jobs of others.
PROCESSES = "ps -eww -o args; cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n'"
JOBS = "squeue -o %all; scontrol show job -dd; sacct --allusers --parsable2 --format=ALL"


def test_another_user_reads_stops_and_changes_nothing(site: Site, scratch: None) -> None:
    program = started()
    dashboard = program.hears(r"dashboard (\S+)\n")[1]
    jobs = program.hears(r"jobs (.+?)\n")[1].split()
    assert len(jobs) == 2
    secrets = secrets_of(site)
    for host in FROM:
        files_are_closed(site, host)
        token, guess = site.exec("login1", f"cat {MINE}/dashboard.token").out.strip(), "A" * 43
        assert site.python(host, DASHBOARD, dashboard, guess, user="bob").out.split() == ["403"] * 6
        assert site.python(host, DASHBOARD, dashboard, token).out.split() == ["403"] * 3 + ["200"] * 3
        commands_are_refused(site, host, jobs)
    for host in (*LOGINS, *NODES):
        seen = site.exec(host, PROCESSES, "bob", check=False).out
        assert SCRATCH in seen or host not in ("login1", "s0"), "bob sees the processes of ada"
        assert not [secret for secret in secrets if secret in seen], host
    variable = "SLURM_JOB_NAME=mine-scheduler"
    assert variable in site.exec("s0", PROCESSES, check=False).out, "ada sees the environment of her job"
    assert variable not in site.exec("s0", PROCESSES, "bob", check=False).out
    queue = site.exec("login2", JOBS, "bob").out
    assert queue.count("mine-scheduler") >= 3, "bob sees the jobs of ada"
    assert not [secret for secret in secrets if secret in queue]
    program.send()
    assert "still 3" in program.ends()


def secrets_of(site: Site) -> list[str]:
    """The lines of all secrets of ada's cluster; no script, log or other file of it has one."""
    files = ("tls/key.pem", "tls/ucx.key", "dashboard.token")
    lines = [line for file in files for line in site.exec("login1", f"cat {MINE}/{file}").out.splitlines()]
    secrets = [line for line in lines if not line.startswith("---")]
    assert len(secrets) >= 5 and min(map(len, secrets)) > 10, "a key of several lines, a key and a token"
    others = site.exec("login1", f"cd {MINE} && cat *.sbatch *.json *.jsonl logs/*").out
    assert "#SBATCH" in others and "distributed" in others
    assert not [secret for secret in secrets if secret in others]
    return secrets


def files_are_closed(site: Site, host: str) -> None:
    """Bob reads, lists and replaces no file of the cluster directory, of which he sees that it is there."""
    files = site.exec("login1", f"cd {MINE} && find . -type f -printf '%P '").out.split()
    assert {"contact.json", "cluster.json", "tls/key.pem", "tls/ucx.key", "dashboard.token", "scheduler.sbatch"} <= {
        *files
    }
    assert [file for file in files if file.startswith("logs/")]
    read = f"for file in {' '.join(files)}; do cat {MINE}/$file; done"
    wait_for(lambda: site.exec(host, read, check=False).code == 0, f"ada reads all on {host}", 60)
    refused = site.exec(host, read, "bob", check=False)
    assert not refused.out
    assert refused.err.splitlines() == [f"cat: {MINE}/{file}: Permission denied" for file in files]
    assert site.exec(host, f"ls -d {MINE}", "bob").out == f"{MINE}\n"
    for change in (f"ls {MINE}", f"touch {MINE}/x", f"mv {MINE} {MINE}-2", f"rm -rf {MINE}", f"chmod 777 {MINE}"):
        refused = site.exec(host, change, "bob", check=False)
        assert refused.code and ("Permission denied" in refused.err or "not permitted" in refused.err), change


def commands_are_refused(site: Site, host: str, jobs: list[str]) -> None:
    """No command does anything for bob; each reports that he may not."""
    python = [PYTHON, "-c", f"import hpcgpu; hpcgpu.connect({MINE!r}, timeout=60)"]
    stop = [f"hpcgpu {words}".split() for words in ("stop mine", f"stop {MINE}")]
    change = [f"hpcgpu {words}".split() for words in ("scale mine --jobs 3", "adapt mine --maximum-jobs 3")]
    show = [f"hpcgpu {words}".split() for words in ("status mine", "logs mine", "dashboard mine", "report mine")]
    for command in (python, *stop, *change, *show) if host in LOGINS else (python, *stop):
        refused = site.exec(host, command, "bob", check=False, env=CONFIGURED)
        assert refused.code and not refused.out, command
        assert "Permission denied" in refused.err and f"{MINE}/cluster.json" in refused.err, refused
    assert site.exec(host, "hpcgpu list && hpcgpu stop --all", "bob", env=CONFIGURED).out.startswith("No clusters.\n")
    for job in jobs:
        refused = site.exec(host, ["scancel", job], "bob", check=False)
        assert "Access/permission denied" in refused.err, refused
        refused = site.exec(host, ["scontrol", "write", "batch_script", job, "-"], "bob", check=False)
        assert "Invalid user id" in refused.err and not refused.out, refused
        assert MINE in site.exec(host, ["scontrol", "write", "batch_script", job, "-"]).out
    assert {job: state for job, state in site.jobs().items() if job in jobs} == dict.fromkeys(jobs, "RUNNING")
    assert "mine" in site.exec(host, "hpcgpu status mine", env=CONFIGURED).out


#: What bob makes where the cluster directory will be, by its name.
PLANTS = {
    "empty": "mkdir empty",
    "cluster": "mkdir -m 777 cluster; echo '{}' > cluster/cluster.json",
    "link": f"mkdir -p {OWN}; ln -s {OWN} link",
    "dangling": "ln -s /home/bob/nothing dangling",
    "file": "echo text > file",
}


def test_what_another_user_has_put_in_the_place_of_a_cluster_is_refused(site: Site, scratch: None) -> None:
    site.exec("login1", f"rm -rf {OWN}; cd {SCRATCH}; {'; '.join(PLANTS.values())}", "bob")
    before = _listed(site)
    program = Program(
        "login1",
        f"""
for name in {[*PLANTS, "fine"]!r}:
    try:
        with SlurmGPUCluster(**{SMALL | {"cluster_directory": SCRATCH}!r}, name=name):
            say(name, "starts")
    except Exception as error:
        say(name, "refused:", type(error).__name__, error)
""",
    )
    said = program.ends()
    for name in PLANTS:
        assert f"{name} refused: OptionError cluster_directory='{SCRATCH}': {SCRATCH}/{name} is not used" in said
        assert f"{SCRATCH}/{name} belongs to bob (uid 2002)" in said
    assert "fine starts" in said
    site.exec("login1", f"rm -r {SCRATCH}/fine")
    assert _listed(site) == before, "ada has written nothing there"


def _listed(site: Site) -> str:
    """Return what is there. A busy container engine may lose the output of a short command: it is asked again."""
    answers = (site.exec("login1", f"ls -lR {SCRATCH} {OWN}", "root").out for _ in range(5))
    return next(filter(None, answers))
