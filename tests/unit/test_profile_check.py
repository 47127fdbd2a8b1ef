"""`hpcgpu profiles check`: each option of a profile beside what a batch system reports; and the draft, which passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcgpu.batch.pbs.nodes import parse_pbsnodes
from hpcgpu.batch.pbs.queues import parse_nodes, parse_queues
from hpcgpu.batch.queues import Accounts, Machine, Queues, Rules
from hpcgpu.batch.slurm.accounts import parse_associations, parse_config, parse_qos
from hpcgpu.batch.slurm.queues import parse_partitions, parse_sinfo
from hpcgpu.checks.check_profile import judge
from hpcgpu.checks.queue_limits import Finding, judge_job, refusals
from hpcgpu.configuration.resolve import of_profile, resolve
from hpcgpu.profiles import draft_profile
from hpcgpu.profiles.site_profiles import Profile

#: As 22.05.8 and 24.11.5 print them; the rest of each line is left out.
SINFO = """\
cpu*|(null)|128|256000|3-00:00:00|milan
gpu|gpu:a100:4(S:0-1)|64|515000|1-00:00:00|a100,ib
gpu|gpu:a100:4(S:0-1)|64|512000|1-00:00:00|a100,ib
gpu|gpu:h100:8|96|2063000|1-00:00:00|h100,ib
debug|gpu:a100:4(S:0-1)|64|512000|30:00|a100,ib
old|gpu:v100:4|40|382000|infinite|v100
vip|gpu:h100:8|96|2063000|infinite|h100,ib
plain|gpu:2|32|128000|infinite|(null)
"""
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES CpuBind=cores  QoS=N/A MaxTime=3-00:00:00 \
RootOnly=NO State=UP MaxCPUsPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=gpu AllowGroups=ALL DenyAccounts=guests AllowQos=normal,gpu Default=NO QoS=gpu MaxTime=1-00:00:00 \
RootOnly=NO State=UP MaxCPUsPerNode=60 MaxMemPerNode=500000
PartitionName=debug AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO MaxTime=00:30:00 RootOnly=NO State=UP
PartitionName=old AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO MaxTime=UNLIMITED RootOnly=NO State=DOWN
PartitionName=vip AllowGroups=vips AllowAccounts=ALL AllowQos=ALL Default=NO MaxTime=UNLIMITED RootOnly=NO State=UP
PartitionName=plain AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO MaxTime=UNLIMITED RootOnly=NO State=UP
"""
SLURM = replace(parse_sinfo(SINFO), rules=parse_partitions(PARTITIONS))
ACCOUNTS = Accounts(
    qos=parse_associations("alpha|physics|gpu,normal\nalpha|guests|normal\nbeta|elsewhere|normal\n", "alpha"),
    limits=parse_qos("normal||\ngpu|12:00:00|DenyOnLimit\nurgent|1-00:00:00|\n")[0],
    enforced=frozenset({"account", "qos"}),
)
ME = Machine(SLURM, ACCOUNTS, "ada", frozenset({"users"}))
#: As a real OpenPBS 23.06.06 prints them, with what the manual adds (pbs_queue_attributes).
QSTAT = """\
Queue: route
    queue_type = Route
    total_jobs = 0
    resources_max.walltime = 48:00:00
    route_destinations = gpu,small
    enabled = True
    started = True

Queue: gpu
    queue_type = Execution
    state_count = Transit:0 Queued:1 Held:0 Waiting:0 Running:0 Exiting:0 Begun
\t:0\x20
    from_route_only = True
    resources_max.walltime = 24:00:00
    enabled = True
    started = True

Queue: small
    queue_type = Execution
    resources_max.ngpus = 0
    resources_max.walltime = 01:00:00
    acl_user_enable = True
    acl_users = alan@*,ada,-grace,barb
\tara
    enabled = True
    started = True

Queue: off
    queue_type = Execution
    acl_group_enable = True
    acl_groups = chemistry
    enabled = False
    started = True
"""


def vnode(host: str, **own: str) -> dict[str, str]:
    own = {"host": host, "ngpus": "4", "ncpus": "64", "mem": "500gb", "gpu_type": "a100,cc80"} | own
    return {f"resources_available.{name}": value for name, value in own.items()}


