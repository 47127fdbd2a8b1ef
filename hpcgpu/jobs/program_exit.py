"""Cancels all jobs when the program ends: at exit, on SIGTERM, and on SIGHUP (a closed ssh session).

dask-jobqueue leaves all jobs in the queue after SIGTERM and SIGHUP. SIGINT needs no handler: Python raises
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

from hpcgpu.display.counts_and_durations import listed
from hpcgpu.jobs.submit_and_cancel import Dispatcher, Ending

_guarded: set[Dispatcher] = set()
#: The dispatchers whose jobs are being cancelled now.
_ending: list[Dispatcher] = []
_TIMEOUT = 20.0


def cancel_at_exit(dispatcher: Dispatcher) -> None:
    """Cancel these jobs when the program ends, unless they have ended by then."""
    _guarded.add(dispatcher)
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers; the exit hook works in any thread
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # do not replace the program's own handler or nohup's SIG_IGN
            signal.signal(number, _on_signal)


def keep_at_exit(dispatcher: Dispatcher) -> None:
    """Cancel nothing when the program ends: the jobs have ended, must stay, or belong to another program."""
    _guarded.discard(dispatcher)


def _on_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if not _guarded:  # all clusters are closed: act as if this handler was never installed
        os.kill(os.getpid(), number)
        return
    if _ending:  # a session ends with both signals: the second one must not interrupt the handler of the first one
        return
    _cancel_all()
    sys.exit(128 + number)  # lets `with` blocks and exit hooks run


def _forget_in_child() -> None:
    """Remove the handlers in a child of multiprocessing.

    The child must not cancel its parent's jobs when it ends, and must end at once when it is terminated.

    Python runs a handler only between two instructions. If a signal arrives just before the child waits for a lock, the
    handler does not run. The child, and the pool that waits for it, would wait for ever.
    """
    _guarded.clear()
    _ending.clear()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _cancel_all() -> None:
    for dispatcher in list(_guarded):
        if dispatcher.ending is Ending.CANCELLED and not dispatcher.left():
            continue
        _ending.append(dispatcher)
        try:
            dispatcher.cancel_all(_TIMEOUT)
        except Exception as error:  # the jobs of the other clusters must be cancelled, too
            with contextlib.suppress(OSError, ValueError):  # stderr may be gone with the terminal
                left = listed(dispatcher.left())
                print(f"hpcgpu: could not cancel {left}: {error}. {dispatcher.advice()}", file=sys.stderr)
        finally:
            _ending.remove(dispatcher)
