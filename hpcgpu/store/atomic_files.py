"""Files of a cluster directory, written so that readers on other machines see all of a file or nothing."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hpcgpu.posix import checked_files


class Files:
    """The files of one directory.

    Parameters
    ----------
    path : Path
        Of the directory, absolute; its last part is the cluster's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, mode 0600, so that readers see all of it or nothing."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
        except OSError as error:
            error.filename = str(self.path)  # that of a full disk names no file
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def refresh(self) -> None:
        """Make the NFS client ask the server for the content of the directory."""
        checked_files.refresh(self.path)
