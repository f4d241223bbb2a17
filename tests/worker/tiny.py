"""Small random Llama models on disk, and how a test feeds a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model, load_model

BASE_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def config_with(**changes: Any) -> dict[str, Any]:
    """Return the base config with `changes`; a value of None takes the key away."""
    merged = {**BASE_CONFIG, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def random_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, mx.array]:
    """Return weights for every required tensor, lively enough that logits differ."""
    keys = iter(mx.random.split(mx.random.key(seed), 4096))
    weights: dict[str, mx.array] = {}
    architecture = find_family(REGISTRY, architecture_of(config))
    for spec in architecture.tensors(architecture.parse(config)):
        if not spec.required:
            continue
        noise = mx.random.normal(spec.shape, key=next(keys))
        if "norm" in spec.name:
            weights[spec.name] = 1 + 0.1 * noise
        elif spec.name.endswith("bias"):
            weights[spec.name] = 0.3 * noise
        else:
            weights[spec.name] = noise * (1.5 / spec.shape[-1] ** 0.5)
    return weights


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_model(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array] | None = None
) -> Path:
    """Write config.json and model.safetensors (random weights by default); return `folder`."""
    write_config(folder, config)
    tensors = random_weights(config) if weights is None else dict(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def stored_in(folder: Path) -> dict[str, mx.array]:
    """Return the tensors of a model of one file."""
    stored = mx.load(str(folder / "model.safetensors"))
    assert isinstance(stored, dict)
    return stored


def write_sharded(folder: Path, config: Mapping[str, Any], *, shards: int) -> Path:
    """Write the same model as `write_model`, spread over shards with an index."""
    write_config(folder, config)
    weights = random_weights(config)
    placed: dict[str, str] = {}
    for number in range(shards):
        part = dict(list(weights.items())[number::shards])
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mx.save_safetensors(str(folder / file), part)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def ignore_progress(read_nbytes: int, total_nbytes: int) -> None:
    """Take a load's progress and do nothing with it."""


def load(folder: Path, form: FloatType = FloatType.F32) -> Model:
    """Return the model in `folder`."""
    return load_model(inspect_model(folder), form=form, progress=ignore_progress)


def caches_of(model: Model, *, rows_max: int = 8) -> RowCaches:
    """Return empty caches for `model`."""
    return RowCaches(model.new_caches(), context_max=model.context_max, rows_max=rows_max)


def forced_logits(
    model: Model, caches: RowCaches, row: RowId, tokens: Sequence[int], cuts: Sequence[int]
) -> mx.array:
    """Feed `tokens` to a new row in pieces that end at `cuts`; return all logits [len, vocab]."""
    caches.join(row, tokens=len(tokens))
    parts = []
    begin = 0
    for end in (*cuts, len(tokens)):
        hidden = model.forward(Batch.prefill(tokens[begin:end], begin, row), caches)
        parts.append(model.logits(hidden))
        mx.eval(parts[-1], caches.state())
        begin = end
    return mx.concatenate(parts, axis=0)


def ints(array: mx.array) -> list[int]:
    """Return a one-dimensional array of integers as a list."""
    return cast("list[int]", array.tolist())


def floats(array: mx.array) -> list[float]:
    """Return a one-dimensional array of numbers as a list."""
    return cast("list[float]", array.tolist())


def difference(left: mx.array, right: mx.array) -> float:
    """Return the largest difference between two arrays of one shape."""
    assert left.shape == right.shape
    return cast("float", mx.max(mx.abs(left - right)).item())
