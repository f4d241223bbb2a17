"""A controller that reads headers and a worker that knows the architecture reckon alike."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlxd_controller.store.facts import read_folder
from mlxd_shared.packed_weights import UNPACKED_LAYERS
from mlxd_worker.models.loader import inspect_model
from tests.worker.kin import QWEN3_MOE, write_quantised
from tests.worker.tiny import config_with, random_weights, write_model

GROUP, BITS = 32, 4


def test_both_sides_count_what_is_unpacked_at_once(tmp_path: Path) -> None:
    """Some layers' packed weights, in numbers; neither table nor head, nor what is stored as
    numbers, of which one layer has more than the other."""
    packing = {"group_size": GROUP, "bits": BITS}
    config = config_with(hidden_size=64, intermediate_size=96, quantization=packing)
    stored: dict[str, mx.array] = {}
    for name, array in random_weights(config).items():
        stored[name] = array
        if array.ndim > 1 and name != "model.layers.0.mlp.down_proj.weight":
            stem = name.removesuffix(".weight")
            words, scales, biases = mx.quantize(array, group_size=GROUP, bits=BITS)
            stored |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
    folder = write_model(tmp_path / "packed", config, stored)

    packed = inspect_model(folder).packed
    assert packed is not None
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    assert packed.unpacked_values == UNPACKED_LAYERS * layer
    assert read_folder(folder).facts.unpacked_values == packed.unpacked_values


def test_experts_are_never_unpacked_whole(tmp_path: Path) -> None:
    """Of a layer of experts both sides count the attention and the router, packed by its own
    setting, and neither the experts; and both count all its values."""
    folder = write_quantised(tmp_path, QWEN3_MOE)

    files, facts = inspect_model(folder), read_folder(folder).facts

    assert files.packed is not None
    layer = 64 * (128 + 2 * 64 + 128) + 6 * 64
    assert files.packed.unpacked_values == UNPACKED_LAYERS * layer
    assert facts.unpacked_values == files.packed.unpacked_values
    assert facts.elements == files.weight_values
