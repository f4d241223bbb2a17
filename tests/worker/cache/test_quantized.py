"""The quantised cache: bits that stay, bytes that add up, and attention by either product."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.sizes.cache_sizes import kv_group_values, rows_unpacked
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.base import ArenaId, Kind, Open, Place, RowError, RowId
from mlxd_worker.cache.changes import carry_out
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.quantized import Packing, QuantizedKVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.mlx_memory import live_nbytes

DEMO = Path(__file__).parents[3] / "shared" / "mlxd_shared" / "demo_model"
KV_HEADS, HEADS, HEAD_DIM = 2, 6, 64
SCALE = HEAD_DIM**-0.5
TYPES = [mx.float32, mx.bfloat16, mx.float16]
FORMATS = [KVFormat.Q8, KVFormat.Q4]


def random(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Normal values, the same every time."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def make(
    kv: KVFormat, *, packed_products: bool = False, head_dim: int = HEAD_DIM
) -> QuantizedKVCache:
    """An empty cache."""
    return QuantizedKVCache(
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        dtype=mx.float32,
        kv=kv,
        packed_products=packed_products,
    )


def chunk_plan(place: Place, first: int, width: int) -> StepPlan:
    """One row's next `width` tokens, from position `first` on."""
    start = mx.array([place.slot, first])
    chunk = Chunk(place.arena, place.capacity, place.slot, first + width, start)
    return StepPlan(
        width=width, dtype=mx.float32, chunk=chunk, groups=(), order=None, places=(place,),
        bounded_shapes=False,
    )  # fmt: skip


def decode_plan(places: list[Place], offsets: list[int], width: int = 1) -> StepPlan:
    """The next `width` tokens of all slots of one arena, in order."""
    assert [place.slot for place in places] == list(range(len(places)))
    positions = [[offset + step for step in range(width)] for offset in offsets]
    group = Group(
        arena=places[0].arena,
        capacity=places[0].capacity,
        members=None,
        queriers=None,
        first=0,
        count=len(places),
        slots_used=len(places),
        span=max(offsets) + width,
        write_slots=mx.array([[place.slot] for place in places]),
        write_positions=mx.array(positions),
        last_visible=mx.array(positions),
    )
    return StepPlan(
        width=width, dtype=mx.float32, chunk=None, groups=(group,), order=None,
        places=tuple(places),
        bounded_shapes=False,
    )  # fmt: skip


