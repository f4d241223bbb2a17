"""Layers whose weights are unpacked are computed a few at a time, while others are put together."""

from __future__ import annotations

import mlx.core as mx

from mlxd_models.sizes.weight_forms import UNPACKED_LAYERS
from mlxd_worker.cache.layers.tokens import TOKEN_SIZES
from mlxd_worker.kernels.packed.product import BLOCK_ROWS_MAX, PACKED_ROWS_MAX
from mlxd_worker.models.weights.pacing import LayerPacer, traced_tokens_max

LAYERS = 9


def follow(*, unpacks: bool) -> list[tuple[str, int]]:
    """Return what is begun and finished while a pass is put together, by its layers."""
    seen: list[tuple[str, int]] = []
    rows = [mx.array(index) for index in range(LAYERS)]
    numbers = {id(array): index for index, array in enumerate(rows)}
    pacer = LayerPacer(
        unpacks=unpacks,
        begin=lambda array: seen.append(("begin", numbers[id(array)])),
        finish=lambda array: seen.append(("finish", numbers[id(array)])),
    )
    for index, array in enumerate(rows):
        pacer.follow(index, array)
    return seen


def test_no_more_layers_are_under_way_than_the_fit_reckons_with() -> None:
    """Those that are computed and those that are put together, and never none."""
    begun = finished = -1
    for what, layer in follow(unpacks=True):
        if what == "finish":
            assert finished < layer < begun, "others are under way meanwhile"
            finished = layer
        else:
            assert layer - finished <= UNPACKED_LAYERS
            begun = layer
    assert begun >= LAYERS - 2


def test_what_is_not_unpacked_is_computed_as_a_whole() -> None:
    """Nothing is begun before the pass is."""
    assert follow(unpacks=False) == []


def test_passes_are_traced_where_a_chunk_stays_packed() -> None:
    """Others would read prompts one by one that are faster together, unpacked once."""
    assert traced_tokens_max(None) == TOKEN_SIZES[-1]
    assert traced_tokens_max(BLOCK_ROWS_MAX) == BLOCK_ROWS_MAX
    assert traced_tokens_max(PACKED_ROWS_MAX) == 0
