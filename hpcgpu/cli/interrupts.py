"""Signals that interrupt a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM, and the SIGHUP of a closed terminal, interrupt the block as Ctrl-C does.

    Later signals do not disturb the cleanup.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]

    def interrupt(number: int, frame: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handled(interrupt, *numbers):
        yield


@contextlib.contextmanager
def handled(handle: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """Handle these signals in the block. A signal that is ignored stays ignored, such as SIGHUP under nohup."""
    earlier = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in earlier.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
