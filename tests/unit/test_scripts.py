"""Scripts: golden files, quoting, directives."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.batch import pbs, slurm
from hpcgpu.batch.directive_syntax import Directives, Syntax, parse_directive, quoted
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.scripts.render import check_launch, check_single, render
from tests.helpers import GOLDEN, golden

PLACE = Path("/home/me/.hpcgpu/clusters/demo")
BASE: dict[str, Any] = {"name": "demo", "python": "/opt/python/bin/python"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "slurm-a100.sbatch": (
        "slurm",
        "worker",
        {
            "queue": "gpu",
            "account": "m1234",
            "walltime": "02:00:00",
            "gpus_per_node": 4,
            "gpu_type": "a100",
            "cores": 16,
            "memory": "60GB",
            "env": {"GREETING": 'it\'s "me"'},
            "job_script_prologue": ["module load cuda"],
            "job_extra_directives": ["--exclusive", '--comment="two words"'],
        },
    ),
    "slurm-scheduler-prefer.sbatch": (
        "slurm",
        "scheduler",
        {
            "queue": "gpu",
            "account": "m1",
            "gpus_per_node": 4,
            "gpu_type": "a100",
            "scheduler": {"queue": "shared", "prefer": "t4"},
        },
    ),
    "slurm-two-nodes.sbatch": (
        "slurm",
        "worker",
        {"nodes_per_job": 2, "gpus_per_node": 4, "cores": 8, "interface": "ib0"},
    ),
    "slurm-cpu.sbatch": (
        "slurm",
        "worker",
        {"gpus_per_node": 0, "cores": 8, "memory": "64GiB", "resources": {"MEMORY": 60e9}},
    ),
    "slurm-gpus-per-node.sbatch": (
        "slurm",
        "worker",
        {"gpus_per_node": 4, "gpu_request": "gpus-per-node", "constraint": "gpu&hbm80g"},
    ),
    "slurm-whole-nodes.sbatch": ("slurm", "worker", {"gpus_per_node": 4, "gpu_request": "none", "queue": "gh"}),
    "slurm-ucx-rmm.sbatch": (
        "slurm",
        "worker",
        {"protocol": "ucx", "rmm_pool_size": 0.8, "enable_nvlink": False, "rmm_async": True},
    ),
    "slurm-ucx-rmm-scheduler.sbatch": (
        "slurm",
        "scheduler",
        {
            "protocol": "ucx",
            "rmm_pool_size": 0.8,
            "enable_cudf_spill": True,
            "enable_nvlink": False,
            "ucx_env": {"UCX_IB_GPU_DIRECT_RDMA": "n"},
        },
    ),
    "pbs-a100.pbs": (
        "pbs",
        "worker",
        {
            "queue": "gpu",
            "account": "m1234",
            "walltime": "1-12:00:00",
            "gpus_per_node": 4,
            "gpu_type": "a100",
            "cores": 16,
            "memory": "60GiB",
            "resource_list": {"filesystems": "home:eagle"},
            "env": {"GREETING": 'it\'s "me"'},
            "job_script_prologue": ["module load cuda"],
            "job_extra_directives": ["-m n", '-W group_list="my group"', "-l site_needed=static"],
        },
    ),
    "pbs-scheduler.pbs": (
        "pbs",
        "scheduler",
        {"queue": "gpu", "gpus_per_node": 4, "gpu_type": "a100", "select_extra": "cputype=milan"},
    ),
    "pbs-two-nodes.pbs": (
        "pbs",
        "worker",
        {"nodes_per_job": 2, "gpus_per_node": 4, "cores": 8, "interface": "ib0", "name": "two.of"},
    ),
    "pbs-mpiexec.pbs": (
        "pbs",
        "worker",
        {
            "nodes_per_job": 2,
            "gpus_per_node": 4,
            "gpu_request": "none",
            "select_extra": "system=polaris",
            "pbs_launcher": "mpiexec --ppn 1",
        },
    ),
    "pbs-flat.pbs": (
        "pbs",
        "worker",
        {"queue": "gpuvolta", "gpus_per_node": 4, "cores": 48, "memory": "190GB", "pbs_shape": "flat"},
    ),
    "pbs-cpu.pbs": (
        "pbs",
        "worker",
        {"gpus_per_node": 0, "cores": 8, "job_directives_skip": ["-l mem", "-c"], "place": "excl"},
    ),
    "local-worker.sh": ("local", "worker", {"gpus_per_node": 2, "walltime": "1h", "walltime_margin": "10m"}),
    "local-scheduler.sh": ("local", "scheduler", {"gpus_per_node": 2, "idle_timeout": "1h"}),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    system, kind, given = CASES[name]
    golden(name, render(system, kind, resolve(system, BASE | given), PLACE))


@pytest.mark.parametrize("refuses", [False, True])
def test_the_scheduler_job_lets_slurm_reconsider_the_worker_jobs_and_runs_whatever_slurm_answers(
    refuses: bool, tmp_path: Path
) -> None:
    said = "echo 'slurm_update error: Access denied' >&2; exit 1" if refuses else ""
    for command, text in {"scontrol": f'echo "$@" >> {tmp_path}/told\n{said}', "python": "echo the scheduler"}.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o755)
    script = tmp_path / "scheduler.sbatch"
    script.write_text(render("slurm", "scheduler", resolve("slurm", BASE | {"python": f"{tmp_path}/python"}), PLACE))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "demo",
    }
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "the scheduler\n"
    assert (tmp_path / "told").read_text() == "update JobId=77 JobName=demo\n"
    words = ["slurm_update error: Access denied", "hpcgpu: worker jobs may start half a minute later than they could"]
    assert done.stderr.splitlines() == (words if refuses else [])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_golden_scripts_and_those_of_the_project_pass_shellcheck() -> None:
    files = [path for path in sorted((Path(__file__).parents[2] / "ci").rglob("*")) if path.is_file()]
    of_shell = [path for path in files if path.read_text().startswith(("#!/bin/bash", "#!/usr/bin/env bash"))]
    assert {"tests.sh", "site", "entry", "prolog"} <= {path.name for path in of_shell}
    golden = [path for path in sorted(GOLDEN.iterdir()) if path.is_file()]
    subprocess.run(["shellcheck", *map(str, golden), *map(str, of_shell)], check=True)


@pytest.mark.parametrize(
    ("value", "expected"), [("gpu", "gpu"), ("a b", '"a b"'), ("x\\y", '"x\\\\y"'), ('"', '"\\""'), ("#", '"#"')]
)
def test_directives_are_quoted_for_sbatch_s_own_parser(value: str, expected: str) -> None:
    assert quoted(value) == expected


def test_a_directive_is_skipped_by_its_name_not_by_substring() -> None:
    given = BASE | {
        "job_directives_skip": ["--mem"],
        "memory": "1GB",
        "job_extra_directives": ["-N run-new", "--ntasks=1"],
    }
    with pytest.raises(OptionError, match="-N is set by nodes_per_job"):
        render("slurm", "worker", resolve("slurm", given), PLACE)
    text = render("slurm", "worker", resolve("slurm", given | {"job_directives_skip": ["-N", "--mem"]}), PLACE)
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert (
        "#SBATCH -N run-new" in directives
        and "#SBATCH --ntasks=1" in directives
        and "#SBATCH --ntasks-per-node=1" in directives
    )
    assert not [line for line in directives if "--mem" in line or "--nodes" in line]


@pytest.mark.parametrize(
    ("system", "skip", "gone"),
    [
        ("slurm", "mem", "--mem"),
        ("slurm", "N", "--nodes"),
        ("slurm", "--mem=0", "--mem"),
        ("pbs", "walltime", "-l walltime"),
        ("pbs", "k", "-k"),
    ],
)
def test_a_directive_is_skipped_with_its_dashes_or_without(system: str, skip: str, gone: str) -> None:
    given = BASE | {"memory": "1GB", "walltime": "1h"}

    def directives(**more: Any) -> str:
        text = render(system, "worker", resolve(system, given | more), PLACE)
        return "\n".join(line for line in text.splitlines() if line.startswith(("#SBATCH", "#PBS")))

    assert gone in directives()
    assert gone not in directives(job_directives_skip=[skip])


def test_the_gpus_of_all_nodes_are_requested_where_slurm_counts_those_of_the_job() -> None:
    given = BASE | {"nodes_per_job": 2, "gpus_per_node": 4, "gpu_type": "a100", "gpu_request": "gpus"}
    assert "#SBATCH --gpus=a100:8\n" in render("slurm", "worker", resolve("slurm", given), PLACE)


@pytest.mark.parametrize(("system", "skip"), [("slurm", "memm"), ("slurm", "-n"), ("pbs", "-l mm"), ("pbs", "--mem")])
def test_a_skip_that_leaves_nothing_out_is_refused(system: str, skip: str) -> None:
    with pytest.raises(
        OptionError, match=f"job_directives_skip: '{skip}'.* is not a directive of this script. Its directives are"
    ):
        render(system, "worker", resolve(system, BASE | {"job_directives_skip": [skip]}), PLACE)
    render(
        "local", "worker", resolve("local", BASE | {"job_directives_skip": [skip]}), PLACE
    )  # it may be meant for another batch system


def test_an_option_that_hpcgpu_owns_is_refused_among_the_extra_directives() -> None:
    with pytest.raises(OptionError, match="--time is set by walltime: use that instead"):
        render("slurm", "worker", resolve("slurm", BASE | {"job_extra_directives": ["--time=1"]}), PLACE)
    words = (
        r"--no-requeue is set by hpcgpu \(it submits lost jobs again itself\): remove it, or add job_directives_skip="
    )
    with pytest.raises(OptionError, match=words):
        render("slurm", "worker", resolve("slurm", BASE | {"job_extra_directives": ["--no-requeue"]}), PLACE)


@pytest.mark.parametrize("kind", ["scheduler", "worker"])
@pytest.mark.parametrize(
    ("system", "directive", "skip"),
    [
        ("slurm", "--requeue", "--no-requeue"),
        ("slurm", "--requ", "--no-requeue"),  # sbatch takes the beginning of an option for it
        ("pbs", "-r y", "-r"),
        ("pbs", "-ry", "-r"),
    ],
)
def test_no_directive_lets_the_queue_start_a_job_again(kind: str, system: str, directive: str, skip: str) -> None:
    extra = {"job_extra_directives": [directive], "job_directives_skip": [skip]}
    given = BASE | ({"scheduler": extra} if kind == "scheduler" else extra)
    words = f"{directive[:2] if system == 'pbs' else directive} is not allowed: hpcgpu submits lost jobs again itself"
    with pytest.raises(OptionError, match=words):
        render(system, kind, resolve(system, given), PLACE)


@pytest.mark.parametrize("kind", ["scheduler", "worker"])
@pytest.mark.parametrize(("system", "directive"), [("slurm", "--hold"), ("slurm", "-H"), ("pbs", "-h")])
def test_no_directive_lets_a_job_wait_forever(kind: str, system: str, directive: str) -> None:
    extra = {"job_extra_directives": [directive]}
    given = BASE | ({"scheduler": extra} if kind == "scheduler" else extra)
    with pytest.raises(OptionError, match=f"{directive} is not allowed: the job would wait forever"):
        render(system, kind, resolve(system, given), PLACE)


def test_the_beginning_of_a_long_option_is_refused_as_the_option_is() -> None:
    with pytest.raises(OptionError, match="--arr is not allowed: a job of a cluster cannot be a job array"):
        render("slurm", "worker", resolve("slurm", BASE | {"job_extra_directives": ["--arr=0-3"]}), PLACE)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [("a/b:c^d", "a/b:c^d"), ("a b", "'a b'"), ("it's", "'it'\"'\"'s'"), ("#", "'#'"), ("\\", "'\\'")],
)
def test_pbs_directives_are_quoted_for_qsub_which_reads_as_a_shell_does(value: str, quoted: str) -> None:
    assert pbs.system.scripts().quote(value) == quoted


def test_control_characters_reach_no_directive() -> None:
    for quote in (quoted, pbs.system.scripts().quote):
        with pytest.raises(OptionError, match="control character"):
            quote("a\nb")


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        (["-l walltime=1:00"], "-l walltime is set by walltime: use that instead"),
        (["-lselect=2:ngpus=1"], "-l select is set by cores, memory, gpus_per_node, gpu_type and select_extra"),
        (["-l mem=4gb"], "-l mem is set by memory"),
        (["-l filesystems=home"], "-l filesystems is set by resource_list"),
        (["-l a=1,b=2"], "sets more than one option: write one option per entry"),
        (["-W block=true"], "-W block is not allowed: hpcgpu waits for its jobs itself"),
        (["-W depend=after:1"], "-W depend is not allowed: hpcgpu sets it"),
        (["-J 0-3"], "-J is not allowed: a job of a cluster cannot be a job array"),
        (["-V"], "-V is not allowed: set env"),
        (["-v A=1"], "-v is set by hpcgpu (use the option env): remove it, or add job_directives_skip=['-v']"),
        (["-o /x.log"], "-o is not allowed: the cluster names the log of each job; set log_directory"),
        (["-N x"], "-N is set by name"),
        (["-l a=1", "-l a=2"], "-l a is given twice"),
    ],
)
def test_pbs_directives_that_cannot_be(directives: list[str], message: str) -> None:
    given = BASE | {"job_extra_directives": directives, "resource_list": {"filesystems": "eagle"}}
    with pytest.raises(OptionError) as caught:
        render("pbs", "worker", resolve("pbs", given), PLACE)
    assert message in str(caught.value)


def test_pbs_directives_are_skipped_by_resource() -> None:
    given = BASE | {
        "walltime": "1h",
        "job_directives_skip": ["-l walltime", "-k"],
        "job_extra_directives": ["-l walltime=2:00:00"],
    }
    lines = [
        line for line in render("pbs", "worker", resolve("pbs", given), PLACE).splitlines() if line.startswith("#PBS")
    ]
    assert "#PBS -l walltime=2:00:00" in lines and "#PBS -l walltime=01:00:00" not in lines
    assert [line for line in lines if line.startswith("#PBS -l select=")] and not [
        line for line in lines if line.startswith("#PBS -k")
    ]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("--exclusive", ("--exclusive", None)),
        ("-C gpu", ("-C", "gpu")),
        ('--a="b c"', ("--a", "b c")),
        ("--a b", ("--a", "b")),
    ],
)
def test_directives_of_the_user_are_taken_apart(text: str, parsed: tuple[str, str | None]) -> None:
    assert parse_directive(text, slurm.system.scripts()) == parsed


def test_directives_may_be_assignments() -> None:
    syntax = Syntax(prefix="#Q", assigned=True, quote=str, refused={"hold": "it would wait"})
    directives = Directives(syntax, ["Memory"], ['Rank = a == "b" && c', "+Mine=$(x)"])
    assert directives.add("cores", "cpus", 2) == "#Q cpus = 2\n"
    assert directives.add("memory", "memory", 3) == "" == directives.add("name", "name", None)
    assert directives.further() == '#Q rank = a == "b" && c\n#Q +mine = $(x)'
    for extra, words in [("CPUS = 3", "set by cores"), ("Hold = 1", "would wait"), ("rank", "not an assignment")]:
        with pytest.raises(OptionError, match=words):
            again = Directives(syntax, [], [extra])
            again.add("cores", "cpus", 2)
            again.further()


def test_values_reach_the_job_s_environment_unchanged() -> None:
    odd = {"A": 'x"; rm -rf / #\n\n\ttwo  ', "B": "`id` $(id) \\n it's", "C": "µ"}
    text = render("slurm", "worker", resolve("slurm", BASE | {"env": odd}), PLACE)
    body = text[: text.index("\nexec ")] + "\nenv -0\n"
    out = subprocess.run(["bash", "-c", body], check=True, capture_output=True, text=True).stdout
    found = dict(entry.split("=", 1) for entry in out.split("\0") if "=" in entry)
    assert {name: found[name] for name in odd} == odd


def test_own_templates_count_before_the_package_s(tmp_path: Path) -> None:
    (tmp_path / "env_prologue_container_stage.j2").write_text("# my own preamble\n")
    text = render("slurm", "worker", resolve("slurm", BASE | {"template_directory": tmp_path}), PLACE)
    assert "# my own preamble" in text and "exec " in text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("# {{ walltme }}", "'walltme' is undefined"),
        ("# {{ job.walltme }}", "has no attribute 'walltme'"),
        ("# {{ job.walltme | seconds }}", "has no attribute 'walltme'"),
        ("# {{ job.python | shel }}", "No filter named 'shel'"),
        ("# {% if job.python }", "unexpected '}'"),
        ('{% include "prolog.j2" %}', "'prolog.j2' not found"),
        ('{% include "directives.j2" %}', "'nodes' is undefined"),
    ],
)
def test_an_error_in_an_own_template_names_its_file_and_its_line(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "env_prologue_container_stage.j2"
    file.write_text(f"# mine\n\n{line}\n")
    with pytest.raises(OptionError) as failed:
        render("slurm", "worker", resolve("slurm", BASE | {"template_directory": tmp_path}), PLACE)
    said = str(failed.value)
    assert said.startswith(f"template_directory: {file}, line 3: ") and problem in said
    assert "Correct it there: hpcgpu's own templates in" in said and "show which names there are" in said


def test_templates_that_were_removed_while_the_cluster_runs_are_named_by_the_error(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    options = resolve("slurm", BASE | {"template_directory": own})
    own.rmdir()
    with pytest.raises(OptionError, match=r"template_directory='\S+/own' cannot be read: No such file or directory"):
        render("slurm", "worker", options, PLACE)


@pytest.mark.parametrize("option", ["template_directory", "stage", "job_script_prologue"])
def test_a_file_that_jobs_run_and_that_everybody_can_change_is_refused(option: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = tmp_path / "templates"
    place.mkdir()
    file = place / {"template_directory": "worker.j2", "stage": "env.tar"}.get(option, "prologue.sh")
    file.touch()
    given = BASE | {option: place if option == "template_directory" else file}
    render("slurm", "worker", resolve("slurm", given), PLACE)
    file.chmod(0o666)
    with pytest.raises(OptionError, match=f"^{option}: .*{file.name}.*everybody can write there.*chmod o-w"):
        render("slurm", "worker", resolve("slurm", given), PLACE)


def test_what_a_batch_system_has_no_script_for_is_refused() -> None:
    with pytest.raises(OptionError, match="has no scripts that start a cluster without Python"):
        check_launch("local")
    with pytest.raises(OptionError, match="has no script that runs scheduler, workers and a program in one job"):
        check_single("pbs")
    check_launch("pbs")
    check_single("slurm")
