"""Waiting for what the event loop brings about by itself, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TURNS_MAX = 10_000_000
"""More than any test takes before its timeout."""


async def turn_until(holds: Callable[[], bool]) -> None:
    """Let the event loop go round until `holds`."""
    for _ in range(TURNS_MAX):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")
