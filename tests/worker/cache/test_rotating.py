"""The rotating cache alone, against the whole history, with contents that tell their position."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import pytest

from mlxd_worker.cache.arenas.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.base import ArenaId, Kind, Open, Place, RowError
from mlxd_worker.cache.changes import carry_out
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.rotating import RotatingCache
from tests.support.mlx_memory import live_nbytes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5
ARENA = ArenaId(7)


@dataclass
class Pair:
    """A cache with one arena, and every slot's whole history; each pass is compared."""

    window: int
    capacity: int
    slots: int = 3
    bounded: bool = False
    keys: list[mx.array] = field(init=False)
    values: list[mx.array] = field(init=False)
    cache: RotatingCache = field(init=False)
    draws: int = 0

    def __post_init__(self) -> None:
        self.cache = new_cache(self.window)
        carry_out([Open(ARENA, self.capacity, self.slots)], [self.cache])
        self.keys = [nothing() for _ in range(self.slots)]
        self.values = [nothing() for _ in range(self.slots)]

    def length(self, slot: int) -> int:
        """Return the slot's tokens."""
        return self.keys[slot].shape[1]

    def place(self, slot: int) -> Place:
        """Return where a slot is."""
        return Place(ARENA, self.capacity, slot)

    def chunk(self, slot: int, width: int) -> None:
        """Append `width` tokens to one slot as a chunk."""
        offset = self.length(slot)
        start = mx.array([slot, offset], dtype=mx.int32)
        chunk = Chunk(ARENA, self.capacity, slot, offset + width, start)
        self._attend([slot], width, self._plan(width, chunk=chunk))

    def batch(self, slots: Sequence[int], width: int = 1) -> None:
        """Append `width` tokens to each of these slots, in this order in the batch."""
        offsets = [self.length(slot) for slot in slots]
        used = max(slots) + 1
        own = mx.array(offsets, dtype=mx.int32)[:, None] + mx.arange(width, dtype=mx.int32)
        asking = [slots.index(slot) if slot in slots else 0 for slot in range(used)]
        queriers = mx.array(asking, dtype=mx.int32)
        group = Group(
            arena=ARENA,
            capacity=self.capacity,
            members=None,
            queriers=None if asking == list(range(len(slots))) else queriers,
            first=0,
            count=len(slots),
            slots_used=used,
            span=min(self.capacity, max(offsets) + width + 3),
            write_slots=mx.array(list(slots), dtype=mx.int32)[:, None],
            write_positions=own,
            last_visible=own[queriers],
        )
        self._attend(slots, width, self._plan(width, group=group, order=mx.array(list(slots))))

    def rewind(self, slot: int, length: int) -> None:
        """Go back as the cache allows: no call is needed."""
        assert self.cache.rewinds(self.length(slot), length)
        self.keys[slot] = self.keys[slot][:, :length]
        self.values[slot] = self.values[slot][:, :length]

    def list_held(self, slot: int) -> list[int]:
        """Return the positions that the cache holds of a slot, in order, as their tags say."""
        keys, values = self.cache.read(self.place(slot), 0, self.length(slot))
        tags = cast("list[float]", keys[0, 0, :, 0].tolist())
        assert tags == values[0, 1, :, 0].tolist()
        return [round(tag * 64) for tag in tags]

    def _plan(
        self,
        width: int,
        *,
        chunk: Chunk | None = None,
        group: Group | None = None,
        order: mx.array | None = None,
    ) -> StepPlan:
        return StepPlan(
            width=width,
            dtype=mx.float32,
            chunk=chunk,
            groups=() if group is None else (group,),
            order=order,
            places=(),
            bounded_shapes=self.bounded,
        )

    def _attend(self, slots: Sequence[int], width: int, plan: StepPlan) -> None:
        self.draws += 1
        draws = mx.random.split(mx.random.key(self.draws), 3)
        queries = mx.random.normal((len(slots), HEADS, width, HEAD_DIM), key=draws[0])
        shape = (len(slots), KV_HEADS, width, HEAD_DIM)
        keys, values = (mx.random.normal(shape, key=key) for key in draws[1:])
        for index, slot in enumerate(slots):
            # The first number of each key and value says which position it belongs to.
            tags = (self.length(slot) + mx.arange(width)) / 64
            keys[index, ..., 0] = values[index, ..., 0] = tags
        read = self.cache.attend(Asked(queries, keys, values, plan, SCALE))
        mx.eval(read, list(self.cache.arrays().values()))
        for index, slot in enumerate(slots):
            self.keys[slot] = mx.concatenate([self.keys[slot], keys[index]], axis=1)
            self.values[slot] = mx.concatenate([self.values[slot], values[index]], axis=1)
            expected = self._naive(slot, queries[index])
            assert mx.allclose(read[index], expected, rtol=1e-4, atol=1e-4).item(), slot

    def _naive(self, slot: int, queries: mx.array) -> mx.array:
        keys, values = (
            mx.repeat(array, HEADS // KV_HEADS, axis=0)
            for array in (self.keys[slot], self.values[slot])
        )
        length, width = self.length(slot), queries.shape[1]
        asking = (length - width + mx.arange(width))[:, None]
        positions = mx.arange(length)
        seen = (positions <= asking) & (positions > asking - self.window)
        scores = queries @ keys.transpose(0, 2, 1) * SCALE
        return mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ values


def new_cache(window: int) -> RotatingCache:
    """Return a cache without arenas."""
    return RotatingCache(kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=window, dtype=mx.float32)


def nothing() -> mx.array:
    """Return the keys of no tokens."""
    return mx.zeros((KV_HEADS, 0, HEAD_DIM))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("window", "capacity"), [(1, 32), (4, 64), (16, 64), (64, 64), (100, 64)])
