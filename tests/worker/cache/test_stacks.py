"""Layers' states in stacks: split, joined and read as if each layer had arrays of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.changes import LIFTED_NBYTES
from mlxd_worker.cache.disk.cutting import cut, tensors_of
from mlxd_worker.cache.kept.snapshot import Snapshot, SnapshotBook
from mlxd_worker.cache.kept.stacks import LayerState, Stack, layers_of, nbytes_of, take_pairs
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from tests.plugins.leaks import Counting
from tests.support.mlx_memory import live_nbytes
from tests.worker.in_place import InPlace

LAYERS: Final = 5
TOKENS: Final = 40
LAYER_NBYTES: Final = 2 * TOKENS * 2 * 8 * 4
"""Keys and values of one layer: 2 heads of 8 numbers in float32."""

PARTITIONS: Final = st.lists(st.booleans(), min_size=LAYERS - 1, max_size=LAYERS - 1).map(
    lambda ends: [at + 1 for at, is_end in enumerate(ends) if is_end]
)
"""Before which layers a new stack begins."""


def read_nothing(row: RowId, kind: Kind, start: int, stop: int) -> tuple[Stack, ...]:
    """Stand for rows where none is lazy."""
    raise AssertionError(f"row {row} {kind} [{start}, {stop})")


def states(tokens: int, *, seed: int = 0) -> tuple[LayerState, ...]:
    """Return random keys and values of each layer, `[1, 2, tokens, 8]`."""
    keys = mx.random.split(mx.random.key(seed), 2 * LAYERS)
    made = [mx.random.normal((1, 2, tokens, 8), key=key) for key in keys]
    mx.eval(made)
    return tuple(zip(made[::2], made[1::2], strict=True))


def stack_up(layers: Sequence[LayerState], starts: Sequence[int]) -> tuple[Stack, ...]:
    """Return the layers in stacks, of which each but the first begins at one of `starts`."""
    ends = [*starts, len(layers)]
    stacks = [
        tuple(mx.concatenate(list(parts)) for parts in zip(*layers[first:last], strict=True))
        for first, last in zip([0, *starts], ends, strict=True)
    ]
    mx.eval(stacks)
    return tuple(stacks)


def assert_same(ours: Sequence[LayerState], expected: Sequence[LayerState]) -> None:
    """Compare layers' arrays, shape and numbers."""
    for state, other in zip(ours, expected, strict=True):
        for one, another in zip(state, other, strict=True):
            assert one.shape == another.shape
            assert mx.array_equal(one, another).item()


@given(before=PARTITIONS, after=PARTITIONS, at=st.integers(1, TOKENS - 1))
def test_stacks_are_split_and_joined_as_layers(
    before: list[int], after: list[int], at: int
) -> None:
    """However two are stacked, they join to what their layers do, and split at any token."""
    book = SnapshotBook(read_nothing)
    first, second = states(TOKENS, seed=1), states(TOKENS, seed=2)
    parent = book.add_owned(Kind.STANDARD, 0, TOKENS, stack_up(first, before))
    child = book.add_owned(Kind.STANDARD, TOKENS, 2 * TOKENS, stack_up(second, after))
    assert book.tally() == (2 * LAYERS * LAYER_NBYTES, 2 * (len(before) + len(after) + 2))

    whole = book.merge(parent, child)

    assert book.tally() == (whole.nbytes, len(book.arrays()))
    pairs = [zip(*both, strict=True) for both in zip(first, second, strict=True)]
    joined = [tuple(mx.concatenate(list(pair), axis=2) for pair in each) for each in pairs]
    assert_same(whole.read(), joined)
    left, right = book.split(whole, at)
    assert_same(left.read(), [(keys[..., :at, :], values[..., :at, :]) for keys, values in joined])
    assert_same(right.read(), [(keys[..., at:, :], values[..., at:, :]) for keys, values in joined])
    assert left.nbytes + right.nbytes == 2 * LAYERS * LAYER_NBYTES
    left.close()
    right.close()
    assert book.tally() == (0, 0)


def test_a_split_stack_s_halves_are_memory_of_their_own(
    watched: Callable[[Counting], None],
) -> None:
    """Closing one half gives its bytes back: it is no view of the whole."""
    book = SnapshotBook(read_nothing)
    watched(book)
    before_nbytes = live_nbytes()
    whole = book.add_owned(Kind.STANDARD, 0, TOKENS, stack_up(states(TOKENS), ()))
    left, right = book.split(whole, 5)

    assert live_nbytes() - before_nbytes == LAYERS * LAYER_NBYTES
    right.close()
    assert live_nbytes() - before_nbytes == left.nbytes == LAYERS * LAYER_NBYTES * 5 // TOKENS
    left.close()


