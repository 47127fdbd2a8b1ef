"""The table of what ran where, in docs/tested.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_what_ran_where_is_what_the_tests_report() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "ran.py"), "--check"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
