"""Qwen3-Next and Qwen3.5-MoE against mlx-lm: every branch, and each one switched off."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.hybrid.qwen3_5_moe import parse_qwen3_5_moe
from mlxd_models.families.hybrid.qwen3_next import parse_qwen3_next
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.cache.base import Kind
from mlxd_worker.models.loader import inspect_model
from tests.real_inputs import real_input
from tests.support.effort import spread_evenly
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.hybrid_experts import (
    MOE,
    NEXT,
    ROPE,
    expert_weights,
    packed_experts,
    parsed_hybrid,
    routing_with,
    unfuse,
    write_experts,
)
from tests.worker.kin import ROWS, all_logits, build, worst_ragged
from tests.worker.models.test_formats import globally_scaled, scaled_numbers
from tests.worker.tiny import caches_of, forced_logits, load, write_model

VARIANTS: dict[str, dict[str, Any]] = {
    "next": {**NEXT},
    "next tied": {**NEXT, "tie_word_embeddings": True},
    "next, keys of their own": {**NEXT, "linear_num_key_heads": 4},
    "next, one key head": {**NEXT, "linear_num_key_heads": 1},
    "next, short kernel": {**NEXT, "linear_conv_kernel_dim": 2},
    "next, not normalised": {**NEXT, "norm_topk_prob": False},
    "next, one expert each": {**NEXT, "num_experts_per_tok": 1},
    "next, every other layer": {**NEXT, "decoder_sparse_step": 2},
    "next, a dense layer": {**NEXT, "mlp_only_layers": [1]},
    "next, interval of 3": {**NEXT, "full_attention_interval": 3},
    "next, biases": {**NEXT, "attention_bias": True},
    "next, half a head turns": {**NEXT, "partial_rotary_factor": 0.5},
    "next, linear rope": {**NEXT, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "moe": {**MOE},
    "moe tied": {**MOE, "tie_word_embeddings": True},
    "moe, whole heads turn": {**MOE, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
}
BOTH = ["next", "moe"]


@pytest.mark.parametrize("name", spread_evenly(list(VARIANTS), 7))
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_experts(tmp_path, VARIANTS[name])
    tokens = token_ids(150, seed=1)

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", BOTH)
def test_ragged_rows_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Rows of different lengths and classes, in any order, give what each row has alone."""
    folder = write_experts(tmp_path, VARIANTS[name])
    model = load(folder)
    kinds = [None if cache is None else cache.kind for cache in model.new_caches()]

    assert kinds == [Kind.RECURRENT, Kind.STANDARD] * 2
    assert worst_ragged(model, folder, [3, 250, 300, 20]) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    ("name", "bits"), spread_evenly([("next", 4), ("next tied", 8), ("moe", 4)], 2)
)
def test_quantised_checkpoints_equal_the_peers(
    name: str, bits: int, tmp_path: Path, *, packed: bool
) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, kept packed or unpacked while loading:
    what is grouped by key heads is put in order packed as it is."""
    folder = write_model(tmp_path, *packed_experts(VARIANTS[name], bits=bits))
    tokens = token_ids(90, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert worst_ragged(model, folder, [3, 30, 60, 20]) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_what_is_put_in_order_keeps_a_scale_of_its_own(tmp_path: Path, *, packed: bool) -> None:
    """Grouped projections in nvfp4, each with a scale of the whole weight, are put in order part by
    part: the logits are those of the numbers that they stand for."""
    plain = expert_weights(NEXT)
    stored = dict(plain)
    for name, array in expert_weights(NEXT).items():
        if ".in_proj_" in name:
            parts = globally_scaled(name.removesuffix(".weight"), array)
            stored |= parts
            plain[name] = scaled_numbers(parts)
    settings = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    folder = write_model(tmp_path / "packed", {**NEXT, "quantization": settings}, stored)
    twin = load(write_model(tmp_path / "plain", NEXT, plain))
    tokens = token_ids(60, seed=9)

    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), all_logits(twin, tokens)) < 1e-4
    scales = [name for name in model.parameters() if name.endswith("global_scale")]
    assert len(scales) == (2 * 2 if packed else 0)


Mutation = Callable[[HybridConfig], dict[str, Any]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "less of a head turns": ("next", lambda c: {"rotary_dim": c.rotary_dim // 2}),
    "no linear scaling": (
        "next, linear rope",
        lambda c: {
            "decoder": replace(c.decoder, rope=replace(c.decoder.rope, position_scale=1.0)),
        },
    ),
    "no shared expert": ("next", lambda c: routing_with(c, shared=None)),
    "shares not normalised": ("next", lambda c: routing_with(c, normalised=False)),
    "shares normalised": ("next, not normalised", lambda c: routing_with(c, normalised=True)),
    "an expert more": ("next", lambda c: routing_with(c, chosen=3)),
    "no shared expert of moe": ("moe", lambda c: routing_with(c, shared=None)),
    "moe not normalised": ("moe", lambda c: routing_with(c, normalised=False)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    variant, mutation = MUTATIONS[name]
    folder = write_experts(tmp_path, VARIANTS[variant])
    tokens = token_ids(200, seed=4)
    model = build(folder, **mutation(parsed_hybrid(folder)))

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def remove_gates(weights: dict[str, mx.array]) -> None:
    """Take attention's gates out: all are a half, and what leads out makes up for it."""
    for name, array in weights.items():
        if name.endswith("self_attn.q_proj.weight"):
            by_head = array.reshape(4, 2, 32, -1) * mx.array([1.0, 0.0]).reshape(1, 2, 1, 1)
            weights[name] = by_head.reshape(array.shape)
        elif name.endswith("self_attn.o_proj.weight"):
            weights[name] = 2 * array


