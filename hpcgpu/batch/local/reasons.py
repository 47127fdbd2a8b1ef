"""What the words of the embedded queue mean."""

from __future__ import annotations

from hpcgpu.batch.base import Outlook, Reasons

_PENDING = {
    "Priority": (Outlook.WAIT, "earlier jobs come first"),
    "Resources": (Outlook.WAIT, "it waits for a free GPU, or for a free slot of this machine"),
    "Dependency": (Outlook.WAIT, "it starts once the scheduler job has started"),
}

REASONS = Reasons(pending=_PENDING.get, failed={"NonZeroExitCode": "its script failed"})
