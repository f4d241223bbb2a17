"""Arenas take what was planned for them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxd_models.sizes.arena_sizes import capacity_classes, slots_bound
from mlxd_models.sizes.cache_sizes import RECURRENT_STEP_LAYERS, CacheSizes, WindowedLayers
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState


@pytest.mark.parametrize("context", [1000, 8192])
@pytest.mark.parametrize("kv_format", KVFormat)
def test_arenas_take_what_was_reckoned(context: int, kv_format: KVFormat) -> None:
    """Real caches of every kind, filled to the bounds of tokens and slots, hold to the byte what
    the fit said: whole layers, a window that slides or is as wide as the rows, and states, with
    what a step takes to replace them."""
    rows_max, kv_heads, head_dim, window = 4, 2, 64, 1024
    per_layer = 2 * kv_heads * head_dim
    sizes = CacheSizes(
        kv_values_per_token=2 * per_layer,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(WindowedLayers(window, per_layer),),
        recurrent_values_per_row=12,
        recurrent_layers=1,
    )
    capacity = capacity_classes(context, rows_max)[-1]
    slots = slots_bound(rows_max)
    geometry = [AttentionGeometry(kv_heads, head_dim, size) for size in (None, None, window)]
    caches = [g.new_cache(mx.float16, kv=kv_format, context_max=context) for g in geometry]
    state = RecurrentCache([RowState("state", (3, 4), mx.float32)])

    sliding = caches[2].kind is Kind.ROTATING
    assert sliding == (context == 8192)
    expected = sum(cache.slot_nbytes(capacity) * rows_max for cache in caches[:2])
    expected += caches[2].slot_nbytes(capacity) * (slots if sliding else rows_max)
    expected += state.slot_nbytes(capacity) * rows_max * (1 + RECURRENT_STEP_LAYERS)
    held = sizes.most_held(context_max=context, rows_max=rows_max, kv_format=kv_format, on_cpu=True)
    assert held.nbytes(2) == expected
    alone = replace(sizes, kv_values_per_token=0)
    for on_cpu, count in ((True, rows_max), (False, slots)):
        held = alone.most_held(
            context_max=context, rows_max=rows_max, kv_format=KVFormat.MODEL, on_cpu=on_cpu
        )
        ring = caches[2].slot_nbytes(capacity) * (count if sliding else rows_max)
        states = state.slot_nbytes(capacity) * rows_max * (1 + RECURRENT_STEP_LAYERS)
        assert held.nbytes(2) == ring + states
