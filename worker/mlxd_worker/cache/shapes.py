"""The shapes that attention takes where MLX keys graphs or kernels by shape: few, and known.

Invariants:
- A batch of rows reads whole arenas: all slots, all of their capacity, one query position a row.
- A prompt's chunk reads its row's capacity with queries padded to one of `CHUNK_WIDTHS`.
- On a CPU nothing is keyed by shape: there spans are exact, and none of this is used.
"""

from dataclasses import dataclass

from mlxd_shared.arena_sizes import capacity_classes, slot_sizes
from mlxd_worker.cache.attention import CHUNK_WIDTHS, padded_width
from mlxd_worker.cache.plan import StepPlan

SHAPES_MAX = 64
"""Shapes of one model's attention, whatever its context and rows."""


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
    return tuple(decode + chunks)


def shapes_of(plan: StepPlan) -> set[AttentionShape]:
    """Return the shapes that a pass of bounded shapes takes."""
    assert plan.bounded_shapes, "other passes take any"
    if plan.chunk is None:
        return {AttentionShape(g.capacity, g.slots_used, plan.width) for g in plan.groups}
    most = CHUNK_WIDTHS[-1]
    widths = [min(plan.width - first, most) for first in range(0, plan.width, most)]
    return {AttentionShape(plan.chunk.capacity, 1, padded_width(width)) for width in widths}
