"""A way for messages of a page to a widget while a cell runs.

A kernel that runs a cell takes no messages from JupyterLab. So a thread of it listens on a Unix socket, in a directory
that the extension of the Jupyter server has made for that. The extension passes messages of pages on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcgpu.client import jupyter_dashboard_link
from hpcgpu.errors import NotTrusted
from hpcgpu.posix.ownership import check

#: Bytes of a message, and seconds for it.
_LARGEST, _WITHIN = 1 << 16, 10.0


class Inbox:
    """Takes messages until it is closed.

    Parameters
    ----------
    directory : Path
    receive : callable
        Called with each message, in a thread. It must not block.

    Raises
    ------
    OSError
        There can be no socket.
    """

    def __init__(self, directory: Path, receive: Callable[[Any], object]) -> None:
        #: By this name the extension finds it.
        self.name = secrets.token_hex(8)
        self._path, self._receive = directory / self.name, receive
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(None)  # a notebook may have called socket.setdefaulttimeout
        try:
            self._socket.bind(str(self._path))
        except OSError:  # a long TMPDIR, for example
            self._socket.close()
            raise
        self._socket.listen()
        # else a process that a cell forks would keep it open after the kernel, and nobody would answer
        os.register_at_fork(after_in_child=self._socket.close)
        threading.Thread(target=self._listen, name="hpcgpu-inbox", daemon=True).start()

    def _listen(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(Exception):  # what is no message does not end the thread
                    connection.settimeout(_WITHIN)
                    with connection.makefile("rb") as stream:
                        self._receive(json.loads(stream.read(_LARGEST)))
                    connection.sendall(b"received")

    def close(self) -> None:
        """Take no more messages."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def opened(receive: Callable[[Any], object]) -> Inbox | None:
    """Return a new inbox; None if no Jupyter server has made a place for it."""
    directory = jupyter_dashboard_link.inboxes()
    if directory is None:
        return None
    with contextlib.suppress(OSError, NotTrusted):  # a kernel in a container, for example, does not see that directory
        check(directory)
        return Inbox(directory, receive)
    return None
