"""Every format of packed weights: mlx-lm's logits, or those of the numbers that it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.packing import (
    FP8_DTYPE,
    MODES,
    NVFP4_FULL_SCALE,
    Packing,
    PackingMode,
)
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.weights.linear import Linear, PackedLinear
from tests.support.mlx_memory import live_nbytes
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import (
    QWEN3,
    QWEN3_MOE,
    all_logits,
    build,
    change,
    kin_weights,
    quantise,
    stack_experts,
    write_quantised,
)
from tests.worker.latent import DEEPSEEK_V3
from tests.worker.tiny import difference, ignore_progress, load, stored_in, write_model

WIDE = change(
    QWEN3, num_hidden_layers=1, hidden_size=128, intermediate_size=128, num_attention_heads=4
)
EXPERTS = change(QWEN3_MOE, num_hidden_layers=1)
FLOATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"bits": 4, "mode": "mxfp4", "group": 32},
    "mxfp8": {"bits": 8, "mode": "mxfp8", "group": 32},
    "nvfp4": {"bits": 4, "mode": "nvfp4", "group": 16},
}
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", sorted(MODES[PackingMode.AFFINE].bits))
def test_integers_of_any_width_equal_the_peers(bits: int, group: int, tmp_path: Path) -> None:
    """2 to 8 bits in groups of 32 to 128, kept packed or not, give mlx-lm's logits."""
    folder = write_quantised(tmp_path, WIDE, bits=bits, group=group)
    tokens = token_ids(40, seed=1)
    expected = peer_logits(folder, tokens)

    for packed in (True, False):
        model = build(folder, packed=packed)
        assert error(all_logits(model, tokens), expected) < TOLERANCE
        assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


