"""gpt-oss against mlx-lm: sinks, windows, bounded gates, layouts; each branch switched off."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.experts import GateClamp
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.layers.quantized import QuantizedKVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.experts import Experts
from tests.real_inputs import real_input
from tests.worker.hybrid import LIVELY, TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import (
    GPT_OSS,
    ROWS,
    YARN,
    all_logits,
    build,
    change,
    experts_with,
    kin_weights,
    parse_folder,
    without_gain,
    worst_joined,
    worst_ragged,
    write_kin,
    write_quantised,
)
from tests.worker.tiny import caches_of, floats, forced_logits, load, write_model

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default"}
MXFP4: dict[str, Any] = {"bits": 4, "mode": "mxfp4"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": change(GPT_OSS),
    "plain rotation": change(GPT_OSS, rope_scaling=PLAIN),
    "layers named": change(GPT_OSS, layer_types=[SLIDING, SLIDING, FULL, FULL]),
    "window as long as the context": change(GPT_OSS, sliding_window=1024),
    "one expert": change(GPT_OSS, num_experts_per_tok=1),
    "a key for each head": change(GPT_OSS, num_key_value_heads=4),
    "one key for all heads": change(GPT_OSS, num_key_value_heads=1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_kin(tmp_path, VARIANTS[name])
    tokens = token_ids(150, seed=1)

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


def test_ragged_rows_equal_the_peers(tmp_path: Path) -> None:
    """Rows before, at and long past their windows' ends give what each has alone."""
    folder = write_kin(tmp_path, VARIANTS["plain"])

    assert worst_ragged(load(folder), folder, [3, 38, 300, 75]) < TOLERANCE


def test_joined_passes_equal_the_peers(tmp_path: Path) -> None:
    """Where all layers' caches are standard ones, passes are joined, sinks and all."""
    folder = write_kin(tmp_path, VARIANTS["window as long as the context"])

    assert worst_joined(load(folder), folder) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("settings", [{"bits": 4}, MXFP4], ids=["affine", "mxfp4"])
def test_quantised_checkpoints_equal_the_peers(
    tmp_path: Path, settings: dict[str, Any], *, packed: bool
) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, routers packed otherwise included."""
    folder = write_quantised(tmp_path, VARIANTS["plain"], **settings)
    tokens = token_ids(90, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


def few_shapes(model: Model, *, kv: KVFormat = KVFormat.MODEL) -> RowCaches:
    """Return caches that keep to few shapes, as on a GPU, and multiply with packed keys there."""
    layers = model.new_caches(kv=kv)
    for layer in layers:
        if isinstance(layer, QuantizedKVCache):
            layer.packed_products = True
    return RowCaches(layers, context_max=model.context_max, rows_max=8, bounded_shapes=True)


def test_few_shapes_equal_the_peers(tmp_path: Path) -> None:
    """Where chunks are padded and all of a row is read under a mask, sinks take the same share."""
    folder = write_kin(tmp_path, GPT_OSS)
    model, tokens = load(folder), token_ids(150, seed=1)

    alone = forced_logits(model, few_shapes(model), ROWS[0], tokens, cuts=[1, 2, 70, 71, 80])

    assert error(alone, peer_logits(folder, tokens)) < TOLERANCE
    assert worst_ragged(model, folder, [3, 38, 300, 75], caches=few_shapes(model)) < TOLERANCE


@pytest.mark.parametrize("bounded", [False, True])
def test_several_tokens_of_each_row_equal_the_peers(tmp_path: Path, *, bounded: bool) -> None:
    """Guesses checked side by side, before and past the windows' ends, give what each has alone."""
    folder = write_kin(tmp_path, GPT_OSS)
    model, lengths = load(folder), [5, 39, 90]
    texts = [token_ids(length + 3, seed=length) for length in lengths]
    caches = few_shapes(model) if bounded else caches_of(model)
    for row, text, length in zip(ROWS, texts, lengths, strict=False):
        assert caches.join(row, tokens=length + 3) is not False
        model.forward(Batch.prefill(text[:length], 0, row), caches)
        mx.eval(caches.state())
    batch = Batch(
        tokens=mx.array([text[-3:] for text in texts], dtype=mx.int32),
        offsets=mx.array(lengths, dtype=mx.int32),
        lengths=tuple(length + 3 for length in lengths),
        rows=tuple(ROWS[:3]),
    )

    logits = model.logits(model.forward(batch, caches)).reshape(3, 3, -1)

    for row_logits, text in zip(logits, texts, strict=True):
        assert error(row_logits, peer_logits(folder, text)[-3:]) < TOLERANCE


def test_products_with_packed_keys_give_sinks_the_same_share(tmp_path: Path) -> None:
    """Quantised keys and values, unpacked or multiplied as they are: the same logits."""
    model = load(write_kin(tmp_path, GPT_OSS))
    tokens = token_ids(100, seed=3)
    caches = few_shapes(model, kv=KVFormat.Q8)

    packed = forced_logits(model, caches, ROWS[0], tokens, cuts=[*range(40, 50), 70])

    assert error(packed, all_logits(model, tokens, kv=KVFormat.Q8)) < TOLERANCE


