"""DeepSeek-V2 and V3 and GLM-4-MoE-lite against mlx-lm: every branch, and each one switched off."""

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

from mlxd_models.families.common.experts import CORRECTION, Scoring
from mlxd_models.families.common.rope_kinds import YarnScaling
from mlxd_models.families.latent.config import LatentConfig
from mlxd_models.fit.described import facts_of
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import Kind
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.families.latent_model import LatentModel
from mlxd_worker.models.loader import inspect_model
from tests.real_inputs import real_input
from tests.support.effort import spread_evenly
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import GROUP, ROWS, all_logits, build, quantise, worst_ragged
from tests.worker.latent import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4,
    WHOLE,
    YARN,
    absorb,
    decoder_with,
    latent_weights,
    packed_latent,
    parsed_latent,
    rope_with,
    routing_with,
    write_latent,
)
from tests.worker.models.test_formats import globally_scaled, scaled_numbers
from tests.worker.tiny import caches_of, forced_logits, load, write_model

VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {**DEEPSEEK_V3},
    "v3 whole queries": {**DEEPSEEK_V3, "q_lora_rank": None},
    "v3 plain rope": {**DEEPSEEK_V3, "rope_scaling": None},
    "v3 linear rope": {**DEEPSEEK_V3, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "v3 yarn, even gains": {**DEEPSEEK_V3, "rope_scaling": {**YARN, "mscale_all_dim": 1.0}},
    "v3 yarn, no gain of scores": {
        **DEEPSEEK_V3, "rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k},
    },
    "v3 one group": {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1},
    "v3 all groups": {**DEEPSEEK_V3, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
    "v3 not normalised": {**DEEPSEEK_V3, "norm_topk_prob": False},
    "v3 no shared expert": {**DEEPSEEK_V3, "n_shared_experts": None},
    "v3 two shared experts": {**DEEPSEEK_V3, "n_shared_experts": 2},
    "v3 all dense": {**DEEPSEEK_V3, "first_k_dense_replace": 3},
    "v3 all experts": {**DEEPSEEK_V3, "first_k_dense_replace": 0},
    "v3 biases": {**DEEPSEEK_V3, "attention_bias": True},
    "v2": {**DEEPSEEK_V2},
    "v2 groups": {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "topk_group": 1},
    "v2 lean queries": {**DEEPSEEK_V2, "q_lora_rank": 32},
    "glm": {**GLM4},
    "glm whole queries": {**GLM4, "q_lora_rank": None},
    "glm groups": {**GLM4, "n_group": 4, "topk_group": 2},
    "glm yarn": {**GLM4, "rope_scaling": YARN},
}  # fmt: skip
FEW = ["v3", "v3 whole queries", "v2", "glm"]


@pytest.mark.parametrize("name", spread_evenly(list(VARIANTS), 9))
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_latent(tmp_path, VARIANTS[name])
    tokens = token_ids(150, seed=1)

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_ragged_rows_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Rows of different lengths and classes, in any order, give what each row has alone."""
    folder = write_latent(tmp_path, VARIANTS[name])

    assert worst_ragged(load(folder), folder, [3, 250, 300, 20]) < TOLERANCE


def without_score_gain(config: LatentConfig) -> dict[str, Any]:
    """Return a change: scores are multiplied by the query's width alone."""
    return decoder_with(config, score_scale=config.query_dim**-0.5)


def without_rotation_gain(config: LatentConfig) -> dict[str, Any]:
    """Return a change: yarn rotates, and multiplies by nothing."""
    yarn = config.decoder.rope.scaling
    assert isinstance(yarn, YarnScaling)
    return rope_with(config, scaling=replace(yarn, gain=1.0))


Mutation = Callable[[LatentConfig], dict[str, Any]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "halves rotate, not pairs": ("v3", lambda c: rope_with(c, interleaved=False)),
    "no yarn": ("v3", lambda c: rope_with(c, scaling=None)),
    "yarn without gain": ("v3", without_rotation_gain),
    "no gain of scores": ("v3 yarn, even gains", without_score_gain),
    "no linear scaling": ("v3 linear rope", lambda c: rope_with(c, position_scale=1.0)),
    "no groups": ("v3", lambda c: routing_with(c, groups=None)),
    "no correction": ("v3", lambda c: routing_with(c, corrected=False)),
    "softmax, not sigmoids": ("v3", lambda c: routing_with(c, scoring=Scoring.SOFTMAX)),
    "no scaling": ("v3", lambda c: routing_with(c, scaling=1.0)),
    "shares not normalised": ("v3", lambda c: routing_with(c, normalised=False)),
    "shares normalised": ("v3 not normalised", lambda c: routing_with(c, normalised=True)),
    "no shared expert": ("v3", lambda c: routing_with(c, shared=None)),
    "no groups of glm": ("glm groups", lambda c: routing_with(c, groups=None)),
    "sigmoids, not softmax": ("v2", lambda c: routing_with(c, scoring=Scoring.SIGMOID)),
    "no groups by their best": ("v2 groups", lambda c: routing_with(c, groups=None)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    variant, mutation = MUTATIONS[name]
    folder = write_latent(tmp_path, VARIANTS[variant])
    tokens = token_ids(200, seed=4)
    model = build(folder, **mutation(parsed_latent(folder)))

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    ("name", "bits"), [("v3", 4), ("v3 whole queries", 8), ("v2", 4), ("glm", 6)]
)
def test_quantised_checkpoints_equal_the_peers(
    name: str, bits: int, tmp_path: Path, *, packed: bool
) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, kept packed or unpacked while loading:
    queries' and values' matrices apart, or those of a DeepSeek-V2 in one."""
    folder = write_model(tmp_path, *packed_latent(VARIANTS[name], bits=bits))
    tokens = token_ids(150, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert worst_ragged(model, folder, [3, 30, 60, 20]) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


@pytest.mark.parametrize(
    ("name", "mode", "bits", "group"),
    [("v3", "mxfp4", 4, 32), ("v2", "mxfp8", 8, 32), ("glm", "nvfp4", 4, 16)],
)
def test_small_floats_equal_the_peers(
    name: str, mode: str, bits: int, group: int, tmp_path: Path
) -> None:
    """Matrices apart or in one, whose groups have no offsets, kept packed."""
    settings = {"mode": mode, "bits": bits, "group": group}
    folder = write_model(tmp_path, *packed_latent(VARIANTS[name], **settings))
    tokens = token_ids(100, seed=14)

    assert (
        error(all_logits(build(folder, packed=True), tokens), peer_logits(folder, tokens))
        < TOLERANCE
    )


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in one"])
def test_matrices_with_scales_of_their_own_are_what_they_stand_for(
    tmp_path: Path, *, apart: bool
) -> None:
    """A scale of each whole matrix multiplies what it makes, for one row as for many."""
    plain = latent_weights(DEEPSEEK_V3)
    plain = absorb(DEEPSEEK_V3, plain) if apart else plain
    stored = dict(plain)
    for name, array in plain.items():
        if name.endswith(("kv_b_proj.weight", "embed_q.weight", "unembed_out.weight")):
            scaled = globally_scaled(name.removesuffix(".weight"), array)
            stored |= scaled
            experts = range(4) if apart else [None]
            parts = [scaled_numbers(scaled, expert) for expert in experts]
            plain[name] = mx.stack(parts) if apart else parts[0]
    settings = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    config = {**DEEPSEEK_V3, "quantization": settings}
    folder = write_model(tmp_path / "packed", config, stored)
    expected = load(write_model(tmp_path / "plain", DEEPSEEK_V3, plain))
    tokens = token_ids(60, seed=15)

    for packed in (True, False):
        actual = all_logits(build(folder, packed=packed), tokens)
        assert error(actual, all_logits(expected, tokens)) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_packed_matrix_is_taken_apart_as_it_is(tmp_path: Path, *, packed: bool) -> None:
    """A published layout that is packed is not rounded again, as it is by mlx-lm: logits are its
    logits with the very numbers that were packed."""
    config, stored = quantise(DEEPSEEK_V3, latent_weights(DEEPSEEK_V3), whole=WHOLE)
    plain = dict(stored)
    for name in stored:
        if name.endswith("kv_b_proj.scales"):
            stem = name.removesuffix(".scales")
            words, scales, offsets = (
                plain.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases")
            )
            plain[f"{stem}.weight"] = mx.dequantize(
                words, scales, offsets, group_size=GROUP, bits=4
            )
    exact = write_model(tmp_path / "exact", config, plain)
    tokens = token_ids(150, seed=3)

    model = build(write_model(tmp_path / "packed", config, stored), packed=packed)

    assert error(all_logits(model, tokens), peer_logits(exact, tokens)) < TOLERANCE


def test_both_layouts_of_a_checkpoint_are_one_model(tmp_path: Path) -> None:
    """A checkpoint as published and the same one as mlx-lm stores it give the same logits."""
    weights = latent_weights(DEEPSEEK_V3)
    tokens = token_ids(60, seed=5)
    models = [
        load(write_model(tmp_path / "published", DEEPSEEK_V3, weights)),
        load(write_model(tmp_path / "converted", DEEPSEEK_V3, absorb(DEEPSEEK_V3, weights))),
    ]

    first, second = (all_logits(model, tokens) for model in models)

    assert error(first, second) < 1e-5


def test_experts_outside_of_the_best_groups_are_never_chosen(tmp_path: Path) -> None:
    """However little the best groups are wanted, as transformers has it; mlx-lm counts the others
    as wanted by nothing, which is more than a correction below."""
    weights = latent_weights(DEEPSEEK_V3)
    lower = {name: array - 3 for name, array in weights.items() if name.endswith(CORRECTION)}
    higher = {name: array + 3 for name, array in weights.items() if name.endswith(CORRECTION)}
    folders = [
        write_model(tmp_path / str(index), DEEPSEEK_V3, weights | moved)
        for index, moved in enumerate((lower, higher))
    ]
    tokens = token_ids(100, seed=6)

    got = all_logits(load(folders[0]), tokens)

    assert error(got, peer_logits(folders[1], tokens)) < TOLERANCE
    assert error(got, peer_logits(folders[0], tokens)) > 10 * TOLERANCE


def test_norms_within_attention_have_an_epsilon_of_their_own(tmp_path: Path) -> None:
    """As transformers has it; mlx-lm gives those of a GLM-4-MoE-lite the config's."""
    folder = write_latent(tmp_path, {**GLM4, "rms_norm_eps": 0.3})
    tokens = token_ids(60, seed=7)
    peer, _ = load_peer(folder)
    for layer in peer.layers:
        layer.self_attn.q_a_layernorm.eps = layer.self_attn.kv_a_layernorm.eps = 1e-6
    expected = peer(mx.array([tokens]), cache=make_prompt_cache(peer))[0]

    got = all_logits(load(folder), tokens)

    assert error(got, expected) < TOLERANCE
    assert error(got, peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_halves_rotate_where_the_config_says_so(tmp_path: Path) -> None:
    """`rope_interleave` false makes pairs of halves, as transformers has it."""
    folder = write_latent(tmp_path, {**DEEPSEEK_V3, "rope_interleave": False})
    tokens = token_ids(60, seed=8)
    peer, _ = load_peer(folder)
    for layer in peer.layers:
        layer.self_attn.rope.traditional = False

    expected = peer(mx.array([tokens]), cache=make_prompt_cache(peer))[0]

    assert error(all_logits(load(folder), tokens), expected) < TOLERANCE


@pytest.mark.parametrize("part", ["queries", "latents"])
def test_latents_are_normalised(part: str, tmp_path: Path) -> None:
    """Without the norm of what queries are made of, or the weight of latents', logits are far from
    mlx-lm's."""
    folder = write_latent(tmp_path, DEEPSEEK_V3)
    tokens = token_ids(100, seed=9)
    model = load(folder)
    assert isinstance(model, LatentModel)
    layers = []
    for layer in model._layers:
        off = replace(layer.attention, latent_norm=Norm(mx.ones(64), 1e-6))
        if part == "queries":
            off = replace(layer.attention, query_norm=None)
        layers.append(replace(layer, attention=off))
    model._layers = tuple(layers)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_a_tied_head_is_the_table(tmp_path: Path) -> None:
    """A config that ties the head gives what the table stored as head gives."""
    weights = latent_weights({**DEEPSEEK_V3, "tie_word_embeddings": True})
    tied = write_model(tmp_path / "tied", {**DEEPSEEK_V3, "tie_word_embeddings": True}, weights)
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    tokens = token_ids(50, seed=10)

    untied = write_model(tmp_path / "untied", DEEPSEEK_V3, weights | head)

    assert error(all_logits(load(tied), tokens), peer_logits(untied, tokens)) < TOLERANCE


def test_drafting_layers_stay_unread(tmp_path: Path) -> None:
    """A published checkpoint holds the layers that draft tokens: it loads, and they take nothing;
    where the config knows of none they are refused by name."""
    plain_config = VARIANTS["v3 plain rope"]
    config = {**plain_config, "num_nextn_predict_layers": 1}
    weights = latent_weights(plain_config)
    drafting = {
        f"model.layers.3.{name.removeprefix('model.layers.2.')}": array
        for name, array in weights.items()
        if name.startswith("model.layers.2.")
    }
    drafting["model.layers.3.eh_proj.weight"] = mx.ones((64, 128))
    drafting["model.layers.3.shared_head.head.weight"] = mx.ones((61, 64))
    folder = write_model(tmp_path / "drafting", config, weights | drafting)
    tokens = token_ids(40, seed=11)

    model, files = load(folder), inspect_model(folder)
    facts = facts_of(files)

    plain = load(write_model(tmp_path / "plain", plain_config, weights))
    assert mx.array_equal(all_logits(model, tokens), all_logits(plain, tokens))
    assert sum(array.size for array in model.parameters().values()) == files.weight_values
    assert facts.elements == files.weight_values
    assert facts.dropped_bytes == sum(array.nbytes for array in drafting.values())
    with pytest.raises(InvalidModel) as refused:
        load(write_model(tmp_path / "unsaid", plain_config, weights | drafting))
    assert refused.value.field == min(drafting)


@pytest.mark.parametrize(
    "published",
    ["deepseek-ai--DeepSeek-V3", "moonshotai--Kimi-K2-Instruct", "GLM-4.7-Flash"],
)
def test_published_configs_give_the_peers_logits(published: str, tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", published, "config.json")
    config = json.loads(path.read_text())
    config["model_type"] = config["model_type"].replace("kimi_k2", "deepseek_v3")
    folder = write_latent(tmp_path, config)
    tokens = token_ids(70, seed=12, vocab=config["vocab_size"])

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("form", [FloatType.BF16, FloatType.F16])
def test_half_precision_runs_end_to_end(form: FloatType, tmp_path: Path) -> None:
    """Weights in half precision give rows and latents of that type and logits near float32's."""
    folder = write_latent(tmp_path, VARIANTS["v3 all dense"])
    tokens = token_ids(60, seed=13)
    exact = all_logits(load(folder), tokens)
    model = load(folder, form)
    caches = caches_of(model)

    logits = forced_logits(model, caches, ROWS[0], tokens, cuts=[10, 11])

    assert {array.dtype for array in caches.state()} == {model.dtype}
    assert bool((mx.mean(mx.abs(logits - exact)) < 0.2).item())


def test_a_position_takes_one_latent_a_layer(tmp_path: Path) -> None:
    """The caches are the latents', their bytes what the fit reckons with; keys and
    values of their own would take seven times as much."""
    folder = write_latent(tmp_path, DEEPSEEK_V3)
    files, model = inspect_model(folder), load(folder)
    sizes = files.footprint.caches
    caches = [cache for cache in model.new_caches() if cache is not None]

    assert {cache.kind for cache in caches} == {Kind.LATENT}
    assert sum(cache.slot_nbytes(512) for cache in caches) == 4 * 512 * sizes.kv_values_per_token
    assert sizes.kv_values_per_token == 3 * (64 + 16)
    assert "latents" in (sizes.kv_format_problem(KVFormat.Q8) or "")
    assert sizes.kv_format_problem(KVFormat.MODEL) is None
