"""Attention over arenas: what the caches of keys and values share, whatever they hold.

Invariants:
- Masks are additive, in the plan's type, and made once a pass for all layers of one geometry.
- The heads that share keys become query positions of one head: with one position a row an array
  mask would switch every fused kernel off.
- A sink is a score of a head beside those of the positions: it takes its share of the attention
  and gives nothing.
- Where MLX keys graphs or kernels by shape, a chunk's queries are padded, in here alone, to one of
  `CHUNK_WIDTHS`, and all of the row's capacity is read. No cache ever sees a padding token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.sizes.pass_sizes import BLOCK_QUERIES
from mlxd_shared import config
from mlxd_worker.cache.arenas.plan import Chunk, Group, StepPlan
from mlxd_worker.kernels.exponentials import (
    LOG2_E,
    by_powers,
    softmax,
    softmax_beside,
    softmax_of_powers,
)
from mlxd_worker.machine.lanes import side_by_side

CHUNK_WIDTHS = (64, config.PREFILL_CHUNK_TOKENS)
"""Query positions of a chunk's attention where shapes must be few; a wider chunk takes several."""

CAUSAL_WIDTHS = (512, 1024, 2048)
"""Query positions of a chunk that begins at a multiple of its width, where keys are copied out: one
call without a mask, over exactly what its last query sees. So few widths have few shapes."""

WORTH_CUTTING = 1024
"""So much is to be left of a prompt that a chunk is cut for it: a pass more costs as much as a mask
does for some of these."""

CAUSAL_WARMED = 8192
"""Positions up to which chunks without a mask are run before anybody asks; each place is a shape of
its own, which takes a tenth of a second when it is met first."""

SCORE_VALUES = 10
"""Exponentials that one score of a single query costs: its key and value must be read as well."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One pass of a layer: what its tokens ask, what they add, and how they attend.

    `queries` are `[N, heads, width, head_dim]`, `keys` and `values` those of the same tokens,
    `[N, kv_heads, width, head_dim]`, in the batch's order. `sinks`, `[heads]`, are scores beside
    those of every query.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    plan: StepPlan
    scale: float
    sinks: mx.array | None = None


def members(array: mx.array, group: Group) -> mx.array:
    """Return the rows of a batch's array `[N, ...]` that live in this arena, `[m, ...]`."""
    if group.members is not None:
        return array[group.members]
    if group.count == array.shape[0]:
        return array
    return array[group.first : group.first + group.count]


def by_slot(array: mx.array, group: Group) -> mx.array:
    """Return a batch's array `[N, ...]` slot by slot, `[slots_used, ...]`.

    A slot whose row is not in the batch takes another row's; chunks become rows of one width.
    """
    chunks = group.chunks
    if chunks is not None:  # a token a row, `[T, heads, 1, *]`
        _, heads, _, values = array.shape
        taken = mx.take(array, chunks.source, axis=0)
        return taken.reshape(-1, chunks.width, heads, values).swapaxes(1, 2)
    return members(array, group) if group.queriers is None else array[group.queriers]


def seen_of(array: mx.array, group: Group, span: int) -> mx.array:
    """Return the first `span` columns of the rows that a group's queries read, slot by slot.

    A view where they are neighbours in their arena; it dies with the step.
    """
    if group.chunks is None:
        return array[: group.slots_used, :, :span]
    slots = group.chunks.slots
    if isinstance(slots, slice):
        return array[slots, :, :span]
    return mx.take(array[:, :, :span], slots, axis=0)


def from_slots(array: mx.array, group: Group) -> mx.array:
    """Return the members' rows of an array that is slot by slot, `[slots_used, ...]`."""
    return array if group.queriers is None else mx.take(array, group.write_slots[:, 0], axis=0)


