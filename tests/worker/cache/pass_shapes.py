"""What shapes of attention a pass takes, to be compared with those that were warmed."""

from __future__ import annotations

from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.cache.layers.attention import CHUNK_WIDTHS, padded_width
from mlxd_worker.cache.layers.shapes import AttentionShape


def shapes_of(plan: StepPlan) -> set[AttentionShape]:
    """Return the shapes that a pass of bounded shapes takes."""
    assert plan.bounded_shapes, "other passes take any"
    if plan.chunk is None:
        return {AttentionShape(g.capacity, g.slots_used, plan.width) for g in plan.groups}
    most = CHUNK_WIDTHS[-1]
    widths = [min(plan.width - first, most) for first in range(0, plan.width, most)]
    return {AttentionShape(plan.chunk.capacity, 1, padded_width(width)) for width in widths}