NODES = {
    "g0": vnode("g0", Qlist="gpu", model="mil_a100"),
    "g1": vnode("g1", Qlist="gpu", model="mil_a100", mem="503gb"),
    "c0": vnode("c0", Qlist="small", ngpus="0", ncpus="128", mem="250gb", model="rom"),
}
KINDS = parse_nodes(NODES)
PBS = Machine(
    Queues(
        gpus=[kind for kind in KINDS if kind.gpus],
        without=[kind for kind in KINDS if not kind.gpus],
        by_default=True,
        rules=parse_queues(QSTAT),
    ),
    user="ada",
    groups=frozenset({"users"}),
)


def findings(machine: Machine, *needs: str, **options: Any) -> list[Finding]:
    system = "pbs" if machine is PBS else "slurm"
    options = {name.replace("_", "-"): value for name, value in options.items()}
    profile = Profile("mine", "", "", "", system, Path("mine.yaml"), needs, options=options)
    return judge(profile, of_profile(profile), machine)


def found(machine: Machine, option: str, *needs: str, **options: Any) -> tuple[str, str, str]:
    """Grade, what the machine reports, and what to write, of the worker job."""
    [one] = [one for one in findings(machine, *needs, **options) if one.option == option and one.job != "scheduler job"]
    return one.grade, one.machine, one.advice


@pytest.mark.parametrize(
    ("option", "options", "said"),
    [
        ("queue", {"queue": "gpu"}, "ok | it is open"),
        ("queue", {"queue": "gpus"}, "failure | there is no such queue, or it is hidden | queue: gpu"),
        ("queue", {"queue": "xyz"}, "failure | there is no such queue, or it is hidden | queue: gpu or debug or plain"),
        ("queue", {"queue": "old"}, "failure | State=DOWN | queue: gpu or debug or plain"),
        ("queue", {"queue": "vip"}, "failure | it is open only to group vips | queue: gpu or debug or plain"),
        ("queue", {"gpus_per_node": 0}, "ok | jobs go to the default queue cpu"),
        ("queue", {"constraint": "a100"}, "not checked | the site may choose it by qos and constraint"),
        ("gpu-type", {"queue": "gpu", "gpu_type": "a100"}, "ok | its nodes have a100, h100"),
        ("gpu-type", {"queue": "gpu", "gpu_type": "A100"}, "failure | its nodes have a100, h100 | gpu-type: a100"),
        ("gpu-type", {"queue": "plain", "gpu_type": "t4"}, "failure | its GPUs have no type | remove gpu-type"),
        ("gpus-per-node", {"queue": "gpu", "gpus_per_node": 8}, "ok | a node has 8"),
        (
            "gpus-per-node",
            {"queue": "gpu", "gpu_type": "a100", "gpus_per_node": 8},
            "failure | a node has 4 | gpus-per-node: 4",
        ),
        ("gpus-per-node", {"queue": "cpu"}, "failure | its nodes list no GPUs | queue: gpu or debug or plain"),
        ("gpus-per-node", {"queue": "cpu", "gpu_request": "none"}, "not checked | the nodes list no GPUs"),
        ("cores", {"queue": "debug", "cores": 64}, "ok | a node has 64"),
        ("cores", {"queue": "debug", "cores": 65}, "failure | a node has 64 | cores: 64"),
        ("cores", {"queue": "gpu", "cores": 64}, "failure | the queue gives at most 60 | cores: 60"),
        ("memory", {"queue": "debug", "memory": "500GiB"}, "ok | a node has 500 GiB"),
        ("memory", {"queue": "debug", "memory": "501GiB"}, "failure | a node has 500 GiB | memory: 486400MiB"),
        (
            "memory",
            {"queue": "gpu", "memory": "501GiB"},
            "failure | the queue gives at most 488.3 GiB | memory: 475000MiB",
        ),
        ("constraint", {"queue": "gpu", "constraint": "ib*2"}, "ok | nodes have it"),
        (
            "constraint",
            {"queue": "debug", "constraint": "v100"},
            "failure | its nodes have a100, ib | constraint: a100",
        ),
        (
            "constraint",
            {"queue": "gpu", "constraint": "IB"},
            "failure | its nodes have a100, h100, ib | constraint: ib",
        ),
        ("walltime", {"queue": "gpu", "walltime": "24h"}, "ok | queue gpu: MaxTime=1-00:00:00"),
        (
            "walltime",
            {"queue": "gpu", "walltime": "25h"},
            "failure | queue gpu: MaxTime=1-00:00:00 | walltime: '24:00:00' or less",
        ),
        ("walltime", {"queue": "debug,gpu", "walltime": "2h"}, "ok | queue gpu: MaxTime=1-00:00:00"),
        ("walltime", {"queue": "plain", "walltime": "900h"}, "ok | the queue has no limit"),
        ("walltime", {"queue": "none", "walltime": "2h"}, "not checked | the limit of the queue is not known"),
        (
            "walltime",
            {"queue": "gpu", "walltime": "13h", "qos": "gpu"},
            "failure | queue gpu: MaxTime=1-00:00:00; QOS gpu: 12:00:00 | walltime: '12:00:00' or less",
        ),
        ("account", {"queue": "cpu", "account": "physics"}, "ok | it is yours"),
        ("account", {"queue": "cpu", "account": "fysics"}, "failure | yours: guests, physics | account: physics"),
        (
            "account",
            {"queue": "cpu", "account": "elsewhere"},
            "failure | yours: guests, physics | account: guests or physics",
        ),
        (
            "account",
            {"queue": "gpu", "account": "guests"},
            "failure | queue gpu: it is closed to account guests | another account or queue",
        ),
        ("qos", {"queue": "gpu", "qos": "gpu"}, "ok | you may use it"),
        (
            "qos",
            {"queue": "cpu", "qos": "urgent"},
            "failure | you may not use it; yours: gpu, normal | qos: gpu or normal",
        ),
        ("qos", {"queue": "cpu", "qos": "normale"}, "failure | there is no such QOS; yours: gpu, normal | qos: normal"),
        (
            "qos",
            {"queue": "cpu", "qos": "gpu", "account": "guests"},
            "failure | you may not use it; yours: normal | qos: normal",
        ),
        (
            "qos",
            {"queue": "gpu", "qos": "urgent"},
            "failure | queue gpu: it is open only to qos gpu, normal | another qos or queue",
        ),
    ],
)
def test_each_option_stands_beside_what_slurm_reports(option: str, options: dict[str, Any], said: str) -> None:
    assert " | ".join(filter(None, found(ME, option, **options))) == said


