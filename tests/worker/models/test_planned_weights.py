"""Weights take what was planned, to the byte: in every format, layout and life, on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.fit.described import facts_of, life_of
from mlxd_models.fit.plan import WEIGHTS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.weight_forms import UNPACKED_LAYERS
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.model_facts import device
from tests.worker.hybrid_experts import MOE, NEXT, expert_weights, packed_experts
from tests.worker.kin import GPT_OSS, QWEN3, QWEN3_MOE, kin_weights, quantise, write_quantised
from tests.worker.latent import DEEPSEEK_V2, DEEPSEEK_V3, absorb, latent_weights, packed_latent
from tests.worker.models.test_formats import fp8_folders, modelopt_folders
from tests.worker.models.test_gemma3 import nest
from tests.worker.models.test_gpt_oss_layouts import in_numbers, publish
from tests.worker.tiny import ignore_progress, write_model

FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"bits": 4, "mode": "mxfp4", "group": 32},
    "mxfp8": {"bits": 8, "mode": "mxfp8", "group": 32},
    "nvfp4": {"bits": 4, "mode": "nvfp4", "group": 16},
    "affine": {"bits": 3, "mode": "affine", "group": 64},
}
KIN = {"dense": QWEN3, "experts": QWEN3_MOE, "sinks": GPT_OSS}


def loaded_as_planned(folder: Path, weights: Weights, kind: DeviceKind) -> list[str]:
    """Hold a load to its plan; return the names of what is packed."""
    files, on_cpu = inspect_model(folder), kind is DeviceKind.CPU
    plan = plan_load(facts_of(files), LoadSpec(weights=weights), device(1 << 20, kind=kind))
    life = life_of(plan, files, on_cpu=on_cpu)
    model = load_model(
        files, form=life.form, progress=ignore_progress, packed=life.packed, on_load=life.on_load
    )
    arrays = {n: array for n, array in model.parameters().items() if "rope" not in n}
    assert plan.nbytes_of(WEIGHTS_TERM) == sum(array.nbytes for array in arrays.values())
    return [name for name, array in arrays.items() if array.dtype == mx.uint32]


def halves(folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Path:
    """Write a model whose numbers are bfloat16; return its folder."""
    stored = {
        name: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array
        for name, array in weights.items()
    }
    return write_model(folder, config, stored)


@pytest.mark.parametrize("config", KIN.values(), ids=KIN)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_packed(name: str, config: Mapping[str, Any], tmp_path: Path) -> None:
    """Words, scales and what is in numbers; a CPU with room has it all in float32."""
    folder = write_quantised(tmp_path, config, **FORMATS[name])
    assert loaded_as_planned(folder, Weights.AUTO, DeviceKind.CUDA)
    assert not loaded_as_planned(folder, Weights.AUTO, DeviceKind.CPU)


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "blocks of gpt-oss": publish,
    "numbers of gpt-oss": in_numbers,
    "floats in blocks": lambda folder: fp8_folders(folder, QWEN3)[0],
    "experts' floats in blocks": lambda folder: fp8_folders(folder, QWEN3_MOE)[0],
    "latents' floats in blocks": lambda folder: fp8_folders(folder, DEEPSEEK_V3)[0],
    "the text of one that sees": nest,
    "the packed text of one that sees": lambda folder: nest(folder, packed=True),
    "modelopt's names": lambda folder: modelopt_folders(folder)[1],
    "latents apart, packed": lambda folder: write_model(folder, *packed_latent(DEEPSEEK_V3)),
    "latents in one, packed": lambda folder: write_model(folder, *packed_latent(DEEPSEEK_V2)),
    "a hybrid of experts, packed": lambda folder: write_model(folder, *packed_experts(NEXT)),
    "all experts, packed": lambda folder: write_model(folder, *packed_experts(MOE)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_that_others_store(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    """Whatever stands for a weight counts as what is made of it."""
    loaded_as_planned(layout(tmp_path / "model"), Weights.STORED, DeviceKind.CPU)


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.CUDA])
@pytest.mark.parametrize("config", KIN.values(), ids=KIN)
@pytest.mark.parametrize("weights", ON_LOAD)
def test_what_is_packed_while_loading(
    weights: Weights, config: Mapping[str, Any], kind: DeviceKind, tmp_path: Path
) -> None:
    """On a CPU beside float32, on a GPU beside what is stored."""
    folder = halves(tmp_path / "model", config, kin_weights(config))
    assert loaded_as_planned(folder, weights, kind)


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.CUDA])
def test_what_is_packed_while_loading_beside_what_is_stored_packed(
    kind: DeviceKind, tmp_path: Path
) -> None:
    """Scales that are stored in halves become what numbers become, and are counted so."""
    weights = kin_weights(QWEN3)
    config, stored = quantise(QWEN3, weights, bits=8)
    query = "model.layers.0.self_attn.q_proj"
    stored = {name: array for name, array in stored.items() if not name.startswith(f"{query}.")}
    stored[f"{query}.weight"] = weights[f"{query}.weight"]
    folder = halves(tmp_path / "model", config, stored)

    names = loaded_as_planned(folder, Weights.MXFP4, kind)

    assert any("layers.0.qkv.0" in name for name in names)
    assert any("layers.0.qkv.1" in name for name in names)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (DEEPSEEK_V3, latent_weights(DEEPSEEK_V3)),
        (DEEPSEEK_V3, absorb(DEEPSEEK_V3, latent_weights(DEEPSEEK_V3))),
        (NEXT, expert_weights(NEXT)),
        (MOE, expert_weights(MOE)),
    ],
    ids=["latents in one", "latents apart", "hybrid of experts", "fused experts"],
)
@pytest.mark.parametrize("weights", [Weights.Q8, Weights.MXFP4])
def test_latents_and_hybrids_that_are_packed_while_loading(
    weights: Weights, config: Mapping[str, Any], stored: dict[str, mx.array], tmp_path: Path
) -> None:
    """What makes keys and values of latents is kept, experts are packed, fused ones too."""
    names = loaded_as_planned(halves(tmp_path / "model", config, stored), weights, DeviceKind.CPU)

    assert any(name.endswith("expert_gate_up.weight") for name in names)
    assert any(name.endswith("expert_down.weight") for name in names) is (weights is Weights.MXFP4)
    assert not any("absorbing" in name or "expanding" in name for name in names)


@pytest.mark.parametrize("weights", [Weights.BFLOAT16, Weights.FLOAT16, Weights.FLOAT32])
@pytest.mark.parametrize(
    ("config", "stored"),
    [(DEEPSEEK_V3, latent_weights(DEEPSEEK_V3)), (NEXT, expert_weights(NEXT))],
    ids=["latents", "hybrid"],
)
def test_what_lives_as_float32_in_every_form(
    config: Mapping[str, Any], stored: dict[str, mx.array], weights: Weights, tmp_path: Path
) -> None:
    """Convolutions, decays and corrections of routers take what they take in float32."""
    loaded_as_planned(write_model(tmp_path / "model", config, stored), weights, DeviceKind.CUDA)


def test_experts_are_never_unpacked_whole(tmp_path: Path) -> None:
    """Of a layer of experts the attention and the router count, packed by its own setting."""
    facts = facts_of(inspect_model(write_quantised(tmp_path, QWEN3_MOE)))

    layer = 64 * (128 + 2 * 64 + 128) + 6 * 64
    assert facts.unpacked_values == UNPACKED_LAYERS * layer
