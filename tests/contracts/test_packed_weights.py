"""A controller that reads headers and a worker that knows the architecture reckon alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_controller.core import fit
from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.fit.described import facts_of
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.making import taken_of
from mlxd_models.sizes.packed_weights import UNPACKED_LAYERS
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import GIB
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from mlxd_worker.memory.residency import DeviceKind, WeightsChoice, plan_residency
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.thread.resident import demand_of
from tests.worker.hybrid_experts import MOE, NEXT, expert_weights, packed_experts
from tests.worker.kin import GPT_OSS, QWEN3, QWEN3_MOE, kin_weights, write_quantised
from tests.worker.latent import DEEPSEEK_V2, DEEPSEEK_V3, absorbed, latent_weights, packed_latent
from tests.worker.models.test_formats import fp8_folders, modelopt_folders
from tests.worker.models.test_gemma3 import nested
from tests.worker.models.test_gpt_oss_layouts import in_numbers, published
from tests.worker.tiny import config_with, ignore_progress, random_weights, write_model

GROUP, BITS = 32, 4


def told_of(folder: Path) -> ModelFacts:
    """Return what a controller plans with; the models here have no tokenizer."""
    described = inspect_model(folder)
    return replace(facts_of(described), taken=taken_of(described))


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
    assert told_of(folder).unpacked_values == packed.unpacked_values


def test_experts_are_never_unpacked_whole(tmp_path: Path) -> None:
    """Of a layer of experts both sides count the attention and the router, packed by its own
    setting, and neither the experts; and both count all its values."""
    folder = write_quantised(tmp_path, QWEN3_MOE)

    files, facts = inspect_model(folder), told_of(folder)

    assert files.packed is not None
    layer = 64 * (128 + 2 * 64 + 128) + 6 * 64
    assert files.packed.unpacked_values == UNPACKED_LAYERS * layer
    assert facts.unpacked_values == files.packed.unpacked_values
    assert facts.elements == files.weight_values


FLOATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"bits": 4, "mode": "mxfp4", "group": 32},
    "mxfp8": {"bits": 8, "mode": "mxfp8", "group": 32},
    "nvfp4": {"bits": 4, "mode": "nvfp4", "group": 16},
    "affine": {"bits": 3, "mode": "affine", "group": 64},
}


def same_on_both_sides(folder: Path) -> None:
    """Hold values, what is kept as stored and what is unpacked at once to be the same."""
    files, facts = inspect_model(folder), told_of(folder)
    packed = files.packed
    assert facts.elements == files.weight_values
    assert facts.item_bytes == 4
    kept = facts.stored_bytes - facts.dropped_bytes
    if packed is None:
        assert (kept, facts.unpacked_values) == (4 * files.weight_values, 0)
    else:
        assert kept == packed.kept_nbytes + 4 * packed.values
        assert facts.unpacked_values == packed.unpacked_values


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE, GPT_OSS], ids=["dense", "experts", "sinks"])
@pytest.mark.parametrize("name", FLOATS)
def test_both_sides_reckon_every_format_alike(
    name: str, config: Mapping[str, Any], tmp_path: Path
) -> None:
    """Words, scales and what is in numbers: to the byte, whatever the format."""
    same_on_both_sides(write_quantised(tmp_path, config, **FLOATS[name]))


def test_both_sides_reckon_the_layouts_of_gpt_oss_alike(tmp_path: Path) -> None:
    """Blocks as published, and numbers whose outputs come last, are what they stand for."""
    same_on_both_sides(published(tmp_path / "blocks"))
    same_on_both_sides(in_numbers(tmp_path / "numbers"))


@pytest.mark.parametrize(
    "config", [QWEN3, QWEN3_MOE, DEEPSEEK_V3], ids=["dense", "experts", "latents"]
)
def test_both_sides_reckon_floats_in_blocks_alike(
    config: Mapping[str, Any], tmp_path: Path
) -> None:
    """8-bit floats live as numbers; what their squares are multiplied by does not live."""
    folder, _ = fp8_folders(tmp_path, config)
    same_on_both_sides(folder)
    assert sum(it.kept_bytes is not None for it in told_of(folder).taken) > 0


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "packed"])
def test_both_sides_reckon_the_text_of_a_model_that_sees_alike(
    tmp_path: Path, *, packed: bool
) -> None:
    """What sees is not kept, and the text is reckoned as if it stood alone."""
    folder = nested(tmp_path, packed=packed)
    same_on_both_sides(folder)
    facts, footprint = told_of(folder), inspect_model(folder).footprint
    assert facts.caches == footprint.caches
    assert facts.pass_sizes == footprint.passes
    assert facts.architecture == "Gemma3ForConditionalGeneration"


def test_both_sides_reckon_modelopts_names_alike(tmp_path: Path) -> None:
    """Bytes of two values each; the scale of what is multiplied is of no use."""
    same_on_both_sides(modelopt_folders(tmp_path)[1])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE, GPT_OSS], ids=["dense", "experts", "sinks"])
@pytest.mark.parametrize("weights", ON_LOAD)
def test_both_sides_reckon_packing_while_loading_alike(
    weights: Weights, config: Mapping[str, Any], device: str, tmp_path: Path
) -> None:
    """Whoever plans, the weights take what they then do, to the byte: on a CPU beside float32, on a
    GPU beside what is stored."""
    packed_alike(write_kin_halves(tmp_path, config, kin_weights(config)), weights, device)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (DEEPSEEK_V3, latent_weights(DEEPSEEK_V3)),
        (DEEPSEEK_V3, absorbed(DEEPSEEK_V3, latent_weights(DEEPSEEK_V3))),
        (NEXT, expert_weights(NEXT)),
        (MOE, expert_weights(MOE)),
    ],
    ids=["latents in one", "latents apart", "hybrid of experts", "fused experts"],
)
@pytest.mark.parametrize("weights", [Weights.Q8, Weights.MXFP4])
def test_both_sides_reckon_packing_latents_and_hybrids_alike(
    weights: Weights, config: Mapping[str, Any], stored: dict[str, mx.array], tmp_path: Path
) -> None:
    """What makes keys and values of latents is kept, experts are packed, fused ones too."""
    folder = write_kin_halves(tmp_path, config, stored)
    names = packed_alike(folder, weights, "cpu")
    assert any(name.endswith("expert_gate_up.weight") for name in names)
    assert any(name.endswith("expert_down.weight") for name in names) is (weights is Weights.MXFP4)
    assert not any("absorbing" in name or "expanding" in name for name in names)


def write_kin_halves(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> Path:
    """Write a model in bfloat16; return its folder."""
    stored = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    return write_model(folder, config, stored)


def packed_alike(folder: Path, weights: Weights, device: str) -> list[str]:
    """Hold both sides' plans and a load that packs to each other; return what was packed."""
    files = inspect_model(folder)
    spec = LoadSpec(context_length=256, rows_max=2, weights=weights)
    told = fit.plan(told_of(folder), spec, fit.Device(device, device, GIB, 0, GIB, GIB))

    alone = plan_residency(
        demand_of(
            files.footprint, weights=files.weight_values, stored=files.stored, rows_max=2,
            kv_format=KVFormat.MODEL, device=DeviceKind(device),
            packed=files.packed_as(ON_LOAD[weights]),
        ),
        contexts=(256,), device=DeviceKind(device), choice=WeightsChoice.PACKED, budget_nbytes=GIB,
    )  # fmt: skip

    assert told.weights is weights
    assert alone.packed
    assert alone.form is (FloatType.F32 if device == "cpu" else FloatType.BF16)
    theirs = {term.name: term.nbytes for term in told.terms}
    for name in ("weights", "kv", "activations", "prefix"):
        assert theirs[name] == alone.nbytes_of(name)
    loaded = load_model(
        files, form=alone.form, progress=ignore_progress, packed=True, on_load=ON_LOAD[weights]
    )
    held = sum(array.nbytes for name, array in loaded.parameters().items() if "rope" not in name)
    assert held == alone.nbytes_of("weights")
    return [name for name, array in loaded.parameters().items() if array.dtype == mx.uint32]


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        packed_latent(DEEPSEEK_V3),
        packed_latent(DEEPSEEK_V2),
        packed_experts(NEXT),
        packed_experts(MOE),
    ],
    ids=["latents apart", "latents in one", "hybrid of experts", "all experts"],
)
def test_both_sides_count_the_same_weights(
    config: dict[str, Any], stored: dict[str, mx.array], tmp_path: Path
) -> None:
    """Whatever of a checkpoint is packed: values in all, and those that are unpacked at once."""
    folder = write_model(tmp_path, config, stored)

    files, facts = inspect_model(folder), told_of(folder)

    assert files.packed is not None
    assert facts.unpacked_values == files.packed.unpacked_values
    assert facts.elements == files.weight_values
