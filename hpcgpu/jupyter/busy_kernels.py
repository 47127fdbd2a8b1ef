"""Passes messages of a page on to widgets whose kernel may be busy: see `hpcgpu.widget.busy_kernel_inbox`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from hpcgpu.errors import NoCluster
from hpcgpu.jupyter.base_handler import Handler, answering
from hpcgpu.posix.ownership import check
from hpcgpu.posix.threads import in_thread

#: Seconds in which a widget takes a message.
_WITHIN = 10.0


class Message(Handler):
    """A message of a page to a widget."""

    def initialize(self, inboxes: Path) -> None:
        self.inboxes = inboxes

    @answering
    async def post(self, name: str) -> Any:
        """Pass it on; the widget answers its page itself.

        Raises
        ------
        NoCluster
            Nobody takes it: the kernel has ended, or computes without letting another thread of it run.
        """
        content, answer = json.dumps(self.body()).encode(), b""
        with contextlib.suppress(FileNotFoundError, ConnectionError, TimeoutError):
            await in_thread(lambda: check(self.inboxes))
            async with asyncio.timeout(_WITHIN):
                reader, writer = await asyncio.open_unix_connection(self.inboxes / name)
                with contextlib.closing(writer):
                    writer.write(content)
                    writer.write_eof()
                    answer = await reader.read()
        if not answer:
            raise NoCluster("the kernel does not take it")
        return {}