def test_every_pass_reads_the_window_and_nothing_else(
    window: int, capacity: int, bounded: bool
) -> None:
    """Chunks and batches of any width, wrapping or not, read what a dense history would give."""
    pair = Pair(window, capacity, bounded=bounded)
    program = random.Random(window)
    for _ in range(120):
        slots = program.sample(range(pair.slots), program.randint(1, pair.slots))
        width = program.choice([1, 1, 1, 2, 3, window - 1, window, window + 1, 2 * window + 3])
        room = capacity - max(pair.length(slot) for slot in slots)
        width = max(1, min(width, room))
        if room == 0:
            pair.cache.clear(pair.place(slots[0]))
            pair.keys[slots[0]], pair.values[slots[0]] = nothing(), nothing()
        elif len(slots) == 1:
            pair.chunk(slots[0], width)
        else:
            pair.batch(slots, width)
        for slot in range(pair.slots):
            length = pair.length(slot)
            assert pair.list_held(slot) == list(range(max(0, length - window), length))


def test_a_chunk_after_a_wrap_finds_the_last_positions_in_order() -> None:
    """After a wrap in mid-ring, the ring is put in order before it is attended and kept."""
    pair = Pair(window=4, capacity=32)
    pair.chunk(0, 3)
    for _ in range(6):
        pair.batch([0])

    pair.chunk(0, 2)

    assert pair.length(0) == 11
    assert pair.list_held(0) == [7, 8, 9, 10]


def test_a_row_rewinds_until_its_window_has_wrapped() -> None:
    """A ring filled to the brim still holds everything; one more position and it does not."""
    pair = Pair(window=8, capacity=32)
    pair.chunk(0, 8)

    pair.rewind(0, 2)
    pair.chunk(0, 3)

    assert pair.list_held(0) == [0, 1, 2, 3, 4]
    rewinds = pair.cache.rewinds
    assert (rewinds(8, 0), rewinds(8, 7), rewinds(9, 9)) == (True, True, True)
    assert (rewinds(9, 8), rewinds(9, 0), rewinds(10, 3)) == (False, False, False)


@pytest.mark.parametrize("length", [3, 8, 9, 21, 40])
def test_what_was_read_can_be_put_back(length: int) -> None:
    """A window that was kept brings its row back, whatever was written since, in any place."""
    pair = Pair(window=8, capacity=64)
    pair.chunk(0, length)
    kept = pair.cache.read(pair.place(0), 0, length)
    mx.eval(kept)
    keys, values = pair.keys[0], pair.values[0]
    pair.chunk(0, 13)

    for slot in (0, 2):
        pair.cache.write(pair.place(slot), 0, length, kept)
        pair.keys[slot], pair.values[slot] = keys, values

    assert kept[0].shape == (1, KV_HEADS, min(length, 8), HEAD_DIM)
    assert pair.list_held(0) == pair.list_held(2) == list(range(max(0, length - 8), length))
    pair.batch([2, 0])
    pair.chunk(2, 5)
    pair.chunk(0, 20)


