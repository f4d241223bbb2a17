"""Random programs over a pair: what a step's numbers mean now depends on what there is now."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mlxd_worker.cache.base import Kind, RowError, RowId
from mlxd_worker.cache.kept.snapshot import SnapshotError
from tests.worker.cache.keeping import copy_out
from tests.worker.cache.pair import CONTEXT_MAX, Pair, Record, Row

STEPS = 200
RECORDS_MAX = 10
"""Open snapshots in a program; beyond, the oldest is closed."""


@dataclass(frozen=True)
class Step:
    """One step; what cannot be done now is left out."""

    verb: str
    which: int
    amount: int
    other: int


def join(pair: Pair, step: Step) -> None:
    """A row joins, with room for some tokens."""
    pair.join(1 + step.amount * step.other % CONTEXT_MAX)


def chunk(pair: Pair, step: Step) -> None:
    """A row gets several tokens: a chunk of a prompt."""
    row = some_row(pair, step)
    if row is not None:
        append(pair, [row], 1 + step.amount)


def decode(pair: Pair, step: Step) -> None:
    """Some rows get a token each, or a few, in any order."""
    width = 1 if step.amount % 4 else 1 + step.other % 5
    rows = sorted(pair.rows, key=lambda row: (row * 7 + step.which) % 11)
    append(pair, rows[: 1 + step.which % len(rows)] if rows else [], width)


def append(pair: Pair, rows: list[RowId], width: int) -> None:
    """Append as much of `width` as all rows that can take any can take."""
    room = {row: pair.width_max(row) for row in rows}
    width = min([width, *(most for most in room.values() if most > 0)])
    able = [row for row in rows if room[row] > 0]
    for row in able:
        pair.reserve(row, pair.rows[row].length + width)
    if able:
        pair.append(able, width)


def rewind(pair: Pair, step: Step) -> None:
    """A row goes back without any snapshot, where its caches can."""
    row = some_row(pair, step)
    if row is not None:
        length = pair.rows[row].length
        back = step.amount % 4 if step.other % 2 else step.amount
        pair.restore(row, [], max(length - back, 0))


def leave(pair: Pair, step: Step) -> None:
    """A row leaves: at its end, or cancelled with captures outstanding."""
    row = some_row(pair, step)
    if row is not None and step.other % 2:
        pair.leave(row)


def tend(pair: Pair, step: Step) -> None:
    """The arenas are tended, which may move a row."""
    del step
    pair.caches.tend()


def snapshot(pair: Pair, step: Step) -> None:
    """One kind of a row is kept, from anywhere on."""
    row = some_row(pair, step)
    if row is not None:
        kind = pair.subject.kinds[step.other % len(pair.subject.kinds)]
        pair.snapshot(row, kind, some_start(pair, row, step))


def snapshots(pair: Pair, step: Step) -> None:
    """All kinds of a row are kept."""
    row = some_row(pair, step)
    if row is not None:
        pair.snapshots(row, some_start(pair, row, step))


def schedule(pair: Pair, step: Step) -> None:
    """Captures are asked for, some of them at the row's own offset."""
    row = some_row(pair, step)
    if row is None:
        return
    held = pair.rows[row]
    first = held.length + step.amount % 3 * 7
    gaps = [1 + step.other % 20, 1 + step.amount % 40][: step.which % 3]
    offsets = [first, *(first + sum(gaps[: count + 1]) for count in range(len(gaps)))]
    offsets = [offset for offset in offsets if offset <= CONTEXT_MAX]
    if held.due is None and offsets:
        pair.schedule(row, offsets)
        return
    with pytest.raises(RowError):
        pair.caches.contents.schedule(row, offsets if held.due is not None else [held.length - 1])


def take(pair: Pair, step: Step) -> None:
    """Captures are taken, whether all have come or not."""
    row = some_row(pair, step)
    if row is not None:
        pair.take(row)


def restore(pair: Pair, step: Step) -> None:
    """A row is given what snapshots hold: its own or others', lazy or not, possible or not."""
    row = some_row(pair, step)
    if row is None:
        return
    parts = []
    for kind in pair.subject.kinds:
        known = [record for record in pair.records if record.kind is kind]
        if known:
            parts += chain(known, known[step.amount % len(known)])
    ends = [part.stop for part in parts] or [pair.rows[row].length]
    target = ends[step.other % len(ends)] - (step.which % 3) * (step.amount % 5)
    target += step.other % 11 == 0
    target = max(target, 0)
    if target <= CONTEXT_MAX:
        pair.reserve(row, max(target, 1))
        if step.other % 4 == 0:
            parts = [part for part in parts if part.start < target]
        pair.restore(row, parts, target)


