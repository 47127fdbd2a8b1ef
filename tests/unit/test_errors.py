"""Each exception names where it is explained, and its own message stays as it is."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback

import pytest
from click.testing import CliRunner

from hpcgpu import HpcgpuError, OptionError, errors
from hpcgpu.cli import main

CLASSES = [
    cls
    for name in errors.__all__
    if isinstance(cls := getattr(errors, name), type) and issubclass(cls, errors.HpcgpuError)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_traceback_ends_with_where_the_error_is_explained(cls: type[HpcgpuError]) -> None:
    error = cls("queue 'a' does not exist")
    assert str(error) == "queue 'a' does not exist"
    message, help_line = traceback.format_exception_only(error)
    assert message.endswith(": queue 'a' does not exist\n")
    assert f"`python -m pydoc hpcgpu.{cls.__name__}`" in help_line
    assert "docs/" not in help_line  # an installed hpcgpu has no docs/


@pytest.mark.parametrize("cls", CLASSES)
def test_the_explanation_has_more_than_the_first_line(cls: type[HpcgpuError]) -> None:
    first, _, more = str(cls.__doc__).partition("\n\n")
    assert first and len(more.split()) >= 5


def test_an_error_from_another_process_reports_it_once() -> None:
    error = pickle.loads(pickle.dumps(OptionError("no")))
    assert len(pickle.loads(pickle.dumps(error)).__notes__) == 1


def test_an_error_of_a_plugin_is_explained_where_that_of_hpcgpu_is_from_which_it_derives() -> None:
    class QuotaExceeded(errors.SubmitRefused):
        pass

    assert QuotaExceeded("no").__notes__ == errors.SubmitRefused("no").__notes__


def test_the_command_in_the_line_shows_the_explanation() -> None:
    done = subprocess.run([sys.executable, "-m", "pydoc", "hpcgpu.OptionError"], capture_output=True, text=True)
    assert "`hpcgpu config` shows each option" in done.stdout.replace("``", "`")


def test_the_command_line_shows_the_same_line_below_the_error() -> None:
    result = CliRunner().invoke(main, ["render", "slurm", "--walltime", "25:99", "-o", "unused"])
    message, help_line = result.output.strip().splitlines()
    assert result.exit_code == 2 and message.startswith("Error: ")
    assert help_line == errors.where_explained(OptionError)
