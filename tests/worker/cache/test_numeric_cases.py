"""Small cases worked out by hand, and mistakes that other runners made, at the caches' level."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.cache.rows import RowCaches
from tests.support.mlx_memory import live_nbytes
from tests.worker.cache.keeping import copy_out
from tests.worker.cache.numbered import OTHER, ROW, TOKENS, numbers_of, sliding, standard, union


def test_rotating_written_mid_ring() -> None:
    """W=4: prefill 3, decode 6, then {10, 11}: the queries see 7..11 between them, offset 11."""
    caches = sliding(4)
    caches.write([1, 2, 3])
    caches.decode(range(4, 10))

    seen = caches.write([10, 11])

    assert seen == [[7, 8, 9, 10], [8, 9, 10, 11]]
    assert union(seen) == [7, 8, 9, 10, 11]
    assert caches.contents.offset(ROW) == 11
    assert caches.list_held() == [8, 9, 10, 11]


def test_rotating_prefilled_twice() -> None:
    """W=4: prefill 6 then 3: 4..9 are seen; decode 10: four tokens, 7..10."""
    caches = sliding(4)
    caches.write(range(1, 7))

    assert union(caches.write([7, 8, 9])) == [4, 5, 6, 7, 8, 9]
    assert caches.decode([10]) == [7, 8, 9, 10]
    assert caches.list_held() == [7, 8, 9, 10]


def test_rotating_rewound_in_a_full_ring() -> None:
    """W=8: exactly 8, back to 2, then {9, 10, 11}: {1, 2, 9, 10, 11} are held, offset 5."""
    caches = sliding(8)
    caches.write(range(1, 9))

    assert caches.contents.restore(ROW, [], 2)
    seen = caches.write([9, 10, 11])

    assert seen[-1] == [1, 2, 9, 10, 11]
    assert caches.list_held() == [1, 2, 9, 10, 11]
    assert caches.contents.offset(ROW) == 5


def test_rotating_refused_once_wrapped() -> None:
    """W=4: with 10 tokens no way back by itself; a snapshot at 10 brings 10 back after 5 more."""
    caches = sliding(4)
    caches.decode(range(1, 11))
    for target in (3, 7, 9):
        assert not caches.contents.restore(ROW, [], target)
    assert caches.contents.offset(ROW) == 10
    snapshot = caches.keep(0)
    caches.decode(range(11, 16))

    assert caches.contents.restore(ROW, [snapshot], 10)

    assert (caches.contents.offset(ROW), caches.list_held()) == (10, [7, 8, 9, 10])
    assert caches.decode([20]) == [8, 9, 10, 20]
    assert not caches.contents.restore(ROW, [snapshot], 9)
    assert not caches.contents.restore(ROW, [snapshot], 11)
    snapshot.close()


def test_rotating_snapshot_that_has_not_wrapped_goes_back_further() -> None:
    """W=4: a state of 4 tokens can stand at any of them; it is cut to the exact token."""
    caches = sliding(4)
    caches.write([1, 2, 3, 4])
    snapshot = caches.keep(0)
    caches.decode(range(5, 10))

    assert caches.contents.restore(ROW, [snapshot], 3)

    assert (caches.contents.offset(ROW), caches.list_held()) == (3, [1, 2, 3])
    assert caches.decode([30]) == [1, 2, 3, 30]
    snapshot.close()


def test_kv_split_and_merged_without_a_byte() -> None:
    """[2, 10) split at 5 is [2, 5) and [5, 10), merged [2, 10): all lazy, nothing allocated."""
    caches = standard()
    caches.write(range(10))
    snapshot = caches.keep(2)
    before_nbytes = live_nbytes()

    left, right = snapshot.split(5)
    assert left is not None
    assert right is not None
    spans = [(left.start, left.stop), (right.start, right.stop)]
    lazies = [left.lazy, right.lazy]
    whole = caches.contents.book.merge(left, right)

    assert (spans, lazies) == ([(2, 5), (5, 10)], [True, True])
    assert (whole.start, whole.stop, whole.lazy, whole.nbytes) == (2, 10, True, 0)
    assert mx.get_active_memory() == before_nbytes
    assert mx.get_peak_memory() <= before_nbytes
    assert numbers_of(whole.read()[0]) == list(range(2, 10))
    whole.close()
    assert caches.contents.book.live == 0


def test_kv_captures_span_writes() -> None:
    """At 2 with {2, 3, 5}, writing 2 and 2: nothing, [2, 3), [3, 5)."""
    caches = standard()
    caches.write([1, 2])
    caches.contents.schedule(ROW, [2, 3, 5])
    caches.write([3, 4])
    caches.write([5, 6])

    taken = caches.contents.take(ROW)

    assert taken[0] is None
    kept = [one[Kind.STANDARD] for one in taken if one is not None]
    assert [(one.start, one.stop) for one in kept] == [(2, 3), (3, 5)]
    assert [numbers_of(one.read()[0]) for one in kept] == [[3], [4, 5]]
    for one in kept:
        one.close()


def test_fault_6_a_long_conversation_survives_a_short_reuse() -> None:
    """A row goes back to a short prefix and grows past an old snapshot in several passes.

    The old conversation restores its own tokens, not those written over them; whenever a pass
    writes, not only the first after going back.
    """
    caches = standard()
    caches.write(range(40))
    old = [caches.keep(0)]
    old += [part for part in caches.keep(5).split(20) if part is not None]
    assert caches.contents.restore(ROW, [], 8)
    caches.write(range(100, 105))
    second = caches.keep(4)
    assert caches.contents.restore(ROW, [], 10)
    caches.write([120])
    caches.write(range(121, 160))

    assert [numbers_of(one.read()[0]) for one in old] == [
        list(range(40)), list(range(5, 20)), list(range(20, 40)),
    ]  # fmt: skip
    assert numbers_of(second.read()[0]) == [4, 5, 6, 7, 100, 101, 102, 103, 104]
    assert caches.list_held() == [*range(8), 100, 101, *range(120, 160)]
    assert caches.contents.restore(ROW, [old[0]], 40)
    assert caches.list_held() == list(range(40))
    for one in [*old, second]:
        one.close()


def test_fault_6_what_a_later_pass_reaches_is_copied_too() -> None:
    """A snapshot of the tokens just written is copied when a second step back overwrites them."""
    caches = standard()
    caches.write(range(10))
    snapshots = []
    for round_ in range(1, 5):
        assert caches.contents.restore(ROW, [], 10 - 2 * round_)
        caches.write(range(20 * round_, 20 * round_ + 2 * round_))
        snapshots.append((caches.keep(0), caches.list_held()))

    for snapshot, expected in snapshots:
        assert numbers_of(snapshot.read()[0]) == expected
        snapshot.close()


@pytest.mark.parametrize("wrapped", [True, False])
def test_fault_7_several_tokens_after_and_before_the_wrap(wrapped: bool) -> None:
    """After the wrap the last W - 1 old tokens stay in order; before it nothing stale is seen."""
    caches = sliding(6)
    if wrapped:
        caches.decode(range(1, 12))
        seen = caches.write([20, 21, 22])
        assert seen == [
            [7, 8, 9, 10, 11, 20], [8, 9, 10, 11, 20, 21], [9, 10, 11, 20, 21, 22],
        ]  # fmt: skip
        assert caches.list_held() == [9, 10, 11, 20, 21, 22]
        return
    caches.write([1, 2, 3, 4, 5])
    assert caches.contents.restore(ROW, [], 2)
    seen = caches.write([20, 21])
    assert seen == [[1, 2, 20], [1, 2, 20, 21]]
    assert caches.list_held() == [1, 2, 20, 21]


@pytest.mark.parametrize("window", [None, 4])
def test_fault_8_nothing_is_not_everything(window: int | None) -> None:
    """The range [0, 0) is empty: of a snapshot, of a rewind, of what a row holds."""
    caches = standard() if window is None else sliding(window)
    assert caches.contents.snapshot(ROW, caches.layer.kind, 0) is None
    caches.write([1, 2, 3])
    snapshot = caches.keep(0)
    caches.join(OTHER)

    assert caches.contents.restore(ROW, [], 0)
    assert caches.list_held() == []
    assert caches.contents.restore(OTHER, [snapshot], 0)
    assert caches.list_held(OTHER) == []
    assert caches.write([7, 8]) == [[7], [7, 8]]
    assert numbers_of(snapshot.read()[0]) == [1, 2, 3]
    snapshot.close()


def test_fault_9_a_snapshot_is_no_view() -> None:
    """Copied out, 10 of 500 tokens cost 10; when the arena closes all of it is freed."""
    empty_nbytes = live_nbytes()
    caches = standard()
    for first in (0, 250):
        caches.write(range(first, first + 250))
    snapshot = caches.keep(490)
    caches.caches.leave(ROW)

    assert caches.caches.nbytes == 0
    assert snapshot.nbytes == 10 * 2 * TOKENS * 4
    assert mx.get_active_memory() - empty_nbytes == snapshot.nbytes
    snapshot.close()
    assert mx.get_active_memory() == empty_nbytes


def test_fault_9_a_recurrent_state_is_no_view_either() -> None:
    """A convolution's tail, cut from a chunk of 200 inputs, keeps neither them nor the arena."""
    layer = RecurrentCache([RowState("tail", (3, 64), mx.float32)])
    caches = RowCaches([layer], context_max=1024, rows_max=4)
    empty_nbytes = live_nbytes()
    assert caches.join(ROW, tokens=512)
    plan = caches.plan(
        (ROW,),
        offsets=mx.array([0], dtype=mx.int32),
        lengths=(200,),
        width=200,
        dtype=mx.float32,
    )
    (tail,) = layer.states(plan)
    inputs = mx.concatenate([tail, mx.random.normal((1, 200, 64))], axis=1)
    layer.put(plan, [inputs[:, -3:]])
    mx.eval(caches.state())
    del inputs, tail, plan
    arena_nbytes = caches.nbytes

    before_nbytes = live_nbytes()
    snapshot = caches.contents.snapshot(ROW, Kind.RECURRENT, 0)

    assert snapshot is not None
    assert mx.get_active_memory() - before_nbytes == snapshot.nbytes == 3 * 64 * 4
    caches.leave(ROW)
    left_nbytes = before_nbytes - arena_nbytes + snapshot.nbytes
    assert abs(mx.get_active_memory() - left_nbytes) < 1 << 10
    snapshot.close()
    assert abs(mx.get_active_memory() - empty_nbytes) < 1 << 10


