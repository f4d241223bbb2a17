"""The most memory that a process of the tests has had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_nbytes() -> int:
    """Return the most memory that this process has had.

    Not asked of getrusage on Linux: there it begins at the peak of the process that forked.
    """
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