@pytest.mark.parametrize(
    ("option", "options", "said"),
    [
        ("queue", {"queue": "route"}, "ok | it hands jobs on to gpu, small"),
        ("queue", {"queue": "gpu"}, "failure | from_route_only = True | queue: route or small"),
        ("queue", {"queue": "off"}, "failure | enabled = False | queue: route or small"),
        ("queue", {"queue": "gpu@other"}, "not checked | it is a queue of another server"),
        ("queue", {"queue": "small", "gpus_per_node": 0}, "ok | it is open"),
        ("gpu-type", {"queue": "route", "gpu_type": "CC80"}, "ok | its nodes have a100, cc80"),
        ("gpus-per-node", {"queue": "route", "gpus_per_node": 4}, "ok | a node has 4"),
        (
            "gpus-per-node",
            {"queue": "small"},
            "failure | its nodes list no GPUs | gpu-request: none, if jobs get whole nodes",
        ),
        ("memory", {"queue": "route", "memory": "503GiB"}, "ok | a node has 503 GiB"),
        ("cores", {"queue": "route", "cores": 65}, "failure | a node has 64 | cores: 64"),
        ("select-extra", {"queue": "route", "select_extra": "model=mil_a100"}, "ok | nodes have it"),
        (
            "select-extra",
            {"queue": "route", "select_extra": "model=mil_h100"},
            "failure | its nodes have model=mil_a100 | select-extra: model=mil_a100",
        ),
        ("select-extra", {"queue": "route", "select_extra": "color=red"}, "not checked | the nodes list no color"),
        (
            "walltime",
            {"queue": "route", "walltime": "25h"},
            "failure | queue route: resources_max.walltime = 48:00:00; queue gpu: resources_max.walltime = 24:00:00 | "
            "walltime: '24:00:00' or less",
        ),
        (
            "account",
            {"queue": "route", "account": "p1"},
            "not checked | the batch system does not say which account you may use",
        ),
    ],
)
def test_each_option_stands_beside_what_pbs_reports(option: str, options: dict[str, Any], said: str) -> None:
    assert " | ".join(filter(None, found(PBS, option, **options))) == said


