"""Threads that take what others leave of the processors.

Linux has a priority for each thread; elsewhere all of a process's threads have one, and nothing is
changed.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


def give_way(niceness: int) -> None:
    """Have this thread run `niceness` (1 to 19) behind others; nothing where that cannot be."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
