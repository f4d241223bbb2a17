"""Small random Qwen3.5 models on disk, as published and as mlx-lm converts them; and the peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from tests.worker.tiny import caches_of, ints, random_weights, write_model

TOLERANCE = 1e-3
"""Of the largest logit."""
LIVELY = 1.0
"""The least standard deviation of logits that tell a wrong model from a right one."""
ROWS = [RowId(10), RowId(11), RowId(12), RowId(13)]
ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
HYBRID_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """Return the base config with `changes`; a value of None takes the key away."""
    merged = {**HYBRID_CONFIG, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def hybrid_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, mx.array]:
    """Return weights as published: norms as their distance from one, slow and fast decays."""
    weights = random_weights(config, seed=seed)
    for name, array in weights.items():
        if "norm" in name and not name.endswith("linear_attn.norm.weight"):
            weights[name] = array - 1
        elif name.endswith("A_log"):
            weights[name] = 2 * array - 2
    return weights


def convert(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return published weights in mlx-lm's layout."""
    tensors = dict(weights)
    for name, array in weights.items():
        if name.endswith("conv1d.weight"):
            tensors[name] = mx.contiguous(array.swapaxes(1, 2))
        elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
            tensors[name] = array + 1
    return tensors


def write_hybrid(folder: Path, **changes: Any) -> Path:
    """Write a model with these changes of its config; return `folder`."""
    config = hybrid_config(**changes)
    return write_model(folder, config, hybrid_weights(config))


def token_ids(count: int, *, seed: int, vocab: int = 61) -> list[int]:
    """Return random token ids."""
    return ints(mx.random.randint(0, vocab, (count,), key=mx.random.key(seed)))


def error(left: mx.array, right: mx.array) -> float:
    """Return the largest difference, relative to the largest value."""
    assert left.shape == right.shape
    return cast("float", (mx.max(mx.abs(left - right)) / mx.max(mx.abs(right))).item())


def peer_logits(folder: Path, tokens: Sequence[int]) -> mx.array:
    """Return mlx-lm's logits of every position, lively enough to compare with.

    On the CPU, also where ours are made on a GPU: what is compared with has one meaning everywhere.
    """
    with mx.stream(mx.cpu):
        peer, _ = load_peer(folder)
        logits = peer(mx.array([list(tokens)]), cache=make_prompt_cache(peer))[0]
    assert cast("float", mx.std(logits).item()) >= LIVELY
    return cast("mx.array", logits)


def feed(model: Model, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> RowCaches:
    """Return caches in which each text's first tokens have been prefilled, one row a text."""
    caches = caches_of(model)
    for row, text, length in zip(ROWS, texts, lengths, strict=False):
        assert caches.join(row, tokens=length) is not False
        model.forward(Batch.prefill(text[:length], 0, row), caches)
        mx.eval(caches.state())
    return caches
