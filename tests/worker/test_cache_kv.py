"""The standard cache against the whole history, with contents that tell their row and position."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxd_worker.cache.base import Place, RowError, RowId
from mlxd_worker.cache.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from tests.support.effort import SAME_EACH_TIME, examples

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5
CONTEXT_MAX = 1024
ROWS_MAX = 5


@dataclass
class Naive:
    """Every row's whole history of keys and values, one array a row, nothing clever."""

    caches: RowCaches
    keys: dict[RowId, mx.array] = field(default_factory=dict)
    values: dict[RowId, mx.array] = field(default_factory=dict)
    written: int = 0

    def kv_cache(self) -> KVCache:
        """Return the cache under test."""
        layer = self.caches.layers[0]
        assert isinstance(layer, KVCache)
        return layer

    def length(self, row: RowId) -> int:
        """Return the row's tokens."""
        return self.keys[row].shape[1]

    def join(self, row: RowId, tokens: int) -> None:
        """Start a row without tokens."""
        self.caches.join(row, tokens=tokens)
        empty = mx.zeros((KV_HEADS, 0, HEAD_DIM))
        self.keys[row] = self.values[row] = empty

    def leave(self, row: RowId) -> None:
        """End a row."""
        self.caches.leave(row)
        del self.keys[row], self.values[row]

    def rewind(self, row: RowId, length: int) -> None:
        """Go back: the cache needs no call, the next write is at the earlier offset."""
        self.keys[row] = self.keys[row][:, :length]
        self.values[row] = self.values[row][:, :length]

    def append(self, rows: tuple[RowId, ...], width: int) -> None:
        """Write `width` tokens to each row and compare what its queries read."""
        offsets = [self.length(row) for row in rows]
        for row, offset in zip(rows, offsets, strict=True):
            self.caches.reserve(row, tokens=offset + width)
        self.written += 1
        draws = mx.random.split(mx.random.key(self.written), 3)
        shape = (len(rows), KV_HEADS, width, HEAD_DIM)
        queries = mx.random.normal((len(rows), HEADS, width, HEAD_DIM), key=draws[0])
        keys, values = (mx.random.normal(shape, key=key) for key in draws[1:])
        # The first number of each key and value says which row and which position it belongs to.
        tags = mx.array(
            [[row * 2048 + offset + step for step in range(width)] for row, offset in
             zip(rows, offsets, strict=True)], dtype=mx.float32,
        )  # fmt: skip
        keys[..., 0] = tags[:, None, :] / 1024
        values[..., 0] = tags[:, None, :]
        plan = self.caches.plan(
            rows,
            offsets=mx.array(offsets, dtype=mx.int32),
            lengths=tuple(offset + width for offset in offsets),
            width=width,
            dtype=mx.float32,
        )
        read = self.kv_cache().attend(queries, keys, values, plan, scale=SCALE)
        mx.eval(read, self.caches.state())
        for index, row in enumerate(rows):
            self.keys[row] = mx.concatenate([self.keys[row], keys[index]], axis=1)
            self.values[row] = mx.concatenate([self.values[row], values[index]], axis=1)
            self._compare(row, queries[index], read[index])

    def _compare(self, row: RowId, queries: mx.array, read: mx.array) -> None:
        length, width = self.length(row), queries.shape[1]
        keys, values = (
            mx.repeat(array, HEADS // KV_HEADS, axis=0)
            for array in (self.keys[row], self.values[row])
        )
        scores = queries @ keys.transpose(0, 2, 1) * SCALE
        visible = mx.arange(length) <= (length - width + mx.arange(width))[:, None]
        expected = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1) @ values
        assert mx.allclose(read, expected, rtol=1e-4, atol=1e-4).item(), row

    def check(self) -> None:
        """Compare the cache's own contents, position by position, and its bytes."""
        arrays = self.caches.arrays()
        for row in self.keys:
            place = self.caches.table.place(row)
            length = self.length(row)
            keys = arrays[f"layers.0.keys.{place.capacity}"][place.slot, :, :length]
            values = arrays[f"layers.0.values.{place.capacity}"][place.slot, :, :length]
            assert mx.array_equal(keys, self.keys[row]).item()
            assert mx.array_equal(values, self.values[row]).item()
        slots = {c: self.caches.table.slots_of(c) for c in self.caches.table.arenas}
        token_nbytes = 2 * KV_HEADS * HEAD_DIM * 4
        assert self.caches.nbytes == sum(c * n * token_nbytes for c, n in slots.items())
        assert set(self.keys) == set(self.caches.rows)


