"""The real clock."""

from __future__ import annotations

import time


class SystemClock:
    """Implements ports.Clock."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()
