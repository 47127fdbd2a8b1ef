"""Somebody who does not belong to a cluster, and tries to use it: with nothing, and with what other clusters have.

A program of its own: processes of a job have the credentials of their cluster in the environment, see `attempts`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed import Client

from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.directory import ClusterDirectory

REFUSED = "all strangers were refused\n"
#: The same in a program that runs in a job.
TRY_STRANGERS = (
    f"sys.path.append({str(Path(__file__).parent)!r}); from strangers import attempts; "
    "print(attempts({address}, {others!r}), flush=True)"
)


def other_clusters(home: Path) -> list[Path]:
    """Directories of two other clusters, with the credentials of a TLS and of an authenticated one."""
    kinds: list[bool | str] = [True, "authenticated"]
    return [
        create_directory.claim(
            home / "others" / str(kind), lambda submits: [], security=kind, complete=certificates_and_keys.create
        ).path
        for kind in kinds
    ]


def attempts(address: str, others: Sequence[Path | str]) -> str:
    """Run the strangers; return `REFUSED`, or who was let in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DASK_", "HPCGPU_"))}
    argv = [sys.executable, __file__, address, *map(str, others)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=250)
    return done.stdout or done.stderr


def main(address: str, *others: str) -> None:
    has: dict[str, Any] = {"nothing": None}
    has |= {other: certificates_and_keys.security(ClusterDirectory(Path(other))) for other in others}
    let_in = False
    for name, security in has.items():
        own, place = address.split("://")
        for scheme in ("tcp", own):
            try:
                Client(f"{scheme}://{place}", security=security, timeout="2s", set_as_default=False)
            except Exception:
                gc.collect()  # see `refused` in tests/local/test_listeners.py
                continue
            print(f"somebody with {name} was let in over {scheme}")
            let_in = True
    if not let_in:
        print(REFUSED, end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