@pytest.mark.parametrize(("slots", "length"), [(1, 256), (1, 300), (8, 200)])
def test_what_is_kept_owns_its_memory(slots: int, length: int) -> None:
    """A window that was read takes its own bytes, be it the only row's and whole; and no more."""
    cache = RotatingCache(kv_heads=1, head_dim=64, window=256, dtype=mx.float32)
    carry_out([Open(ARENA, 512, slots)], [cache])
    own_nbytes = 2 * min(length, 256) * 64 * 4
    mx.clear_cache()  # a buffer used again may be larger than what is asked for
    before_nbytes = live_nbytes()

    kept = cache.read(Place(ARENA, 512, 0), 0, length)
    mx.eval(kept)

    assert abs(mx.get_active_memory() - before_nbytes - own_nbytes) < 32 << 10


def test_a_state_of_another_row_is_refused() -> None:
    """A window that is not the row's length, or a place too small for it, is a loud bug."""
    pair = Pair(window=4, capacity=8)
    pair.chunk(0, 3)
    kept = pair.cache.read(pair.place(0), 0, 3)

    with pytest.raises(RowError, match="3 positions before 6"):
        pair.cache.write(pair.place(1), 0, 6, kept)
    with pytest.raises(RowError, match="a capacity of 8"):
        pair.cache.write(pair.place(1), 0, 9, (*pair.cache.read(pair.place(0), 0, 4),))


def test_a_row_crosses_into_a_larger_ring() -> None:
    """Out of an arena shorter than the window, positions keep their columns and go on."""
    pair = Pair(window=24, capacity=16, slots=1)
    pair.chunk(0, 15)
    larger = Place(ArenaId(8), 64, 1)
    carry_out([Open(larger.arena, larger.capacity, 2)], [pair.cache])

    pair.cache.move(pair.place(0), larger, pair.cache.lift(pair.place(0)))
    pair.cache.close(ARENA)

    keys, values = pair.cache.read(larger, 0, 15)
    assert mx.array_equal(keys[0], pair.keys[0])
    assert mx.array_equal(values[0], pair.values[0])
    assert set(pair.cache.arrays()) == {"keys.8", "values.8"}


def test_a_row_takes_no_more_than_its_window() -> None:
    """The bytes of a slot stop growing at the window, and the arrays have exactly these."""
    cache = new_cache(window=100)
    token = 2 * KV_HEADS * HEAD_DIM * 4

    assert [cache.slot_nbytes(capacity) for capacity in (64, 256, 4096)] == [
        64 * token, 100 * token, 100 * token,
    ]  # fmt: skip
    carry_out([Open(ARENA, 4096, 3)], [cache])
    assert cache.nbytes == 3 * cache.slot_nbytes(4096)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    assert cache.kind is Kind.ROTATING
    assert not cache.kind.sliceable


def test_clearing_leaves_nothing_of_a_poisoned_row() -> None:
    """A slot that held NaN reads as zeros after `clear`, its neighbours as before."""
    pair = Pair(window=4, capacity=16)
    pair.chunk(1, 6)
    for array in pair.cache.arrays().values():
        array[0] = mx.nan

    pair.cache.clear(pair.place(0))

    assert pair.list_held(1) == [2, 3, 4, 5]
    for array in pair.cache.arrays().values():
        assert not mx.any(array[0]).item()


def growth(width: int, *, hold_view: bool) -> tuple[int, int]:
    """Return by how much memory grows at the peak of one pass that wraps, and an array's bytes."""
    pair = Pair(window=128, capacity=1024, slots=64)
    for slot in range(pair.slots):
        pair.chunk(slot, 130)
    array = pair.cache.arrays()[f"keys.{ARENA}"]
    array_nbytes = array.nbytes
    view = array[:1, :, :1] if hold_view else None
    del array
    if view is not None:
        mx.eval(view)
    before = live_nbytes()
    if width == 1:
        pair.batch([1, 2, 3])
    else:
        pair.chunk(3, width)
    return mx.get_peak_memory() - before, array_nbytes


@pytest.mark.parametrize("width", [1, 5, 140])
def test_a_pass_writes_in_place(width: int) -> None:
    """A step or a chunk that wraps never copies the arena; a view held across it makes it do so."""
    in_place, _ = growth(width, hold_view=False)
    copied, array_nbytes = growth(width, hold_view=True)

    assert copied - in_place > array_nbytes / 2
    assert in_place < array_nbytes / 2 or width == 140  # whose scores alone are larger
