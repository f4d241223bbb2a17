"""Attention over arenas: what the caches of keys and values share, whatever they hold.

Invariants:
- Masks are additive, in the plan's type, and made once a pass for all layers of one geometry.
- The heads that share keys become query positions of one head: with one position a row an array
  mask would switch every fused kernel off.
"""

import mlx.core as mx

from mlxd_worker.cache.plan import Group, StepPlan


def members(array: mx.array, group: Group) -> mx.array:
    """Return the rows of a batch's array `[N, ...]` that live in this arena, `[m, ...]`."""
    if group.members is not None:
        return array[group.members]
    if group.count == array.shape[0]:
        return array
    return array[group.first : group.first + group.count]


def by_slot(array: mx.array, group: Group) -> mx.array:
    """Return a batch's array `[N, ...]` slot by slot, `[slots_used, ...]`.

    A slot whose row is not in the batch takes another row's.
    """
    return members(array, group) if group.queriers is None else array[group.queriers]


def additive(hidden: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return a mask that is -inf where `hidden`, else 0."""
    return mx.where(hidden, mx.array(-mx.inf, dtype=dtype), mx.array(0, dtype=dtype))


def visible_by_slot(group: Group, span: int, plan: StepPlan) -> mx.array:
    """Return the mask `[slots_used, 1, width, span]` of columns that are positions from 0 on."""

    def make() -> mx.array:
        last = group.last_visible[:, None, :, None]
        return additive(mx.arange(span, dtype=mx.int32) > last, plan.dtype)

    return plan.shared(("visible", group.arena, span), make)


def attend_slots(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, *, scale: float
) -> mx.array:
    """Return what queries `[slots, heads, width, head_dim]` read, of the same shape.

    Keys and values are `[slots, kv_heads, span, head_dim]`, the mask `[slots, 1, width, span]`.
    """
    slots, heads, width, head_dim = queries.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    shared = heads // kv_heads
    folded = mx.broadcast_to(mask[:, :, None], (slots, 1, shared, width, span))
    result = mx.fast.scaled_dot_product_attention(
        queries.reshape(slots, kv_heads, shared * width, head_dim),
        keys,
        values,
        scale=scale,
        mask=folded.reshape(slots, 1, shared * width, span),
    )
    return result.reshape(slots, heads, width, head_dim)


def attend_chunk(
    queries: mx.array, keys: mx.array, values: mx.array, *, length: int, scale: float
) -> mx.array:
    """Return what one row's last positions `[1, heads, width, head_dim]` read of all `length`.

    Keys and values are `[1, kv_heads, capacity, head_dim]`, the queries' own among them.
    """
    width = queries.shape[2]
    return mx.fast.scaled_dot_product_attention(
        queries,
        keys[:, :, :length],
        values[:, :, :length],
        scale=scale,
        mask="causal" if width > 1 else None,
    )
