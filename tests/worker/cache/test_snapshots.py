"""What a snapshot owns, and that it ends once, by MLX's own count of bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import pytest

from mlxd_worker.cache import changes
from mlxd_worker.cache.base import Kind, RowError, RowId
from mlxd_worker.cache.changes import LIFTED_NBYTES
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.kept.snapshot import Snapshot, SnapshotError, _take_some
from mlxd_worker.cache.kept.stacks import LayerState
from tests.plugins.leaks import Counting, watching
from tests.support.counting import calls_of
from tests.support.mlx_memory import live_nbytes
from tests.worker.cache.keeping import copy_out, snapshots_of
from tests.worker.cache.pair import Pair, pair
from tests.worker.cache.subjects import Recurrent, Subject, rotating, standard

TOKEN_NBYTES = 2 * 2 * 8 * 4
"""Keys and values of one token: 2 heads of 8 numbers in float32."""

LAYERS = 3
STANDARD = Subject("standard", (standard(),) * LAYERS)
MIXED = Subject("mixed", (standard(), None, rotating(48), Recurrent()))


@pytest.fixture
def cache_pair(watched: Callable[[Counting], None]) -> Pair:
    """Return standard layers without rows; fails the test that leaves a snapshot open."""
    new = pair(STANDARD)
    watched(new.caches.contents.book)
    return new


def row_of(into: Pair, tokens: int, *, reserved: int = 1000) -> RowId:
    """Return a new row with `tokens` tokens."""
    row = into.join(reserved)
    assert row is not None
    if tokens:
        into.append([row], tokens)
    return row


def keep(into: Pair, row: RowId, start: int = 0) -> Snapshot:
    """Return a snapshot of a row's standard layers that the test itself closes."""
    snapshot = into.caches.contents.snapshot(row, Kind.STANDARD, start)
    assert snapshot is not None
    return snapshot


def grown_nbytes(act: Callable[[], object]) -> int:
    """Return by how many bytes MLX's arrays grew through `act`."""
    before_nbytes = live_nbytes()
    act()
    return mx.get_active_memory() - before_nbytes


def test_ten_tokens_of_a_large_arena_cost_ten_tokens(cache_pair: Pair) -> None:
    """A lazy snapshot owns nothing; copied out, exactly its own tokens, by MLX's count too."""
    row = row_of(cache_pair, 700)
    lazies: list[Snapshot] = []
    assert grown_nbytes(lambda: lazies.append(keep(cache_pair, row, 690))) == 0
    assert lazies[0].nbytes == 0

    grown = grown_nbytes(lambda: copy_out(lazies[0]))

    assert grown == lazies[0].nbytes == 10 * TOKEN_NBYTES * LAYERS
    assert grown_nbytes(lazies[0].close) == -grown


@pytest.mark.parametrize("heads_and_slots", ["one row", "several rows"])
def test_a_snapshot_keeps_no_arena_alive(cache_pair: Pair, heads_and_slots: str) -> None:
    """When the last row leaves its arena is really freed; what was kept stays, and costs itself."""
    empty_nbytes = live_nbytes()
    row = row_of(cache_pair, 100)
    if heads_and_slots == "several rows":
        cache_pair.leave(row_of(cache_pair, 50))
    snapshot = keep(cache_pair, row, 40)

    cache_pair.leave(row)

    assert cache_pair.caches.nbytes == 0
    assert snapshot.nbytes == 60 * TOKEN_NBYTES * LAYERS
    assert abs(mx.get_active_memory() - empty_nbytes - snapshot.nbytes) < 4 << 10
    snapshot.close()


