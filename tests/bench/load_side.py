"""One load in a process of its own, by mlxd's loader or by MLX alone; and the models for it.

The loader is called as the worker calls it, with the worker's bound on what MLX keeps of freed
buffers; MLX alone opens every shard and evaluates everything in one go.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd_models.sizes.pass_sizes import POOL_NBYTES
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.models.loader import inspect_model, load_model

GROUP, BITS = 64, 4
SHARD_NBYTES = 256 << 20
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
"""516 million values: 1.03 GB in bfloat16, 0.29 in 4 bits."""

SETTINGS = {"group_size": GROUP, "bits": BITS}


def write_models(plain: Path, packed: Path) -> None:
    """Write a random Llama in bfloat16, and the same in 4 bits, in shards."""
    weights = _weights()
    _write(plain, CONFIG, weights)
    stored: dict[str, mx.array] = {}
    for name, array in weights.items():
        if array.ndim == 1:
            stored[name] = array
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(array, group_size=GROUP, bits=BITS)
        stored |= zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True)
    _write(packed, {**CONFIG, "quantization": SETTINGS}, stored)


def load_ours(folder: Path, form: str) -> list[mx.array]:
    """Load by the worker's loader."""
    mx.set_cache_limit(POOL_NBYTES)
    files = inspect_model(folder)
    wanted = FloatType.BF16 if form == "stored" else FloatType.F32
    model = load_model(files, form=wanted, progress=lambda *_: None, packed=False)
    return list(model.parameters().values())


def load_bare(folder: Path, form: str) -> list[mx.array]:
    """Load by MLX alone, everything evaluated at once."""
    tensors: dict[str, mx.array] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        loaded = mx.load(str(shard))
        assert isinstance(loaded, dict)
        tensors |= loaded
    if form == "q4":
        arrays = []
        for name, array in tensors.items():
            stem = name.removesuffix(".weight")
            if f"{stem}.scales" in tensors and stem != name:
                scales, offsets = tensors[f"{stem}.scales"], tensors[f"{stem}.biases"]
                numbers = mx.dequantize(
                    array, scales, offsets, group_size=GROUP, bits=BITS, dtype=mx.float32
                )
                arrays.append(numbers)
            elif array.ndim == 1:
                arrays.append(array.astype(mx.float32))
    elif form == "float32":
        arrays = [array.astype(mx.float32) for array in tensors.values()]
    else:
        arrays = list(tensors.values())
    tensors.clear()
    mx.eval(arrays)
    return arrays


def main() -> None:
    """`write PLAIN PACKED`, or `ours|bare FORM FOLDER`: print what a load took, as JSON."""
    way, *rest = sys.argv[1:]
    if way == "write":
        write_models(Path(rest[0]), Path(rest[1]))
        return
    form, folder = rest[0], Path(rest[1])
    mx.eval(mx.ones(1) + 1)  # MLX's threads are there
    began_s = time.perf_counter()
    arrays = load_ours(folder, form) if way == "ours" else load_bare(folder, form)
    took_s = time.perf_counter() - began_s
    held = sum(array.nbytes for array in arrays)
    stored_nbytes = {"stored": 0, "float32": 2, "q4": (BITS + 32 / GROUP) / 8}[form]
    largest = max(array.nbytes + array.size * stored_nbytes for array in arrays)
    figures = {
        "took_s": took_s,
        "held_nbytes": held,
        "beyond_nbytes": mx.get_peak_memory() - held,
        "largest_nbytes": int(largest),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def _weights() -> dict[str, mx.array]:
    hidden, mlp, vocab = (CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = CONFIG["num_key_value_heads"] * hidden // CONFIG["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.mlp.down_proj.weight": (hidden, mlp),
            f"{name}.mlp.gate_proj.weight": (mlp, hidden),
            f"{name}.mlp.up_proj.weight": (mlp, hidden),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
        }
    draws = mx.random.split(mx.random.key(7), len(shapes))
    return {
        name: (mx.random.uniform(-1, 1, shape, key=key) * shape[-1] ** -0.5).astype(mx.bfloat16)
        for (name, shape), key in zip(shapes.items(), draws, strict=True)
    }


def _write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shards: list[dict[str, mx.array]] = [{}]
    for name, array in weights.items():
        if sum(written.nbytes for written in shards[-1].values()) + array.nbytes > SHARD_NBYTES:
            shards.append({})
        shards[-1][name] = array
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        mx.save_safetensors(str(folder / file), shard, {"format": "mlx"})
        placed |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


if __name__ == "__main__":
    main()
