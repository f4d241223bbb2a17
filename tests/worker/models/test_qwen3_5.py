"""Qwen3.5 against mlx-lm: every variant of its config, both layouts of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.recurrent import RecurrentCache
from mlxd_worker.models.base import Batch
from mlxd_worker.models.loader import inspect_model
from tests.real_inputs import real_input
from tests.support.effort import spread_evenly
from tests.worker.hybrid import (
    ROPE,
    ROWS,
    TOLERANCE,
    convert,
    error,
    hybrid_config,
    hybrid_weights,
    peer_logits,
    token_ids,
    write_hybrid,
)
from tests.worker.kin import all_logits, build, quantise
from tests.worker.tiny import caches_of, forced_logits, load, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared-keys": {},
    "tied": {"tie_word_embeddings": True},
    "own-keys": {"linear_num_key_heads": 4},
    "one-key-head": {"linear_num_key_heads": 1},
    "wide-keys": {"linear_key_head_dim": 20, "linear_value_head_dim": 4},
    "short-kernel": {"linear_conv_kernel_dim": 2},
    "long-kernel": {"linear_conv_kernel_dim": 7},
    "interval-3": {"full_attention_interval": 3},
    "ends-recurrent": {"num_hidden_layers": 5},
    "biases": {"attention_bias": True},
    "multi-query": {"num_key_value_heads": 1},
    "half-rotary": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "whole-rotary": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    "other-theta": {"rope_parameters": {**ROPE, "rope_theta": 500.0}},
    "linear-rope": {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
    "llama3-rope": {"rope_parameters": {**ROPE, **LLAMA3}},
    "yarn": {"rope_parameters": {**ROPE, **YARN}},
}

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "linear_value_head_dim": 16,
}
"""Widths that groups of packed values divide."""


@pytest.mark.parametrize("name", spread_evenly(list(VARIANTS), 9))
def test_teacher_forced_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the config's variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_hybrid(tmp_path, **VARIANTS[name])
    tokens = token_ids(290, seed=1)
    model = load(folder)

    got = forced_logits(
        model, caches_of(model), ROWS[0], tokens, cuts=[1, 2, 9, 73, 138, 270, *range(271, 290)]
    )

    assert error(got, peer_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_quantised_checkpoint_equals_the_peers(tmp_path: Path, *, packed: bool) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, kept packed or unpacked."""
    config = hybrid_config(**WIDE)
    stored = quantise(config, convert(hybrid_weights(config)), whole=("conv1d.weight",))
    folder = write_model(tmp_path, *stored)
    tokens = token_ids(90, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


def test_variants_differ(tmp_path: Path) -> None:
    """Each variant of the rotary settings has an effect: an ignored key would leave none."""
    tokens = token_ids(80, seed=2)
    results = {}
    for name in (
        "shared-keys",
        "half-rotary",
        "whole-rotary",
        "other-theta",
        "linear-rope",
        "llama3-rope",
        "yarn",
    ):
        model = load(write_hybrid(tmp_path / name, **VARIANTS[name]))
        results[name] = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[])

    plain = results.pop("shared-keys")

    assert all(error(other, plain) > 10 * TOLERANCE for other in results.values())