def test_halves_of_a_snapshot_own_their_own_halves(cache_pair: Pair) -> None:
    """Closing the large side of an owned split gives the large side's bytes back."""
    snapshot = keep(cache_pair, row_of(cache_pair, 500))
    copy_out(snapshot)
    left, right = snapshot.split(5)
    assert left is not None
    assert right is not None

    assert (left.nbytes, right.nbytes) == tuple(n * TOKEN_NBYTES * LAYERS for n in (5, 495))
    assert grown_nbytes(right.close) == -495 * TOKEN_NBYTES * LAYERS
    assert grown_nbytes(left.close) == -5 * TOKEN_NBYTES * LAYERS


def test_many_layers_are_copied_out_in_one_evaluation(cache_pair: Pair) -> None:
    """Reading is lazy in every layer, so that one evaluation copies all of them."""
    row = row_of(cache_pair, 300)
    snapshot = keep(cache_pair, row)

    states: list[object] = []
    assert grown_nbytes(lambda: states.append(snapshot.read())) == 0
    assert grown_nbytes(lambda: mx.eval(states)) == 300 * TOKEN_NBYTES * LAYERS
    assert snapshot.lazy
    snapshot.close()


def test_a_snapshot_is_split_and_joined_in_one_evaluation_each(cache_pair: Pair) -> None:
    """A GPU's host waits once for all layers that a second copy has room for; all stay the same."""
    snapshot = keep(cache_pair, row_of(cache_pair, 300))
    copy_out(snapshot)
    before = [[mx.array(array) for array in state] for state in snapshot.layers]
    book = cache_pair.caches.contents.book
    parts: list[Snapshot] = []
    merged: list[Snapshot] = []

    assert calls_of(lambda: parts.extend(book.split(snapshot, 100)), changes.wait) == 1
    assert calls_of(lambda: merged.append(book.merge(*parts)), changes.wait) == 1

    (whole,) = merged
    for state, arrays in zip(whole.layers, before, strict=True):
        assert all(mx.array_equal(*both).item() for both in zip(state, arrays, strict=True))
    whole.close()


