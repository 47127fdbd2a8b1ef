"""The options of a cluster on the command line: those of the batch system that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpcgpu.cli import main
from hpcgpu.cli.json_types import OUTPUTS


def hpcgpu(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("command", ["start", "run", "check", "config"])
def test_the_help_for_one_system_has_its_own_options_and_not_those_of_another(command: str) -> None:
    code, slurm = hpcgpu(command, "--system", "slurm", "--help")
    assert code == 0 and "Options of Slurm:" in slurm and "--qos" in slurm and "--pbs-shape" not in slurm
    code, pbs = hpcgpu(command, "--system=pbs", "--help")
    assert code == 0 and "Options of PBS:" in pbs and "--pbs-shape" in pbs and "--qos" not in pbs
    code, local = hpcgpu(command, "--system", "local", "--help")
    assert code == 0 and "--cores" in local and "--qos" not in local and "--pbs-shape" not in local


def test_the_help_without_a_system_lists_the_options_of_each_under_its_name() -> None:
    code, text = hpcgpu("start", "--help")
    assert code == 0 and text.count("--cores ") == 1
    assert text.index("--cores") < text.index("Options of PBS:") < text.index("--pbs-shape")
    assert "--qos" in text[text.index("Options of Slurm:") :]


def test_what_each_command_prints_as_json_has_a_type() -> None:
    def commands(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
        context = click.Context(group)
        for part in group.list_commands(context):
            command = group.get_command(context, part)
            assert command is not None
            if isinstance(command, click.Group):
                yield from commands(command, f"{name}{part} ")
            else:
                yield name + part, command

    found = {name for name, command in commands(main) if any("--json" in option.opts for option in command.params)}
    assert found == OUTPUTS.keys()


def test_the_help_of_render_depends_on_its_argument() -> None:
    assert "--pbs-shape" not in hpcgpu("render", "slurm", "--help")[1]
    assert "--pbs-shape" in hpcgpu("render", "pbs", "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["config", "--system", "slurm", "--pbs-shape", "flat"],
            "--pbs-shape is an option of PBS jobs, and Slurm does not have it: remove it",
        ),
        (
            ["config", "--system", "pbs", "--qos", "high"],
            "--qos is an option of Slurm jobs: PBS has none; many sites have a queue instead",
        ),
        (["config", "--profile", "puhti", "--account", "x", "--place", "scatter"], "place is an option of PBS jobs"),
        (["config", "--system", "slurm", "--quue", "x"], "No such option"),
        (["config", "--system", "slrum"], "'slrum' is not one of 'auto'"),
    ],
)
def test_an_option_of_another_system_is_refused_with_the_system_that_has_it(arguments: list[str], message: str) -> None:
    code, text = hpcgpu(*arguments)
    assert code == 2 and message in text, text


def test_options_of_one_system_reach_its_scripts(tmp_path: Path) -> None:
    code, text = hpcgpu(
        "render",
        "pbs",
        "-o",
        str(tmp_path / "demo"),
        "--place",
        "excl",
        "--nodes-per-job",
        "2",
        "--resource-list",
        "a=b",
        "--scheduler",
        "place=excl",
    )
    assert code == 0, text
    assert "-l place=scatter:excl" in (tmp_path / "demo" / "worker.pbs").read_text()
    assert "-l place=excl" in (tmp_path / "demo" / "scheduler.pbs").read_text()


def test_what_follows_two_dashes_is_the_program_s() -> None:
    code, text = hpcgpu("run", "--", "no-such-program", "--system", "pbs", "--qos", "x")
    assert code == 127, text


@pytest.mark.parametrize(
    ("given", "runs_with"), [("true", ""), ("false", "--insecure"), ("authenticated", "--authenticated")]
)
def test_security_is_on_off_or_a_word(tmp_path: Path, given: str, runs_with: str) -> None:
    code, text = hpcgpu(
        "render", "slurm", "-o", str(tmp_path / "made"), "--single-job", "--security", given, "--", "./program"
    )
    assert code == 0, text
    script = next((tmp_path / "made").glob("*.sbatch")).read_text()
    assert {flag for flag in ("--insecure", "--authenticated") if flag in script} == set(runs_with.split())


def test_security_refuses_other_words() -> None:
    code, text = hpcgpu("config", "--system", "slurm", "--security", "tls")
    assert code == 2 and "'true', 'false', 'authenticated'" in text
