"""What the rows hold: how far each has come, what is kept of it, and how it is put back.

Invariants:
- All layers of a row stand at `offset(row)`. It moves forward by `appending` alone, which every
  pass goes through, back by `cut_back`, and anywhere else only by a `restore` that succeeded.
- Whatever a write is about to replace has been copied out before it: every open lazy snapshot of
  the row that reaches beyond the pass's start, at every pass, and what a restore overwrites.
- A restore happens wholly or not at all. What is put ahead of a row before it lies beyond the row's
  offset, where nothing has a meaning, until a restore moves the row there.
- Captures that fall due while the row grows are the schedule's until they are taken; what is never
  taken is closed when the row leaves.
- No arena's array is kept across a call, not even a view of one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxd_worker.cache.base import Kind, LayerCache, Place, RowError, RowId
from mlxd_worker.cache.changes import LIFTED_NBYTES, evaluate
from mlxd_worker.cache.kept import putting
from mlxd_worker.cache.kept.captures import Captures
from mlxd_worker.cache.kept.snapshot import Snapshot, SnapshotBook, allocate_exactly
from mlxd_worker.cache.kept.stacks import POSITION_AXIS, LayerState

Kept = Mapping[Kind, Snapshot]
"""Snapshots of all the model's kinds, taken at one offset."""


@dataclass(slots=True)
class _Row:
    """One row: its offset, and what is to be captured."""

    offset: int = 0
    reach: int = 0
    """A bound on the ends of its lazy snapshots, and of what was put ahead of it."""
    ahead: dict[tuple[Kind, int], int] = field(default_factory=dict)
    """Up to where each layer, by kind and number, has been put ahead of the offset."""
    captures: Captures[Kept] | None = None