def unshared_gate(weights: dict[str, mx.array]) -> None:
    """Take the shared expert's gate out, likewise."""
    for name, array in weights.items():
        if name.endswith("shared_expert_gate.weight"):
            weights[name] = mx.zeros_like(array)
        elif name.endswith("shared_expert.down_proj.weight"):
            weights[name] = 2 * array


def undecaying(weights: dict[str, mx.array]) -> None:
    """Let recurrent states stay as they are."""
    for name, array in weights.items():
        if name.endswith("A_log"):
            weights[name] = mx.full(array.shape, -40.0)


def skip_convolutions(weights: dict[str, mx.array]) -> None:
    """Let convolutions see the current token alone."""
    for name, array in weights.items():
        if name.endswith("conv1d.weight"):
            weights[name] = array * mx.array([0.0, 0.0, 0.0, 1.0])


GATES = {
    "attention ungated": remove_gates,
    "shared expert ungated": unshared_gate,
    "no decay": undecaying,
    "no convolution": skip_convolutions,
}


@pytest.mark.parametrize("name", GATES)
def test_each_gate_acts(name: str, tmp_path: Path) -> None:
    """With weights that amount to one gate less logits are far from mlx-lm's with it."""
    weights = expert_weights(NEXT)
    folder = write_model(tmp_path / "whole", NEXT, weights)
    tokens = token_ids(100, seed=5)
    GATES[name](weights)
    less = all_logits(load(write_model(tmp_path / "less", NEXT, weights)), tokens)

    assert error(less, peer_logits(folder, tokens)) > 10 * TOLERANCE


def pass_through(heads: mx.array) -> mx.array:
    """Take a norm's place."""
    return heads


def test_heads_are_normalised(tmp_path: Path) -> None:
    """Without its norms of queries and keys mlx-lm's logits are far from ours."""
    folder = write_experts(tmp_path, NEXT)
    tokens = token_ids(100, seed=6)
    peer, _ = load_peer(folder)
    for layer in peer.layers[1::2]:
        layer.self_attn.q_norm = layer.self_attn.k_norm = pass_through

    without = peer(mx.array([tokens]), cache=make_prompt_cache(peer))[0]

    assert error(all_logits(load(folder), tokens), without) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["next, one key head", "next", "moe"])
def test_both_layouts_of_a_checkpoint_are_one_model(name: str, tmp_path: Path) -> None:
    """A checkpoint as published and the same one as mlx-lm stores it give the same logits."""
    config = VARIANTS[name]
    weights = expert_weights(config)
    tokens = token_ids(50, seed=7)
    models = [
        load(write_model(tmp_path / "published", config, weights)),
        load(write_model(tmp_path / "converted", config, unfuse(weights))),
    ]

    first, second = (forced_logits(m, caches_of(m), ROWS[0], tokens, cuts=[20]) for m in models)

    assert unfuse(weights).keys() != weights.keys()
    assert error(first, second) < 1e-5


