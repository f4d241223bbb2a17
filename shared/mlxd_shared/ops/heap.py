"""Give what the C heap keeps of freed memory back to the system.

MLX's CPU arrays and large requests come from malloc. glibc keeps what is freed below a live block:
a third of a 135M model's bytes stayed resident after it was unloaded, and a controller that had
answered 6,000 calls at once and some large ones kept 100 MiB of which it used 13.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import NoReturn

import psutil

from mlxd_shared import config


def trim_heap() -> None:
    """Return free pages of the heap to the system, where the C library can (glibc); any thread."""
    try:
        trim = ctypes.CDLL(None)["malloc_trim"]
    except AttributeError:
        return
    trim(ctypes.c_size_t(0))


def resident_nbytes() -> int:
    """Return the process's resident memory in bytes."""
    return int(psutil.Process().memory_info().rss)


async def keep_heap_trimmed(
    *,
    idle: Callable[[], bool] = lambda: True,
    resident: Callable[[], int] = resident_nbytes,
    trim: Callable[[], None] = trim_heap,
    every_s: float = config.HEAP_LOOK_S,
) -> NoReturn:
    """Trim the heap whenever the process has grown by HEAP_GROWTH_BYTES since it was smallest.

    Growth that trimming leaves is taken for live: it is not tried again until there is as much
    more. Runs until it is cancelled; trims on a thread.

    idle: whether a trim would be in nobody's way now.
    resident: gives the process's resident memory in bytes.
    every_s: seconds between two looks.
    """
    least_nbytes = resident()
    while True:
        await asyncio.sleep(every_s)
        least_nbytes = min(least_nbytes, now_nbytes := resident())
        if now_nbytes - least_nbytes >= config.HEAP_GROWTH_BYTES and idle():
            await asyncio.to_thread(trim)
            least_nbytes = resident()
