"""Site profiles: data that is read, checked, and rendered as golden scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml

from hpcgpu.batch import system_registry
from hpcgpu.batch.pbs.nodes import parse_pbsnodes
from hpcgpu.batch.pbs.queues import parse_nodes
from hpcgpu.batch.queues import Machine, Queues
from hpcgpu.batch.slurm.queues import parse_sinfo
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.profiles import draft_profile, site_profiles
from hpcgpu.scripts.render import render
from tests.helpers import golden, printed

#: What a user of each site gives.
GIVEN: dict[str, Any] = {"account": "m1234", "queue": "debug", "walltime": "2h", "memory": "200GB"}
ALL = [
    "casper",
    "derecho",
    "gadi",
    "hecc",
    "juwels-booster",
    "lonestar6",
    "mahti",
    "perlmutter",
    "polaris",
    "puhti",
    "roihu",
    "vista",
]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_there_is_one_for_each_site() -> None:
    assert site_profiles.names() == ALL


@pytest.mark.parametrize("name", ALL)
def test_each_reports_where_it_is_from_and_gives_golden_scripts(name: str) -> None:
    profile = site_profiles.load(name)
    assert profile.source.startswith("https://") and profile.date.startswith("20") and profile.about
    given = {option: GIVEN[option] for option in profile.needs}
    base = {"name": "demo", "cluster_directory": "/home/me/clusters", "python": "/opt/env/bin/python", "profile": name}
    options = resolve(profile.system, base | given)
    suffix = "sbatch" if profile.system == "slurm" else "pbs"
    for kind in ("scheduler", "worker"):
        golden(f"profile-{name}-{kind}.{suffix}", render(profile.system, kind, options, Path("/home/me/clusters/demo")))


def test_the_site_s_advice_has_its_source_and_when_it_was_read(own_home: Path) -> None:
    for name in ALL:
        for advice in site_profiles.load(name).advice.values():
            assert advice.says and advice.source.startswith("https://") and advice.read.startswith("20")
    assert "podman-hpc" in site_profiles.load("perlmutter").advice["containers"].says
    directory = own_home / ".config" / "hpcgpu" / "profiles"
    directory.mkdir(parents=True)
    for advice in ("{jupyter: use it}", "{weather: {says: x, source: y, read: z}}", "[1]"):
        (directory / "odd.yaml").write_text(f"system: slurm\noptions: {{}}\nadvice: {advice}\n")
        with pytest.raises(OptionError, match="`advice` has containers and jupyter, each with read, says, source"):
            site_profiles.load("odd")


def test_arguments_count_before_configuration_before_the_profile() -> None:
    given = {"profile": "puhti", "account": "a", "walltime": "1h"}
    assert resolve("slurm", given).worker.queue == "gpu"
    with dask.config.set({"hpcgpu": {"slurm": {"queue": "gputest", "scheduler": {"cores": 2}}}}):
        options = resolve("slurm", given | {"memory": "100GB", "scheduler": {"memory": "8GB"}})
        assert (options.worker.queue, options.worker.memory, options.worker.gpu_type) == (
            "gputest",
            100 * 10**9,
            "v100",
        )
        assert options.scheduler is not None
        assert (options.scheduler.cores, options.scheduler.memory, options.scheduler.queue) == (2, 8 * 10**9, "gputest")
    with dask.config.set({"hpcgpu": {"profile": "puhti", "slurm": {"account": "a", "walltime": "1h"}}}):
        assert resolve("slurm", {}).worker.gpu_type == "v100", (
            "the configuration may name the profile, and what it needs"
        )


@pytest.mark.parametrize(
    ("system", "given", "message"),
    [
        (
            "slurm",
            {"profile": "perlmuter"},
            "no profile 'perlmuter': did you mean 'perlmutter'? The profiles are",
        ),
        ("slurm", {"profile": "polaris"}, "profile 'polaris' is for PBS: use PBSGPUCluster"),
        ("pbs", {"profile": "puhti"}, "profile 'puhti' is for Slurm: use SlurmGPUCluster"),
        ("slurm", {"profile": "puhti", "walltime": "1h"}, "profile 'puhti' needs account: CSC Puhti"),
        (
            "slurm",
            {"profile": "frontier"},
            "this site's GPUs are made by AMD. hpcgpu cannot use them, because its GPU workers need NVIDIA's CUDA",
        ),
        ("slurm", {"profile": "LUMI"}, "this site's GPUs are made by AMD"),
        ("pbs", {"profile": "aurora"}, "this site's GPUs are made by Intel"),
    ],
)
def test_what_cannot_be_is_refused(system: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(system, given)
    assert message in str(caught.value)


def test_a_profile_of_one_s_own_counts_first_and_is_checked(own_home: Path) -> None:
    directory = own_home / ".config" / "hpcgpu" / "profiles"
    directory.mkdir(parents=True)
    (directory / "puhti.yaml").write_text("system: slurm\noptions: {queue: mine, gpus-per-node: 2}\n")
    assert resolve("slurm", {"profile": "puhti"}).worker.queue == "mine"
    (directory / "odd.yaml").write_text("system: slurm\noptions: {colour: red}\n")
    with pytest.raises(OptionError, match=r"profile 'odd': unknown option 'colour'"):
        resolve("slurm", {"profile": "odd"})
    (directory / "odd.yaml").write_text("options: [1, 2]\n")
    with pytest.raises(OptionError, match=r"odd\.yaml must hold `system` and `options`"):
        site_profiles.load("odd")
    (directory / "odd.yaml").write_text("{")
    with pytest.raises(OptionError, match=r"'odd' cannot be read from .*odd\.yaml"):
        site_profiles.load("odd")


def test_a_package_that_adds_a_batch_system_may_bring_profiles(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = replace(system_registry.system("pbs"), name="others", profiles=own_home / "others")
    monkeypatch.setattr(system_registry, "systems", lambda: [others])
    for directory in (others.profiles, own_home / ".config" / "hpcgpu" / "profiles"):
        assert directory is not None
        directory.mkdir(parents=True)
    for name in ("theirs", "puhti"):
        (own_home / "others" / f"{name}.yaml").write_text("system: others\noptions: {queue: theirs}\n")
    assert site_profiles.names() == sorted([*ALL, "theirs"])
    assert site_profiles.load("theirs").options == {"queue": "theirs"}
    assert site_profiles.load("puhti").system == "slurm", "hpcgpu's own counts before"
    (site_profiles.user_directory() / "theirs.yaml").write_text("system: others\noptions: {queue: mine}\n")
    assert site_profiles.load("theirs").options == {"queue": "mine"}


def test_a_draft_from_sinfo() -> None:
    found = parse_sinfo(
        "cpu|(null)|64|256000|infinite|(null)\n"
        "gpu|gpu:a100:4(S:0-1)|64+|500000|2-00:00:00|a100,ib\n"
        "small|gpu:2,lustre:1|16|64000|infinite|(null)\nnonsense\n"
    )
    assert [(q.name, q.gpus, q.gpu_type, q.cores) for q in found.gpus] == [("gpu", 4, "a100", 64), ("small", 2, "", 16)]
    text = draft_profile.render("slurm", Machine(found), "2026-01-01")
    content = yaml.safe_load(text)
    assert content["options"] == {
        "queue": "gpu",
        "gpus-per-node": 4,
        "gpu-type": "a100",
        "cores": 64,
        "memory": "475000MiB",
        "scheduler": {"cores": 4},
    }
    assert (
        "# Longest walltime: 2-00:00:00" in text
        and "# queue: small" in text
        and "# Features of the nodes: a100,ib" in text
    )
    none = Queues(gpus=[], by_default=False)
    assert yaml.safe_load(draft_profile.render("slurm", Machine(none), "2026-01-01"))["options"] == {
        "gpus-per-node": 1,
        "gpu-request": "none",
    }


def test_a_draft_from_pbsnodes() -> None:
    recorded = (Path(__file__).parents[1] / "queue" / "openpbs-pbsnodes.txt").read_text()
    nodes = parse_pbsnodes(recorded)
    hosts = {
        name: node | {"resources_available.host": name} for name, node in nodes.items()
    }  # the recorded ones are vnodes of one
    queues = parse_nodes(hosts)
    assert {(q.gpus, q.gpu_type, q.cores) for q in queues} == {(4, "a100", 16), (1, "t4", 4)}
    content = yaml.safe_load(draft_profile.render("pbs", Machine(Queues(gpus=queues, by_default=True)), "2026-01-01"))
    assert content["system"] == "pbs" and content["options"]["gpu-type"] == "a100"


def test_a_node_with_a_vnode_for_each_socket_is_one_node_and_nodes_that_differ_in_memory_alone_are_one_kind() -> None:
    def vnode(host: str, memory: str, gpu_type: str = "a100") -> dict[str, str]:
        own = {"host": host, "ngpus": "2", "ncpus": "32", "mem": memory, "gpu_type": gpu_type}
        return {f"resources_available.{name}": value for name, value in own.items()}

    nodes = {f"g{i}[{j}]": vnode(f"g{i}", f"{256000000 + i}kb") for i in range(4) for j in range(2)}
    nodes["g0"] = {"resources_available.host": "g0", "resources_available.ncpus": "0"}
    [queue] = parse_nodes(nodes)
    assert (queue.gpus, queue.cores, queue.memory) == (4, 64, 500000)
    mixed = parse_nodes({"a": vnode("h", "1gb"), "b": vnode("h", "1gb", "t4,cc75")})
    assert [(q.gpus, q.gpu_type, q.others) for q in mixed] == [(2, "a100", 2), (2, "t4,cc75", 2)]
    text = draft_profile.render("pbs", Machine(Queues(gpus=mixed[1:], by_default=True)), "2026-01-01")
    assert yaml.safe_load(text)["options"]["gpu-type"] == "t4" and "Other names of this type: cc75" in text


def test_a_node_has_the_cores_and_memory_of_its_vnodes_without_gpus_too() -> None:
    def vnode(gpus: str, queue: str) -> dict[str, str]:
        own = {"host": "h", "ngpus": gpus, "ncpus": "32", "mem": "256000mb"}
        return {"queue": queue} | {f"resources_available.{name}": value for name, value in own.items()}

    [queue] = parse_nodes({"h[0]": vnode("4", "gpu"), "h[1]": vnode("0", "gpu"), "h[2]": vnode("0", "other")})
    assert (queue.gpus, queue.cores, queue.memory) == (4, 64, 512000)


def test_a_node_with_two_kinds_of_gpu_has_both() -> None:
    queues = parse_sinfo(
        "gpu|gpu:a100_1g.5gb:14(S:0),gpu:a100:1(S:0),gpu:a100:1(S:1),nvme:3600|64|500000|infinite|(null)\n"
    ).gpus
    assert [(q.gpu_type, q.gpus, q.others) for q in queues] == [("a100_1g.5gb", 14, 2), ("a100", 2, 14)]


@pytest.mark.parametrize(
    ("partitions", "gpus"),
    [
        (("cpu*", "gpu"), False),
        (("gpu*", "cpu"), True),
        (("cpu", "gpu"), True),
        (("cpu",), False),
        (("gpu*", "cpu*"), True),
    ],
)
def test_a_job_without_a_queue_can_get_gpus_where_the_default_partition_has_them(
    partitions: tuple[str, ...], gpus: bool
) -> None:
    lines = [f"{name}|{'gpu:1' if name.startswith('gpu') else '(null)'}|8|1000|infinite|(null)" for name in partitions]
    found = parse_sinfo("\n".join(lines))
    assert found.by_default is gpus
    assert {queue.name for queue in found.gpus} <= {"gpu"}


def hpcgpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcgpu", "profiles", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_the_command_lists_shows_and_drafts(own_home: Path) -> None:
    assert [row["name"] for row in printed("profiles list", hpcgpu("list", "--json").stdout)] == ALL
    assert "Perlmutter" in hpcgpu("list").stdout
    assert yaml.safe_load(hpcgpu("show", "gadi").stdout)["options"]["pbs-shape"] == "flat"
    done = hpcgpu("show", "nowhere")
    assert done.returncode == 2 and "no profile 'nowhere'" in done.stderr
    programs = own_home / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "sinfo").write_text("#!/bin/sh\necho 'gpu|gpu:h100:8|96|1000000|1-00:00:00|(null)'\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    done = hpcgpu("new", "mysite", PATH=path)
    assert done.returncode == 0, done.stderr
    assert resolve("slurm", {"profile": "mysite", "account": "a", "walltime": "1h"}).worker.gpus_per_node == 8
    done = hpcgpu("new", "mysite", PATH=path)
    assert done.returncode == 1 and "mysite.yaml already exists: use --force to overwrite it" in done.stderr
    assert hpcgpu("new", "mysite", "--force", "-o", "-", PATH=path).stdout.startswith("# A profile for hpcgpu")
    done = hpcgpu("new", "my site", PATH=path)
    assert done.returncode == 2 and "NAME='my site' is not a valid name: use up to 50 letters" in done.stderr


def test_a_draft_names_where_it_must_be_to_be_found(own_home: Path, tmp_path: Path) -> None:
    (own_home / "bin").mkdir()
    (own_home / "bin" / "sinfo").write_text("#!/bin/sh\necho 'gpu|gpu:h100:8|96|1000000|1-00:00:00|(null)'\n")
    (own_home / "bin" / "sinfo").chmod(0o755)
    path = f"{own_home / 'bin'}:{os.environ['PATH']}"
    done = hpcgpu("new", "site", "--system", "slurm", PATH=path)
    assert "profiles/site.yaml. Next:" in done.stdout and "- move it" not in done.stdout, done.stderr
    assert "hpcgpu profiles check site\n" in done.stdout and "profile='site', or --profile site\n" in done.stdout
    done = hpcgpu("new", "site", "--system", "slurm", "-o", str(tmp_path / "x.yaml"), PATH=path)
    assert f"- move it to {own_home}/.config/hpcgpu/profiles/site.yaml: hpcgpu finds it there" in done.stdout


@pytest.mark.parametrize("none", ["accounting_storage/none", "(null)"])  # the second is how Slurm 26.05 writes it
def test_the_command_compares_a_profile_with_this_machine(own_home: Path, none: str) -> None:
    programs = own_home / "bin"
    programs.mkdir()
    partition = "PartitionName=gpu AllowGroups=ALL Default=YES MaxTime=12:00:00 RootOnly=NO State=UP"
    config = f"AccountingStorageEnforce = none\nAccountingStorageType   = {none}\n"
    for name, text in {
        "sinfo": "echo 'gpu*|gpu:v100:4|40|382000|12:00:00|(null)'",
        "scontrol": f"case $* in *partition*) echo '{partition}';; *) printf '{config}';; esac",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    done = hpcgpu("check", "puhti", PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("puhti.yaml: 0 failures, 8 ok, 3 not checked\n")
    answer = printed("profiles check", hpcgpu("check", "mahti", "--json", PATH=path).stdout)
    assert not answer["ok"]
    wrong = {(one["job"], one["option"]): one["advice"] for one in answer["options"] if one["grade"] == "failure"}
    assert wrong == {("worker job", "queue"): "queue: gpu", ("scheduler job", "queue"): "queue: gpu"}
    assert hpcgpu("check", "mahti", PATH=path).returncode == 1
    directory = own_home / ".config" / "hpcgpu" / "profiles"
    directory.mkdir(parents=True)
    (directory / "site.yaml").write_text("system: slurm\noptions: {queue: gpu, walltime: 24h}\n")
    done = hpcgpu("check", "site", PATH=path)
    assert done.returncode == 1 and "walltime: '12:00:00' or less" in done.stdout, done.stdout + done.stderr
    (programs / "sinfo").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    done = hpcgpu("check", "puhti", PATH=path)
    assert done.returncode == 1 and "profile 'puhti' is for Slurm, which does not answer:" in done.stderr
    assert "Unable to contact slurm controller" in done.stderr