def test_fault_10_counted_bytes_are_real_bytes() -> None:
    """A count of sizes at birth and of what hooks said frees exactly itself when all is closed."""
    caches = standard()
    caches.write(range(200))
    counted: list[int] = []

    def count(snapshot: Snapshot) -> Snapshot:
        counted.append(snapshot.nbytes)
        snapshot.on_materialise = counted.append
        return snapshot

    snapshots = [count(caches.keep(start)) for start in (0, 50, 150, 190)]
    snapshots.pop(0).close()
    assert sum(counted) == 0
    assert caches.contents.restore(ROW, [], 195)
    caches.write([201])
    copy_out(snapshots[0])
    before_nbytes = live_nbytes()

    for snapshot in snapshots:
        snapshot.close()

    assert sum(counted) == before_nbytes - mx.get_active_memory() == (150 + 50 + 10) * 2 * 1024


def test_fault_12_a_partial_match_is_cut_to_the_exact_token() -> None:
    """A row given 13 of a snapshot's 20 tokens stands at 13, not at the snapshot's end or start."""
    caches = standard()
    caches.write(range(20))
    snapshot = caches.keep(0)
    caches.join(OTHER)

    assert caches.contents.restore(OTHER, [snapshot], 13)

    assert caches.contents.offset(OTHER) == 13
    assert caches.list_held(OTHER) == list(range(13))
    assert caches.write([50], OTHER) == [[*range(13), 50]]
    assert caches.contents.restore(ROW, [], 13)
    assert caches.write([60], ROW) == [[*range(13), 60]]
    assert numbers_of(snapshot.read()[0]) == list(range(20))
    snapshot.close()