def redo(pair: Pair, step: Step) -> None:
    """A row returns to where it, or another, once stood: mostly possible, and often without a copy.

    Its own lazy snapshots come first; a kind without a snapshot that ends there has none.
    """
    if not pair.rows or not pair.records:
        return
    lazy = [record for record in pair.records if record.snapshot.lazy]
    chosen = (lazy or pair.records)[step.which % len(lazy or pair.records)]
    row = chosen.snapshot.row if chosen.snapshot.row is not None else some_row(pair, step)
    assert row is not None
    target = chosen.stop
    parts: dict[Kind, list[Record]] = {chosen.kind: chain(pair.records, chosen)}
    for record in pair.records:
        if record.stop == target and record.kind is not chosen.kind:
            parts[record.kind] = chain(pair.records, record)
    if step.other % 3 == 0 and len(pair.subject.kinds) == 1:
        target -= step.amount % (chosen.stop - chosen.start)
    pair.reserve(row, target)
    pair.restore(row, [part for run_of in parts.values() for part in run_of], target)


def resume(pair: Pair, step: Step) -> None:
    """A new row starts where a snapshot of all kinds ends, as with a prefix found again."""
    by_stop: dict[int, dict[str, list[Record]]] = {}
    for record in pair.records:
        if not record.kind.sliceable or record.start == 0:
            by_stop.setdefault(record.stop, {}).setdefault(record.kind, []).append(record)
    whole = {stop: kept for stop, kept in by_stop.items() if len(kept) == len(pair.subject.kinds)}
    if not whole:
        return
    target = sorted(whole)[step.amount % len(whole)]
    row = pair.join(target)
    if row is not None:
        assert pair.restore(row, [records[0] for records in whole[target].values()], target)


def split(pair: Pair, step: Step) -> None:
    """A snapshot is split inside, at an end, or beyond."""
    record = some_record(pair, step)
    if record is not None:
        span = record.stop - record.start
        pair.split(record, record.start - 1 + step.amount % (span + 3))


def merge(pair: Pair, step: Step) -> None:
    """Two adjacent snapshots become one."""
    adjacent = [
        (parent, child)
        for parent in pair.records
        for child in pair.records
        if parent is not child
        and parent.kind is child.kind
        and (not parent.kind.sliceable or parent.stop == child.start)
    ]
    if adjacent:
        pair.merge(*adjacent[(step.which + step.amount) % len(adjacent)])


def close(pair: Pair, step: Step) -> None:
    """A snapshot is closed, and cannot be closed again."""
    record = some_record(pair, step)
    if record is not None:
        pair.close(record)
        with pytest.raises(SnapshotError):
            record.snapshot.close()


def materialise(pair: Pair, step: Step) -> None:
    """A snapshot is copied out before anybody needs it to be."""
    record = some_record(pair, step)
    if record is not None:
        copy_out(record.snapshot)


VERBS: dict[Callable[[Pair, Step], None], int] = {
    join: 5, chunk: 9, decode: 14, rewind: 8, leave: 3, tend: 4, snapshot: 6,
    snapshots: 4, schedule: 4, take: 3, restore: 7, redo: 6, resume: 3, split: 6, merge: 5,
    close: 1, materialise: 1,
}  # fmt: skip
"""What a step may be, and how often."""

_BY_NAME = {verb.__name__: verb for verb in VERBS}
_OFTEN = [verb.__name__ for verb, weight in VERBS.items() for _ in range(weight)]


def program_of(seed: int) -> list[Step]:
    """Return the program that a seed stands for."""
    draws = random.Random(seed)
    return [
        Step(
            draws.choice(_OFTEN), draws.randint(0, 59), draws.randint(0, 130), draws.randint(0, 59)
        )
        for _ in range(STEPS)
    ]


def run(pair: Pair, program: list[Step], *, probe: bool) -> None:
    """Carry out a program and compare after every step; then end everything.

    With `probe` every step is followed by a token for every row, so that attention is compared
    after every step, whatever it was.
    """
    for number, step in enumerate(program):
        try:
            _BY_NAME[step.verb](pair, step)
            if probe:
                append(pair, list(pair.rows), 1)
            while len(pair.records) > RECORDS_MAX:
                pair.close(pair.records[0])
            pair.check()
        except Exception as error:
            error.add_note(f"at step {number}: {step}")
            raise
    pair.end()


def some_row(pair: Pair, step: Step) -> RowId | None:
    """Return the row that a step is about."""
    rows = list(pair.rows)
    return rows[step.which % len(rows)] if rows else None


def some_record(pair: Pair, step: Step) -> Record | None:
    """Return the snapshot that a step is about."""
    return pair.records[step.which % len(pair.records)] if pair.records else None


def some_start(pair: Pair, row: RowId, step: Step) -> int:
    """Return where to keep from: before the row, inside it, at its end or beyond."""
    held: Row = pair.rows[row]
    return (-3, 0, held.length * step.amount // 131, held.length - 1, held.length, held.length + 2)[
        step.amount % 6
    ]


def chain(known: list[Record], last: Record) -> list[Record]:
    """Return a run of adjacent snapshots that ends with `last`, as long as can be."""
    run_of = [last]
    while last.kind.sliceable and run_of[0].start:
        before = [
            other for other in known if other.kind is last.kind and other.stop == run_of[0].start
        ]
        if not before:
            break
        run_of.insert(0, before[0])
    return run_of
