"""Packages beside hpcgpu that add a batch system: what to install where that system is found.

This file alone names them. It has nothing else of these systems, and changes nothing where their packages are there.
"""

from __future__ import annotations

import shutil

#: By the name of the batch system: a command that no other system has, and the package.
PACKAGES = {
    "gridengine": ("qconf", "hpcgpu-gridengine"),
    "htcondor": ("condor_submit", "hpcgpu-htcondor"),
}


def advice(name: str) -> str:
    """Return what to install for a batch system of this name; empty if no package is known."""
    _, package = PACKAGES.get(name, ("", ""))
    return f"for {name}, run: pip install {package}" if package else ""


def found_here(installed: list[str]) -> list[str]:
    """Return a sentence for each batch system of this machine whose package is not installed."""
    return [
        f"`{command}` is here, but hpcgpu does not know its batch system: {advice(name)}"
        for name, (command, _) in PACKAGES.items()
        if name not in installed and shutil.which(command) is not None
    ]
