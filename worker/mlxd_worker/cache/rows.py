"""The rows of one model: the table that places them, their contents, every layer's cache, in step.

Invariants:
- All layers have the same rows in the same places: what the table decides is carried out in all of
  them together (`changes`).
- Every pass goes through `plan`: a write beyond what a row reserved, or not where the row stands,
  is refused there, on the host, before anything is dispatched.
- If carrying out a change fails (out of memory), layers may differ: the owner must end the process.
"""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlxd_models.sizes.arena_sizes import capacity_classes, slot_sizes
from mlxd_worker.cache.arenas.chunks import plan_chunks
from mlxd_worker.cache.arenas.judged import JudgedSlots
from mlxd_worker.cache.arenas.layout import Layout, arrange, group_of
from mlxd_worker.cache.arenas.plan import Chunk, StepPlan
from mlxd_worker.cache.arenas.table import RowTable
from mlxd_worker.cache.base import Change, Clear, Kind, LayerCache, Open, RowError, RowId
from mlxd_worker.cache.changes import LIFTED_NBYTES, carry_out
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.layers.shapes import AttentionShape, all_shapes
from mlxd_worker.cache.layers.slots import SlotLayout, lay_by_slots, positions_of, slot_caches
from mlxd_worker.cache.layers.tokens import RowSlots, TokenLayout, lay_rows, lay_tokens, step_of
from mlxd_worker.kernels.device import runs_cpu


