"""What the tests of jobs in containers need of the machine.

python tests/local/container_tools.py install    # Debian or Ubuntu: Charliecloud, Podman and debootstrap
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "slurm"))

from bed import BedError, install_packages, is_root, which

#: By package, the command that it brings. None is a part of Docker. Where runc is there, Podman alone brings no crun.
BROUGHT = {
    "charliecloud-runtime": "ch-run",
    "podman": "podman",
    "crun": "crun",
    "uidmap": "newuidmap",
    "debootstrap": "debootstrap",
}
#: The interpreter that every user may run; the image has the same.
CLIENT = "/usr/bin/python3"


def missing_packages() -> list[str]:
    """The packages that are not there."""
    return [package for package, command in BROUGHT.items() if which(command) is None]


def release() -> str:
    """The code name of the distribution that this machine runs, such as bookworm."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def client_version() -> str:
    """Major and minor version of the distribution's Python, such as 3.11."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([CLIENT, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def why_not() -> str | None:
    """Why no image can be made here, or None if one can."""
    if not is_root():
        return "it makes an image and a user, which needs root"
    if missing := missing_packages():
        return f"not installed: {' '.join(missing)} (run: python tests/local/container_tools.py install)"
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(CLIENT).exists() or (theirs := client_version()) != here:
        found = f"is Python {theirs}" if Path(CLIENT).exists() else "does not exist"
        return f"the image gets the packages of these tests, which run in Python {here}, but {CLIENT} {found}"
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]  # a chroot and some hosts refuse it
    tried = subprocess.run([*as_nobody, "unshare", "--user", "--mount", "true"], capture_output=True, text=True)
    return f"an ordinary user may make no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def install() -> None:
    """Install the packages that are missing."""
    install_packages(missing_packages())


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    try:
        install()
    except (BedError, subprocess.SubprocessError) as error:
        sys.exit(f"containers: {error}")
