"""Cancels all jobs when the program ends: at exit, on SIGTERM, and on SIGHUP (a closed ssh session).

dask-jobqueue leaves all of them in the queue on the last two. SIGINT needs no handler: Python turns it into
KeyboardInterrupt.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType

from hpcgpu.cluster.dispatcher import Dispatcher
from hpcgpu.display.words import listed

__all__ = ["guard", "unguard"]

_guarded: set[Dispatcher] = set()
#: Those whose jobs are being cancelled right now.
_ending: list[Dispatcher] = []
_TIMEOUT = 20.0


def guard(dispatcher: Dispatcher) -> None:
    """Cancel these jobs when the program ends, unless they have ended by then."""
    _guarded.add(dispatcher)
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers; the exit hook works nevertheless
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # the program's own handler, and nohup's SIG_IGN, are left alone
            signal.signal(number, _on_signal)


def unguard(dispatcher: Dispatcher) -> None:
    """Forget jobs that have all ended."""
    _guarded.discard(dispatcher)


def _on_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if not _guarded:  # all is closed: as if this handler had never been
        os.kill(os.getpid(), number)
        return
    if _ending:  # a session ends with both signals: the second one must not break off what the first one began
        return
    _cancel_all()
    sys.exit(128 + number)  # lets `with` blocks and exit hooks run


def _forget_in_child() -> None:
    """Remove the handlers in a child of multiprocessing.

    It must not cancel its parent's jobs when it ends, and must end at once when it is terminated.

    A handler in Python runs between two instructions only: a signal just before a wait for a lock would go unseen, and
    the child, and the pool that waits for it, would wait for ever.
    """
    _guarded.clear()
    _ending.clear()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _cancel_all() -> None:
    for dispatcher in list(_guarded):
        if dispatcher.closing and not dispatcher.left():
            continue
        _ending.append(dispatcher)
        try:
            dispatcher.cancel_all(_TIMEOUT)
        except Exception as error:  # the other clusters' jobs must nevertheless be cancelled
            with contextlib.suppress(OSError, ValueError):  # stderr may be gone with the terminal
                left = listed(dispatcher.left())
                print(f"hpcgpu: could not cancel {left}: {error}. {dispatcher.advice()}", file=sys.stderr)
        finally:
            _ending.remove(dispatcher)