def test_a_published_config_gives_the_peers_logits(tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", "Qwen--Qwen3.5-27B", "config.json")
    text = json.loads(path.read_text())["text_config"]
    config = {**text, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"}
    folder = write_model(tmp_path, config, hybrid_weights(config))
    tokens = token_ids(100, seed=3, vocab=config["vocab_size"])
    model = load(folder)

    got = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[67])

    assert error(got, peer_logits(folder, tokens)) < TOLERANCE


def test_both_layouts_of_a_checkpoint_are_one_model(tmp_path: Path) -> None:
    """A checkpoint as published and the same one as mlx-lm stores it give the same logits."""
    config = hybrid_config()
    weights = hybrid_weights(config)
    tokens = token_ids(50, seed=4)
    models = [
        load(write_model(tmp_path / "published", config, weights)),
        load(write_model(tmp_path / "converted", config, convert(weights))),
    ]

    first, second = (forced_logits(m, caches_of(m), ROWS[0], tokens, cuts=[20]) for m in models)

    assert error(first, second) < 1e-5


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    """A checkpoint with one layer converted and another one not says two things about its norms."""
    config = hybrid_config()
    weights = hybrid_weights(config)
    name = "model.layers.2.linear_attn.conv1d.weight"
    weights[name] = mx.contiguous(weights[name].swapaxes(1, 2))

    with pytest.raises(InvalidModel) as refused:
        load(write_model(tmp_path, config, weights))

    assert refused.value.field == name


def test_layers_may_come_in_any_order(tmp_path: Path) -> None:
    """`layer_types` says which layer is which, and each gets the cache of its kind."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    folder = write_hybrid(tmp_path, layer_types=kinds, full_attention_interval=None)
    tokens = token_ids(60, seed=5)
    model = load(folder)

    cache_kinds = [None if cache is None else cache.kind for cache in model.new_caches()]
    whole = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[])
    cut = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[1, 7, 40, 41])

    assert cache_kinds == [Kind.STANDARD, Kind.RECURRENT, Kind.RECURRENT, Kind.STANDARD]
    assert error(cut, whole) < TOLERANCE


def test_the_heads_of_drafting_stay_unread(tmp_path: Path) -> None:
    """A published checkpoint holds `mtp.*` besides: it loads, and they take no memory."""
    config = hybrid_config()
    weights = hybrid_weights(config)
    plain = load(write_model(tmp_path / "plain", config, weights))
    more = {"mtp.fc.weight": mx.ones((32, 64)), "mtp.norm.weight": mx.ones((32,))}
    more["mtp.layers.0.self_attn.q_proj.weight"] = mx.ones((128, 32))

    model = load(write_model(tmp_path / "more", config, weights | more))

    assert [array.shape for array in model.parameters().values()] == [
        array.shape for array in plain.parameters().values()
    ]


def test_bfloat16_stays_bfloat16_but_for_the_recurrence(tmp_path: Path) -> None:
    """No scalar or norm widens the rows; the recurrence's state and decays stay float32."""
    folder = write_hybrid(tmp_path)
    model, exact = load(folder, FloatType.BF16), load(folder)
    tokens = token_ids(60, seed=7)
    caches = caches_of(model)
    caches.join(ROWS[0], tokens=60)

    for begin, end in ((0, 40), (40, 41), (41, 60)):
        hidden = model.forward(Batch.prefill(tokens[begin:end], begin, ROWS[0]), caches)
        mx.eval(hidden, caches.state())
        assert hidden.dtype == mx.bfloat16
    recurrent = [cache for cache in caches.layers if isinstance(cache, RecurrentCache)]
    for cache in recurrent:
        tail, state = cache.read(caches.table.place(ROWS[0]), 0, 60)
        assert (tail.dtype, state.dtype) == (mx.bfloat16, mx.float32)
        # Values between those of bfloat16: nothing rounded them on the way.
        assert not mx.array_equal(state, state.astype(mx.bfloat16).astype(mx.float32))
    kept = {array.dtype for name, array in model.parameters().items() if name.endswith("decay")}
    reference = forced_logits(exact, caches_of(exact), ROWS[0], tokens, cuts=[])[-1:]

    assert len(recurrent) == 2
    assert kept == {mx.float32}
    assert error(model.logits(hidden[-1:]), reference) < 0.1


def test_the_footprint_is_what_a_row_takes(tmp_path: Path) -> None:
    """The fit's sums are the very bytes of a row's slots: states once, keys and values a token."""
    folder = write_hybrid(tmp_path)
    sizes = inspect_model(folder).footprint.caches
    caches = [cache for cache in load(folder).new_caches() if cache is not None]

    recurrent = [cache for cache in caches if cache.kind is Kind.RECURRENT]
    standard = [cache for cache in caches if cache.kind is Kind.STANDARD]

    assert sum(cache.slot_nbytes(512) for cache in recurrent) == 4 * sizes.recurrent_values_per_row
    assert sum(cache.slot_nbytes(512) for cache in standard) == 4 * 512 * sizes.kv_values_per_token
    assert len(recurrent) == len(standard) == 2
