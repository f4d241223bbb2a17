"""The shapes that attention takes where MLX keys graphs or kernels by shape: few, and known.

Invariants:
- A batch of rows reads whole arenas: all slots, all of their capacity, one query position a row, or
  `WIDE_WIDTH` where rows guess. Those wide shapes are as many as the others leave room for, of the
  arenas with most slots first; where a batch would take another one, nobody guesses.
- A prompt's chunk reads its row's capacity with queries padded to one of `CHUNK_WIDTHS`.
- On a CPU nothing is keyed by shape: there spans are exact, and none of this is used.
"""

from dataclasses import dataclass

from mlxd_models.sizes.arena_sizes import capacity_classes, slot_sizes
from mlxd_worker.cache.layers.attention import CHUNK_WIDTHS

SHAPES_MAX = 64
"""Shapes of one model's attention, whatever its context and rows."""

WIDE_WIDTH = 8
"""Query positions a row in a step in which rows guess."""

WIDE_SLOTS_MAX = 16
"""Arenas with more slots have no wide shapes: so many rows are busy enough with one token each."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """What one attention call of a standard cache reads, but for the model's own widths."""

    capacity: int
    slots: int
    width: int
    """Query positions a slot."""


def all_shapes(*, context_max: int, rows_max: int) -> tuple[AttentionShape, ...]:
    """Return every shape in use for these bounds, at most `SHAPES_MAX`."""
    classes = capacity_classes(context_max, rows_max)
    decode = [AttentionShape(c, slots, 1) for c in classes for slots in slot_sizes(rows_max)]
    chunks = [AttentionShape(c, 1, width) for c in classes for width in CHUNK_WIDTHS]
    wide = [
        AttentionShape(c, slots, WIDE_WIDTH)
        for slots in sorted(slot_sizes(rows_max), reverse=True)
        for c in classes
        if 1 < slots <= WIDE_SLOTS_MAX
    ]
    return (*decode, *chunks, *wide)[:SHAPES_MAX]