class RowCaches:
    """All layers' caches under one row table. One owner: the engine thread."""

    def __init__(
        self,
        layers: Sequence[LayerCache | None],
        *,
        context_max: int,
        rows_max: int,
        bounded_shapes: bool | None = None,
        keeps_spares: bool = False,
        lifted_nbytes: int = LIFTED_NBYTES,
        in_place: bool = False,
    ) -> None:
        """Take ownership of `layers` (empty caches; None for a stateless layer).

        `lifted_nbytes`: what may be out of its arena at once while rows move, see `changes`.

        `in_place`: the model's passes write by kernels, in place. Where all layers are standard,
        one arena then has room for all rows at full length, and no row ever moves (decision 0075).

        `keeps_spares`: arenas without rows are kept for later rows, until `rest`.

        `bounded_shapes` keeps attention to few shapes (`shapes`) at the price of reading more than
        what is there; None means wherever MLX keys graphs or kernels by shape. On a CPU it keys
        nothing, and the softmax is a scalar loop (8 layers, 32 rows of 100 tokens: 16 ms of
        attention to a multiple of 32 positions, 19 to 256).
        """
        self.layers = tuple(layers)
        self.standard = all(
            layer is not None and layer.kind is Kind.STANDARD for layer in self.layers
        )
        """Whether every layer keeps all keys and values as they are."""
        self.sliceable = all(layer is not None and layer.kind.sliceable for layer in self.layers)
        """Whether every layer keeps every position's entry."""
        self.bounded_shapes = not runs_cpu() if bounded_shapes is None else bounded_shapes
        self.in_place = in_place and self.standard and self.bounded_shapes
        """Whether passes go over tokens (`by_tokens`) in one arena."""
        self.table = RowTable(
            context_max=context_max,
            rows_max=rows_max,
            keeps_spares=keeps_spares,
            sinks=not self.bounded_shapes,
            one_class=not self.bounded_shapes and _only_slides(self.layers),
            whole=self.in_place,
        )
        self._spans = capacity_classes(context_max, rows_max)
        self._sizes = slot_sizes(rows_max)
        self._lifted_nbytes = lifted_nbytes
        self.contents = RowContents(
            self.layers, self.table.place, lifted_nbytes=lifted_nbytes, in_place=self.in_place
        )
        self._stateful = tuple(layer for layer in self.layers if layer is not None)
        self._rest: Callable[[], None] | None = None
        self._layout: Layout | None = None
        self._slot_layout: SlotLayout | None = None
        self._row_slots: RowSlots | None = None
        self._judged = JudgedSlots(in_place=self.in_place)
        self._slotwise = self.bounded_shapes and slot_caches(self.layers) is not None

    def precede(self, rest: Callable[[], None]) -> None:
        """Have `rest` called before a join or a restored prefix changes any array."""
        self._rest = self.contents.rest = rest

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows, in the order in which a batch costs no gathering."""
        return self.table.rows

    @property
    def nbytes(self) -> int:
        """The exact bytes of all live arrays; snapshots are `contents.book.nbytes`."""
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

    def shapes(self) -> tuple[AttentionShape, ...]:
        """Return every shape that attention takes where `bounded_shapes`, at most 64."""
        table = self.table
        return all_shapes(context_max=table.context_max, rows_max=table.rows_max)

    def rehearse(self, row: RowId, *, capacity: int, slots: int) -> None:
        """Join a row, the only one, in an arena of just this shape, to warm that shape up.

        Raises:
            RowError: other rows are there, or rows never see such an arena.
        """
        changes = self.table.rehearse(row, capacity=capacity, slots=slots)
        self.contents.join(row)
        self._carry_out(self._judged.clear_less(changes))

    def join(
        self, row: RowId, *, tokens: int, tokens_max: int | None = None, coming: int = 1
    ) -> bool:
        """Give a new, empty row a place for `tokens` tokens; False: there is none now.

        It costs nothing to other rows. Where it says False, ask again after `tend`. tokens_max:
        what the row may become; coming: how many such rows are about to join, this one included.

        Raises:
            RowError: a row known already, a full table, or `tokens` out of range.
        """
        changes = self.table.join(row, tokens=tokens, tokens_max=tokens_max, coming=coming)
        if changes is None:
            return False
        changes = self._judged.clear_less(changes)
        if self._rest is not None and any(isinstance(each, Open | Clear) for each in changes):
            self._rest()
        self.contents.join(row)
        self._carry_out(changes)
        return True

    def reserve(self, row: RowId, *, tokens: int) -> None:
        """Make sure that `row` can hold `tokens` tokens, keeping its contents.

        Raises:
            RowError: unknown row, or `tokens` out of range.
        """
        self.reserve_all({row: tokens})

    def reserve_all(
        self, wanted: Mapping[RowId, int], *, before: Callable[[], None] | None = None
    ) -> None:
        """Make sure that each row can hold its tokens; those that cross together do so at once.

        before: called before any array is changed, and only then.

        Raises:
            RowError: unknown row, or tokens out of range.
        """
        self._change(self.table.reserve(wanted), before)

    def leave(self, row: RowId, *, sound: bool = True) -> None:
        """Free a row's place; an arena without rows is kept for others while there is room.

        sound: whether all that it held are numbers.

        Raises:
            RowError: unknown row.
        """
        tokens = self.contents.offset(row)
        self.contents.leaving(row)
        if sound:
            self._judged.note(self.table.place(row), tokens)
        self._carry_out(self._judged.clear_less(self.table.leave(row)))

    def tend(self, *, before: Callable[[], None] | None = None) -> None:
        """Move at most one row, so that there is room for others; once a step.

        before: called before any array is changed, and only then.
        """
        self._change(self.table.tend(), before)

    def rest(self) -> None:
        """Release the arenas that are kept for rows to come."""
        self._carry_out(self._judged.clear_less(self.table.rest()))

    def join_nbytes(self, tokens: int, *, tokens_max: int | None = None, coming: int = 1) -> int:
        """Return by how many bytes such a `join` would make the caches grow.

        Its recurrent states, which come with its first pass, are counted.

        Raises:
            RowError: `tokens` is out of range.
        """
        opened, closed = self.table.opened_by_join(tokens, tokens_max=tokens_max, coming=coming)
        states = sum(s.slot_nbytes(0) for s in self._stateful if s.kind is Kind.RECURRENT)
        grows = 0 if opened is None else self._nbytes_of(opened)
        return states + grows - sum(self._nbytes_of(spare) for spare in closed)

    def plan(
        self,
        rows: tuple[RowId, ...],
        *,
        offsets: mx.array,
        lengths: tuple[int, ...],
        width: int,
        dtype: mx.Dtype,
        counts: tuple[int, ...] = (),
        lasts: tuple[int, ...] = (),
    ) -> StepPlan:
        """Return how a batch of `rows` x `width` tokens meets the arenas; masks are of `dtype`.

        The rows stand at `lengths` from now on, so the pass must be carried out. counts: where the
        batch is several rows' chunks, over `sliceable` layers: the tokens of each. lasts: the last
        position that each token of chunks sees, within its own; empty: its own.

        Raises:
            RowError: an unknown or doubled row, one whose length exceeds what it reserved, or one
                that does not stand at its length - `width`, or its count.
        """
        widths = counts or (width,) * len(rows)
        self._check(rows, lengths, widths)
        self.contents.append_each(rows, lengths, widths)
        if counts:
            assert self.sliceable, "other layers read chunks one by one"
            places, few = self.table.places(rows), self.bounded_shapes
            return plan_chunks(
                places, lengths, counts, lasts=lasts, dtype=dtype, bounded_shapes=few
            )
        if len(rows) == 1 and (width > 1 or not self.bounded_shapes):
            plan = self._plan_chunk(rows[0], offsets, lengths[0], width=width, dtype=dtype)
            return plan if plan.chunk is None or not lasts else plan.seeing(lasts)
        layout = self._layout
        if layout is None or layout.rows != rows or layout.version != self.table.version:
            layout = arrange(self.table, rows, whole_arenas=self.bounded_shapes)
            self._layout = layout
        groups = tuple(
            group_of(part, offsets, lengths, width=width, whole_arenas=self.bounded_shapes)
            for part in layout.groups
        )
        return StepPlan(
            width=width,
            dtype=dtype,
            groups=groups,
            order=layout.order,
            places=layout.places,
            bounded_shapes=self.bounded_shapes,
        )

    def by_slots(
        self, rows: tuple[RowId, ...], lengths: tuple[int, ...], *, lone_row: bool
    ) -> tuple[SlotLayout, mx.array] | None:
        """Return how a pass of one token a row lies by slots, and where each flat row writes.

        As with `plan` the rows stand at `lengths` from now on. None, and nothing has changed: the
        pass cannot be done like this, and takes a `plan`.

        Raises:
            RowError: as `plan`.
        """
        if not self._slotwise:
            return None
        self._check(rows, lengths, (1,) * len(rows))
        layout = self._slot_layout
        known = layout is not None and (layout.rows, layout.version) == (rows, self.table.version)
        if layout is None or not known or (layout.alone is not None) > lone_row:
            layout = lay_by_slots(self.table, rows, lone_row=lone_row)
            self._slot_layout = layout if lone_row else None
        waiting = {row: self.contents.offset(row) for _, row in layout.waiting}
        if any(
            offset >= self.table.capacity(row) or self.contents.is_ahead(row)
            for row, offset in waiting.items()
        ):
            return None  # a row that is full, or put ahead, has no position that could be written
        self.contents.append_each(rows, lengths, (1,) * len(rows))
        for row, offset in waiting.items():
            self.contents.appending(row, offset, offset)
        return layout, positions_of(layout, lengths, waiting)

    def by_tokens(
        self,
        rows: tuple[RowId, ...],
        lengths: tuple[int, ...],
        counts: tuple[int, ...],
        *,
        most: int,
        least: int = 1,
    ) -> TokenLayout | None:
        """Return how a pass over `counts` tokens of each row lies, for kernels that write in place.

        As with `plan` the rows stand at `lengths` from now on. None, and nothing has changed: the
        pass takes a `plan`. most: the most tokens where a row has several; 0: no row may have.
        least: the fewest flat tokens, those that are copies included.

        Raises:
            RowError: as `plan`.
        """
        if not self.in_place:
            return None
        self._check(rows, lengths, counts)
        if max(counts) > 1:
            places, slots = self.table.places(rows), self.table.rows_max
            layout = lay_tokens(places, lengths, counts, slots=slots, most=most, least=least)
        else:
            layout = step_of(self._slots_of(rows, lengths, least), lengths)
        if layout is not None:
            self.contents.append_each(rows, lengths, counts)
        return layout

    def _slots_of(self, rows: tuple[RowId, ...], lengths: tuple[int, ...], least: int) -> RowSlots:
        """Return how one token of each row lies; made anew where rows or places have changed."""
        kept, version = self._row_slots, self.table.version
        if kept is None or (kept.rows, kept.version) != (rows, version) or kept.layout.flat < least:
            places = self.table.places(rows)
            kept = self._row_slots = lay_rows(
                rows,
                places,
                lengths,
                slots=self.table.rows_max,
                version=version,
                sizes=self._sizes,
                least=least,
            )
        return kept

    def _nbytes_of(self, arena: Open) -> int:
        """Return the bytes of an arena of such a shape, in all layers."""
        by_slot = (s for s in self._stateful if s.kind is not Kind.RECURRENT)
        return sum(layer.slot_nbytes(arena.capacity) * arena.slots for layer in by_slot)

    def _change(self, changes: Sequence[Change], before: Callable[[], None] | None) -> None:
        if changes and before is not None:
            before()
        self._carry_out(self._judged.clear_less(changes))

    def _carry_out(self, changes: Sequence[Change]) -> None:
        carry_out(changes, self._stateful, lifted_nbytes=self._lifted_nbytes)

    def _check(
        self, rows: tuple[RowId, ...], lengths: tuple[int, ...], widths: tuple[int, ...]
    ) -> None:
        if not rows or len(set(rows)) != len(rows) or not len(lengths) == len(widths) == len(rows):
            raise RowError(f"{len(rows)} rows, {len(set(rows))} distinct, {len(lengths)} lengths")
        places = self.table.places(rows)
        for row, length, width, place in zip(rows, lengths, widths, places, strict=True):
            if not width <= length <= place.capacity:
                most = place.capacity
                raise RowError(f"row {row}: {length} tokens after {width}, {most} reserved")

    def _plan_chunk(
        self, row: RowId, offsets: mx.array, length: int, *, width: int, dtype: mx.Dtype
    ) -> StepPlan:
        place = self.table.place(row)
        slot = mx.array([place.slot], dtype=mx.int32)
        chunk = Chunk(
            arena=place.arena,
            capacity=place.capacity,
            slot=place.slot,
            length=length,
            start=mx.concatenate([slot, offsets]),
            span=next(span for span in self._spans if span >= length) if self.in_place else 0,
        )
        return StepPlan(
            width=width,
            dtype=dtype,
            chunk=chunk,
            places=(place,),
            bounded_shapes=self.bounded_shapes,
        )


def _only_slides(layers: Sequence[LayerCache | None]) -> bool:
    """Tell whether what a row takes ends at a window.

    Then classes save little, and arenas of several take up to three times as much (decision 0026).
    """
    kinds = {layer.kind for layer in layers if layer is not None}
    return Kind.ROTATING in kinds and kinds <= {Kind.ROTATING, Kind.RECURRENT}
