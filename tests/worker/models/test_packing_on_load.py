"""Weights packed while they are loaded: what mlx-lm's converter writes, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.packing import ON_LOAD, Packing, Recipe
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.requests import Weights
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.mlx_memory import live_nbytes
from tests.worker.kin import build, change, kin_weights, quantise, stack_experts
from tests.worker.models.test_formats import EXPERTS, Q0, WIDE
from tests.worker.tiny import ignore_progress, write_model

KEPT_STEMS = ("embed_tokens", "lm_head", "mlp.gate")
FINER_STEMS = ("k_proj", "v_proj", "down_proj")


def as_converted(config: Mapping[str, Any], on_load: Recipe) -> tuple[Any, dict[str, mx.array]]:
    """Return what mlx-lm's converter writes of a model where it is told to keep what we keep."""
    weights = stack_experts(kin_weights(config))
    made, stored = quantise(config, weights, **settings_of(on_load.common))
    finer = {} if on_load.finer is None else settings_of(on_load.finer)
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        is_finer = bool(finer) and stem.endswith(FINER_STEMS)
        if not is_finer and not stem.endswith(KEPT_STEMS):
            continue
        stored = {n: a for n, a in stored.items() if not n.startswith(f"{stem}.")}
        if is_finer:
            own, parts = quantise({}, {name: array}, **finer)
            made["quantization"][stem] = own["quantization"]
            stored |= parts
        else:
            stored[name] = array
    return made, stored


def settings_of(packing: Packing) -> dict[str, Any]:
    """Return a packing as `quantise` takes it."""
    return {"bits": packing.bits, "mode": packing.mode.value, "group": packing.group_size}


@pytest.mark.parametrize("config", [WIDE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("weights", ON_LOAD)
def test_packing_while_loading_is_what_the_converter_writes(
    weights: Weights, config: Mapping[str, Any], tmp_path: Path
) -> None:
    """Linears and experts are packed, bit for bit; embedding, head, router and norms are kept."""
    on_load = ON_LOAD[weights]
    files = inspect_model(write_model(tmp_path / "plain", config, kin_weights(config)))
    converted = write_model(tmp_path / "packed", *as_converted(config, on_load))
    expected = build(converted, packed=True).parameters()

    model = load_model(
        files, form=FloatType.F32, progress=ignore_progress, packed=True, on_load=on_load
    )

    parameters = model.parameters()
    suits = [name for name, array in parameters.items() if array.dtype == mx.uint32]
    assert suits
    for name in suits:
        stem = name.removesuffix(".weight")
        for part in ("weight", "scales", "biases"):
            if f"{stem}.{part}" in parameters:
                assert mx.array_equal(parameters[f"{stem}.{part}"], expected[f"{stem}.{part}"])
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert mx.array_equal(parameters[name], expected[name])
        assert parameters[name].dtype == mx.float32
    routers = [array for name, array in parameters.items() if name.endswith("router.weight")]
    assert all(array.dtype == mx.float32 for array in routers)
    assert len(routers) == (1 if config is EXPERTS else 0)


def test_what_is_stored_packed_is_not_packed_anew(tmp_path: Path) -> None:
    """Told to pack while loading, a load leaves 8 bits 8 bits and packs what is in numbers."""
    weights = kin_weights(WIDE)
    config, stored = quantise(WIDE, weights, bits=8)
    stored = {name: array for name, array in stored.items() if not name.startswith(f"{Q0}.")}
    stored[f"{Q0}.weight"] = weights[f"{Q0}.weight"]
    files = inspect_model(write_model(tmp_path, config, stored))

    model = load_model(
        files, form=FloatType.F32, progress=ignore_progress, packed=True,
        on_load=ON_LOAD[Weights.Q4],
    )  # fmt: skip

    parameters = model.parameters()
    assert parameters["layers.0.qkv.0.weight"].shape == (128, 128 * 4 // 32)
    assert parameters["layers.0.qkv.1.weight"].shape == (64, 128 * 8 // 32)
    assert parameters["layers.0.feed.down.weight"].shape == (128, 128 * 8 // 32)


@pytest.mark.parametrize("weights", [Weights.Q4, Weights.MXFP8])
def test_packing_while_loading_needs_little_besides(weights: Weights, tmp_path: Path) -> None:
    """The peak is the finished weights and one module's, as stored and packed."""
    config = change(
        WIDE, num_hidden_layers=6, hidden_size=256, intermediate_size=512, vocab_size=16
    )
    stored = {name: array.astype(mx.bfloat16) for name, array in kin_weights(config).items()}
    files = inspect_model(write_model(tmp_path, config, stored))
    del stored
    mx.clear_cache()
    before = live_nbytes()

    model = load_model(
        files, form=FloatType.BF16, progress=ignore_progress, packed=True, on_load=ON_LOAD[weights]
    )

    finished = sum(array.nbytes for array in model.parameters().values())
    values = 2 * 512 * 256
    packed_nbytes = values * ON_LOAD[weights].common.bits // 8 * 9 // 8
    assert mx.get_peak_memory() - before <= finished + 2 * values + packed_nbytes + (64 << 10)
