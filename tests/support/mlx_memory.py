"""MLX's memory as tests compare it: what live arrays hold, apart from garbage of other tests."""

from __future__ import annotations

import gc

import mlx.core as mx


def live_nbytes() -> int:
    """Return the bytes of live arrays, from where the peak is counted from now on.

    Arrays that only a reference cycle holds, such as a traceback of a test before, would be freed
    by Python's collector at any later moment: they are freed first. So is MLX's pool: a buffer out
    of it may be larger than what it is for. So a difference to this figure is the caller's own.
    """
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
