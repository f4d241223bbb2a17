"""Give what the C heap keeps of freed memory back to the system.

MLX's CPU arrays and large requests come from malloc. glibc keeps what is freed below a live block:
a third of a 135M model's bytes stayed resident after it was unloaded, and a controller that had
refused 24 texts of 8 MiB at once kept 0.8 GiB.
"""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return free pages of the heap to the system, where the C library can (glibc); any thread."""
    try:
        trim = ctypes.CDLL(None)["malloc_trim"]
    except AttributeError:
        return
    trim(ctypes.c_size_t(0))