def test_an_own_snapshot_is_restored_without_a_copy() -> None:
    """Going back and forth within what a row still holds moves an offset and nothing else."""
    caches = standard()
    caches.write(range(100))
    snapshot = caches.keep(0)
    before_nbytes = live_nbytes()

    assert caches.contents.restore(ROW, [], 10)
    assert caches.contents.restore(ROW, [snapshot], 90)

    assert snapshot.lazy
    assert mx.get_peak_memory() <= before_nbytes
    assert caches.list_held() == list(range(90))
    snapshot.close()


def test_a_lazy_snapshot_serves_other_rows_and_stays_lazy() -> None:
    """Another row gets its copy out of the arena; nobody pays for a snapshot."""
    caches = standard()
    caches.write(range(30))
    snapshot = caches.keep(0)
    caches.join(OTHER)

    assert caches.contents.restore(OTHER, [snapshot], 25)

    assert (snapshot.lazy, caches.contents.book.nbytes) == (True, 0)
    assert caches.list_held(OTHER) == list(range(25))
    snapshot.close()


def test_a_gap_before_a_snapshot_is_refused() -> None:
    """A snapshot that begins beyond the row's offset cannot be reached; the row stays."""
    caches = standard()
    caches.write(range(30))
    snapshot = caches.keep(10)
    assert caches.contents.restore(ROW, [], 9)

    assert not caches.contents.restore(ROW, [snapshot], 20)
    assert not caches.contents.restore(ROW, [snapshot], 31)
    assert (caches.contents.offset(ROW), caches.list_held()) == (9, list(range(9)))
    snapshot.close()


