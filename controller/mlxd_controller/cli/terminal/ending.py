"""Signals that end a command which has changed the terminal, once that is as it was."""

from __future__ import annotations

import os
import signal

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def end_by(number: int) -> None:
    """End this process by a signal, as it would have without us."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