def test_the_heads_of_drafting_stay_unread(tmp_path: Path) -> None:
    """A published checkpoint holds `mtp.*` besides, experts among it: it loads, and they take
    nothing."""
    weights = expert_weights(NEXT)
    plain = load(write_model(tmp_path / "plain", NEXT, weights))
    layer = {
        f"mtp.layers.0.{name.removeprefix('model.layers.1.')}": array
        for name, array in weights.items()
        if name.startswith("model.layers.1.")
    }
    more = {"mtp.fc.weight": mx.ones((64, 128)), "mtp.norm.weight": mx.ones((64,)), **layer}

    model = load(write_model(tmp_path / "more", NEXT, weights | more))

    assert any(".experts.5." in name for name in layer)
    held = [[array.shape for array in m.parameters().values()] for m in (model, plain)]
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("published", "architecture"),
    [
        ("Qwen3-Next-80B-A3B", "Qwen3NextForCausalLM"),
        ("Qwen--Qwen3.5-35B-A3B", "Qwen3_5MoeForCausalLM"),
    ],
)
def test_published_configs_give_the_peers_logits(
    published: str, architecture: str, tmp_path: Path
) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", published, "config.json")
    raw_config = json.loads(path.read_text())
    text = raw_config.get("text_config", raw_config)
    config = {**text, "architectures": [architecture], "model_type": raw_config["model_type"]}
    folder = write_experts(tmp_path, config)
    tokens = token_ids(60, seed=8, vocab=config["vocab_size"])

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", BOTH)
def test_parameters_are_the_checkpoints_values(name: str, tmp_path: Path) -> None:
    """Each array once: as many values as the fit reckons with, and states' and keys' bytes."""
    folder = write_experts(tmp_path, VARIANTS[name])
    files, model = inspect_model(folder), load(folder, FloatType.F32)
    sizes = files.footprint.caches
    caches = [cache for cache in model.new_caches() if cache is not None]

    assert sum(array.size for array in model.parameters().values()) == files.weight_values
    assert (
        sum(cache.slot_nbytes(512) for cache in caches[::2]) == 4 * sizes.recurrent_values_per_row
    )
    assert sum(c.slot_nbytes(512) for c in caches[1::2]) == 4 * 512 * sizes.kv_values_per_token


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "shares unsaid": ("norm_topk_prob", {"norm_topk_prob": None}),
    "no experts": ("num_experts", {"num_experts": 0}),
    "no shared expert": (
        "shared_expert_intermediate_size", {"shared_expert_intermediate_size": None},
    ),
    "pictures": ("vision_config", {"vision_config": {"depth": 2}}),
    "nested": ("text_config", {"text_config": {"hidden_size": 32}}),
    "no-gate": ("attn_output_gate", {"attn_output_gate": False}),
}  # fmt: skip
REFUSED_MOE: dict[str, tuple[str, dict[str, Any]]] = {
    "not normalised": ("norm_topk_prob", {"norm_topk_prob": False}),
    "dense layers": ("mlp_only_layers", {"mlp_only_layers": [1]}),
    "some dense": ("mlp_only_layers", {"decoder_sparse_step": 2}),
    "no width": ("intermediate_size", {"moe_intermediate_size": None}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    """A key that would change the arithmetic unheard is an error that names it."""
    field, changes = REFUSED[name]

    with pytest.raises(InvalidModel) as refused:
        parse_qwen3_next({**NEXT, **changes})

    assert refused.value.field == field


@pytest.mark.parametrize("name", REFUSED_MOE)
def test_a_moe_refuses_dense_layers_by_name(name: str) -> None:
    """All layers of a Qwen3.5-MoE have experts whose weights sum to one, or it is refused."""
    field, changes = REFUSED_MOE[name]

    with pytest.raises(InvalidModel) as refused:
        parse_qwen3_5_moe({**MOE, **changes})

    assert refused.value.field == field
