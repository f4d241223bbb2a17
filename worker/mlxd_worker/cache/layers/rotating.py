"""The rotating cache: keys and values of a sliding window, in rings.

Invariants:
- An arena is two arrays `[slots, kv_heads, ring, head_dim]`, `ring = min(capacity, window)`;
  position p of a row is column `p % ring`. A row of an arena shorter than the window never wraps.
- A query at position q sees the positions (q - window, q]. After q is written, a ring of `window`
  holds exactly these: one token a row is written first, and the mask is the standard cache's,
  since every column is visible from `q = ring - 1` on.
- Several tokens that wrap would overwrite what the first of them still sees. They attend the old
  ring, in ring order, beside their own keys, and go into the ring when that has been evaluated: a
  read still in the queue would turn the write into a copy of the whole arena (16 slots of 1 MiB:
  a peak of 18.9 MB instead of 2.1). So such a pass cannot be traced by `mx.compile`. It serves
  rows of a batch just as well (for drafts), at the price of copying the rings that it reads.
- Never quantised: a window is small, and its keys are rewritten again and again.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlxd_models.sizes.pass_sizes import PIECE_TOKENS_MIN
from mlxd_worker.cache.arenas.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.base import Kind, Place, RowError
from mlxd_worker.cache.layers.attention import (
    CHUNK_WIDTHS,
    Asked,
    additive,
    attend_chunk,
    attend_row,
    attend_slots,
    by_slot,
    from_slots,
    members,
    padded_width,
    visible_by_slot,
)
from mlxd_worker.cache.layers.store import (
    ArenaCache,
    Part,
    columns_copy,
    scatter,
    start_at,
    write_block,
)


class RotatingCache(ArenaCache):
    """One layer's sliding window. One owner: the engine thread."""

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        window: int,
        dtype: mx.Dtype,
        value_dim: int | None = None,
    ) -> None:
        """Return a cache without arenas; `window` counts the query's own position.

        By default values are as wide as keys.
        """
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.window = window
        parts = (
            Part("keys", kv_heads, self.head_dim, dtype),
            Part("values", kv_heads, self.value_dim, dtype),
        )
        super().__init__(Kind.ROTATING, parts)

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return keys and values `[1, kv_heads, n, head_dim]` of the last positions before `stop`.

        n is `min(stop, window)`, whatever `start`; the row stands at `stop`, or further where it
        has not wrapped. Lazy, compact.
        """
        del start
        arrays = self._arenas[place.arena]
        count = min(stop, self.window)
        first = (stop - count) % ring_of(arrays)
        return tuple(columns_copy(array, place.slot, first, count) for array in arrays)

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned, lazy; the row then stands at `stop`.

        Raises:
            RowError: `state` is not that of a row at `stop`, or the place is too small for it.
        """
        del start
        arrays, count = self._arenas[place.arena], state[0].shape[2]
        if count != min(stop, self.window) or stop > place.capacity:
            problem = f"{count} positions before {stop} in a window of {self.window}"
            raise RowError(f"{problem} and a capacity of {place.capacity}")
        write_positions(arrays, place.slot, stop - count, state)

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell whether nothing that a row at `target` sees has been overwritten by `offset`."""
        return target == offset or offset <= self.window

    def attend(self, inputs: Asked) -> mx.array:
        """Write keys and values; return what the queries read, in their shape and order.

        Lazy, except for several tokens of a row that wrap: their result is evaluated.
        """
        plan = inputs.plan
        if plan.chunk is not None:
            return self._attend_chunk(inputs, plan.chunk)
        return plan.in_order([self._attend_group(inputs, group) for group in plan.groups])

    def fetch(
        self, keys: mx.array, values: mx.array, plan: StepPlan, group: Group | None
    ) -> tuple[mx.array, mx.array]:
        """Write one part of a pass, a group or the chunk; return what it may read.

        All is slot by slot. Columns are the ring's, position p being column `p % ring`; but where
        several tokens wrap they are copies of the positions before them (a chunk's in order, up to
        the window; a group's as the ring has them), and then their own. Lazy, but for such a chunk.
        """
        if group is None:
            assert plan.chunk is not None, "a pass without groups is a chunk"
            return self._fetch_chunk(keys, values, plan.chunk, plan)
        arrays, slots = self._arenas[group.arena], group.slots_used
        tokens = [from_slots(new, group) for new in (keys, values)]
        if keys.shape[2] == 1 or group.span <= ring_of(arrays):
            scatter_last(arrays, group, tokens)
            seen = min(group.span, ring_of(arrays))
            seen_keys, seen_values = (array[:slots, :, :seen] for array in arrays)
            return seen_keys, seen_values
        used = mx.arange(slots, dtype=mx.int32)
        held = [mx.take(array, used, axis=0) for array in arrays]
        mx.eval(held)
        scatter_last(arrays, group, tokens)
        return _after(held[0], keys), _after(held[1], values)

    def _fetch_chunk(
        self, keys: mx.array, values: mx.array, chunk: Chunk, plan: StepPlan
    ) -> tuple[mx.array, mx.array]:
        arrays, before = self._arenas[chunk.arena], chunk.length - keys.shape[2]
        if keys.shape[2] == 1 or chunk.length <= ring_of(arrays):
            write_positions(arrays, chunk.slot, before, (keys, values))
            row, seen = slice(chunk.slot, chunk.slot + 1), min(chunk.length, ring_of(arrays))
            seen_keys, seen_values = (array[row, :, :seen] for array in arrays)
            return seen_keys, seen_values
        held = self.read(plan.places[0], 0, before)
        mx.eval(held)
        whole = _after(held[0], keys), _after(held[1], values)
        kept = tuple(array[:, :, -self.window :] for array in whole)
        self.write(plan.places[0], 0, chunk.length, kept)
        mx.eval(arrays)
        return whole

    def _attend_chunk(self, inputs: Asked, chunk: Chunk) -> mx.array:
        arrays, width = self._arenas[chunk.arena], inputs.keys.shape[2]
        ring, row = ring_of(arrays), slice(chunk.slot, chunk.slot + 1)
        if chunk.length > ring and width > 1:
            return self._attend_wrapping(inputs, chunk)
        write_positions(arrays, chunk.slot, chunk.length - width, (inputs.keys, inputs.values))
        keys, values = (array[row] for array in arrays)
        if chunk.length > ring:
            return attend_chunk(
                inputs.queries, keys, values, length=ring, scale=inputs.scale, sinks=inputs.sinks
            )
        return attend_row(inputs, keys, values, chunk)

    def _attend_wrapping(self, inputs: Asked, chunk: Chunk) -> mx.array:
        """Attend several tokens of one row piece by piece, each written before the next reads."""
        arrays, plan, width = self._arenas[chunk.arena], inputs.plan, inputs.keys.shape[2]
        ring, row = ring_of(arrays), slice(chunk.slot, chunk.slot + 1)
        before = chunk.length - width
        piece = CHUNK_WIDTHS[-1] if plan.bounded_shapes else max(self.window, PIECE_TOKENS_MIN)
        parts = []
        for first, count in pieces_of(width, piece, before, chunk.lasts):
            new_queries, new_keys, new_values = (
                array[:, :, first : first + count]
                for array in (inputs.queries, inputs.keys, inputs.values)
            )
            padding = padded_width(count) - count if plan.bounded_shapes else 0
            held = ring if plan.bounded_shapes else min(before + first, ring)
            read = mx.fast.scaled_dot_product_attention(
                _pad(new_queries, padding),
                _after(arrays[0][row, :, :held], _pad(new_keys, padding)),
                _after(arrays[1][row, :, :held], _pad(new_values, padding)),
                scale=inputs.scale,
                mask=self._chunk_mask(chunk, plan, first, held, count + padding),
                sinks=inputs.sinks,
            )
            parts.append(read[:, :, :count])
            mx.eval(parts[-1])
            kept = min(count, ring)
            write_positions(
                arrays,
                chunk.slot,
                before + first + count - kept,
                (new_keys[:, :, count - kept :], new_values[:, :, count - kept :]),
            )
        # Else what each layer writes, and what that is a view of, would be there to the very end.
        mx.eval(arrays)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _chunk_mask(
        self, chunk: Chunk, plan: StepPlan, first: int, held: int, width: int
    ) -> mx.array:
        return plan.share(
            ("sliding", self.window, chunk.arena, first),
            lambda: sliding_mask(
                self.window,
                chunk.start[1:] + first,
                held,
                width,
                plan.dtype,
                lasts=chunk.last_seen(first, width, width),
            ),
        )

    def _attend_group(self, inputs: Asked, group: Group) -> mx.array:
        arrays, plan, width = self._arenas[group.arena], inputs.plan, inputs.keys.shape[2]
        by_row, slots, ring = by_slot(inputs.queries, group), group.slots_used, ring_of(arrays)
        tokens = [members(new, group) for new in (inputs.keys, inputs.values)]
        if width == 1 or group.span <= ring:
            scatter_last(arrays, group, tokens)
            seen = min(group.span, ring)
            keys, values = (array[:slots, :, :seen] for array in arrays)
            mask = visible_by_slot(group, seen, plan)
            return attend_slots(by_row, keys, values, mask, scale=inputs.scale, sinks=inputs.sinks)
        mask = plan.share(
            ("sliding", self.window, group.arena),
            lambda: sliding_mask(self.window, group.last_visible[:, 0], ring, width, plan.dtype),
        )
        result = attend_slots(
            by_row,
            _after(arrays[0][:slots], by_slot(inputs.keys, group)),
            _after(arrays[1][:slots], by_slot(inputs.values, group)),
            mask,
            scale=inputs.scale,
            sinks=inputs.sinks,
        )
        mx.eval(result)
        scatter_last(arrays, group, tokens)
        return result

    def _count_kept(self, start: int, stop: int) -> int:
        del start
        return min(stop, self.window)

    def _columns(self, capacity: int) -> int:
        return min(capacity, self.window)


def _pad(array: mx.array, columns: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, columns), (0, 0)]) if columns else array


def _after(held: mx.array, new: mx.array) -> mx.array:
    return mx.concatenate([held, new], axis=2)


def ring_of(arrays: Sequence[mx.array]) -> int:
    """Return the columns of each row of an arena."""
    return arrays[0].shape[2]


def scatter_last(arrays: list[mx.array], group: Group, tokens: Sequence[mx.array]) -> None:
    """Write a batch's tokens `[m, kv_heads, n, head_dim]`, each row's at its own positions, lazy.

    Of more tokens than the ring has columns only the last find room.
    """
    ring = ring_of(arrays)
    columns = group.write_positions[:, -ring:] % ring
    scatter(arrays, group.write_slots, columns, (new[:, :, -ring:] for new in tokens))


def write_positions(
    arrays: list[mx.array], slot: int, first: int, tokens: Sequence[mx.array]
) -> None:
    """Write `[1, kv_heads, n, head_dim]`, n <= ring, as the positions from `first` on, lazy."""
    ring, count = ring_of(arrays), tokens[0].shape[2]
    column = first % ring
    fits = min(count, ring - column)
    write_block(arrays, start_at(slot, column), (new[:, :, :fits] for new in tokens))
    if fits < count:
        write_block(arrays, start_at(slot, 0), (new[:, :, fits:] for new in tokens))


def pieces_of(
    width: int, piece: int, start: int, lasts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the first token and the number of each piece of a chunk from position `start` on. Pure.

    Of `piece` tokens at most, but none ends where one of its tokens sees further (`Chunk.lasts`):
    it ends before that, or where all of that fills more than a piece, behind.
    """
    first = 0
    while first < width:
        end = min(first + piece, width)
        if lasts:
            while end > first and lasts[end - 1] >= start + end:
                end -= 1
            end = end if end > first else lasts[first] - start + 1
        yield first, end - first
        first = end


def sliding_mask(
    window: int,
    first: mx.array,
    held: int,
    width: int,
    dtype: mx.Dtype,
    *,
    lasts: Sequence[int] = (),
) -> mx.array:
    """Return `[rows, 1, width, held + width]` for rings before the position `first` [rows].

    The first `held` columns are the ring's, which has as many as the window; the others are the
    positions from `first` on. lasts: the last position that each query sees; empty: its own.
    """
    positions = wrapping_positions(window, first, held, width)[:, None, None, :]
    asking = (first[:, None] + mx.arange(width, dtype=mx.int32))[:, None, :, None]
    last = mx.array(list(lasts))[:, None] if lasts else asking
    hidden = (positions < 0) | (positions > last) | (positions <= asking - window)
    return additive(hidden, dtype)


def wrapping_positions(ring: int, first: mx.array, held: int, width: int) -> mx.array:
    """Return the positions `[rows, held + width]` of the same columns; negative: none."""
    first = first[:, None]
    # The latest position before `first` that falls on the column.
    old = first - ring + (mx.arange(held, dtype=mx.int32) - first) % ring
    return mx.concatenate([old, first + mx.arange(width, dtype=mx.int32)], axis=1)
