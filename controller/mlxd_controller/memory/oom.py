"""How often the kernel has ended a process for want of memory, so that other kills are told apart.

Source: `oom_kill` in /proc/vmstat, of Linux 4.13 and later, which counts ends by the machine's want
and by a cgroup's alike, each before its SIGKILL is delivered.
"""

from __future__ import annotations

import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def oom_kills(vmstat: Path = VMSTAT) -> int | None:
    """Return how many processes have been ended since the machine began; None where none tells."""
    try:
        lines = vmstat.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.split() for line in lines)
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), None)


def killed_from_outside(exit_code: int | None, *, before: int | None, now: int | None) -> bool:
    """Return whether somebody killed a process, so that nothing it was at work on is to blame.

    No process comes to SIGKILL by itself but by want of memory; `before` and `now` count such ends
    when it began and after its own. Where nobody counts them, nobody is cleared.
    """
    return exit_code == -signal.SIGKILL and before is not None and before == now