def test_gpus_of_pbs_without_a_type_may_have_the_requested_one_and_those_of_another_type_do_not_count() -> None:
    nodes = {"g0": vnode("g0", Qlist="gpu"), "g1": vnode("g1", Qlist="gpu", gpu_type="h100", ngpus="8")}
    del nodes["g0"]["resources_available.gpu_type"]
    machine = replace(PBS, queues=replace(PBS.queues, gpus=parse_nodes(nodes)))
    worker = resolve("pbs", {"queue": "route", "gpu_type": "t4", "gpus_per_node": 8}).worker
    findings = {one.option: f"{one.grade}: {one.machine}" for one in judge_job(worker, machine)}
    assert findings["gpu-type"] == "not checked: the nodes list GPUs without a type"
    assert findings["gpus-per-node"] == "failure: a node has 4"


def test_a_queue_of_pbs_is_open_to_the_users_that_it_lists() -> None:
    users = ("ada", "alan", "barbara", "grace", "eve")
    assert [name for name in users if not replace(PBS, user=name).why_closed("small")] == ["ada", "alan", "barbara"]


def test_a_qos_may_lift_the_limit_of_the_queue() -> None:
    limits, beyond = parse_qos("long|7-00:00:00|DenyOnLimit,PartitionTimeLimit\n")
    machine = replace(ME, accounts=replace(ACCOUNTS, limits=limits, beyond=beyond))
    options = {"queue": "debug", "qos": "long"}
    assert found(machine, "walltime", walltime="7d", **options)[0] == "ok"
    assert found(machine, "walltime", walltime="8d", **options)[:2] == ("failure", "QOS long: 168:00:00")


def test_one_node_must_have_all_features_that_a_constraint_joins() -> None:
    def grades(constraint: str) -> list[tuple[str, str]]:
        every = findings(ME, queue="gpu", constraint=constraint)
        return [(one.profile, one.grade) for one in every if one.option == "constraint" and one.job == "worker job"]

    assert grades("a100&ib") == [("a100", "ok"), ("ib", "ok")]
    assert grades("[a100|h100]") == [("a100", "ok"), ("h100", "ok")]
    assert grades("a100&h100") == [("a100", "ok"), ("h100", "ok"), ("a100&h100", "failure")]


def test_a_constraint_with_a_choice_may_name_nodes_that_the_other_options_leave_out() -> None:
    def grade(constraint: str) -> set[str]:
        options = {"queue": "gpu", "gpu-type": "a100", "gpus-per-node": 4, "constraint": constraint}
        return {one.grade for one in findings(ME, **options) if one.option == "constraint"}

    assert grade("a100|h100") == {"ok"}
    assert grade("a100&h100") == {"ok", "failure"}
    assert grade("a100|b200") == {"ok", "failure"}


def test_words_of_select_extra_are_compared_in_any_case_as_pbs_does() -> None:
    assert found(PBS, "select-extra", queue="gpu", select_extra="model=MIL_A100")[0] == "ok"


def test_what_is_left_to_the_user_reports_what_there_is_to_choose() -> None:
    needed = {one.option: (one.grade, one.machine) for one in findings(ME, "queue", "walltime", "account")}
    assert needed["queue"] == ("not checked", "open to you: gpu, debug, plain")
    assert needed["account"] == ("not checked", "yours: guests, physics")
    assert needed["walltime"] == ("not checked", "the limit of the queue is not known")
    assert found(ME, "walltime", "walltime", queue="gpu")[:2] == ("not checked", "queue gpu: MaxTime=1-00:00:00")