@dataclass
class Row:
    """What one row was given, for a reference that keeps everything."""

    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)

    def read(self, queries: mx.array, packing: Packing) -> mx.array:
        """Attention of the last positions [heads, width, head_dim] over all, as it was packed."""
        stored = [
            mx.dequantize(
                *packing.pack(mx.concatenate(part, axis=1)),
                group_size=packing.group,
                bits=packing.bits,
            )
            for part in (self.keys, self.values)
        ]
        keys, values = (mx.repeat(array, HEADS // KV_HEADS, axis=0) for array in stored)
        scores = queries @ keys.swapaxes(-1, -2) * SCALE
        width, length = scores.shape[-2:]
        visible = mx.arange(length)[None] <= mx.arange(length - width, length)[:, None]
        return mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1) @ values


def feed(
    cache: QuantizedKVCache, plan: StepPlan, rows: list[Row], seed: int
) -> tuple[mx.array, mx.array]:
    """Write random tokens of `rows`; return what was read, and what should have been."""
    shape = (len(rows), KV_HEADS, plan.width, HEAD_DIM)
    keys, values = random(*shape, seed=seed), random(*shape, seed=seed + 1)
    queries = random(len(rows), HEADS, plan.width, HEAD_DIM, seed=seed + 2)
    for index, row in enumerate(rows):
        row.keys.append(keys[index])
        row.values.append(values[index])
    read = cache.attend(Asked(queries, keys, values, plan, SCALE))
    expected = [row.read(queries[index], cache.packing) for index, row in enumerate(rows)]
    return read, mx.stack(expected)


def farthest(actual: mx.array, expected: mx.array) -> float:
    """The largest difference."""
    value = mx.abs(actual - expected).max().item()
    assert isinstance(value, float)
    return value


def assert_close(actual: mx.array, expected: mx.array) -> None:
    """Equal to what float32 sums differ by."""
    assert farthest(actual, expected) < 1e-4


def test_what_a_step_unpacks_is_what_the_fit_reckons() -> None:
    """All rows, but where products read packed integers within an arena: on Metal alone."""
    by_device = [
        QuantizedKVCache(kv_heads=2, head_dim=64, dtype=dtype, kv=KVFormat.Q8) for dtype in TYPES
    ]
    cuda = mx.cuda.is_available()
    here = DeviceKind.CPU if runs_cpu() else DeviceKind.CUDA if cuda else DeviceKind.METAL

    assert [cache.packed_products for cache in by_device] == [rows_unpacked(4, here) == 1] * 3
    assert [rows_unpacked(4, kind) for kind in DeviceKind] == [4, 4, 1]


@pytest.mark.parametrize("packed_products", [False, True])
@pytest.mark.parametrize("kv", FORMATS)
def test_both_products_attend_over_what_was_packed(kv: KVFormat, *, packed_products: bool) -> None:
    """Chunks, then ragged rows side by side, one token and several: as attention over the whole
    history, each token packed once."""
    cache = make(kv, packed_products=packed_products)
    arena = ArenaId(0)
    carry_out([Open(arena, 256, 4)], [cache])
    places = [Place(arena, 256, slot) for slot in range(3)]
    rows, offsets = [Row() for _ in places], [0, 0, 0]
    seeds = itertools.count(step=10)
    for index, widths in enumerate(((5, 1, 7), (1,), (40,))):
        for width in widths:
            plan = chunk_plan(places[index], offsets[index], width)
            assert_close(*feed(cache, plan, [rows[index]], next(seeds)))
            offsets[index] += width
    for width in (1, 1, 3, 1):
        assert_close(*feed(cache, decode_plan(places, offsets, width), rows, next(seeds)))
        offsets = [offset + width for offset in offsets]


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_unpacking_by_bytes_is_dequantising(kv: KVFormat, dtype: mx.Dtype, head_dim: int) -> None:
    """The same values as MLX's own, in the type of the scales, for every width of a head."""
    packing = Packing(kv, head_dim=head_dim)
    stored = packing.pack(random(2, 3, 5, head_dim, seed=1, dtype=dtype))
    expected = mx.dequantize(*stored, group_size=packing.group, bits=packing.bits)
    unpacked = packing.unpack(stored)

    assert unpacked.dtype == expected.dtype == dtype
    tolerance = {mx.float32: 1e-6, mx.float16: 4e-3, mx.bfloat16: 4e-2}[dtype]
    assert farthest(unpacked, expected) <= tolerance


@pytest.mark.parametrize(("kv", "error_max"), [(KVFormat.Q8, 0.02), (KVFormat.Q4, 0.4)])
def test_what_is_packed_is_near_what_was_given(kv: KVFormat, error_max: float) -> None:
    """About a step of a group's range at most: 6 sigma over 255, or over 15."""
    packing = Packing(kv, head_dim=HEAD_DIM)
    array = random(4, 50, HEAD_DIM, seed=3)
    assert farthest(packing.unpack(packing.pack(array)), array) < error_max


@pytest.mark.parametrize(
    ("head_dim", "kv", "token_nbytes"),
    [
        (64, KVFormat.Q8, 64 + 2 * 2),
        (64, KVFormat.Q4, 32 + 2 * 2),
        (96, KVFormat.Q8, 96 + 3 * 2 * 2),
        (96, KVFormat.Q4, 48 + 3 * 2 * 2),
        (128, KVFormat.Q8, 128 + 2 * 2 * 2),
        (128, KVFormat.Q4, 64 + 2 * 2 * 2),
    ],
)
def test_bytes_are_bits_and_a_scale_and_a_bias_a_group(
    head_dim: int, kv: KVFormat, token_nbytes: int
) -> None:
    """What a slot is said to take is what its arrays take: at most 0.6 and 0.35 of float16."""
    cache = QuantizedKVCache(kv_heads=KV_HEADS, head_dim=head_dim, dtype=mx.float16, kv=kv)
    carry_out([Open(ArenaId(0), 256, 3)], [cache])

    assert cache.slot_nbytes(256) == 2 * KV_HEADS * 256 * token_nbytes
    assert cache.nbytes == 3 * cache.slot_nbytes(256)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    plain = 2 * KV_HEADS * 256 * head_dim * 2
    assert cache.slot_nbytes(256) <= plain * (0.6 if kv is KVFormat.Q8 else 0.35)
    cache.close(ArenaId(0))
    assert cache.nbytes == 0


def test_groups_divide_heads() -> None:
    """64 values share a scale where they can, else 32; other widths cannot be packed."""
    assert [kv_group_values(width) for width in (256, 128, 96, 80, 64, 48, 32)] == [
        64, 64, 32, None, 64, None, 32,
    ]  # fmt: skip


@pytest.mark.parametrize("kv", FORMATS)
def test_bits_survive_snapshots_and_moves(kv: KVFormat) -> None:
    """Read, written elsewhere and moved: the same bits, and the neighbours' untouched."""
    cache = make(kv)
    small, large = ArenaId(0), ArenaId(1)
    carry_out([Open(small, 256, 2)], [cache])
    carry_out([Open(large, 512, 2)], [cache])
    source, neighbour = Place(small, 256, 0), Place(small, 256, 1)
    target, free = Place(large, 512, 1), Place(large, 512, 0)
    for place, seed in ((source, 1), (neighbour, 2)):
        feed(cache, chunk_plan(place, 0, 30), [Row()], seed * 100)
    kept = cache.read(source, 3, 20)
    whole, other = cache.read(source, 0, 30), cache.read(neighbour, 0, 30)
    mx.eval(kept, whole, other)
    assert [array.shape[:3] for array in kept] == [(1, 2 * KV_HEADS, 17)] * 3

    cache.move(source, target, cache.lift(source))
    assert_same(cache.read(target, 0, 30), whole)
    cache.write(free, 3, 20, kept)
    assert_same(cache.read(free, 3, 20), kept)
    assert_same(cache.read(target, 0, 30), whole)
    assert_same(cache.read(neighbour, 0, 30), other)
    cache.clear(source)
    assert all(mx.all(array == 0).item() for array in cache.read(source, 0, 256))
    assert_same(cache.read(neighbour, 0, 30), other)


def assert_same(actual: tuple[mx.array, ...], expected: tuple[mx.array, ...]) -> None:
    """Equal to the last bit."""
    assert all(mx.array_equal(*pair).item() for pair in zip(actual, expected, strict=True))


def test_a_snapshot_is_compact() -> None:
    """It owns the bytes of its positions and nothing of the arena."""
    cache = make(KVFormat.Q4)
    carry_out([Open(ArenaId(0), 4096, 8)], [cache])
    place = Place(ArenaId(0), 4096, 5)
    before = live_nbytes()
    kept = cache.read(place, 100, 200)
    mx.eval(kept)
    own = sum(array.nbytes for array in kept)

    assert own == cache.slot_nbytes(100)
    assert mx.get_active_memory() - before <= own + 3 * 16_384, "but for the allocator's pages"
    mx.eval(cache.arrays())
    cache.close(ArenaId(0))
    mx.eval(kept)
    assert mx.get_active_memory() < before


@pytest.mark.parametrize("several", [False, True])
def test_a_step_writes_in_place(*, several: bool) -> None:
    """Neither a chunk nor a step of many rows makes a second arena, at the peak."""
    cache = QuantizedKVCache(
        kv_heads=8, head_dim=HEAD_DIM, dtype=mx.float32, kv=KVFormat.Q8, packed_products=True
    )
    arena = ArenaId(0)
    carry_out([Open(arena, 8192, 4)], [cache])
    places = [Place(arena, 8192, slot) for slot in range(4)]
    plan = decode_plan(places, [9, 8, 7, 6]) if several else chunk_plan(places[1], 4, 4)
    rows = 4 if several else 1
    keys, values = (random(rows, 8, plan.width, HEAD_DIM, seed=seed) for seed in range(2))
    queries = random(rows, 8, plan.width, HEAD_DIM, seed=9)
    mx.eval(keys, values, queries)
    before = live_nbytes()
    read = cache.attend(Asked(queries, keys, values, plan, SCALE))
    mx.eval(read, *cache.arrays().values())

    assert mx.get_peak_memory() - before < cache.nbytes // 8


def test_a_state_of_another_range_is_refused() -> None:
    """Neither a wrong length nor a row beyond its capacity is written."""
    cache = make(KVFormat.Q8)
    carry_out([Open(ArenaId(0), 256, 1)], [cache])
    place = Place(ArenaId(0), 256, 0)
    kept = cache.read(place, 0, 10)
    for start, stop in ((0, 9), (250, 260)):
        with pytest.raises(RowError):
            cache.write(place, start, stop, kept)


def test_it_goes_back_anywhere() -> None:
    """Every position stands for itself."""
    cache = make(KVFormat.Q8)
    assert cache.kind is Kind.QUANTIZED
    assert cache.kind.sliceable
    assert cache.rewinds(5, 0)
    assert cache.rewinds(5, 5)
    assert not cache.rewinds(5, 6)


@pytest.mark.parametrize(("kv", "error_max"), [(KVFormat.Q8, 0.2), (KVFormat.Q4, 3.0)])
def test_a_trained_model_answers_nearly_the_same(kv: KVFormat, error_max: float) -> None:
    """The logits of a prompt and of a step, some of them above 10, move little."""
    model = load_model(inspect_model(DEMO), form=FloatType.F32, progress=lambda *_: None)
    plain, packed = (answers(model, kv_format) for kv_format in (KVFormat.MODEL, kv))

    assert farthest(plain, mx.zeros_like(plain)) > 10
    assert 0 < farthest(packed, plain) < error_max


def answers(model: Model, kv: KVFormat) -> mx.array:
    """Return the logits after a prompt of 100 tokens, and after one more."""
    layers = model.new_caches(kv=kv, context_max=1024)
    caches = RowCaches(layers, context_max=1024, rows_max=1)
    row = RowId(0)
    caches.join(row, tokens=101)
    logits = []
    for batch in (Batch.prefill(range(10, 110), 0, row), Batch.decode([110], [100], [row])):
        logits.append(model.logits(model.forward(batch, caches)[-1:]))
        mx.eval(logits, *caches.state())
    return mx.concatenate(logits)
