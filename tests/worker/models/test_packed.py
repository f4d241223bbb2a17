"""Weights that MLX has packed: the same model, in the bytes that the fit reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.describe import Description
from mlxd_models.families.common.packing import Packing
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.cache.base import RowId
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.weights.expert_linear import PackedExpertLinear
from mlxd_worker.models.weights.linear import (
    Linear,
    PackedLinear,
    SideBySide,
    packed_rows_least,
)
from tests.worker.tiny import (
    caches_of,
    config_with,
    difference,
    forced_logits,
    ignore_progress,
    load,
    random_weights,
    write_model,
)

GROUP, TOKENS = 32, [(11 * index) % 61 for index in range(9)]
Q0 = "model.layers.0.self_attn.q_proj"


def packed_config(*, bits: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a config whose weights are packed, all rows being whole groups."""
    packing = {"group_size": GROUP, "bits": bits}
    return config_with(
        hidden_size=64, intermediate_size=96, quantization=packing, quantization_config=packing
    ) | {key: value for key, value in changes.items() if value is not None}


def pack(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return a checkpoint with every matrix packed, as mlx-lm's converter writes it."""
    bits, stored = config["quantization"]["bits"], {}
    for name, array in weights.items():
        if array.ndim < 2:
            stored[name] = array
            continue
        stem = name.removesuffix(".weight")
        words, scales, biases = mx.quantize(array, group_size=GROUP, bits=bits)
        stored |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
    return stored


def unpack(config: Mapping[str, Any], stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the numbers that a packed checkpoint stands for."""
    bits, plain = config["quantization"]["bits"], {}
    for name, array in stored.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if part == "weight" and f"{stem}.scales" in stored:
            scales, biases = stored[f"{stem}.scales"], stored[f"{stem}.biases"]
            plain[name] = mx.dequantize(array, scales, biases, group_size=GROUP, bits=bits)
        else:
            plain[name] = array
    return plain


def write_packed(folder: Path, config: dict[str, Any]) -> tuple[Description, Model]:
    """Write a packed model; return it and a model of the numbers that it stands for."""
    stored = pack(config, random_weights(config))
    plain = {k: v for k, v in config.items() if not k.startswith("quantization")}
    twin = write_model(folder / "plain", plain, unpack(config, stored))
    files = inspect_model(write_model(folder / "packed", config, stored))
    model = load_model(inspect_model(twin), form=FloatType.F32, progress=ignore_progress)
    return files, model


def logits(model: Model) -> mx.array:
    """Return a short prompt's logits, read in a chunk and token by token."""
    return forced_logits(model, caches_of(model), RowId(0), TOKENS, cuts=(6, 7, 8))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bits", "biased"), [(4, True), (8, False), (3, False)])
def test_packed_weights_give_what_they_stand_for(
    tmp_path: Path, *, bits: int, biased: bool, tied: bool
) -> None:
    """Kept packed or unpacked while loading, logits are those of the numbers packed."""
    config = packed_config(bits=bits, attention_bias=biased, tie_word_embeddings=tied)
    files, twin = write_packed(tmp_path, config)
    expected = logits(twin)

    kept = load_model(files, form=FloatType.F32, progress=ignore_progress, packed=True)
    loose = load_model(files, form=FloatType.F32, progress=ignore_progress)

    assert difference(logits(kept), expected) < 1e-3
    assert difference(logits(loose), expected) < 1e-4
    assert {array.dtype for array in loose.parameters().values()} == {mx.float32}
    assert kept.parameters()["layers.0.qkv.weight"].dtype == mx.uint32


def test_a_checkpoint_may_leave_matrices_unpacked(tmp_path: Path) -> None:
    """What has no scales beside it is numbers, also one of three that would be joined."""
    config = packed_config(attention_bias=True)
    stored = pack(config, random_weights(config))
    plain = unpack(config, stored)
    twin = {k: v for k, v in config.items() if not k.startswith("quantization")}
    expected = logits(load(write_model(tmp_path / "plain", twin, plain)))
    down = "model.layers.1.mlp.down_proj"
    tensors = {n: a for n, a in stored.items() if not n.startswith((f"{down}.", f"{Q0}."))}
    for stem in (down, Q0):
        tensors |= {n: a for n, a in plain.items() if n.startswith(f"{stem}.")}
    files = inspect_model(write_model(tmp_path / "loose", config, tensors))

    kept = load_model(files, form=FloatType.F32, progress=ignore_progress, packed=True)
    loose = load_model(files, form=FloatType.F32, progress=ignore_progress)

    dtypes = {name: array.dtype for name, array in kept.parameters().items()}
    assert dtypes["layers.1.feed.down.weight"] == mx.float32
    assert dtypes["layers.0.feed.down.weight"] == mx.uint32
    assert [dtypes[f"layers.0.qkv.{part}.weight"] for part in range(3)] == [
        mx.float32, mx.uint32, mx.uint32,
    ]  # fmt: skip
    assert difference(logits(kept), expected) < 1e-3
    assert difference(logits(loose), expected) < 1e-4
    with pytest.raises(AssertionError):
        SideBySide((Linear(mx.zeros((2, 2))),)).lookup(mx.array([0]))


def test_weights_may_have_settings_of_their_own(tmp_path: Path) -> None:
    """A recipe that mixes bits, within what would be joined too, gives what the numbers say."""
    config = packed_config()
    stored = pack(config, random_weights(config))
    plain = unpack(config, stored)
    value = "model.layers.1.self_attn.v_proj"
    settings = {**config["quantization"], value: {"bits": 8, "group_size": 64}, "lm_head": False}
    words, scales, biases = mx.quantize(plain[f"{value}.weight"], group_size=64, bits=8)
    stored |= {f"{value}.weight": words, f"{value}.scales": scales, f"{value}.biases": biases}
    plain[f"{value}.weight"] = mx.dequantize(words, scales, biases, group_size=64, bits=8)
    stored = {n: a for n, a in stored.items() if not n.startswith("lm_head.")}
    stored["lm_head.weight"] = plain["lm_head.weight"]
    config |= {"quantization": settings, "quantization_config": settings}
    twin = {k: v for k, v in config.items() if not k.startswith("quantization")}
    expected = logits(load(write_model(tmp_path / "plain", twin, plain)))
    files = inspect_model(write_model(tmp_path / "packed", config, stored))

    for packed, bound in ((True, 1e-3), (False, 1e-4)):
        model = load_model(files, form=FloatType.F32, progress=ignore_progress, packed=packed)
        assert difference(logits(model), expected) < bound


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (f"{Q0}.weight", mx.zeros((64, 16), dtype=mx.uint32)),
        (f"{Q0}.weight", mx.zeros((64, 8), dtype=mx.float32)),
        (f"{Q0}.scales", mx.zeros((64, 4), dtype=mx.float32)),
        (f"{Q0}.scales", mx.zeros((64, 2), dtype=mx.uint32)),
    ],
    ids=["as 8 bits", "as numbers", "as groups of 16", "scales as integers"],
)
def test_packed_parts_of_another_shape_or_type_are_refused(
    tmp_path: Path, name: str, array: mx.array
) -> None:
    """Words, scales and offsets are what bits and group size make of the config's shape."""
    config = packed_config()
    stored = pack(config, random_weights(config)) | {name: array}

    with pytest.raises(InvalidModel) as caught:
        inspect_model(write_model(tmp_path, config, stored))

    assert caught.value.field == name


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_a_packed_product_does_not_depend_on_how_many_rows_there_are(rows: int) -> None:
    """Few rows are multiplied packed and many unpacked, to the same result."""
    weight = mx.random.normal((48, 64), key=mx.random.key(1))
    words, scales, offsets = mx.quantize(weight, group_size=GROUP, bits=4)
    packing = Packing(group_size=GROUP, bits=4)
    bias = mx.arange(48, dtype=mx.float32)
    plain = Linear(mx.dequantize(words, scales, offsets, group_size=GROUP, bits=4), bias)
    rows_given = mx.random.normal((rows, 64), key=mx.random.key(2))

    actual = PackedLinear(words, scales, offsets, packing, bias)(rows_given)

    assert difference(actual, plain(rows_given)) < 1e-4


@dataclass(frozen=True, slots=True)
class Limited(PackedLinear):
    """A packed weight that stays packed for so many rows, whatever computes."""

    most: int = 0

    @property
    def rows_max(self) -> int:
        """That number."""
        return self.most


def limit(most: int) -> Limited:
    """Return such a weight."""
    words, scales, offsets = mx.quantize(mx.zeros((32, 64)), 64, 4)
    return Limited(words, scales, offsets, Packing(64, 4), most=most)


def test_a_model_unpacks_from_where_its_first_weight_is() -> None:
    """Of parts in any depth; numbers never are, nor are experts as a whole."""
    plain = Linear(mx.zeros((32, 64)))

    assert packed_rows_least((limit(512), SideBySide((plain, limit(128))), plain)) == 128
    assert packed_rows_least((plain, SideBySide((plain, limit(512))))) == 512
    assert packed_rows_least(((plain,), None)) is None
    words, scales, offsets = mx.quantize(mx.zeros((2, 32, 64)), 64, 4)
    assert packed_rows_least(PackedExpertLinear(words, scales, offsets, Packing(64, 4))) is None