def naive(*, fine_spans: bool = False) -> Naive:
    """Return an empty pair of cache and reference."""
    cache = KVCache(kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=mx.float32)
    return Naive(
        RowCaches([cache], context_max=CONTEXT_MAX, rows_max=ROWS_MAX, fine_spans=fine_spans)
    )


@dataclass(frozen=True)
class Step:
    """One step of a program; what it cannot do now it leaves out."""

    verb: str
    number: int
    order: int
    amount: int


STEPS = st.builds(
    Step,
    verb=st.sampled_from(
        ["join", "chunk", "chunk", "decode", "decode", "draft", "rewind", "leave"]
    ),
    number=st.integers(0, ROWS_MAX + 1),
    order=st.integers(0, 119),
    amount=st.integers(1, 300),
)


def run(pair: Naive, step: Step) -> None:
    """Carry out one step on both."""
    row = RowId(step.number)
    if step.verb == "join":
        if row not in pair.keys and len(pair.keys) < ROWS_MAX:
            pair.join(row, step.amount)
    elif step.verb in {"decode", "draft"}:
        width = 1 if step.verb == "decode" else 1 + step.amount % 4
        able = [r for r in pair.keys if pair.length(r) + width <= CONTEXT_MAX]
        # Some of the rows, in some order: a batch need not hold every row of an arena.
        able.sort(key=lambda r: (r * 7 + step.order) % 11)
        chosen = able[: 1 + step.amount % ROWS_MAX]
        if chosen:
            pair.append(tuple(chosen), width)
    elif row not in pair.keys:
        return
    elif step.verb == "chunk":
        width = min(step.amount, CONTEXT_MAX - pair.length(row))
        if width:
            pair.append((row,), width)
    elif step.verb == "rewind":
        pair.rewind(row, pair.length(row) * step.order // 119)
    else:
        pair.leave(row)


@settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=SAME_EACH_TIME,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(STEPS, min_size=20, max_size=60), st.booleans())
def test_any_program_reads_what_was_written(program: list[Step], fine_spans: bool) -> None:
    """Joins, appends, rewinds and leaves in any order read exactly each row's own history."""
    pair = naive(fine_spans=fine_spans)
    for step in program:
        run(pair, step)
        pair.check()


@settings(
    max_examples=examples(3),
    deadline=None,
    derandomize=SAME_EACH_TIME,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example,
                           HealthCheck.data_too_large],
)  # fmt: skip
@given(st.lists(STEPS, min_size=250, max_size=260))
def test_long_programs_too(program: list[Step]) -> None:
    """The same over hundreds of steps on one cache."""
    pair = naive()
    for step in program:
        run(pair, step)
    pair.check()


def test_everything_is_given_back() -> None:
    """When the last row leaves, the cache holds no array."""
    pair = naive()
    for number in range(ROWS_MAX):
        pair.join(RowId(number), 200 * (number + 1))

    for number in range(ROWS_MAX):
        pair.leave(RowId(number))

    assert (pair.caches.nbytes, pair.caches.state()) == (0, [])


def test_the_growth_of_a_join_is_known_beforehand() -> None:
    """`join_nbytes` is to the byte what joining adds, growth of the arena included."""
    pair = naive()
    for number, tokens in enumerate([10, 20, 300, 30, 1000]):
        expected = pair.caches.nbytes + pair.caches.join_nbytes(tokens)
        pair.join(RowId(number), tokens)
        assert pair.caches.nbytes == expected


def test_rows_and_lengths_are_checked_before_a_write() -> None:
    """Unknown and doubled rows and lengths that do not fit are refused on the host."""
    pair = naive()
    pair.join(RowId(1), 10)

    def plan(rows: tuple[RowId, ...], lengths: tuple[int, ...], width: int = 1) -> None:
        offsets = mx.array([n - width for n in lengths], dtype=mx.int32)
        pair.caches.plan(rows, offsets=offsets, lengths=lengths, width=width, dtype=mx.float32)

    for rows, lengths, width in [
        ((), (), 1),
        ((RowId(2),), (1,), 1),
        ((RowId(1), RowId(1)), (1, 1), 1),
        ((RowId(1),), (257,), 1),
        ((RowId(1),), (3,), 4),
        ((RowId(1),), (1, 2), 1),
    ]:
        with pytest.raises(RowError):
            plan(rows, lengths, width)


