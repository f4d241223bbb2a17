"""The caches of a model beside the naive reference: each row's whole history of tokens, by kind.

Whatever is done is done to both; a refusal must come from both. Histories are kept for each kind,
since a restore may give a row one kind's past from here and another's from there.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from mlxd_worker.cache.base import Kind, RowError, RowId
from mlxd_worker.cache.kept.contents import Kept
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.kept.stacks import LayerState
from mlxd_worker.cache.rows import RowCaches
from tests.support.mlx_memory import live_nbytes
from tests.worker.cache.keeping import snapshots_of
from tests.worker.cache.subjects import Fed, Subject

CONTEXT_MAX = 1024
ROWS_MAX = 8
SLACK_NBYTES = 64 << 10
"""Index arrays of a batch that stay from step to step; the smallest arena has more."""


@dataclass
class Row:
    """The reference of one row."""

    history: dict[Kind, list[int]]
    due: list[int] | None = None
    """Offsets of captures that have not been taken."""
    base: int = 0

    @property
    def length(self) -> int:
        """Tokens of the row: the same in all kinds."""
        (length,) = {len(history) for history in self.history.values()}
        return length


@dataclass
class Record:
    """The reference of one open snapshot."""

    snapshot: Snapshot
    history: list[int]
    """All tokens up to `stop`."""
    start: int
    stop: int

    @property
    def kind(self) -> Kind:
        """The layers that were kept."""
        return self.snapshot.kind


@dataclass
class Pair:
    """Caches under test and what they must hold."""

    subject: Subject
    caches: RowCaches
    rows: dict[RowId, Row] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    step: int = 0
    tokens: int = 0
    next_row: int = 0
    owned_nbytes: int = 0
    """What the snapshots said: their size when they came, and their hooks since."""
    baseline_nbytes: int = field(default_factory=live_nbytes)

    # Rows

    def join(self, tokens: int) -> RowId | None:
        """Start a row; None where there is no room for it yet."""
        row = RowId(self.next_row)
        if len(self.rows) == ROWS_MAX or not self.caches.join(row, tokens=tokens):
            return None
        self.next_row += 1
        self.rows[row] = Row({kind: [] for kind in self.subject.kinds})
        return row

    def leave(self, row: RowId) -> None:
        """End a row, finished or cancelled."""
        self.caches.leave(row)
        del self.rows[row]

    def reserve(self, row: RowId, tokens: int) -> None:
        """Make room for `tokens` in a row."""
        self.caches.reserve(row, tokens=tokens)

    def append(self, rows: Sequence[RowId], width: int) -> None:
        """Write `width` new tokens to each row and compare what its queries read."""
        self.step += 1
        fed_by_kind: dict[Kind, list[Fed]] = {kind: [] for kind in self.subject.kinds}
        offsets = [self.rows[row].length for row in rows]
        plan = self.caches.plan(
            tuple(rows),
            offsets=mx.array(offsets, dtype=mx.int32),
            lengths=tuple(offset + width for offset in offsets),
            width=width,
            dtype=mx.float32,
        )
        for row in rows:
            tags = list(range(self.tokens, self.tokens + width))
            self.tokens += width
            for kind, history in self.rows[row].history.items():
                history.extend(tags)
                fed_by_kind[kind].append(Fed(list(history), width))
        read = []
        for index, layer in self.subject.stateful:
            cache = self.caches.layers[index]
            assert cache is not None
            read.append(layer.drive(cache, plan, self.step, index, fed_by_kind[layer.kind]))
        mx.eval([result for result in read if result is not None], self.caches.state())
        for (index, layer), result in zip(self.subject.stateful, read, strict=True):
            expected = layer.expect(self.step, index, fed_by_kind[layer.kind])
            for number, one in enumerate(expected):
                assert result is not None
                close(result[number], one, f"{layer.kind}, row {rows[number]}")
        for row in rows:
            self.caches.contents.settle(row)

    # Captures

    def schedule(self, row: RowId, offsets: list[int]) -> None:
        """Ask for captures."""
        held = self.rows[row]
        self.caches.contents.schedule(row, offsets)
        held.due, held.base = offsets, held.length

    def take(self, row: RowId) -> None:
        """Take the captures and record those that came."""
        held = self.rows[row]
        due, held.due = held.due, None
        taken = self.caches.contents.take(row)
        assert len(taken) == len(due or [])
        base = held.base
        for offset, kept in zip(due or [], taken, strict=True):
            if offset > held.length or offset == base:
                assert kept is None
                continue
            assert kept is not None
            self._record_all(row, kept, base, offset)
            base = offset

    def width_max(self, row: RowId) -> int:
        """Return how many tokens may be appended at most, for the captures' sake as well."""
        held = self.rows[row]
        stop = CONTEXT_MAX
        if held.due is not None and not all(kind.sliceable for kind in self.subject.kinds):
            stop = min([stop, *(offset for offset in held.due if offset > held.length)])
            coming = self.caches.contents.next_stop(row)
            assert coming is None or coming == stop
        return stop - held.length

    # Snapshots

    def snapshot(self, row: RowId, kind: Kind, start: int) -> Record | None:
        """Keep one kind of a row."""
        snapshot = self.caches.contents.snapshot(row, kind, start)
        start, stop = max(start, 0), self.rows[row].length
        assert (snapshot is None) == (start >= stop)
        return None if snapshot is None else self._record(row, snapshot, start, stop)

    def snapshots(self, row: RowId, start: int) -> None:
        """Keep all kinds of a row."""
        snapshots = snapshots_of(self.caches.contents, row, start)
        stop = self.rows[row].length
        assert list(snapshots) == (self.subject.kinds if max(start, 0) < stop else [])
        if snapshots:
            self._record_all(row, snapshots, max(start, 0), stop)

    def _record_all(self, row: RowId, kept: Kept, start: int, stop: int) -> None:
        assert list(kept) == self.subject.kinds
        for snapshot in kept.values():
            self._record(row, snapshot, start, stop)

    def _record(self, row: RowId, snapshot: Snapshot, start: int, stop: int) -> Record:
        assert snapshot.lazy == snapshot.kind.sliceable
        return self._note(snapshot, self.rows[row].history[snapshot.kind][:stop], start, stop)

    def _note(self, snapshot: Snapshot, history: list[int], start: int, stop: int) -> Record:
        if snapshot.kind.sliceable:
            assert (snapshot.start, snapshot.stop) == (start, stop)
        assert snapshot.stop == stop
        self.owned_nbytes += snapshot.nbytes
        snapshot.on_materialise = self._grow
        record = Record(snapshot, history, start, stop)
        self.records.append(record)
        return record

    def _grow(self, delta_nbytes: int) -> None:
        assert delta_nbytes > 0
        self.owned_nbytes += delta_nbytes

    def forget(self, record: Record) -> Snapshot:
        """Take a snapshot out of the books: it is about to end."""
        self.records.remove(record)
        self.owned_nbytes -= record.snapshot.nbytes
        return record.snapshot

    def close(self, record: Record) -> None:
        """Close a snapshot."""
        self.forget(record).close()

    def split(self, record: Record, at: int) -> None:
        """Split a snapshot and record what came of it."""
        old = self.forget(record)
        was_lazy = old.lazy
        left, right = old.split(at)
        if not old.kind.sliceable or at <= record.start:
            assert (left, right) == (None, old)
            self._note(old, record.history, record.start, record.stop)
        elif at >= record.stop:
            assert (left, right) == (old, None)
            self._note(old, record.history, record.start, record.stop)
        else:
            assert left is not None
            assert right is not None
            assert (left.lazy, right.lazy, old.closed) == (was_lazy, was_lazy, True)
            self._note(left, record.history[:at], record.start, at)
            self._note(right, record.history, at, record.stop)

    def merge(self, parent: Record, child: Record) -> None:
        """Merge two snapshots, and record the result."""
        merged = self.caches.contents.book.merge(self.forget(parent), self.forget(child))
        start = parent.start if merged.kind.sliceable else child.start
        # Of each position the entry that the part had: the parts may be of different rows.
        history = parent.history[: parent.stop] + child.history[parent.stop :]
        known = history if merged.kind.sliceable else child.history
        self._note(merged, known, start, child.stop)

    def restore(self, row: RowId, parts: Sequence[Record], target: int) -> bool:
        """Restore a row from snapshots, where that is possible, on both sides."""
        held = self.rows[row]
        contents = self.caches.contents
        snapshots = [part.snapshot for part in parts]
        if held.due is not None:
            with pytest.raises(RowError):
                contents.restore(row, snapshots, target)
            return False
        wanted = {
            kind: self._restore(
                kind, held.history[kind], [part for part in parts if part.kind is kind], target
            )
            for kind in self.subject.kinds
        }
        possible = all(history is not None for history in wanted.values())
        assert contents.restore(row, snapshots, target) == possible
        if possible:
            held.history = {kind: list(history or []) for kind, history in wanted.items()}
            assert held.length == target
        return possible

    def _restore(
        self, kind: Kind, history: list[int], parts: Sequence[Record], target: int
    ) -> list[int] | None:
        """Return the history that a restore leaves, None where it must be refused."""
        if parts and parts[-1].stop < target:
            return None
        if kind.sliceable:
            if parts and parts[0].start > len(history):
                return None
            known = list(history)
            for part in parts:
                known[part.start :] = part.history[part.start : part.stop]
            known += history[len(known) :] if not parts else []
            return known[:target] if len(known) >= target else None
        at = parts[0].stop if parts else len(history)
        known = parts[0].history if parts else history
        if target > at:
            return None
        windows = [layer.window for _, layer in self.subject.of(kind)]
        if target < at and not all(window is not None and at <= window for window in windows):
            return None
        return known[:target]

    # Comparing

    def check(self) -> None:
        """Compare every row and snapshot, entry by entry, and every count of bytes."""
        # A buffer out of MLX's pool may be larger than what it is for, and counts whole.
        mx.clear_cache()
        contents = self.caches.contents
        assert set(self.caches.rows) == set(self.rows)
        for row, held in self.rows.items():
            assert contents.offset(row) == held.length
            if held.length:
                self._check_row(row, held)
        for record in self.records:
            self.check_snapshot(record)
        captured = contents.book.live - len(self.records)
        assert captured >= 0
        assert captured == 0 or any(held.due for held in self.rows.values())
        if not captured:
            assert contents.book.nbytes == self.owned_nbytes
        assert (
            sum(array.nbytes for array in contents.book.arrays().values()) == contents.book.nbytes
        )
        known_nbytes = self.caches.nbytes + contents.book.nbytes
        active_nbytes = mx.get_active_memory() - self.baseline_nbytes
        if abs(active_nbytes - known_nbytes) > SLACK_NBYTES:
            gc.collect()  # what a refused step's traceback refers to goes with its cycle
            active_nbytes = mx.get_active_memory() - self.baseline_nbytes
        assert abs(active_nbytes - known_nbytes) <= SLACK_NBYTES, (active_nbytes, known_nbytes)

    def _check_row(self, row: RowId, held: Row) -> None:
        place = self.caches.table.place(row)
        for index, layer in self.subject.stateful:
            cache = self.caches.layers[index]
            assert cache is not None
            expected = layer.expect_contents(index, held.history[layer.kind], 0, held.length)
            same_state(cache.read(place, 0, held.length), expected, f"{layer.kind}, row {row}")

    def check_snapshot(self, record: Record) -> None:
        """Compare what a snapshot gives with what it was taken of; it stays as it is."""
        snapshot = record.snapshot
        was_lazy = snapshot.lazy
        states = snapshot.read()
        layers = self.subject.of(record.kind)
        assert len(states) == len(layers)
        for (index, layer), state in zip(layers, states, strict=True):
            expected = layer.expect_contents(index, record.history, record.start, record.stop)
            same_state(state, expected, repr(snapshot))
        compact_nbytes = sum(array.nbytes for state in states for array in state)
        assert snapshot.nbytes == (0 if was_lazy else compact_nbytes)
        assert snapshot.lazy == was_lazy

    def end(self) -> None:
        """Close and leave everything; nothing must be left anywhere."""
        while self.records:
            self.close(self.records[0])
        for row in list(self.rows):
            self.leave(row)
        book = self.caches.contents.book
        assert book.live == 0, f"snapshots left open: {book.live}"
        assert book.nbytes == 0
        assert self.caches.nbytes == 0
        assert self.caches.state() == []


def pair(subject: Subject, *, bounded_shapes: bool | None = None) -> Pair:
    """Return an empty pair."""
    caches = [None if layer is None else layer.make() for layer in subject.layers]
    return Pair(
        subject,
        RowCaches(
            caches, context_max=CONTEXT_MAX, rows_max=ROWS_MAX, bounded_shapes=bounded_shapes
        ),
    )


def close(got: mx.array, expected: np.typing.NDArray[np.float32], label: str) -> None:
    """Compare to 1e-4."""
    assert got.shape == expected.shape, label
    difference = np.abs(np.array(got) - expected)
    assert np.allclose(np.array(got), expected, rtol=1e-4, atol=1e-4), (label, difference.max())


def same_state(
    got: LayerState, expected: Sequence[np.typing.NDArray[np.generic]], label: str
) -> None:
    """Compare a layer's state: what is stored exactly, what is computed to 1e-4."""
    mx.eval(got)
    assert len(got) == len(expected), label
    for one, wanted in zip(got, expected, strict=True):
        assert one.shape == wanted.shape, (label, one.shape, wanted.shape)
        assert np.allclose(np.array(one), wanted, rtol=1e-4, atol=1e-5), label
