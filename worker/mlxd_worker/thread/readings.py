"""What the engine thread reads of the world: clock, memory, masks; all else follows from its calls.

Invariants:
- What depends on time, on memory or on the pace of other threads reads it here: where one model is
  divided over several processes, one of them reads, and the others are sent what was read
  (`mlxd_worker.distributed`).
"""

from __future__ import annotations

import time
from typing import Protocol

import mlx.core as mx
import psutil

from mlxd_shared.domain.devices import DeviceKind
from mlxd_worker.engine.masks.advance import Masks
from mlxd_worker.engine.masks.threads import MaskThreads


class Readings(Protocol):
    """Where readings come from."""

    def now_s(self) -> float:
        """Return the monotonic clock."""

    def held_nbytes(self) -> int:
        """Return what MLX holds, its pool included."""

    def available_nbytes(self, kind: DeviceKind) -> int:
        """Return what a model may take of the device's memory before any reserve."""

    def make_masks(self, threads: int) -> Masks:
        """Return what makes so many masks at once for one engine, or knows of them."""


class Local:
    """Readings of this process itself."""

    now_s = staticmethod(time.monotonic)
    """The clock itself: the engine reads it several times a step."""

    def held_nbytes(self) -> int:
        """Return what MLX holds, its pool included."""
        return mx.get_active_memory() + mx.get_cache_memory()

    def available_nbytes(self, kind: DeviceKind) -> int:
        """Return the machine's free memory; of a GPU MLX's limit, a part of its memory."""
        if kind is DeviceKind.CUDA:
            return mx.get_memory_limit()
        return psutil.virtual_memory().available

    def make_masks(self, threads: int) -> MaskThreads:
        """Return threads that make them."""
        return MaskThreads(threads, clock=self.now_s)


LOCAL = Local()
