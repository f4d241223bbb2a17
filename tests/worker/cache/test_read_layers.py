"""All layers of a row are read alike, whichever way: by one kernel for many, or layer by layer."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_worker.cache.base import ArenaId, Place
from mlxd_worker.cache.changes import LIFTED_NBYTES
from mlxd_worker.cache.kept.putting import read_layers
from mlxd_worker.cache.kept.stacks import layers_of, nbytes_of
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.kernels import row_copies
from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import find_compiler
from mlxd_worker.kernels.own import Constant, source_of
from mlxd_worker.kernels.row_copies import LAYERS_AT_ONCE, Range, are_alike, copy_ranges

ARENA, SLOTS, CAPACITY = ArenaId(0), 3, 200
HEADS, WIDTH = 2, 64


def make_layer(seed: int, *, capacity: int = CAPACITY) -> KVCache:
    """Return a layer whose arena holds random numbers."""
    layer = KVCache(kv_heads=HEADS, head_dim=WIDTH, dtype=mx.bfloat16)
    shape = (SLOTS, HEADS, capacity, WIDTH)
    made = [mx.random.normal(shape, key=mx.random.key(2 * seed + part)) for part in range(2)]
    layer.settle(ARENA, [array.astype(mx.bfloat16) for array in made])
    mx.eval(list(layer.arrays().values()))
    return layer


@pytest.mark.parametrize("count", [1, 130])
@pytest.mark.parametrize("layers", [1, 3, LAYERS_AT_ONCE + 2])
def test_every_layer_s_own_positions_are_read(layers: int, count: int) -> None:
    """Keys and values of each, in the layers' order; on a GPU by kernels for many layers."""
    caches = [make_layer(seed) for seed in range(layers)]
    place = Place(ARENA, CAPACITY, slot=1)

    read = layers_of(read_layers(caches, place, 7, 7 + count))

    assert len(read) == layers
    for cache, state in zip(caches, read, strict=True):
        for copied, array in zip(state, cache.arrays().values(), strict=True):
            assert bool(mx.array_equal(copied[0], array[1, :, 7 : 7 + count]))


def test_layers_of_other_shapes_are_not_read_as_one() -> None:
    """One launch has one shape and one place."""
    whole, other = (mx.zeros((2, 1, length, 64), dtype=mx.bfloat16) for length in (8, 9))
    one = Range(whole, whole, slot=0, start=0)

    assert are_alike([one, one])
    assert not are_alike([one, Range(other, other, slot=0, start=0)])
    assert not are_alike([one, Range(whole, whole, slot=1, start=0)])
    assert not are_alike([])


def test_each_layer_has_a_case_of_its_own() -> None:
    """The source reads no layer's arrays for another one's result, and takes two a layer."""
    body = row_copies._layers_kernel()._body
    types = [mx.bfloat16] * (2 * LAYERS_AT_ONCE)
    constants: list[Constant] = [("T", mx.bfloat16), ("KV", 2), ("D", 64)]
    source = source_of(body, types, [mx.bfloat16] * 2, constants)

    for at in range(LAYERS_AT_ONCE):
        chosen = f"keys = keys_{at}; values = values_{at}; break;"
        assert source.count(f"case {at}: {chosen}") == 1
    assert source.count("__nv_bfloat16* keys_") == LAYERS_AT_ONCE


@pytest.mark.skipif(not runs_cuda() or find_compiler() is None, reason="a kernel for CUDA")
def test_a_kernel_s_copies_are_those_of_each_layer_by_itself() -> None:
    """More layers than one launch takes, each against `copy_range`."""
    caches = [make_layer(seed, capacity=300) for seed in range(LAYERS_AT_ONCE + 1)]
    place = Place(ARENA, 300, slot=2)
    ranges = [cache.range_at(place, 5) for cache in caches]
    together, apart = copy_ranges(ranges, 290), [cache.read(place, 5, 295) for cache in caches]
    mx.eval(together, apart)

    assert [len(keys) for keys, _ in together] == [LAYERS_AT_ONCE, 1]
    for ours, expected in zip(layers_of(together), apart, strict=True):
        for one, other in zip(ours, expected, strict=True):
            assert bool(mx.array_equal(one, other))
    assert nbytes_of(together[0]) < LIFTED_NBYTES