def test_a_row_that_left_and_came_back_is_empty() -> None:
    """A row's name may be used again; what was kept of the former one is its own."""
    caches = standard()
    caches.write(range(5))
    snapshot = caches.keep(0)
    caches.caches.leave(ROW)
    caches.join(ROW)

    assert caches.list_held() == []
    assert caches.write([9]) == [[9]]
    assert numbers_of(snapshot.read()[0]) == list(range(5))
    assert caches.contents.restore(ROW, [snapshot], 4)
    assert caches.list_held() == list(range(4))
    snapshot.close()


def test_parts_of_two_rows_merge_into_a_copy_of_both() -> None:
    """Lazy snapshots of different rows are not one range: the merged one has each row's tokens."""
    caches = standard()
    caches.write(range(10))
    caches.join(OTHER)
    caches.write(range(20, 30), OTHER)
    first, rest = caches.keep(0).split(4)
    early, second = caches.keep(0, OTHER).split(4)
    for unused in (rest, early):
        assert unused is not None
        unused.close()

    assert first is not None
    assert second is not None

    merged = caches.contents.book.merge(first, second)

    assert (merged.start, merged.stop, merged.lazy) == (0, 10, False)
    assert numbers_of(merged.read()[0]) == [0, 1, 2, 3, 24, 25, 26, 27, 28, 29]
    merged.close()


@pytest.mark.parametrize("window", [None, 400])
@pytest.mark.parametrize("lazy", [True, False])
def test_a_part_longer_than_the_row_has_room_for_is_cut(window: int | None, lazy: bool) -> None:
    """A row with room for 256 tokens takes 200 of a snapshot of 300; its neighbour is spared."""
    caches = standard() if window is None else sliding(window)
    for first in (0, 100, 200):
        caches.write(token % TOKENS for token in range(first, first + 100))
    snapshot = caches.keep(0)
    if not lazy:
        copy_out(snapshot)
    rows = [RowId(2), RowId(3)]
    for row in rows:
        assert caches.caches.join(row, tokens=100)
        caches.write([7, 8, 9], row)

    assert caches.contents.restore(rows[0], [snapshot], 200)

    assert caches.list_held(rows[0]) == list(range(200))
    assert caches.list_held(rows[1]) == [7, 8, 9]
    assert caches.decode([250], rows[1]) == [7, 8, 9, 250]
    snapshot.close()