def additive(hidden: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return a mask that is -inf where `hidden`, else 0."""
    return mx.where(hidden, mx.array(-mx.inf, dtype=dtype), mx.array(0, dtype=dtype))


def visible_by_slot(group: Group, span: int, plan: StepPlan) -> mx.array:
    """Return the mask `[slots_used, 1, width, span]` of columns that are positions from 0 on."""

    def make() -> mx.array:
        last = group.last_visible[:, None, :, None]
        return additive(mx.arange(span, dtype=mx.int32) > last, plan.dtype)

    width = 1 if group.chunks is None else group.chunks.width
    return plan.share(("visible", group.arena, span, width), make)


def shares_of(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Return what each of `[..., span]` scores takes of the attention; sinks are `[..., 1]`."""
    return softmax(scores) if sinks is None else softmax_beside(scores, sinks)


def folded_sinks(sinks: mx.array | None, kv_heads: int, width: int) -> mx.array | None:
    """Return sinks `[heads]` as `[1, kv_heads, heads / kv_heads * width, 1]`."""
    if sinks is None:
        return None
    return mx.repeat(sinks.reshape(1, kv_heads, -1, 1), width, axis=2)


def attend_slots(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    *,
    scale: float,
    sinks: mx.array | None = None,
    fused: bool = True,
) -> mx.array:
    """Return what queries `[slots, heads, width, head_dim]` read, as wide as the values.

    Keys and values are `[slots, kv_heads, span, head_dim]`, the mask `[slots, 1, width, span]`,
    sinks `[heads]`; values may be of another width. fused: whether one of MLX's kernels may do it.
    """
    slots, heads, width, head_dim = queries.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    shared = heads // kv_heads
    folded = mx.broadcast_to(mask[:, :, None], (slots, 1, shared, width, span))
    folded = folded.reshape(slots, 1, shared * width, span)
    grouped = queries.reshape(slots, kv_heads, shared * width, head_dim)
    beside = folded_sinks(sinks, kv_heads, width)
    powers = by_powers() and queries.dtype == mx.float32

    def read(part: slice) -> mx.array:
        if powers and beside is None:
            exponents = (grouped[part] * (scale * LOG2_E)) @ keys[part].swapaxes(-1, -2)
            return softmax_of_powers(exponents + folded[part]) @ values[part]
        if not fused:  # scores in full, as kernels have them: rounded, one of 20 is 0.06 off
            wide_queries, wide_keys = (its[part].astype(mx.float32) for its in (grouped, keys))
            scores = (wide_queries @ wide_keys.swapaxes(-1, -2)) * scale + folded[part]
            return shares_of(scores, beside).astype(values.dtype) @ values[part]
        if beside is not None:  # MLX has one sink for all queries of a head
            scores = (grouped[part] * scale) @ keys[part].swapaxes(-1, -2) + folded[part]
            return shares_of(scores, beside) @ values[part]
        return mx.fast.scaled_dot_product_attention(
            grouped[part], keys[part], values[part], scale=scale, mask=folded[part]
        )

    cost = slots * heads * width * span * SCORE_VALUES
    result = side_by_side(read, count=slots, values=cost, axis=0)
    return result.reshape(slots, heads, width, values.shape[-1])


def attend_group(inputs: Asked, keys: mx.array, values: mx.array, group: Group) -> mx.array:
    """Return what a batch's queries read of one arena, slot by slot.

    Keys and values are all that the rows hold (`seen_of`). The chunks of several rows come in any
    number and width: where MLX builds a kernel for each shape, single products are used instead.
    """
    mask = visible_by_slot(group, keys.shape[2], inputs.plan)
    fused = group.chunks is None or not inputs.plan.bounded_shapes
    rows = by_slot(inputs.queries, group)
    return attend_slots(
        rows, keys, values, mask, scale=inputs.scale, sinks=inputs.sinks, fused=fused
    )


def attend_chunk(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    length: int,
    scale: float,
    sinks: mx.array | None = None,
    lasts: Sequence[int] = (),
) -> mx.array:
    """Return what one row's last positions `[1, heads, width, head_dim]` read of all `length`.

    Keys and values are `[1, kv_heads, capacity, head_dim]`, the queries' own among them; values may
    be of another width, which is then the result's.
    """
    width = queries.shape[2]
    if width == 1 and not by_powers():
        seen_keys, seen_values = keys[:, :, :length], values[:, :, :length]
        return mx.fast.scaled_dot_product_attention(
            queries, seen_keys, seen_values, scale=scale, sinks=sinks
        )
    scaled, parts = queries * scale, []
    for first in range(0, width, BLOCK_QUERIES):
        block = scaled[:, :, first : first + BLOCK_QUERIES]
        own = lasts[first : first + BLOCK_QUERIES]
        seen = max(own) + 1 if own else length - width + first + block.shape[2]
        parts.append(_attend_block(block, keys[:, :, :seen], values[:, :, :seen], sinks, own))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _attend_block(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    sinks: mx.array | None,
    lasts: Sequence[int],
) -> mx.array:
    """Return what the last positions' scaled queries read, in single steps: a CPU fuses none.

    lasts: up to which position each reads; empty: up to its own.

    The exponentials go side by side; the products, which use all cores by themselves, do not.
    """
    _, heads, count, _ = queries.shape
    kv_heads, seen = keys.shape[1:3]
    folded = (1, kv_heads, heads // kv_heads * count, -1)
    scores = (queries.reshape(folded) @ keys.swapaxes(-1, -2)).reshape(1, heads, count, seen)
    if count > 1:
        own = mx.array(list(lasts)) if lasts else mx.arange(seen - count, seen)
        later = mx.arange(seen) > own[:, None]
        scores = scores + additive(later, scores.dtype)
    beside = None if sinks is None else sinks.reshape(1, heads, 1, 1)
    weights = side_by_side(
        lambda part: shares_of(scores[:, part], None if beside is None else beside[:, part]),
        count=heads,
        values=scores.size,
        axis=1,
    )
    return (weights.reshape(folded) @ values).reshape(1, heads, count, values.shape[-1])


def attend_row(inputs: Asked, keys: mx.array, values: mx.array, chunk: Chunk) -> mx.array:
    """Return what a chunk's queries read of their whole row.

    Keys and values are `[1, kv_heads, capacity, head_dim]`, column p being position p.
    """
    queries, plan, scale, sinks = inputs.queries, inputs.plan, inputs.scale, inputs.sinks
    if not plan.bounded_shapes:
        length, lasts = chunk.length, chunk.lasts
        return attend_chunk(
            queries, keys, values, length=length, scale=scale, sinks=sinks, lasts=lasts
        )
    span, width = chunk.span or keys.shape[2], queries.shape[2]
    keys, values = keys[:, :, :span], values[:, :, :span]
    most = CHUNK_WIDTHS[-1]
    parts = []
    for first in range(0, width, most):
        block = queries[:, :, first : first + most]
        padded = padded_width(block.shape[2])
        mask = plan.share(
            ("causal", chunk.arena, span, first),
            lambda first=first, padded=padded: _causal(  # type: ignore[misc]
                chunk.start[1:] + first,
                padded,
                span,
                plan.dtype,
                lasts=chunk.last_seen(first, most, padded),
            ),
        )
        wide = mx.pad(block, [(0, 0), (0, 0), (0, padded - block.shape[2]), (0, 0)])
        read = mx.fast.scaled_dot_product_attention(
            wide, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        parts.append(read[:, :, : block.shape[2]])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def causal_width(start: int, count: int, capacity: int) -> int | None:
    """Return as how wide a chunk of `count` tokens from `start` on is attended causally. Pure.

    None: it is attended under a mask, in blocks of `CHUNK_WIDTHS`.
    """
    width = next((wide for wide in CAUSAL_WIDTHS if wide >= count), None)
    if width is None or start % width or start + width > capacity:
        return None
    return width


def unmasked_count(start: int, count: int, *, wanted: int, capacity: int) -> int:
    """Return how many of `count` tokens from `start` on are best read as one chunk. Pure.

    As many as need no mask (`causal_width`); where `start` is not at a multiple of a width, those
    up to the next one, so that what follows needs none. All of them, under a mask if need be, where
    less than `WORTH_CUTTING` would be left of the prompt, of which so much is `wanted`.
    """
    least = CAUSAL_WIDTHS[0]
    fitting = [width for width in CAUSAL_WIDTHS if start % width == 0 and start + width <= capacity]
    chunk = fitting[-1] if fitting else least - start % least
    return count if chunk >= count or wanted - chunk < WORTH_CUTTING else chunk


def attend_causally(inputs: Asked, keys: mx.array, values: mx.array, width: int) -> mx.array:
    """Return what a chunk's queries read, which are the first of `width` query positions.

    Keys and values are `[1, kv_heads, n, head_dim]`, of all positions up to the last query's; what
    stands where no token of the chunk does is seen by padding alone.
    """
    queries, count = inputs.queries, inputs.queries.shape[2]
    if count < width:
        queries = mx.pad(queries, [(0, 0), (0, 0), (0, width - count), (0, 0)])
    read = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=inputs.scale, mask="causal", sinks=inputs.sinks
    )
    return read if count == width else read[:, :, :count]


def padded_width(width: int) -> int:
    """Return the smallest of `CHUNK_WIDTHS` that holds `width` queries, at most the last."""
    return next(wide for wide in CHUNK_WIDTHS if wide >= width)


def _causal(
    start: mx.array, width: int, span: int, dtype: mx.Dtype, *, lasts: Sequence[int] = ()
) -> mx.array:
    """Return the mask `[1, 1, width, span]` of queries from the position `start` [1] on.

    Queries beyond the row's capacity are padding; they see all of it. lasts: the last position that
    each sees; empty: its own.
    """
    asking = mx.array(list(lasts)) if lasts else start + mx.arange(width, dtype=mx.int32)
    hidden = mx.arange(span, dtype=mx.int32) > asking[:, None]
    return additive(hidden[None, None], dtype)