def test_the_scheduler_job_is_held_against_its_own_queue() -> None:
    every = findings(ME, queue="gpu", gpus_per_node=8, scheduler={"queue": "debug", "cores": 70, "memory": "8GB"})
    assert [(one.option, one.advice) for one in every if one.grade == "failure"] == [("cores", "cores: 64")]
    assert {one.job for one in every} == {"worker job", "scheduler job"}
    assert [one.job for one in findings(ME, queue="gpu") if one.option == "queue"] == ["all jobs"]


def test_options_that_no_batch_system_reports_are_named_and_not_counted_as_right() -> None:
    [rest] = [
        one for one in findings(ME, queue="gpu", interface="ib0", scheduler={"env": {"A": "1"}}) if not one.profile
    ]
    assert (rest.option, rest.grade, rest.job) == ("env, interface", "not checked", "all jobs")
    assert "hpcgpu check --in-job --profile mine" in rest.advice


@pytest.mark.parametrize(
    ("accounts", "words"),
    [
        (Accounts(unknown="`sacctmgr` failed: no"), "the accounting does not answer: `sacctmgr` failed: no"),
        (replace(ACCOUNTS, enforced=frozenset()), "the batch system does not enforce the account"),
    ],
)
def test_an_account_that_nobody_enforces_or_lists_is_not_checked(accounts: Accounts, words: str) -> None:
    assert found(replace(ME, accounts=accounts), "account", queue="cpu", account="x")[:2] == ("not checked", words)


def test_a_qos_and_a_walltime_that_the_accounting_does_not_answer_for_are_not_checked() -> None:
    silent = replace(ME, accounts=Accounts(unknown="`sacctmgr` failed: no", silent=True))
    words = "the accounting does not answer: `sacctmgr` failed: no"
    assert found(silent, "qos", queue="gpu", qos="gpu")[:2] == ("not checked", words)
    grade, machine, *_ = found(silent, "walltime", queue="debug", qos="gpu", walltime="2h")
    assert grade == "not checked" and machine.endswith(f"{words}, and a QOS may allow more")


def test_amounts_that_no_node_lists_are_not_checked() -> None:
    bare = replace(ME, queues=parse_sinfo("plain|gpu:2|0|0|infinite|(null)\n"))
    for option, value in (("cores", 4), ("memory", "8GB")):
        assert found(bare, option, queue="plain", **{option: value})[:2] == (
            "not checked",
            "the batch system does not say what a node has",
        )


def test_a_batch_system_that_does_not_list_its_queues_is_no_proof() -> None:
    silent = replace(ME, queues=Queues(gpus=[], by_default=False))
    grades = {one.option: one.grade for one in findings(silent, queue="gpu", gpu_type="a100", walltime="2h")}
    assert grades == {"queue": "not checked", "nodes": "not checked", "walltime": "not checked"}


def test_what_scontrol_reports_of_accounting_is_read() -> None:
    said = "Configuration data as of x\nAccountingStorageEnforce = associations,qos\nClusterName             = alpha\n"
    assert parse_config(said)["ClusterName"] == "alpha"


@pytest.mark.parametrize("machine", [ME, PBS])
def test_a_draft_loads_and_passes_the_check_at_once(machine: Machine) -> None:
    system = "slurm" if machine is ME else "pbs"
    text = draft_profile.render(system, machine, "2026-01-01", ["lo", "ib0"])
    content = yaml.safe_load(text)
    profile = Profile("new", "", "", "", system, Path("new.yaml"), tuple(content["needs"]), options=content["options"])
    every = judge(profile, of_profile(profile), machine)
    assert [one for one in every if one.grade == "failure"] == []
    assert content["options"]["gpus-per-node"] == (8 if machine is ME else 4)
    assert "This node has ib0; compute nodes may differ." in text
    if machine is ME:
        assert content["options"]["queue"] == "gpu", "the user may not use vip"
        assert (
            "# Your accounts: guests, physics." in text
            and "#   vip: not for you: it is open only to group vips" in text
        )
        assert content["options"]["cores"] == 60, "as the partition allows"
        assert "# Longest walltime: MaxTime=1-00:00:00" in text
    else:
        assert "#   route: resources_max.walltime = 48:00:00; routes to gpu, small" in text