def test_a_second_copy_of_a_large_snapshot_is_made_in_parts() -> None:
    """What is copied at once is bounded, or one layer's."""
    array = mx.zeros((1, 1, LIFTED_NBYTES // 3 // 4, 1))
    states: list[LayerState] = [(array,) for _ in range(5)]
    sizes = []
    while states:
        sizes.append(len(_take_some(states)))
    assert sizes == [3, 2]


def test_the_hook_tells_the_bytes_that_were_added(cache_pair: Pair) -> None:
    """Bytes counted at birth plus what the hook said are what is owned, whoever caused the copy."""
    row = row_of(cache_pair, 20)
    snapshot = keep(cache_pair, row, 4)
    added_nbytes: list[int] = []
    snapshot.on_materialise = added_nbytes.append

    assert cache_pair.restore(row, [], 10)
    cache_pair.append([row], 1)
    copy_out(snapshot)

    assert added_nbytes == [snapshot.nbytes] == [16 * TOKEN_NBYTES * LAYERS]
    assert cache_pair.caches.contents.book.nbytes == snapshot.nbytes
    snapshot.close()


def test_a_second_close_is_an_error(cache_pair: Pair) -> None:
    """A snapshot ends once: closed, split up or merged; after that every use of it is refused."""
    row = row_of(cache_pair, 9)
    closed, divided, first, second = (keep(cache_pair, row, start) for start in (0, 0, 5, 0))
    closed.close()
    left, right = divided.split(5)
    assert left is not None
    assert right is not None
    whole = cache_pair.caches.contents.book.merge(left, first)

    for ended in (closed, divided, left, first):
        for use in (ended.close, ended.read, partial(copy_out, ended)):
            with pytest.raises(SnapshotError):
                use()
        with pytest.raises(SnapshotError):
            ended.split(2)
        with pytest.raises(SnapshotError):
            cache_pair.caches.contents.restore(row, [ended], 9)
    for each in (whole, right, second):
        each.close()
    assert cache_pair.caches.contents.book.live == 0


def test_only_adjacent_snapshots_of_one_kind_merge() -> None:
    """A gap, an overlap, another kind or the same one twice is a mistake; nothing ends."""
    mixed = pair(MIXED)
    contents, row = mixed.caches.contents, row_of(mixed, 6)
    early = snapshots_of(contents, row, 0)
    mixed.append([row], 3)
    late = snapshots_of(contents, row, 7)

    for parent, child in [
        (early[Kind.STANDARD], late[Kind.STANDARD]),
        (late[Kind.STANDARD], early[Kind.STANDARD]),
        (early[Kind.STANDARD], early[Kind.STANDARD]),
        (early[Kind.ROTATING], early[Kind.ROTATING]),  # which would stand for itself, closed
        (early[Kind.RECURRENT], late[Kind.ROTATING]),
    ]:
        with pytest.raises(SnapshotError):
            contents.book.merge(parent, child)

    for snapshot in [*early.values(), *late.values()]:
        snapshot.close()
    assert contents.book.live == 0


def test_a_whole_state_is_split_to_the_right_and_superseded() -> None:
    """What cannot be cut stays with the later part; of two, the later one stands for both."""
    mixed = pair(MIXED)
    contents, row = mixed.caches.contents, row_of(mixed, 6)
    early = snapshots_of(contents, row, 0)
    mixed.append([row], 60)
    late = snapshots_of(contents, row, 6)

    for kind in (Kind.ROTATING, Kind.RECURRENT):
        assert early[kind].split(3) == (None, early[kind])
        nbytes = late[kind].nbytes
        merging = partial(contents.book.merge, early[kind], late[kind])
        assert grown_nbytes(merging) == -early_nbytes(kind)
        assert (early[kind].closed, late[kind].closed) == (True, False)
        assert late[kind].nbytes == nbytes
        late[kind].close()
    early[Kind.STANDARD].close()
    late[Kind.STANDARD].close()
    assert contents.book.live == 0


def early_nbytes(kind: Kind) -> int:
    """Return the bytes of the state of a row of 6 tokens in one layer of `MIXED`."""
    return 6 * TOKEN_NBYTES if kind is Kind.ROTATING else (3 * 6 + 6 * 6) * 4


def test_nothing_is_split_off_at_an_end(cache_pair: Pair) -> None:
    """A split at or beyond an end leaves the snapshot as it is."""
    snapshot = keep(cache_pair, row_of(cache_pair, 8), 2)
    for at in (-1, 0, 2):
        assert snapshot.split(at) == (None, snapshot)
    for at in (8, 9):
        assert snapshot.split(at) == (snapshot, None)
    snapshot.close()


def test_what_reaches_no_further_than_its_start_is_not_kept(cache_pair: Pair) -> None:
    """A snapshot at or below its start is None; a negative start is 0."""
    contents = cache_pair.caches.contents
    row, empty = row_of(cache_pair, 8), row_of(cache_pair, 0)
    assert contents.snapshot(row, Kind.STANDARD, 8) is None
    assert contents.snapshot(row, Kind.STANDARD, 9) is None
    assert contents.snapshot(empty, Kind.STANDARD, -5) is None
    assert snapshots_of(contents, empty, 0) == {}

    snapshot = keep(cache_pair, row, -3)

    assert (snapshot.start, snapshot.stop) == (0, 8)
    snapshot.close()


def test_rows_and_offsets_that_cannot_be_are_refused(cache_pair: Pair) -> None:
    """A negative target, one beyond what is reserved, unknown rows and kinds, a wrong start."""
    contents, row = cache_pair.caches.contents, row_of(cache_pair, 8, reserved=100)
    snapshot = keep(cache_pair, row)
    for mistake in (
        lambda: contents.restore(row, [snapshot], -1),
        lambda: contents.restore(row, [snapshot], 257),
        lambda: contents.restore(row, [snapshot, snapshot], 8),
        lambda: contents.restore(RowId(9), [], 0),
        lambda: contents.snapshot(row, Kind.RECURRENT, 0),
        lambda: contents.appending(row, 7, 9),
        lambda: contents.appending(row, 8, 7),
        lambda: contents.join(row),
        lambda: contents.leaving(RowId(9)),
    ):
        with pytest.raises(RowError):
            mistake()
    assert contents.offset(row) == 8
    snapshot.close()


def test_a_restore_happens_wholly_or_not_at_all() -> None:
    """Where one kind cannot follow, the others stay too, entry by entry."""
    mixed = pair(MIXED)
    row, other = row_of(mixed, 60), row_of(mixed, 80)
    mixed.snapshots(other, 0)
    standard_alone = [record for record in mixed.records if record.kind is Kind.STANDARD]

    assert not mixed.restore(row, standard_alone, 80)
    assert not mixed.restore(row, mixed.records, 81)
    assert not mixed.restore(row, [], 50)
    mixed.check()
    assert mixed.restore(row, mixed.records, 80)
    mixed.append([row, other], 1)
    mixed.check()
    mixed.end()


def test_a_pass_must_not_run_past_a_capture_of_a_state() -> None:
    """A state passes by once: a pass beyond it is refused before anything has been written."""
    mixed = pair(MIXED)
    contents, row = mixed.caches.contents, row_of(mixed, 4)
    mixed.schedule(row, [4, 7])
    assert contents.next_stop(row) == 7

    with pytest.raises(RowError):
        contents.appending(row, 4, 8)
    assert contents.offset(row) == 4
    mixed.append([row], 3)
    assert contents.next_stop(row) is None
    mixed.append([row], 3)
    mixed.take(row)

    assert [record.stop for record in mixed.records] == [7, 7, 7]
    mixed.check()
    mixed.end()


def test_a_schedule_is_taken_before_anything_else_may_happen(cache_pair: Pair) -> None:
    """A second schedule, or a restore, while captures are outstanding is a mistake."""
    contents, row = cache_pair.caches.contents, row_of(cache_pair, 4)
    cache_pair.schedule(row, [6])
    assert contents.next_stop(row) is None

    for mistake in (lambda: contents.schedule(row, [8]), lambda: contents.restore(row, [], 2)):
        with pytest.raises(RowError):
            mistake()

    assert contents.take(row) == [None]
    assert contents.take(row) == []


def test_captures_that_nobody_takes_end_with_the_row() -> None:
    """A row that is cancelled during its prefill leaves no snapshot behind."""
    mixed = pair(MIXED)
    row = row_of(mixed, 0)
    mixed.schedule(row, [3, 5, 9])
    mixed.append([row], 3)
    mixed.append([row], 2)
    assert mixed.caches.contents.book.live == 2 * 3

    mixed.leave(row)

    assert mixed.caches.contents.book.live == 0
    mixed.check()


def test_a_leak_is_found() -> None:
    """The end of a program, and of a watched test, fails where a snapshot is open still."""
    cache_pair = pair(STANDARD)
    snapshot = keep(cache_pair, row_of(cache_pair, 4))

    with pytest.raises(AssertionError, match="snapshot"):
        cache_pair.end()
    with pytest.raises(AssertionError, match="left open"), watching() as watch:
        watch(cache_pair.caches.contents.book)
    snapshot.close()


def test_contents_name_each_array_once(cache_pair: Pair) -> None:
    """The ledger finds every owned array under its own name, and nothing else."""
    contents: RowContents = cache_pair.caches.contents
    row = row_of(cache_pair, 12)
    first, second = keep(cache_pair, row), keep(cache_pair, row, 6)
    assert contents.book.arrays() == {}

    copy_out(first)
    copy_out(second)

    arrays = contents.book.arrays()
    assert len({id(array) for array in arrays.values()}) == len(arrays) == 2 * 2 * LAYERS
    assert sum(array.nbytes for array in arrays.values()) == contents.book.nbytes
    first.close()
    second.close()
