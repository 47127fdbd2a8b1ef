"""Installs a wheel on another host, by ssh."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib import metadata
from typing import IO

from hpcgpu.errors import HostError
from hpcgpu.posix.printable import printable
from hpcgpu.ssh.failures import failure
from hpcgpu.ssh.far_side import PYTHON_LINK
from hpcgpu.ssh.login import Login

#: Whether all files of a wheel are installed as they are in it. It stands in two kinds of quotes, so it has none.
_SAME_FILES = (
    "import importlib.metadata, sys, zipfile; wheel, name, record, digest = sys.argv[1:]; "
    "archive = zipfile.ZipFile(wheel); [path] = [one for one in archive.namelist() if one.endswith(record)]; "
    "there = set(importlib.metadata.distribution(name).read_text(record).splitlines()); "
    "sys.exit(any(digest in line and line not in there for line in archive.read(path).decode().splitlines()))"
)
#: The remote command line. Its input: the path of an interpreter, or nothing; the name of the wheel; the Python of this
#: machine, and its Dask and distributed; the wheel. Without an interpreter it makes a private environment with these;
#: with the newest Python there if that one is not there. pip keeps another state of the same version, so the files are
#: compared. No value is part of the command line.
_COMMAND = (
    "sh -c 'set -e; umask 077; IFS= read -r python; IFS= read -r wheel; "
    "IFS= read -r same; IFS= read -r dask; IFS= read -r distributed; "
    f'link="{PYTHON_LINK}"; '
    'dir=$(dirname "$link")/environments; mkdir -p "$dir"; cat > "$dir/$wheel"; '
    'set -- "$dir/$wheel"; if [ -z "$python" ]; then set -- "$@" "$dask" "$distributed"; '
    'for name in "$same" python3.14 python3.13 python3.12 python3.11 python3; do '
    'if command -v "$name" > /dev/null && "$name" -c "import sys; sys.exit(sys.version_info < (3, 11))"; '
    'then python="$dir/$name/bin/python"; "$name" -P -m venv "$dir/$name"; break; fi; done; '
    'if [ -z "$python" ]; then echo "no Python 3.11 or later is on the PATH" >&2; exit 3; fi; fi; '
    'pip() { "$python" -P -m pip install --disable-pip-version-check "$@"; }; '
    f'pip "$@"; "$python" -P -c "{_SAME_FILES}" "$dir/$wheel" hpcgpu RECORD sha256 '
    '|| pip --no-deps --force-reinstall "$dir/$wheel"; '
    '"$python" -P -m hpcgpu --version; '
    'ln -sfn "$("$python" -P -c "import sys; print(sys.executable)")" "$link"; rm -f "$dir/$wheel"\''
)


def install(login: Login, wheel: str, content: bytes) -> str:
    """Install a wheel, into the environment of the login's interpreter or into a private one; return what it printed.

    Parameters
    ----------
    login : Login
    wheel : str
        Name of the file.
    content : bytes

    Raises
    ------
    HostError
        ssh fails, or pip does; the message has its words.
    """
    process = subprocess.Popen(
        login.command(_COMMAND), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    printed, errors = list[str](), list[str]()
    readers = [
        threading.Thread(target=_read, args=(process.stdout, printed)),
        threading.Thread(target=_read, args=(process.stderr, errors)),
    ]
    for reader in readers:
        reader.start()
    try:
        lines = login.python, wheel, *_same()
        process.stdin.write("".join(f"{line}\n" for line in lines).encode() + content)
        process.stdin.close()
    except OSError:  # ssh has ended: its exit code shows why
        pass
    code = process.wait()
    for reader in readers:
        reader.join()
    if code == 255:
        raise HostError(failure(login.host, code, "\n".join(errors), ""))
    if code:
        raise HostError(
            f"hpcgpu is not installed on {login.host}: {'; '.join(errors[-4:]) or 'no reason is known'}. If that host "
            "reaches no package index, install hpcgpu's dependencies there by the site's own way (a module, conda), "
            "then run this again with --python and the path of that Python"
        )
    return printed[-1] if printed else ""


def _same() -> tuple[str, str, str]:
    """Return what the private environment has in the version of this machine, because Dask sends Python objects."""
    dask, distributed = (f"{name}=={metadata.version(name)}" for name in ("dask", "distributed"))
    return f"python{sys.version_info.major}.{sys.version_info.minor}", dask, distributed


def _read(stream: IO[bytes], lines: list[str]) -> None:
    for line in stream:
        lines.append(printable(line.decode(errors="replace").strip()))
        print(lines[-1], file=sys.stderr, flush=True)
    stream.close()