@pytest.mark.parametrize(
    ("fine_spans", "spans"), [(False, [256, 256, 512, 1024]), (True, [32, 64, 320, 1024])]
)
def test_spans_are_few_or_fine(fine_spans: bool, spans: list[int]) -> None:
    """Attention spans are powers of two, or multiples of 32 where shapes are free."""
    pair = naive(fine_spans=fine_spans)
    rows = (RowId(1), RowId(2))
    for row in rows:
        pair.join(row, 1024)

    seen = []
    for length in (32, 33, 300, 1000):
        offsets = mx.array([length - 1, 0], dtype=mx.int32)
        plan = pair.caches.plan(
            rows, offsets=offsets, lengths=(length, 1), width=1, dtype=mx.float32
        )
        (group,) = plan.groups
        assert group.mask.shape == (2, 1, 1, group.span)
        seen.append(group.span)

    assert seen == spans


def growth_of_steps(pair: Naive, *, hold_view: bool) -> float:
    """Return the median peak of bytes above the live ones over some decode steps."""
    growths = []
    rows = pair.caches.rows
    for _ in range(9):
        view = pair.kv_cache().arrays()["keys.1024"][:1] if hold_view else None
        if view is not None:
            mx.eval(view)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        pair.append(rows, 1)
        growths.append(mx.get_peak_memory() - before)
    return statistics.median(growths)


def wide_rows() -> Naive:
    """Return rows in one arena much larger than what a step computes."""
    cache = KVCache(kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=mx.float32)
    pair = Naive(RowCaches([cache], context_max=1024, rows_max=64))
    for number in range(64):
        pair.join(RowId(number), 1000)
        pair.append((RowId(number),), 2)
    return pair


def test_a_step_writes_in_place() -> None:
    """A decode step needs much less than the arena; a view kept across it costs a whole copy."""
    pair = wide_rows()
    one_array = pair.caches.nbytes // 2

    in_place = growth_of_steps(pair, hold_view=False)
    copied = growth_of_steps(pair, hold_view=True)

    assert in_place < one_array / 2
    assert copied - in_place > one_array / 2


def test_filling_a_hole_copies_one_row() -> None:
    """When a row leaves, the room needed for the move is a row's, not an arena's."""
    pair = wide_rows()
    row_nbytes = pair.caches.nbytes // 64
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    pair.leave(RowId(3))

    assert mx.get_peak_memory() - before < 3 * row_nbytes
    pair.check()


def test_a_row_that_moved_is_found_by_the_same_batch() -> None:
    """A batch of the same rows as before follows a row that filled another's hole."""
    pair = naive()
    for number in (1, 2, 3):
        pair.join(RowId(number), 10)
        pair.append((RowId(number),), 4)
    pair.append((RowId(2), RowId(3)), 1)

    pair.leave(RowId(1))

    pair.append((RowId(2), RowId(3)), 1)
    pair.check()


def test_growing_needs_the_room_of_one_old_array() -> None:
    """An arena grows array by array: the peak is the new size and one old array."""
    caches = [KVCache(kv_heads=8, head_dim=64, dtype=mx.float32) for _ in range(4)]
    rows = RowCaches(caches, context_max=1024, rows_max=8)
    for number in range(4):
        rows.join(RowId(number), tokens=1000)
    old_nbytes = rows.nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    rows.join(RowId(4), tokens=1000)

    assert rows.nbytes == 2 * old_nbytes
    old_array_nbytes = old_nbytes // (2 * len(caches))
    assert mx.get_peak_memory() - before <= old_nbytes + old_array_nbytes + (64 << 10)


def test_a_moved_row_leaves_no_view_of_its_arena() -> None:
    """After a class change and a hole filled, only the arenas themselves are alive."""
    cache = KVCache(kv_heads=8, head_dim=64, dtype=mx.float32)
    before = mx.get_active_memory()
    rows = RowCaches([cache], context_max=1024, rows_max=8)
    for number in range(3):
        rows.join(RowId(number), tokens=200)

    rows.reserve(RowId(0), tokens=500)
    rows.leave(RowId(1))

    assert abs(mx.get_active_memory() - before - rows.nbytes) < 16 << 10
    assert rows.table.place(RowId(2)) == Place(256, 0)
