"""Handlers of signals on the event loop, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGINT)
"""What has a server stop."""


@contextmanager
def handling(handler: Callable[[int], object], *numbers: signal.Signals) -> Iterator[None]:
    """Call `handler` with the number of each of these signals. Needs a running event loop."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
