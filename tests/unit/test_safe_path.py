"""No process that hpcgpu starts imports a module from the directory in which it happens to run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgpu.errors import OptionError
from hpcgpu.jupyter import start_from_form

ROOT = Path(__file__).parents[2]
#: A start of a Python with a module or code, in a list of arguments or in a script.
STARTS = re.compile(r"""(?:sys\.executable|\{\{ interpreter \}\}|"\$python")[",]*\s+(?:#[^\n]*\s+)*"?(-\w+)""")
#: `hpcgpu.runtime.launch` becomes what is after its ``--``, in its own process, which has ``-P``.
BECOMES = {"worker_command.j2", "scheduler_command.j2"}


def test_each_python_that_is_started_leaves_out_the_working_directory() -> None:
    files = [*(ROOT / "hpcgpu").rglob("*.py"), *(ROOT / "templates").rglob("*.j2")]
    found = {(path.name, flag) for path in files for flag in STARTS.findall(path.read_text())}
    assert {name for name, flag in found if flag != "-P"} == BECOMES
    assert {"start_from_form.py", "queue.py", "keep_manager_running.py", "single.sbatch.j2"} <= {
        name for name, _ in found
    }


def test_the_page_starts_the_installed_hpcgpu_whatever_the_server_s_directory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hpcgpu.py").write_text('print(\'{"name": "of a stranger"}\')')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="no-such-option"):
        start_from_form.run(["start", "--no-such-option"])


def test_a_request_for_the_help_of_the_command_is_refused() -> None:
    with pytest.raises(OptionError, match="'help' cannot be set from Jupyter"):
        start_from_form.arguments({"name": "demo", "options": {"help": True}})
