"""Last import of the fork server (`hpcgpu.runtime.forkserver`): makes what it has imported ready to be shared.

Never import this module elsewhere.
"""

from __future__ import annotations

import gc
import os
import sys

__all__: list[str] = []

_SERVER = os.getpid()


def _own_random_numbers() -> None:
    """Give a worker random numbers of its own: forks would have equal ones. `random` of Python does so itself."""
    if os.getppid() == _SERVER and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


os.register_at_fork(after_in_child=_own_random_numbers)
gc.collect()
gc.freeze()  # else the first garbage collection of each worker copies what they share
