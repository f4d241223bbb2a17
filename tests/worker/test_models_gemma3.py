"""Gemma 3's text against mlx-lm: both kinds of layers, and each branch switched off."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_shared.errors import InvalidModel
from mlxd_shared.requests import KVFormat
from mlxd_worker.cache.base import Kind
from mlxd_worker.memory.residency import FloatType
from mlxd_worker.models.config import Activation, DecoderConfig
from mlxd_worker.models.fused import bounded_sum
from mlxd_worker.models.gemma3 import parse_gemma3, rounded_to_bfloat16
from tests.real_inputs import real_input
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import (
    GEMMA3,
    ROWS,
    built,
    changed,
    forced,
    kin_weights,
    parsed,
    worst_joined,
    worst_ragged,
    write_kin,
    write_quantised,
)
from tests.worker.tiny import caches_of, forced_logits, load, write_model

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": changed(GEMMA3),
    "linear rope": changed(GEMMA3, rope_scaling=LINEAR),
    "longer pattern": changed(GEMMA3, sliding_window_pattern=3),
    "no sliding layer": changed(GEMMA3, sliding_window_pattern=1, sliding_window=None),
    "own head": changed(GEMMA3, tie_word_embeddings=False),
    "grouped": changed(GEMMA3, num_key_value_heads=2),
    "window as long as the context": changed(GEMMA3, sliding_window=1024),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_kin(tmp_path, VARIANTS[name])
    tokens = token_ids(150, seed=1)

    assert error(forced(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


def test_ragged_rows_equal_the_peers(tmp_path: Path) -> None:
    """Rows before, at and long past their windows' ends give what each has alone."""
    folder = write_kin(tmp_path, VARIANTS["linear rope"])
    model = load(folder)

    assert worst_ragged(model, folder, [3, 38, 300, 75]) < TOLERANCE


def test_joined_passes_equal_the_peers(tmp_path: Path) -> None:
    """Where all layers' caches are standard ones, passes are joined, each layer by its rotation."""
    folder = write_kin(tmp_path, VARIANTS["window as long as the context"])

    assert worst_joined(load(folder), folder) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_quantised_checkpoints_equal_the_peers(tmp_path: Path, *, packed: bool) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, a scaled packed embedding included."""
    folder = write_quantised(tmp_path, VARIANTS["linear rope"])
    tokens = token_ids(90, seed=2)
    model = built(folder, packed=packed)

    assert error(forced(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


def test_each_layer_gets_the_cache_of_its_kind(tmp_path: Path) -> None:
    """Sliding layers rotate, whole ones keep all, quantised where that is asked for."""
    model = load(write_kin(tmp_path, VARIANTS["plain"]))

    for kv, whole in ((KVFormat.MODEL, Kind.STANDARD), (KVFormat.Q8, Kind.QUANTIZED)):
        kinds = [None if cache is None else cache.kind for cache in model.new_caches(kv=kv)]
        assert kinds == [Kind.ROTATING, whole, Kind.ROTATING, whole]


def test_quantised_keys_and_values_stay_near(tmp_path: Path) -> None:
    """With the whole layers' keys and values in 8 bits logits stay near the exact ones."""
    folder = write_kin(tmp_path, VARIANTS["plain"])
    tokens = token_ids(100, seed=3)

    exact, near = (forced(load(folder), tokens, kv=kv) for kv in (KVFormat.MODEL, KVFormat.Q8))

    assert 0 < error(near, exact) < 0.05


