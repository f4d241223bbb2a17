"""Small random models of Llama's kin on disk, mlx-lm's logits of them, and ours with a part off."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.rope_kinds import YarnScaling
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.loader import builder_of, inspect_model
from mlxd_worker.models.weights.reader import Reader
from tests.worker.hybrid import error, peer_logits, token_ids
from tests.worker.tiny import caches_of, forced_logits, ignore_progress, random_weights, write_model

ROWS = [RowId(10), RowId(11), RowId(12), RowId(13)]
GROUP = 32
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN3_MOE: Mapping[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "sliding_window": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
GEMMA3: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "sliding_window": 40,
    "sliding_window_pattern": 2,
    "rope_theta": 100000.0,
    "rope_local_base_freq": 1000.0,
    "query_pre_attn_scalar": 48,
    "hidden_activation": "gelu_pytorch_tanh",
}


ROUTERS = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate")
"""What the converter packs in 8 bits, whatever it packs the rest in."""


def change(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return `base` with `changes`; a value of None takes the key away."""
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def kin_weights(config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return weights as published: experts one by one, Gemma's norms as distances from one.

    Those of gpt-oss are as mlx-lm has them, gates large enough to be bounded.
    """
    stored: dict[str, mx.array] = {}
    for name, array in random_weights(config).items():
        if ".switch_mlp." in name:
            for expert in range(array.shape[0]):
                part = name.replace("switch_mlp", f"experts.{expert}")
                stored[part] = mx.contiguous(array[expert])
        elif ".experts.gate_proj.w" in name or ".experts.up_proj.w" in name:
            stored[name] = 3 * array
        elif "norm" in name and config["model_type"] == "gemma3_text":
            stored[name] = array - 1
        else:
            stored[name] = array
    return stored


def stack_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return published weights as mlx-lm stores them: one tensor for a linear of all experts."""
    tensors, groups = dict(weights), dict[str, list[str]]()
    for name in weights:
        if re.search(r"\.experts\.\d", name):
            before, _, after = name.partition(".experts.")
            groups.setdefault(f"{before}.switch_mlp.{after.partition('.')[2]}", []).append(name)
    for name, parts in groups.items():
        tensors[name] = mx.stack([tensors.pop(part) for part in parts])
    return tensors


def quantise(
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    *,
    bits: int = 4,
    mode: str = "affine",
    group: int = GROUP,
    whole: tuple[str, ...] = (),
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return config and weights as mlx-lm's converter writes them: routers in 8 bits.

    whole: ends of the names of those that it leaves as numbers.
    """
    settings: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
    stored: dict[str, mx.array] = {}
    for name, array in stack_experts(weights).items():
        stem = name.removesuffix(".weight")
        suits = array.ndim >= 2 and stem != name and array.shape[-1] % group == 0
        if not suits or name.endswith(whole):
            stored[name] = array
            continue
        own: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
        if stem.endswith(ROUTERS) and (bits, mode) != (8, "affine"):
            own = settings[stem] = {"group_size": GROUP, "bits": 8, "mode": "affine"}
        parts = mx.quantize(array, **own)
        stored |= zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=False)
    return {**config, "quantization": settings, "quantization_config": settings}, stored


def write_kin(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model as published; return `folder`."""
    return write_model(folder, config, kin_weights(config))


def write_quantised(folder: Path, config: Mapping[str, Any], **settings: Any) -> Path:
    """Write a model as mlx-lm's converter does, by `quantise`; return `folder`."""
    return write_model(folder, *quantise(config, kin_weights(config), **settings))


def build(folder: Path, *, packed: bool = False, **changes: Any) -> Model:
    """Return the model in `folder`, its parsed config changed: parts of it switched off."""
    files = inspect_model(folder)
    reader = Reader(
        files.facts, files.specs, dtype=mx.float32, keep_packed=packed, progress=ignore_progress
    )
    config = cast("DecoderConfig", files.config)
    return builder_of(files.family)(replace(config, **changes), reader)


def without_gain(config: DecoderConfig) -> dict[str, Any]:
    """Return a change: yarn rotates, and multiplies by nothing."""
    assert isinstance(config.rope.scaling, YarnScaling)
    return {"rope": replace(config.rope, scaling=replace(config.rope.scaling, gain=1.0))}


def with_betas(config: DecoderConfig) -> dict[str, Any]:
    """Return a change: yarn blends where it does by default."""
    assert isinstance(config.rope.scaling, YarnScaling)
    yarn = replace(config.rope.scaling, beta_fast=32.0, beta_slow=1.0)
    return {"rope": replace(config.rope, scaling=yarn)}


def experts_with(config: DecoderConfig, **changes: Any) -> dict[str, Any]:
    """Return a change of the experts."""
    assert config.experts is not None
    return {"experts": replace(config.experts, **changes)}


def parse_folder(folder: Path) -> DecoderConfig:
    """Return the parsed config of the model in `folder`."""
    return cast("DecoderConfig", inspect_model(folder).config)


def all_logits(model: Model, tokens: Sequence[int], *, kv: KVFormat = KVFormat.MODEL) -> mx.array:
    """Return all logits, read in chunks, one by one, and in a chunk that follows."""
    caches = RowCaches(model.new_caches(kv=kv), context_max=model.context_max, rows_max=8)
    count = len(tokens)
    cuts = [1, 2, count // 3, count // 2, *range(count // 2 + 1, count // 2 + 6), count - 9]
    return forced_logits(model, caches, ROWS[0], tokens, cuts=cuts)


def worst_ragged(
    model: Model,
    folder: Path,
    lengths: Sequence[int],
    *,
    steps: int = 6,
    caches: RowCaches | None = None,
) -> float:
    """Return the largest error of rows that decode together, in any order, against the peer's."""
    texts = [token_ids(length + steps, seed=length) for length in lengths]
    expected = [peer_logits(folder, text) for text in texts]
    caches = caches or caches_of(model)
    for row, text, length in zip(ROWS, texts, lengths, strict=True):
        assert caches.join(row, tokens=length + steps) is not False
        for begin, end in ((0, length // 2), (length // 2, length)):
            if end > begin:
                model.forward(Batch.prefill(text[begin:end], begin, row), caches)
                mx.eval(caches.state())
    orders = [[0, 1, 2, 3], [3, 1, 0], [2, 1], [1, 0, 3, 2]]
    chosen = [orders[step % len(orders)] for step in range(steps)]
    return worst_decoded(model, caches, texts, expected, lengths, chosen)


def worst_decoded(
    model: Model,
    caches: RowCaches,
    texts: Sequence[Sequence[int]],
    expected: Sequence[mx.array],
    lengths: Sequence[int],
    orders: Sequence[Sequence[int]],
) -> float:
    """Return the largest error of steps, of the rows in `orders` each, behind so many tokens."""
    reached, worst = list(lengths), 0.0
    for chosen in orders:
        batch = Batch.decode(
            [texts[index][reached[index]] for index in chosen],
            [reached[index] for index in chosen],
            [ROWS[index] for index in chosen],
        )
        logits = model.logits(model.forward(batch, caches))
        mx.eval(logits, caches.state())
        for place, index in enumerate(chosen):
            worst = max(worst, error(logits[place], expected[index][reached[index]]))
            reached[index] += 1
    return worst


def worst_joined(model: Model, folder: Path) -> float:
    """Return the largest error of a chunk and decoding rows in one joined pass."""
    texts = [token_ids(60, seed=index) for index in range(3)]
    expected = [peer_logits(folder, text) for text in texts]
    assert isinstance(model, LlamaModel), "others have passes that are never joined"
    caches = caches_of(model)
    for row, text, length in zip(ROWS, texts, (20, 50, 59), strict=False):
        assert caches.join(row, tokens=60) is not False
        model.forward(Batch.prefill(text[:length], 0, row), caches)
        mx.eval(caches.state())
    batches = [
        Batch.prefill(texts[0][20:45], 20, ROWS[0]),
        Batch.decode([texts[1][50], texts[2][59]], [50, 59], [ROWS[1], ROWS[2]]),
    ]
    chunk, decoded = (model.logits(part) for part in model.forward_joined(batches, caches))
    return max(
        error(chunk, expected[0][20:45]),
        error(decoded, mx.stack([expected[1][50], expected[2][59]])),
    )