def test_packed_experts_give_the_same_gathered_or_one_by_one(tmp_path: Path) -> None:
    """Small floats with biases: products that gather, ordered or not, and one an expert."""
    model = build(write_quantised(tmp_path, GPT_OSS, **MXFP4), packed=True)
    assert isinstance(model, LlamaModel)
    experts = model._layers[0].feed
    assert isinstance(experts, Experts)
    for count in (1, 40):
        rows = mx.random.normal((count, 64), key=mx.random.key(count))
        _, chosen = experts._choose(rows)
        assert error(experts._gather(rows, chosen), experts._by_expert(rows, chosen)) < 1e-5


Mutation = Callable[[DecoderConfig], dict[str, Any]]


def clamp_gates(limit: float = 7.0, slope: float = 1.702) -> Mutation:
    """Return a change of the experts' gates."""
    return lambda config: experts_with(config, clamp=GateClamp(limit, slope))


MUTATIONS: dict[str, Mutation] = {
    "no sinks": lambda _: {"sinks": False},
    "no window": lambda c: {"windows": (None,) * c.layers},
    "windows the other way round": lambda c: {"windows": c.windows[::-1]},
    "no scaling of rotations": lambda c: {"rope": replace(c.rope, scaling=None)},
    "no gain of rotations": without_gain,
    "gates unbounded": clamp_gates(limit=1e9),
    "a plain sigmoid": clamp_gates(slope=1.0),
    "another activation": lambda c: experts_with(c, clamp=None),
    "no biases of experts": lambda c: experts_with(c, biased=False),
    "shares of all experts": lambda c: experts_with(c, normalised=False),
    "one expert": lambda c: experts_with(c, chosen=1),
    "no biases of keys": lambda _: {"qkv_bias": False},
    "no biases of what is read": lambda _: {"output_bias": False},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    folder = write_kin(tmp_path, GPT_OSS)
    tokens = token_ids(130, seed=4)
    model = build(folder, **MUTATIONS[name](parse_folder(folder)))

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def untruncated_periods(scaling: Mapping[str, Any], base: float, dims: int) -> mx.array:
    """Return yarn's tokens per radian with a blend between pairs: transformers' formula."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def place(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(place(32.0), 0.0), min(place(1.0), dims - 1.0)
    kept = 1 - mx.clip((mx.arange(dims // 2) - low) / (high - low), 0, 1)
    plain = base ** (-mx.arange(0, dims, 2) / dims)
    return cast("mx.array", 1 / (plain / factor * (1 - kept) + plain * kept))


@pytest.mark.parametrize("changes", [{}, {"swiglu_limit": 3.0, "swiglu_alpha": 1.2}])
def test_what_the_peer_ignores_is_as_transformers_has_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """A blend that is not truncated, and other bounds: mlx-lm told these gives the same logits."""
    scaling = {**YARN, "truncate": False}
    folder = write_kin(tmp_path, change(GPT_OSS, rope_scaling=scaling, **changes))
    tokens = token_ids(150, seed=1)
    ignorant = peer_logits(folder, tokens)
    peer, _ = load_peer(folder)
    for layer in peer.layers:
        layer.self_attn.rope._freqs = untruncated_periods(scaling, 10000.0, 32)
        gate = layer.mlp.experts.activation
        gate._limit = changes.get("swiglu_limit", gate._limit)
        gate._alpha = changes.get("swiglu_alpha", gate._alpha)

    reference_logits = peer(mx.array([tokens]), cache=make_prompt_cache(peer))[0]

    assert floats(mx.std(reference_logits)[None])[0] >= LIVELY
    assert error(all_logits(load(folder), tokens), reference_logits) < TOLERANCE
    assert error(ignorant, reference_logits) > TOLERANCE


def test_what_mlx_lm_does_not_know_follows_transformers(tmp_path: Path) -> None:
    """Without biases of attention, and with a head that is the embedding: as if they were zero."""
    config = change(GPT_OSS, attention_bias=False, tie_word_embeddings=True)
    weights = kin_weights(config)
    folder = write_model(tmp_path / "ours", config, weights)
    zeros = {
        f"model.layers.{index}.self_attn.{name}_proj.bias": mx.zeros(width)
        for index in range(4)
        for name, width in (("q", 128), ("k", 64), ("v", 64), ("o", 64))
    }
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    same = write_model(tmp_path / "peers", GPT_OSS, weights | zeros | head)
    tokens = token_ids(60, seed=5)

    assert error(all_logits(load(folder), tokens), peer_logits(same, tokens)) < TOLERANCE


def test_the_published_config_gives_the_peers_logits(tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood; what mlx-lm ignores left out."""
    path = real_input("configs", "shrunk", "openai--gpt-oss-20b", "config.json")
    config = json.loads(path.read_text())
    config["rope_scaling"] = {**config["rope_scaling"], "truncate": True}
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    config.pop("quantization_config", None)
    folder = write_kin(tmp_path, config)
    tokens = token_ids(90, seed=6, vocab=config["vocab_size"])

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE
