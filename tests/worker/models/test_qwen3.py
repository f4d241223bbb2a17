"""Qwen3, dense and of experts, against mlx-lm: every branch, and each one switched off."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_model as load_peer

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.requests import KVFormat
from tests.real_inputs import real_input
from tests.worker.hybrid import LIVELY, TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import (
    QWEN3,
    QWEN3_MOE,
    ROWS,
    YARN,
    all_logits,
    build,
    change,
    experts_with,
    kin_weights,
    parse_folder,
    stack_experts,
    with_betas,
    without_gain,
    worst_joined,
    worst_ragged,
    write_kin,
    write_quantised,
)
from tests.worker.tiny import caches_of, forced_logits, load, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": change(QWEN3),
    "dense tied": change(QWEN3, tie_word_embeddings=True),
    "dense multi-query": change(QWEN3, num_key_value_heads=1),
    "dense narrow heads": change(QWEN3, head_dim=8),
    "dense linear rope": change(QWEN3, rope_scaling={"type": "linear", "factor": 4.0}),
    "dense llama3 rope": change(QWEN3, rope_scaling=LLAMA3),
    "dense yarn": change(QWEN3, rope_scaling=YARN),
    "dense yarn betas": change(QWEN3, rope_scaling={**YARN, "beta_fast": 8.0, "beta_slow": 0.5}),
    "dense yarn gains": change(QWEN3, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "dense yarn, newer": change(
        QWEN3, rope_parameters={**YARN, "rope_theta": 500.0}, rope_theta=None
    ),
    "dense dynamic rope": change(QWEN3, rope_scaling={"type": "dynamic", "factor": 4.0}),
    "experts": change(QWEN3_MOE),
    "experts tied": change(QWEN3_MOE, tie_word_embeddings=True),
    "experts not normalised": change(QWEN3_MOE, norm_topk_prob=False),
    "experts, one each": change(QWEN3_MOE, num_experts_per_tok=1),
    "experts, all of them": change(QWEN3_MOE, num_experts_per_tok=6),
    "experts every other layer": change(QWEN3_MOE, decoder_sparse_step=2),
    "experts, dense layers": change(QWEN3_MOE, mlp_only_layers=[1]),
    "experts, none": change(QWEN3_MOE, mlp_only_layers=[0, 1, 2]),
}
FEW = ["dense", "dense yarn", "experts"]
RAGGED = [3, 250, 290, 20]
"""Lengths, and seeds, of rows whose experts no rounding decides: the shares of who is chosen and of
who is next are 2e-5 apart at least. In the text of 300 tokens they are 1e-7 apart once."""


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_kin(tmp_path, VARIANTS[name])
    tokens = token_ids(150, seed=1)

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_ragged_and_joined_rows_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Rows of different lengths and classes, and joined passes, give what each row has alone."""
    folder = write_kin(tmp_path, VARIANTS[name])
    model = load(folder)

    assert model.capabilities.joins_passes
    assert worst_ragged(model, folder, RAGGED) < TOLERANCE
    assert worst_joined(model, folder) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("dense", 4), ("dense tied", 8), ("experts", 4), ("experts, dense layers", 6)],
)
def test_quantised_checkpoints_equal_the_peers(
    name: str, bits: int, tmp_path: Path, *, packed: bool
) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, kept packed or unpacked while loading,
    though routers have settings of their own."""
    folder = write_quantised(tmp_path, VARIANTS[name], bits=bits)
    tokens = token_ids(90, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert worst_ragged(model, folder, [3, 30, 60, 20]) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_quantised_keys_and_values_equal_the_peers(name: str, tmp_path: Path) -> None:
    """With keys and values in 8 bits logits are those of mlx-lm's cache of the same form."""
    folder = write_kin(tmp_path, VARIANTS[name])
    tokens = token_ids(70, seed=3)
    peer, _ = load_peer(folder)
    caches = [QuantizedKVCache(group_size=32, bits=8) for _ in range(3)]
    expected = mx.concatenate([peer(mx.array([[token]]), cache=caches)[0] for token in tokens])

    got = all_logits(load(folder), tokens, kv=KVFormat.Q8)

    assert bool((mx.std(expected) >= LIVELY).item())
    assert error(got, expected) < 10 * TOLERANCE  # a value at a rounding's edge falls either way
    assert error(got[:2], expected[:2]) < TOLERANCE


Mutation = Callable[[DecoderConfig], dict[str, Any]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "queries and keys not normalised": ("dense", lambda _: {"head_norms": False}),
    "no linear scaling": (
        "dense linear rope", lambda c: {"rope": replace(c.rope, position_scale=1.0)},
    ),
    "no llama3 scaling": ("dense llama3 rope", lambda c: {"rope": replace(c.rope, scaling=None)}),
    "no yarn": ("dense yarn", lambda c: {"rope": replace(c.rope, scaling=None)}),
    "yarn without gain": ("dense yarn", without_gain),
    "yarn with other betas": ("dense yarn betas", with_betas),
    "shares not normalised": ("experts", lambda c: experts_with(c, normalised=False)),
    "shares normalised": ("experts not normalised", lambda c: experts_with(c, normalised=True)),
    "an expert less": ("experts", lambda c: experts_with(c, chosen=1)),
    "an expert more": ("experts", lambda c: experts_with(c, chosen=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    variant, mutation = MUTATIONS[name]
    folder = write_kin(tmp_path, VARIANTS[variant])
    tokens = token_ids(200, seed=4)
    model = build(folder, **mutation(parse_folder(folder)))

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_experts_have_the_configs_rotation(tmp_path: Path) -> None:
    """Rope scaling holds for experts too, as transformers has it; mlx-lm passes it by."""
    folder = write_kin(tmp_path, change(QWEN3_MOE, rope_scaling=YARN))
    tokens = token_ids(150, seed=5)
    peer, _ = load_peer(folder)
    for layer in peer.layers:
        layer.self_attn.rope = initialize_rope(32, 10000.0, False, dict(YARN), 1024)
    expected = peer(mx.array([tokens]), cache=make_prompt_cache(peer))[0]

    got = all_logits(load(folder), tokens)

    assert error(got, expected) < TOLERANCE
    assert error(got, peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_experts_one_by_one_or_stacked_are_one_model(tmp_path: Path) -> None:
    """A checkpoint as published and the same one as mlx-lm stores it give the same logits."""
    config = change(QWEN3_MOE)
    weights = kin_weights(config)
    tokens = token_ids(60, seed=6)

    first, second = (
        all_logits(load(write_model(tmp_path / name, config, stored)), tokens)
        for name, stored in (("published", weights), ("converted", stack_experts(weights)))
    )

    assert len(stack_experts(weights)) < len(weights)
    assert mx.array_equal(first, second)


def test_a_qwen3_with_windows_equals_the_peers_with_rotating_caches(tmp_path: Path) -> None:
    """Where windows are in use, layers from `max_window_layers` on slide."""
    config = change(QWEN3, use_sliding_window=True, sliding_window=40, max_window_layers=1)
    folder = write_kin(tmp_path, config)
    tokens = token_ids(150, seed=7)
    plain = peer_logits(folder, tokens)
    model = load(folder)
    whole = build(folder, windows=(None,) * 3)

    got = all_logits(model, tokens)

    assert [geometry.window for geometry in cast("Any", model).attention] == [None, 40, 40]
    assert error(got[:40], plain[:40]) < TOLERANCE
    assert error(got, plain) > 10 * TOLERANCE
    assert error(all_logits(whole, tokens), plain) < TOLERANCE


@pytest.mark.parametrize("published", ["Qwen--Qwen3-0.6B", "Qwen--Qwen3-30B-A3B"])
def test_published_configs_give_the_peers_logits(published: str, tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", published, "config.json")
    config = json.loads(path.read_text())
    folder = write_kin(tmp_path, config)
    tokens = token_ids(70, seed=8, vocab=config["vocab_size"])

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("form", [FloatType.BF16, FloatType.F16])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_half_precision_runs_end_to_end(name: str, form: FloatType, tmp_path: Path) -> None:
    """Weights in half precision, experts' too, give rows of that type and logits near float32's."""
    folder = write_kin(tmp_path, VARIANTS[name])
    tokens = token_ids(60, seed=9)
    exact = all_logits(load(folder), tokens)
    model = load(folder, form)
    caches = caches_of(model)

    logits = forced_logits(model, caches, ROWS[0], tokens, cuts=[10, 11])

    assert {array.dtype for array in caches.state()} == {model.dtype}
    assert logits.dtype == mx.float32
    # An expert may be chosen otherwise where two are wanted nearly alike.
    assert bool((mx.mean(mx.abs(logits - exact)) < 0.2).item())
