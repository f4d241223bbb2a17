"""Give what the C heap keeps of freed memory back to the system.

MLX's CPU arrays and large requests come from malloc. glibc keeps what is freed below a live block,
and ever larger blocks at the end of each thread's heap: a third of a 135M model's bytes stayed
resident after it was unloaded, and a controller that had answered bursts of 6,000 calls and some
large ones kept 200 MiB of which it used 13.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import Final, NoReturn

from mlxd_shared import config

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3


def trim_heap() -> None:
    """Return free pages of the heap to the system, where the C library can (glibc); any thread."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def bound_heap() -> None:
    """Keep glibc from raising the sizes above which it gives blocks back; as a process starts.

    By itself it raises both with the largest block that was freed, to 32 and 64 MiB; and the free
    end of a thread's heap is given back as it is freed, or never: `malloc_trim` passes it over.
    """
    set_option = _c_function("mallopt")
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, config.HEAP_BLOCK_BYTES_MAX)
        set_option(M_TRIM_THRESHOLD, config.HEAP_BLOCK_BYTES_MAX)


async def keep_heap_trimmed(
    *,
    idle: Callable[[], bool] = lambda: True,
    used_s: Callable[[], float] = time.process_time,
    trim: Callable[[], None] = trim_heap,
    every_s: float = config.HEAP_LOOK_S,
) -> NoReturn:
    """Trim the heap after each period in which the process worked. Runs until it is cancelled.

    A trim takes some milliseconds of a thread, and finds pages that were freed without any growth:
    how much is resident does not say whether one is due.

    idle: whether a trim would be in nobody's way now; until then it is put off.
    used_s: gives the processor time that the process has used, in seconds.
    every_s: seconds between two looks.
    """
    trimmed_s = used_s()
    while True:
        await asyncio.sleep(every_s)
        if used_s() - trimmed_s >= config.HEAP_WORK_S and idle():
            await asyncio.to_thread(trim)
            trimmed_s = used_s()


def _c_function(name: str) -> Callable[..., object] | None:
    """Return a function of the C library; None: it has none of that name."""
    try:
        function: Callable[..., object] = ctypes.CDLL(None)[name]
    except AttributeError:
        return None
    return function