def test_a_draft_passes_where_nodes_list_no_gpus_and_where_scontrol_does_not_answer() -> None:
    for text in ("cpu*|(null)|128|256000|3-00:00:00|milan\n", SINFO):
        machine = replace(ME, queues=parse_sinfo(text))
        drafted = yaml.safe_load(draft_profile.render("slurm", machine, "2026-01-01"))["options"]
        profile = Profile("new", "", "", "", "slurm", Path("new.yaml"), options=drafted)
        assert {one.grade for one in judge(profile, of_profile(profile), machine)} <= {"ok", "not checked"}


def test_a_queue_whose_name_is_a_word_of_yaml_is_in_quotes() -> None:
    found = parse_sinfo("off|gpu:1e3:1|8|1000|infinite|(null)\n")
    options = yaml.safe_load(draft_profile.render("slurm", Machine(found), "2026-01-01"))["options"]
    assert (options["queue"], options["gpu-type"]) == ("off", "1e3")


def test_the_recorded_nodes_of_an_openpbs_are_two_kinds() -> None:
    recorded = (Path(__file__).parents[1] / "queue" / "openpbs-pbsnodes.txt").read_text()
    assert all(kind.gpus for kind in parse_nodes(parse_pbsnodes(recorded)))


def test_accounts_and_qos_are_compared_in_any_case() -> None:
    assert found(ME, "account", queue="debug", account="Physics")[0] == "ok"
    assert found(ME, "qos", queue="gpu", account="PHYSICS", qos="GPU", gpus_per_node=4)[0] == "ok"
    assert found(ME, "account", queue="gpu", account="GUESTS")[0] == "failure", "the queue is closed to it"
    machine = replace(ME, accounts=replace(ACCOUNTS, qos=parse_associations("a|Physics|GPU\n", "a")))
    assert found(machine, "qos", queue="gpu", account="physics", qos="gpu", gpus_per_node=4)[0] == "ok"


def test_the_check_reports_that_no_account_of_the_user_may_use_a_queue() -> None:
    machine = replace(ME, accounts=replace(ACCOUNTS, qos={"guests": frozenset({"normal"})}))
    assert found(machine, "queue", queue="gpu")[:2] == ("failure", "it is closed to account guests")


def test_a_default_qos_that_may_lift_the_limit_is_no_failure() -> None:
    machine = replace(ME, accounts=replace(ACCOUNTS, beyond=frozenset({"long"})))
    assert found(ME, "walltime", queue="debug", walltime="2h")[0] == "failure"
    grade, said, _ = found(machine, "walltime", queue="debug", walltime="2h")
    assert grade == "not checked" and "your default QOS may allow more" in said


def test_a_plan_does_not_refuse_a_walltime_that_the_default_qos_may_allow() -> None:
    job = resolve("slurm", {"queue": "debug", "walltime": "2h", "gpus_per_node": 4}).worker
    machine = replace(ME, accounts=Accounts())
    assert [one.option for one in refusals(job, machine, lambda: ACCOUNTS)] == ["walltime"]
    assert refusals(job, machine, lambda: replace(ACCOUNTS, beyond=frozenset({"long"}))) == []


def test_a_draft_prefers_whole_gpus_and_queues_that_an_account_of_the_user_may_use() -> None:
    nodes = parse_sinfo("a|gpu:a100:4|64|500000|infinite|(null)\nm|gpu:1g.10gb:56|64|500000|infinite|(null)\n")
    assert yaml.safe_load(draft_profile.render("slurm", Machine(nodes), "2026-01-01"))["options"]["gpu-type"] == "a100"
    rules = {
        "labx": Rules(allowed={"account": frozenset({"labx"})}),
        "members": Rules(denied={"account": frozenset({"guests"})}),
        "vip": Rules(allowed={"qos": frozenset({"vip"})}),
    }
    machine = Machine(replace(nodes, rules=rules), replace(ACCOUNTS, enforced=frozenset()))
    text = draft_profile.render("slurm", machine, "2026-01-01")
    assert "#   labx: not for you: it is open only to account labx\n" in text
    assert "#   members: no walltime limit\n" in text
    assert "#   vip: not for you: it is open only to qos vip\n" in text
