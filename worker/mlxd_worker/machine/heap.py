"""Give what the C heap keeps of freed memory back to the system.

MLX's CPU arrays come from malloc. glibc keeps what is freed below a live block: a third of a 135M
model's bytes stayed resident after it was unloaded.
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