def test_a_layer_s_own_state_is_no_copy() -> None:
    """What is read of a stack of one is its arrays; of a larger one views, in order."""
    alone = states(3)
    assert all(one is other for one, other in zip(layers_of(alone)[2], alone[2], strict=True))
    stacks = stack_up(alone, (1, 3))
    before_nbytes = live_nbytes()
    views = layers_of(stacks)
    mx.eval(views)

    assert live_nbytes() == before_nbytes
    assert_same(views, alone)


def test_stacks_joined_stay_within_what_is_copied_at_once() -> None:
    """Two stacks of as much as may be give several; of layers that are larger, one each."""
    tokens = LIFTED_NBYTES // LAYERS // 8
    stack = (mx.zeros((LAYERS, 1, tokens, 1)), mx.zeros((LAYERS, 1, tokens, 1)))
    assert nbytes_of(stack) <= LIFTED_NBYTES
    pairs = list(take_pairs([stack], [stack]))
    assert [len(ours[0]) for ours, _ in pairs] == [2, 2, 1]

    large = (mx.zeros((2, 1, LIFTED_NBYTES // 4, 1)),)
    assert [len(ours[0]) for ours, _ in take_pairs([large], [large])] == [1, 1]


def test_what_is_joined_again_and_again_stays_in_few() -> None:
    """As many stacks as what is kept needs, however often it was joined; single layers stay so."""
    book = SnapshotBook(read_nothing)
    whole = book.add_owned(Kind.STANDARD, 0, 1, stack_up(states(1), ()))
    for end in range(2, 6):
        piece = book.add_owned(Kind.STANDARD, end - 1, end, stack_up(states(1), (end - 1,)))
        whole = book.merge(whole, piece)
        assert len(whole.stacks) == 1
    whole.close()
    parts = [book.add_owned(Kind.STANDARD, at, at + 1, states(1)) for at in range(2)]
    apart = book.merge(*parts)
    assert len(apart.stacks) == LAYERS
    apart.close()


def test_a_join_has_one_stack_of_each_side_alive_beside_it() -> None:
    """Not a second copy of all: 8 of each side, of 32 MB, two layers in each."""
    book = SnapshotBook(read_nothing)
    length = LIFTED_NBYTES // 4 // 8

    def whole(start: int) -> Snapshot:
        made = tuple((mx.zeros((2, 1, length, 4)), mx.zeros((2, 1, length, 4))) for _ in range(8))
        mx.eval(made)
        return book.add_owned(Kind.STANDARD, start, start + length, made)

    parent, child = whole(0), whole(length)
    before_nbytes = live_nbytes()
    mx.reset_peak_memory()
    merged = book.merge(parent, child)

    assert mx.get_peak_memory() - before_nbytes <= 4 * LIFTED_NBYTES
    merged.close()


def test_blocks_for_the_disk_are_cut_from_stacks() -> None:
    """Bit for bit what they are of layers with arrays of their own, from several snapshots."""
    book = SnapshotBook(read_nothing)
    first, second = states(TOKENS, seed=3), states(TOKENS, seed=4)
    for starts in ((), (2,)):
        parts, apart = (
            [
                book.add_owned(Kind.STANDARD, 0, TOKENS, one),
                book.add_owned(Kind.STANDARD, TOKENS, 2 * TOKENS, other),
            ]
            for one, other in (
                (stack_up(first, starts), stack_up(second, starts)),
                (first, second),
            )
        )
        for start, stop in ((3, 17), (0, TOKENS), (30, 50)):
            ours, expected = cut(parts, start, stop), cut(apart, start, stop)
            assert ours is not None
            assert expected is not None
            assert tensors_of({Kind.STANDARD: ours}) == tensors_of({Kind.STANDARD: expected})
        for snapshot in (*parts, *apart):
            snapshot.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_row_is_put_back_from_a_stack(*, in_place: bool) -> None:
    """Each layer has its own part of it, up to where the row then stands; also by kernels."""
    layers = [
        (InPlace if in_place else KVCache)(kv_heads=2, head_dim=8, dtype=mx.float32)
        for _ in range(LAYERS)
    ]
    caches = RowCaches(
        layers, context_max=64, rows_max=1, bounded_shapes=in_place, in_place=in_place
    )
    row, kept = RowId(0), states(TOKENS, seed=5)
    assert caches.join(row, tokens=TOKENS)
    contents = caches.contents
    snapshot = contents.book.add_owned(Kind.STANDARD, 0, TOKENS, stack_up(kept, (2,)))

    assert contents.restore(row, [snapshot], TOKENS - 3)

    place = caches.table.place(row)
    read = [layer.read(place, 0, TOKENS - 3) for layer in layers]
    assert_same(read, [tuple(array[:, :, : TOKENS - 3] for array in state) for state in kept])
    snapshot.close()
