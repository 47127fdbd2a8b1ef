"""The packages that programs have uploaded to a cluster: the next scheduler of the cluster gets them too.

Each is a zip file, ``package-NAME.zip``, and a file of JSON beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from hpcgpu.errors import Damaged
from hpcgpu.posix import checked_files, json_records
from hpcgpu.store.directory import ClusterDirectory


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that was packed.

    Attributes
    ----------
    name : str
        Of the distribution.
    modules : tuple of str
        What can be imported.
    archive : bytes
        A zip file of what is installed.
    """

    name: str
    modules: tuple[str, ...]
    archive: bytes = field(default=b"", repr=False)


def keep(directory: ClusterDirectory, package: Package, replaced: Iterable[str] = ()) -> None:
    """Keep a package, in place of others.

    Raises
    ------
    OSError
        It cannot be written.
    """
    directory.write(f"package-{package.name}.zip", package.archive)
    directory.write(f"package-{package.name}.json", json.dumps({"name": package.name, "modules": package.modules}))
    for name in replaced:
        for kind in ("json", "zip"):
            (directory.path / f"package-{name}.{kind}").unlink(missing_ok=True)


def kept(directory: ClusterDirectory) -> list[Package]:
    """Return the packages that are kept; one that cannot be read is left out."""
    found = []
    for path in sorted(directory.path.glob("package-*.json")):
        with suppress(OSError, Damaged):
            about = json_records.read(path, Package)
            archive = checked_files.read(path.with_suffix(".zip"))
            found.append(Package(name=about.name, modules=about.modules, archive=archive))
    return found
