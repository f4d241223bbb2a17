"""What holds a row, in a number: equal on all ranks of a model, or they differ."""

from __future__ import annotations

from typing import Final
from zlib import crc32

from mlxd_worker.engine.masks.advance import Advance, Follower

FREE: Final = -1
WAITS: Final = -2


def hold_of(follower: Follower | None, advance: Advance | None) -> int:
    """Return FREE, WAITS for a mask, or a hash of the mask that is in force."""
    if advance is not None:
        return WAITS
    return FREE if follower is None or not follower.is_awake else crc32(follower.mask())