@pytest.mark.parametrize("config", [QWEN3, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", FLOATS)
def test_small_floats_equal_the_peers(name: str, config: Mapping[str, Any], tmp_path: Path) -> None:
    """Floats of 4 and 8 bits, kept packed or not, an embedding's too, give mlx-lm's logits."""
    folder = write_quantised(tmp_path, config, **FLOATS[name])
    tokens = token_ids(40, seed=2)
    expected = peer_logits(folder, tokens)

    for packed in (True, False):
        model = build(folder, packed=packed)
        assert error(all_logits(model, tokens), expected) < TOLERANCE
        assert any(array.dtype == mx.uint8 for array in model.parameters().values()) is packed


def test_weights_of_several_formats_equal_the_peers(tmp_path: Path) -> None:
    """One in 8-bit integers, one in other floats and one in numbers, where three would be joined,
    and a head in numbers: mlx-lm's logits."""
    value, key = Q0.replace("q_proj", "v_proj"), Q0.replace("q_proj", "k_proj")
    own: dict[str, Any] = {
        key: {"bits": 8, "group_size": 64},
        value: {"bits": 4, "group_size": 16, "mode": "nvfp4"},
        Q0: False,
        "lm_head": False,
    }
    weights = kin_weights(QWEN3)
    config, stored = quantise(QWEN3, weights, **FLOATS["mxfp8"])
    for stem, setting in own.items():
        stored = {name: array for name, array in stored.items() if not name.startswith(f"{stem}.")}
        array = weights[f"{stem}.weight"]
        if setting is False:
            stored[f"{stem}.weight"] = array
            continue
        names = (f"{stem}.{part}" for part in ("weight", "scales", "biases"))
        stored |= zip(names, mx.quantize(array, **setting), strict=False)
    settings = {**config["quantization"], **own}
    config |= {"quantization": settings, "quantization_config": settings}
    folder = write_model(tmp_path, config, stored)
    tokens = token_ids(40, seed=3)
    expected = peer_logits(folder, tokens)

    for packed in (True, False):
        assert error(all_logits(build(folder, packed=packed), tokens), expected) < TOLERANCE


def test_experts_with_scales_of_their_own_are_what_they_stand_for(tmp_path: Path) -> None:
    """A scale for each expert's whole weight, beside those of its groups. MLX multiplies with such
    on a GPU alone, so that the logits are held to those of the numbers."""
    weights = stack_experts(kin_weights(EXPERTS))
    stored, plain = dict(weights), dict(weights)
    for name, array in weights.items():
        if ".switch_mlp." in name:
            parts = globally_scaled(name.removesuffix(".weight"), array)
            stored |= parts
            plain[name] = mx.stack([scaled_numbers(parts, expert) for expert in range(6)])
    settings = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    folder = write_model(tmp_path / "packed", {**EXPERTS, "quantization": settings}, stored)
    twin = write_model(tmp_path / "plain", EXPERTS, plain)
    tokens = token_ids(40, seed=4)
    expected = peer_logits(twin, tokens)

    for packed in (True, False):
        assert error(all_logits(build(folder, packed=packed), tokens), expected) < TOLERANCE


def globally_scaled(stem: str, weight: mx.array) -> dict[str, mx.array]:
    """Return a weight in nvfp4 with a scale of its own; of a stack, one for each expert."""
    if weight.ndim == 3:
        parts = [globally_scaled("", expert) for expert in weight]
        return {f"{stem}{name}": mx.stack([part[name] for part in parts]) for name in parts[0]}
    scale = mx.abs(weight).max().astype(mx.float32)
    words, scales, *_ = mx.quantize(weight, group_size=16, bits=4, mode="nvfp4", global_scale=scale)
    return {f"{stem}.weight": words, f"{stem}.scales": scales, f"{stem}.global_scale": scale}


def scaled_numbers(scaled: Mapping[str, mx.array], expert: int | None = None) -> mx.array:
    """Return what `globally_scaled` made, or one expert's part of it, stands for."""
    parts = [array if expert is None else array[expert] for array in scaled.values()]
    words, scales, scale = parts
    return mx.dequantize(
        words,
        scales,
        group_size=16,
        bits=4,
        mode="nvfp4",
        global_scale=scale,
        dtype=mx.float32,
    )


def test_weights_with_scales_of_their_own_are_what_they_stand_for(tmp_path: Path) -> None:
    """mlx-lm knows no such scale outside of experts: the logits are those of the numbers."""
    config, stored = quantise(QWEN3, kin_weights(QWEN3), **FLOATS["nvfp4"])
    plain = kin_weights(QWEN3)
    for name, array in kin_weights(QWEN3).items():
        if array.ndim == 2:
            stem = name.removesuffix(".weight")
            parts = globally_scaled(stem, 1000 * array)
            parts[f"{stem}.global_scale"] = parts[f"{stem}.global_scale"] / 1000
            stored |= parts
            plain[name] = scaled_numbers(parts)
    folder = write_model(tmp_path / "packed", config, stored)
    twin = write_model(tmp_path / "plain", QWEN3, plain)
    tokens = token_ids(40, seed=5)
    expected = all_logits(load(twin), tokens)

    for packed in (True, False):
        assert error(all_logits(build(folder, packed=packed), tokens), expected) < TOLERANCE
    kept = build(folder, packed=True).parameters()
    assert kept["layers.0.qkv.0.global_scale"].dtype == mx.float32
    held = inspect_model(folder).kept
    assert held.nbytes(4) == sum(array.nbytes for array in kept.values())


@pytest.mark.parametrize("form", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_scale_of_its_own_is_safe_in_half_precision(rows: int, form: mx.Dtype) -> None:
    """Before it is scaled a product may be beyond float16; what is yielded is not."""
    weight = 0.5 * mx.random.normal((48, 512), key=mx.random.key(1))
    parts = globally_scaled("", weight)
    linear = PackedLinear(
        parts[".weight"], parts[".scales"], None, Packing(16, 4, PackingMode.NVFP4),
        global_scale=parts[".global_scale"], form=form,
    )  # fmt: skip
    plain = scaled_numbers(parts)
    rows_given = 10 * mx.random.normal((rows, 512), key=mx.random.key(2))

    actual = linear(rows_given.astype(form))

    assert actual.dtype == form
    assert error(actual.astype(mx.float32), Linear(plain)(rows_given)) < 0.02
    assert linear.lookup(mx.array([3])).dtype == form
    assert error(linear.lookup(mx.array([3])).astype(mx.float32), plain[3:4]) < 0.01
    assert NVFP4_FULL_SCALE == 2688


BLOCK = (48, 40)


def block_scaled(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return a weight in 8-bit floats, what its squares are multiplied by, and their product."""
    height, width = BLOCK
    shape = [-(-size // block) for size, block in zip(weight.shape[-2:], BLOCK, strict=True)]
    scales = mx.exp(mx.random.normal((*weight.shape[:-2], *shape), key=mx.random.key(9))) / 100
    spread = mx.repeat(mx.repeat(scales, height, axis=-2), width, axis=-1)
    spread = spread[..., : weight.shape[-2], : weight.shape[-1]]
    small = mx.to_fp8(weight / spread)
    return small, scales, mx.from_fp8(small, dtype=mx.float32) * spread


def write_with_fp8(
    folder: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, mx.array],
    *,
    ends: tuple[str, ...] = ("",),
) -> Path:
    """Write a model whose bytes, of tensors with these ends, are 8-bit floats: MLX has no such."""
    write_model(folder, config, stored)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith(ends) and (entry or {}).get("dtype") == "U8":
            entry["dtype"] = FP8_DTYPE
    header_bytes = json.dumps(header).encode()
    path.write_bytes(len(header_bytes).to_bytes(8, "little") + header_bytes + raw[8 + length :])
    return folder


def fp8_folders(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write a model with blocks of 8-bit floats, and the numbers that it stands for."""
    stored, plain = {}, {}
    for name, array in kin_weights(config).items():
        stored[name] = plain[name] = array
        if array.ndim == 2 and "layers" in name and ".gate.weight" not in name:
            small, scales, plain[name] = block_scaled(array)
            stored |= {name: small, f"{name}_scale_inv": scales}
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    packed = write_with_fp8(folder / "fp8", {**config, "quantization_config": method}, stored)
    return packed, write_model(folder / "plain", config, plain)


@pytest.mark.parametrize(
    "config", [QWEN3, EXPERTS, DEEPSEEK_V3], ids=["dense", "experts", "latents"]
)
def test_blocks_of_8_bit_floats_are_what_they_stand_for(
    config: Mapping[str, Any], tmp_path: Path
) -> None:
    """Read as numbers, each is its float times its square's, bit for bit, whatever was joined."""
    folder, twin = fp8_folders(tmp_path, config)

    for kept in (True, False):
        parameters, expected = (
            build(model_folder, packed=kept).parameters() for model_folder in (folder, twin)
        )
        assert parameters.keys() == expected.keys()
        assert all(mx.array_equal(array, expected[name]) for name, array in parameters.items())
    # Tables of rotations and a correction of experts are float32 whatever the rest is.
    halves = load(folder, FloatType.BF16).parameters()
    half = mx.bfloat16
    assert all(mx.array_equal(a.astype(half), expected[n].astype(half)) for n, a in halves.items())
    wide = {name.rpartition(".")[2] for name, a in halves.items() if a.dtype != half}
    assert not any("weight" in name for name in wide)
    assert not inspect_model(folder).packed
    assert inspect_model(folder).stored is FloatType.F32


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    """8-bit floats alone, or squares of another number, are errors that name the tensor."""
    folder, _ = fp8_folders(tmp_path, QWEN3)
    scales = f"{Q0}.weight_scale_inv"
    stored = stored_in(folder)
    for case, field in (
        ({name: array for name, array in stored.items() if name != scales}, f"{Q0}.weight"),
        (stored | {scales: mx.zeros((1, 1))}, scales),
    ):
        config = json.loads((folder / "config.json").read_text())
        write_with_fp8(folder, config, case)
        with pytest.raises(InvalidModel) as caught:
            inspect_model(folder)
        assert caught.value.field == field


def test_a_large_weight_of_8_bit_floats_is_read_in_pieces(tmp_path: Path) -> None:
    """While it is read no more is there than the weight in both forms, and a few rows wider."""
    rows = 6144
    config = change(
        QWEN3, num_hidden_layers=1, vocab_size=rows, hidden_size=2048, tie_word_embeddings=True,
        head_dim=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
    )  # fmt: skip
    stored = kin_weights(config)
    name = "model.embed_tokens.weight"
    squares = [math.ceil(rows / 128), 2048 // 128]
    stored |= {name: mx.zeros((rows, 2048), dtype=mx.uint8), f"{name}_scale_inv": mx.ones(squares)}
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_with_fp8(tmp_path, {**config, "quantization_config": method}, stored)
    files = inspect_model(folder)
    del stored
    mx.clear_cache()
    before = live_nbytes()

    model: Model = load_model(files, form=FloatType.BF16, progress=ignore_progress)

    resident = sum(array.nbytes for array in model.parameters().values())
    largest = rows * 2048 * (1 + 2)
    assert mx.get_peak_memory() - before <= resident + largest + (16 << 20)
    assert difference(model.parameters()[name].astype(mx.float32), mx.zeros((rows, 2048))) == 0


def modelopt_folders(folder: Path) -> tuple[Path, Path]:
    """Write a model in nvfp4 with global scales by MLX's names, and by ModelOpt's."""
    plain = kin_weights(QWEN3)
    packed, named = dict(plain), dict(plain)
    for name, array in plain.items():
        if array.ndim != 2 or "layers" not in name:
            continue
        stem = name.removesuffix(".weight")
        parts = globally_scaled(stem, array)
        packed |= parts
        named |= {
            name: parts[name].view(mx.uint8),
            f"{stem}.weight_scale": parts[f"{stem}.scales"],
            f"{stem}.weight_scale_2": parts[f"{stem}.global_scale"] / NVFP4_FULL_SCALE,
            f"{stem}.input_scale": mx.array(0.5),
        }
    settings = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    ours = write_model(folder / "a", {**QWEN3, "quantization": settings}, packed)
    method = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    theirs = write_with_fp8(
        folder / "b", {**QWEN3, "quantization_config": method}, named, ends=(".weight_scale",)
    )
    return ours, theirs


def test_modelopts_names_and_bytes_are_one_model_with_mlxs(tmp_path: Path) -> None:
    """Bytes, scales of 8 bits and a quotient are the words, scales and dividend that MLX has."""
    folders = modelopt_folders(tmp_path)

    for kept in (True, False):
        first, second = (build(folder, packed=kept).parameters() for folder in folders)
        assert first.keys() == second.keys()
        for part, array in first.items():
            assert array.dtype == second[part].dtype
            assert difference(array.astype(mx.float32), second[part].astype(mx.float32)) < 1e-5
