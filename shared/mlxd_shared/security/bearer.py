"""What refused callers are told, and what is logged about them."""

from __future__ import annotations

import time

from mlxd_shared import config
from mlxd_shared.ops.logs import get_logger

REFUSAL = "valid credentials are needed"
"""All that a refused caller is told."""
_log = get_logger("security")


class Refusals:
    """The log of refused callers: a line at most every REFUSAL_LOG_INTERVAL_S, with the count."""

    def __init__(self) -> None:
        self._unsaid = 0
        self._said_s = -config.REFUSAL_LOG_INTERVAL_S

    def note(self, peer: str) -> None:
        """Count one refusal; `peer` is where it came from."""
        self._unsaid += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= config.REFUSAL_LOG_INTERVAL_S:
            _log.warning("calls without valid credentials", count=self._unsaid, last_peer=peer)
            self._unsaid, self._said_s = 0, now_s
