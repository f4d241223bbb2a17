"""The rows of one model: the table that places them and every layer's cache, kept in step.

Invariants:
- All layers have the same rows in the same places; a change is carried out layer by layer, so that
  growing an arena needs the room of one layer's old copy, not of all.
- Index arrays are rebuilt only when a row's place or the batch's rows change.
- A write beyond what a row reserved is refused here, on the host, before anything is dispatched.
- If carrying out a change fails (out of memory), layers may differ: the owner must end the process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.cache.base import Change, LayerCache, Move, Resize, RowError, RowId
from mlxd_worker.cache.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.table import CAPACITY_MIN, RowTable

FINE_SPAN = 32
"""Where shapes cost nothing, attention spans are multiples of this instead of powers of two."""


@dataclass(frozen=True, slots=True)
class _GroupLayout:
    """The part of a group that depends on places alone."""

    capacity: int
    batch_rows: tuple[int, ...]
    members: mx.array | None
    queriers: mx.array | None
    slots_used: int
    write_slots: mx.array


@dataclass(frozen=True, slots=True)
class _Layout:
    """The part of a plan that depends on places alone, and what it was made for."""

    rows: tuple[RowId, ...]
    version: int
    groups: tuple[_GroupLayout, ...]
    order: mx.array | None


class RowCaches:
    """All layers' caches under one row table. One owner: the engine thread."""

    def __init__(
        self,
        layers: Sequence[LayerCache | None],
        *,
        context_max: int,
        rows_max: int,
        fine_spans: bool | None = None,
    ) -> None:
        """Take ownership of `layers` (empty caches; None for a stateless layer).

        `fine_spans` lets a batch attend little more than its longest row, at the price of many
        shapes; None means where MLX runs on a CPU, which caches nothing by shape and whose softmax
        is a scalar loop (8 layers, 32 rows of 100 tokens: 16 ms of attention against 19).
        """
        self.layers = tuple(layers)
        self.table = RowTable(context_max=context_max, rows_max=rows_max)
        self._stateful = tuple(layer for layer in self.layers if layer is not None)
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._fine_spans = on_cpu if fine_spans is None else fine_spans
        self._layout: _Layout | None = None

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows, in the order in which a batch costs no gathering."""
        return self.table.rows

    @property
    def nbytes(self) -> int:
        """The exact bytes of all live arrays."""
        return sum(layer.nbytes for layer in self._stateful)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return all live arrays by name, for the ledger; do not keep them across a step."""
        return {
            f"layers.{index}.{name}": array
            for index, layer in enumerate(self.layers)
            if layer is not None
            for name, array in layer.arrays().items()
        }

    def state(self) -> list[mx.array]:
        """Return all live arrays: what to evaluate after a forward pass; do not keep them."""
        return [array for layer in self._stateful for array in layer.arrays().values()]

    def join(self, row: RowId, *, tokens: int) -> None:
        """Give a new row a place for `tokens` tokens; its contents start out zero.

        Raises:
            RowError: a row known already, a full table, or `tokens` out of range.
        """
        self._apply(self.table.join(row, tokens=tokens))

    def reserve(self, row: RowId, *, tokens: int) -> None:
        """Make sure that `row` can hold `tokens` tokens, keeping its contents.

        Raises:
            RowError: unknown row, or `tokens` out of range.
        """
        self._apply(self.table.reserve(row, tokens=tokens))

    def leave(self, row: RowId) -> None:
        """Free a row's place; an arena without rows is released.

        Raises:
            RowError: unknown row.
        """
        self._apply(self.table.leave(row))

    def join_nbytes(self, tokens: int) -> int:
        """Return by how many bytes one more row of `tokens` tokens would make the caches grow.

        Raises:
            RowError: `tokens` is out of range.
        """
        capacity = self.table.class_of(tokens)
        slots = self.table.slots_added(capacity)
        return slots * sum(layer.slot_nbytes(capacity) for layer in self._stateful)

    def plan(
        self,
        rows: tuple[RowId, ...],
        *,
        offsets: mx.array,
        lengths: tuple[int, ...],
        width: int,
        dtype: mx.Dtype,
    ) -> StepPlan:
        """Return how a batch of `rows` x `width` tokens meets the arenas; masks are of `dtype`.

        Raises:
            RowError: an unknown or doubled row, or one whose length exceeds what it reserved.
        """
        self._check(rows, lengths, width)
        if len(rows) == 1:
            return self._plan_chunk(rows[0], offsets, lengths[0], width)
        layout = self._layout
        if layout is None or layout.rows != rows or layout.version != self.table.version:
            layout = self._layout = self._arrange(rows)
        groups = tuple(
            _group(part, offsets, self._span(part, lengths), width=width, dtype=dtype)
            for part in layout.groups
        )
        return StepPlan(width=width, chunk=None, groups=groups, order=layout.order)

    def _span(self, part: _GroupLayout, lengths: tuple[int, ...]) -> int:
        longest = max(lengths[index] for index in part.batch_rows)
        if self._fine_spans:
            span = -(-longest // FINE_SPAN) * FINE_SPAN
        else:
            span = CAPACITY_MIN
            while span < longest:
                span *= 2
        return min(span, part.capacity)

    def _apply(self, changes: list[Change]) -> None:
        for layer in self._stateful:
            for change in changes:
                if isinstance(change, Resize):
                    layer.resize(change.capacity, slots=change.slots)
                elif isinstance(change, Move):
                    layer.move(change.source, change.target)
                else:
                    layer.clear(change.place)

    def _check(self, rows: tuple[RowId, ...], lengths: tuple[int, ...], width: int) -> None:
        if not rows or len(set(rows)) != len(rows) or len(lengths) != len(rows):
            raise RowError(f"{len(rows)} rows, {len(set(rows))} distinct, {len(lengths)} lengths")
        for row, length in zip(rows, lengths, strict=True):
            if not width <= length <= self.table.capacity(row):
                reserved = self.table.capacity(row)
                raise RowError(f"row {row}: {length} tokens after {width}, {reserved} reserved")

    def _plan_chunk(self, row: RowId, offsets: mx.array, length: int, width: int) -> StepPlan:
        place = self.table.place(row)
        start = mx.concatenate([mx.array([place.slot], dtype=mx.int32), offsets])
        chunk = Chunk(capacity=place.capacity, slot=place.slot, length=length, start=start)
        return StepPlan(width=width, chunk=chunk, groups=(), order=None)

    def _arrange(self, rows: tuple[RowId, ...]) -> _Layout:
        index_of = {row: index for index, row in enumerate(rows)}
        groups: list[_GroupLayout] = []
        result_of = [0] * len(rows)
        results = 0
        for capacity in self.table.arenas:
            residents = self.table.rows_of(capacity)
            slots = [slot for slot, row in enumerate(residents) if row in index_of]
            if not slots:
                continue
            slots_used = slots[-1] + 1
            batch_rows = tuple(index_of[residents[slot]] for slot in slots)
            for slot, index in zip(slots, batch_rows, strict=True):
                result_of[index] = results + slot
            results += slots_used
            queriers = tuple(index_of.get(row, batch_rows[0]) for row in residents[:slots_used])
            groups.append(
                _GroupLayout(
                    capacity=capacity,
                    batch_rows=batch_rows,
                    members=None if _consecutive(batch_rows) else _index(batch_rows),
                    queriers=None if queriers == batch_rows else _index(queriers),
                    slots_used=slots_used,
                    write_slots=_index(slots).reshape(-1, 1),
                )
            )
        in_order = result_of == list(range(results))
        return _Layout(
            rows=rows,
            version=self.table.version,
            groups=tuple(groups),
            order=None if in_order else _index(result_of),
        )


def _index(values: Sequence[int]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)


def _consecutive(values: Sequence[int]) -> bool:
    return list(values) == list(range(values[0], values[0] + len(values)))


def _group(
    part: _GroupLayout, offsets: mx.array, span: int, *, width: int, dtype: mx.Dtype
) -> Group:
    first = part.batch_rows[0]
    count = len(part.batch_rows)
    steps = mx.arange(width, dtype=mx.int32)
    own = offsets[first : first + count] if part.members is None else offsets[part.members]
    asked = own if part.queriers is None else offsets[part.queriers]
    last_visible = (asked[:, None] + steps)[:, None, :, None]
    hidden = mx.arange(span, dtype=mx.int32) > last_visible
    return Group(
        capacity=part.capacity,
        members=part.members,
        queriers=part.queriers,
        first=first,
        count=count,
        slots_used=part.slots_used,
        span=span,
        write_slots=part.write_slots,
        write_positions=own[:, None] + steps,
        mask=mx.where(hidden, mx.array(-mx.inf, dtype=dtype), mx.array(0, dtype=dtype)),
    )