Mutation = Callable[[DecoderConfig], dict[str, Any]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "no window": ("plain", lambda c: {"windows": (None,) * c.layers}),
    "one rotation for all": ("plain", lambda _: {"ropes": None}),
    "no linear scaling": (
        "linear rope",
        lambda c: {"ropes": tuple(replace(rope, position_scale=1.0) for rope in c.ropes or ())},
    ),
    "linear scaling everywhere": (
        "linear rope",
        lambda c: {
            "ropes": tuple(replace(rope, position_scale=c.rope.position_scale)
                           for rope in c.ropes or ())
        },
    ),
    "queries and keys not normalised": ("plain", lambda _: {"head_norms": False}),
    "norms as stored": ("plain", lambda _: {"norms_from_one": False}),
    "no norms of outputs": ("plain", lambda _: {"output_norms": False}),
    "embeddings not scaled": ("plain", lambda _: {"embedding_scale": 1.0}),
    "scores scaled by the head": ("plain", lambda _: {"score_scale": None}),
    "other activation": ("plain", lambda _: {"activation": Activation.SILU}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    variant, mutation = MUTATIONS[name]
    folder = write_kin(tmp_path, VARIANTS[variant])
    tokens = token_ids(130, seed=4)
    model = built(folder, **mutation(parsed(folder)))

    assert error(forced(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_capped_logits_are_the_peers_bent(tmp_path: Path) -> None:
    """`final_logit_softcapping` bends logits as transformers does; mlx-lm passes it by."""
    folder = write_kin(tmp_path, changed(GEMMA3, final_logit_softcapping=3.0))
    tokens = token_ids(60, seed=5)
    plain = peer_logits(folder, tokens)

    got = forced(load(folder), tokens)

    assert error(got, 3.0 * mx.tanh(plain / 3.0)) < TOLERANCE
    assert error(got, plain) > 10 * TOLERANCE


def test_named_layers_and_nested_rotations_are_the_same_model() -> None:
    """`layer_types` and rotations by kind of layer, as transformers 5 writes them, say the same."""
    older = parse_gemma3(VARIANTS["linear rope"])
    newer = parse_gemma3(
        changed(
            GEMMA3,
            sliding_window_pattern=None,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            rope_theta=None,
            rope_local_base_freq=None,
            rope_parameters={
                FULL: {**LINEAR, "rope_theta": 100000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
            },
        )
    )

    assert newer == older
    assert [rope.base for rope in older.ropes or ()] == [1000.0, 100000.0] * 2
    assert [rope.position_scale for rope in older.ropes or ()] == [1.0, 0.125] * 2


def test_the_published_config_gives_the_peers_logits(tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", "gemma-3-270m-it", "config.json")
    config = json.loads(path.read_text())
    folder = write_kin(tmp_path, config)
    tokens = token_ids(90, seed=6, vocab=config["vocab_size"])

    assert error(forced(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


def test_a_head_stored_beside_the_embedding_is_a_copy(tmp_path: Path) -> None:
    """Older converters store the tied head once more: it must be the embedding, and is not kept."""
    config, weights = VARIANTS["plain"], kin_weights(VARIANTS["plain"])
    embedding = weights["model.embed_tokens.weight"]
    load(write_model(tmp_path / "copy", config, weights | {"lm_head.weight": embedding}))

    with pytest.raises(InvalidModel, match="differs"):
        load(write_model(tmp_path / "other", config, weights | {"lm_head.weight": 2 * embedding}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "capped scores": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "seeing ahead": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "other activation": ({"hidden_activation": "gelu"}, "hidden_activation"),
    "activation, older key": ({"hidden_act": "silu"}, "hidden_act"),
    "heads of no width": ({"head_dim": None}, "head_dim"),
    "heads of keys unsaid": ({"num_key_value_heads": None}, "num_key_value_heads"),
    "no window": ({"sliding_window": None}, "sliding_window"),
    "layers unlike the pattern": ({"layer_types": [FULL] * 4}, "layer_types"),
    "rotations twice": (
        {"rope_scaling": LINEAR, "rope_parameters": {FULL: LINEAR}}, "rope_scaling",
    ),
    "cap of nothing": ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
    "scores by nothing": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    changes, field = REFUSED[name]

    with pytest.raises(InvalidModel) as caught:
        parse_gemma3(changed(GEMMA3, **changes))

    assert caught.value.field == field


def test_the_embeddings_scale_is_rounded_as_bfloat16_does() -> None:
    """The scale is the root of the width to the eight digits of bfloat16, whatever the form."""
    widths = [64, 640, 1152, 2560, 3840, 5376, *range(1, 3000, 37)]

    for width in widths:
        wanted = mx.array(math.sqrt(width), dtype=mx.bfloat16).item()
        assert rounded_to_bfloat16(math.sqrt(width)) == wanted
    assert rounded_to_bfloat16(math.sqrt(1152)) == 34.0


@pytest.mark.parametrize("form", [FloatType.BF16, FloatType.F16])
def test_half_precision_runs_end_to_end(form: FloatType, tmp_path: Path) -> None:
    """Weights in half precision give rows and caches of that type, and logits near float32's."""
    folder = write_kin(tmp_path, VARIANTS["plain"])
    tokens = token_ids(60, seed=7)
    exact = forced(load(folder), tokens)
    model = load(folder, form)
    caches = caches_of(model)

    logits = forced_logits(model, caches, ROWS[0], tokens, cuts=[30, 31])

    assert {array.dtype for array in caches.state()} == {model.dtype}
    assert error(logits, exact) < 0.2


def test_a_sum_in_float16_stays_finite() -> None:
    """What would be beyond float16 ends at its largest number; other types add as they are."""
    large = mx.array([60000.0, -60000.0, 1.5], dtype=mx.float16)

    assert bounded_sum(large, large).tolist() == [65504.0, -65504.0, 3.0]
    assert bounded_sum(large.astype(mx.float32), large).tolist() == [120000.0, -120000.0, 3.0]
