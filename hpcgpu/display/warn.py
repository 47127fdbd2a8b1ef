"""Warnings that name the user's own line of code, or none."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from hpcgpu.errors import ClusterWarning

#: Modules that call this package without a line of the user's code: the event loop in its thread, the command line.
_NO_USER = ("asyncio", "threading", "tornado", "click")
#: The file of a warning that no line of the user's code caused.
_NOWHERE = "hpcgpu"
_before = warnings.formatwarning


def warn(message: str) -> None:
    """Warn about a cluster, at the line of the user's program that caused the warning.

    `warnings.warn` finds the source line by a fixed number of frames. In the event loop's thread this is a line of this
    package, which does not help the user.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) in ("hpcgpu", "distributed"):
        frame = frame.f_back
    if frame is None or _package(frame) in _NO_USER:
        warnings.formatwarning = _format
        warnings.warn_explicit(message, ClusterWarning, _NOWHERE, 0)
    else:
        warnings.warn_explicit(message, ClusterWarning, frame.f_code.co_filename, frame.f_lineno)


def _format(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning without a source line if it has none; another package may have replaced `formatwarning`."""
    if filename == _NOWHERE:
        return f"{category.__name__}: {message}\n"
    return _before(message, category, filename, lineno, line)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".", 1)[0]