class RowContents:
    """Offsets, snapshots and captures of all rows. One owner: the engine thread."""

    def __init__(
        self,
        layers: Sequence[LayerCache | None],
        place: Callable[[RowId], Place],
        *,
        lifted_nbytes: int = LIFTED_NBYTES,
        in_place: bool = False,
    ) -> None:
        """Look after the rows of `layers` (None for a stateless one), which `place` finds.

        lifted_nbytes: what may be out of its row at once, see `changes`. in_place: passes write by
        kernels, which go behind what is under way; whoever else writes calls `rest` first.
        """
        self._in_place = in_place
        self._lifted_nbytes = lifted_nbytes
        self._place = place
        self.layers: dict[Kind, list[LayerCache]] = {}
        """The layers that remember something, by kind; a capture has one snapshot of each."""
        for layer in layers:
            if layer is not None:
                self.layers.setdefault(layer.kind, []).append(layer)
        self._whole = [
            layer for kind, same in self.layers.items() if not kind.sliceable for layer in same
        ]
        """Those that do not go back by themselves to any offset; the others always do."""
        self._rows: dict[RowId, _Row] = {}
        self.rest: Callable[[], None] | None = None
        """What is called before arrays are written, but for a pass's own tokens."""
        self._putting = putting.putting_layers(layers) if in_place else ()
        self._read = putting.reader_of(self.layers, place)
        self.book = SnapshotBook(self._read, waits=not in_place)

    def offset(self, row: RowId) -> int:
        """Return how many tokens the row holds.

        Raises:
            RowError: unknown row.
        """
        return self._of(row).offset

    def join(self, row: RowId) -> None:
        """Note a new row, empty.

        Raises:
            RowError: the row is known.
        """
        if row in self._rows:
            raise RowError(f"row {row} joined twice")
        self._rows[row] = _Row()

    def appending(self, row: RowId, start: int, stop: int) -> None:
        """Get ready for a pass that writes positions [start, stop), and move the row to `stop`.

        Lazy snapshots that reach beyond `start` are copied out.

        Raises:
            RowError: unknown row, `start` is not where it stands, or `stop` lies before it, or the
                pass runs past an offset at which a state is to be captured.
        """
        state = self._of(row)
        if start != state.offset or stop < start:
            raise RowError(f"row {row} is at {state.offset}: it cannot write [{start}, {stop})")
        due = None if state.captures is None else self.next_stop(row)
        if due is not None and due < stop:
            raise RowError(f"row {row} writes [{start}, {stop}) past its capture at {due}")
        if state.reach > start:
            self._copy_out(row, start, None)
            # The row is about to write from here on, so nothing beyond is named any more.
            state.reach = start
            state.ahead.clear()
        state.offset = stop

    def append_each(
        self, rows: Sequence[RowId], stops: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Do `appending` for a pass of `counts` tokens of each row, which ends at `stops`.

        A row of which nothing is kept or to be captured costs no call: most of a step are such.

        Raises:
            RowError: as `appending`; the rows before have moved.
        """
        known = self._rows
        for row, stop, count in zip(rows, stops, counts, strict=True):
            start, state = stop - count, known.get(row)
            if state is None or state.captures is not None or state.reach > start:
                self.appending(row, start, stop)
            elif start != state.offset or count < 0:
                raise RowError(f"row {row} is at {state.offset}: it cannot write [{start}, {stop})")
            else:
                state.offset = stop

    def takes_back(self, row: RowId, width: int) -> bool:
        """Tell whether the row's next pass may be `width` tokens of which all but one are cut back.

        Raises:
            RowError: unknown row.
        """
        offset, due = self.offset(row), self.next_stop(row)
        if due is not None and offset + width > due:
            return False
        return all(layer.rewinds(offset + width, offset + 1) for layer in self._whole)

    def cut_back(self, row: RowId, target: int) -> None:
        """Take back what the row has written from `target` on, before any of it is kept.

        What falls due up to `target` is still captured.

        Raises:
            RowError: unknown row, `target` is not within what the pass wrote, or something was
                kept of what lies beyond it, or a layer cannot go back.
        """
        state = self._of(row)
        if target == state.offset:
            return
        captured = 0 if state.captures is None else state.captures.base
        if not max(state.reach, captured) <= target <= state.offset:
            raise RowError(f"row {row} is at {state.offset} and cannot be cut back to {target}")
        if self._whole and not all(layer.rewinds(state.offset, target) for layer in self._whole):
            raise RowError(f"row {row} cannot go back from {state.offset} to {target}")
        state.offset = target

    def cut_back_each(self, targets: Mapping[RowId, int]) -> None:
        """Do `cut_back` for several rows; one that can only go back by itself costs no call.

        Raises:
            RowError: as `cut_back`; the rows before have gone back.
        """
        known = self._rows
        for row, target in targets.items():
            state = known.get(row)
            if state is None or state.captures is not None or self._whole:
                self.cut_back(row, target)
            elif state.reach <= target <= state.offset:
                state.offset = target
            else:
                self.cut_back(row, target)

    def leaving(self, row: RowId) -> None:
        """Forget a row that is about to lose its place; its lazy snapshots are copied out.

        In place nobody waits for that: it goes behind the step under way, and the slot's next row
        behind it.

        Raises:
            RowError: unknown row.
        """
        self.unschedule(row)
        self.book.copy_out(self.book.lazy_of(row), waits=not self._in_place)
        del self._rows[row]

    def snapshot(self, row: RowId, kind: Kind, start: int) -> Snapshot | None:
        """Keep what the row's layers of `kind` hold: of positions [start, offset) where sliceable.

        Those are lazy; any other is a copy of the state at the row's offset. A negative start is 0;
        None where nothing lies between. The caller closes it.

        Raises:
            RowError: unknown row, or the model has no such layers.
        """
        return self._keep(row, kind, max(start, 0), self.offset(row))

    def schedule(self, row: RowId, offsets: Sequence[int]) -> None:
        """Ask for captures at `offsets`, sorted, distinct, none behind the row.

        Raises:
            RowError: unknown row, offsets out of order or in the past, or the results of the
                schedule before have not been taken.
        """
        state = self._of(row)
        if state.captures is not None:
            raise RowError(f"row {row} has captures that nobody took")
        state.captures = Captures(offsets, offset=state.offset)

    def next_stop(self, row: RowId) -> int | None:
        """Return where a pass must end at the latest, for a state to be captured; None: anywhere.

        Raises:
            RowError: unknown row.
        """
        captures = self._of(row).captures
        return captures.next_stop if captures is not None and self._whole else None

    def settle(self, row: RowId) -> None:
        """Make the captures that have fallen due; call it when a pass has been evaluated.

        Raises:
            RowError: unknown row.
        """
        state = self._of(row)
        captures = state.captures
        while captures is not None and (due := captures.due(state.offset)) is not None:
            captures.fire(self._keep_all(row, *due) or None)

    def take(self, row: RowId) -> list[Kept | None]:
        """Return one capture for each scheduled offset and end the schedule; the caller owns them.

        None where nothing lay between an offset and the capture before, or the row never got there.

        Raises:
            RowError: unknown row.
        """
        self.settle(row)
        state = self._of(row)
        captures, state.captures = state.captures, None
        return [] if captures is None else captures.results()

    def unschedule(self, row: RowId) -> None:
        """End the schedule; what was captured and not taken is closed, what is due is not made.

        Raises:
            RowError: unknown row.
        """
        state = self._of(row)
        captures, state.captures = state.captures, None
        for kept in captures.results() if captures is not None else []:
            for snapshot in (kept or {}).values():
                snapshot.close()

    def put_ahead(
        self, row: RowId, kind: Kind, start: int, states: Mapping[int, LayerState]
    ) -> None:
        """Write what some layers of a sliceable kind hold from position `start` on.

        states: by the layers' numbers within the kind, as `read` returns them. The row stays where
        it is; once all layers of its sliceable kinds have been put ahead, a `restore` without parts
        of these moves it there. A pass of the row before that takes their place.

        Raises:
            RowError: unknown row, or a layer that has not come as far as `start`.
        """
        state, place, layers = self._of(row), self._place(row), self.layers[kind]
        for number in states:
            end = state.ahead.get((kind, number), state.offset)
            if start > end or not kind.sliceable:
                raise RowError(f"row {row}: {kind} {number} is at {end}, nothing goes to {start}")
        stop = start + next(iter(states.values()))[0].shape[POSITION_AXIS]
        self._copy_out(row, start, stop)
        if self._putting:
            putting.put_states_behind(self._putting, place, start, states)
        else:
            if self.rest is not None:
                self.rest()
            putting.write_states(layers, place, start, states)
        state.ahead |= {(kind, number): stop for number in states}
        state.reach = max(state.reach, stop)

    def is_ahead(self, row: RowId) -> bool:
        """Tell whether anything has been put ahead of the row.

        Raises:
            RowError: unknown row.
        """
        return bool(self._of(row).ahead)

    def restore(self, row: RowId, parts: Sequence[Snapshot], target: int) -> bool:
        """Bring the row to exactly `target`, holding what `parts` do; or leave it and return False.

        `parts` stay the caller's. A sliceable kind's are adjacent and in order; they must begin at
        or before the row's offset and reach `target`. A whole-state kind has one at most, at
        `target`, or beyond where such a state can be wound back. A kind without any goes back by
        itself where it can, or forward to where it was put ahead. The row's own lazy snapshots cost
        no copy.

        Raises:
            RowError: unknown row, a negative target or one beyond what was reserved, untaken
                captures, or parts that do not go together.
            SnapshotError: a part has ended.
        """
        state = self._of(row)
        if not 0 <= target <= self._place(row).capacity:
            raise RowError(f"row {row} cannot be restored to {target}")
        if state.captures is not None:
            raise RowError(f"row {row} is restored before its captures were taken")
        by_kind = putting.sort_by_kind(parts, self.layers)
        if not all(self._restorable(kind, by_kind[kind], state, target) for kind in self.layers):
            return False
        if self._putting:
            others = [part for part in parts if part.row != row]
            self._copy_out(row, min((part.start for part in others), default=target), target)
            putting.put_behind(self._putting, self._place(row), others, self._place, most=target)
        else:
            if self.rest is not None:
                self.rest()
            for kind, chosen in by_kind.items():
                for part in chosen:
                    self._put_back(row, kind, part, target)
            evaluate([layer for layers in self.layers.values() for layer in layers])
        state.offset = target
        state.ahead.clear()
        return True

    def _restorable(self, kind: Kind, parts: list[Snapshot], state: _Row, target: int) -> bool:
        layers, offset = self.layers[kind], state.offset
        if not parts and kind.sliceable and target > offset:
            ends = (state.ahead.get((kind, number), offset) for number in range(len(layers)))
            return all(end == target for end in ends)
        if not parts:
            return target <= offset and all(layer.rewinds(offset, target) for layer in layers)
        first, last = parts[0], parts[-1]
        if last.stop < target:
            return False
        if kind.sliceable:
            return first.start <= offset
        return all(layer.rewinds(last.stop, target) for layer in layers)

    def _put_back(self, row: RowId, kind: Kind, part: Snapshot, target: int) -> None:
        # A state of the whole begins at 0 however little of it the caller asked for.
        start, stop = part.start if kind.sliceable else 0, min(part.stop, target)
        if part.row == row or stop <= start:
            return
        if kind.sliceable:
            self._copy_out(row, start, stop)
        source = None if part.row is None else self._place(part.row)
        most, layers, place = self._lifted_nbytes, self.layers[kind], self._place(row)
        putting.put_part(layers, place, part, start, stop, source=source, lifted_nbytes=most)

    def _keep_all(self, row: RowId, start: int, stop: int) -> dict[Kind, Snapshot]:
        kept = ((kind, self._keep(row, kind, start, stop)) for kind in self.layers)
        return {kind: snapshot for kind, snapshot in kept if snapshot is not None}

    def _keep(self, row: RowId, kind: Kind, start: int, stop: int) -> Snapshot | None:
        if kind not in self.layers:
            raise RowError(f"the model has no {kind} layers")
        if start >= stop:
            return None
        if not kind.sliceable:
            allocate_exactly()
            layers = self._read(row, kind, start, stop)
            mx.eval(layers)
            return self.book.add_owned(kind, start, stop, layers)
        state = self._of(row)
        state.reach = max(state.reach, stop)
        return self.book.add_lazy(row, kind, start, stop)

    def _copy_out(self, row: RowId, start: int, stop: int | None) -> None:
        touched = [
            snapshot
            for snapshot in self.book.lazy_of(row)
            if snapshot.stop > start and (stop is None or snapshot.start < stop)
        ]
        if touched:
            self.book.copy_out(touched)

    def _of(self, row: RowId) -> _Row:
        try:
            return self._rows[row]
        except KeyError:
            raise RowError(f"row {row} is not known") from None
