"""A random Llama-shaped model on disk, large enough that its weights do not fit a CPU cache."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a Llama; the head is tied."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 8
    mlp: int = 1376
    context: int = 2048


SHAPES: Mapping[str, Shape] = {
    "small": Shape(),
    "tiny": Shape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128),
    # The widths of Qwen3 and of Llama 3 of these sizes, but for the vocabulary.
    "0.6b": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, mlp=3072, context=32768),
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, context=32768),
}


def write_random_llama(
    folder: Path, *, tokenizer_from: Path, shape: Shape, seed: int, dtype: mx.Dtype = mx.bfloat16
) -> int:
    """Write a model with the tokenizer of another one; return its parameter count.

    Scales are chosen so that logits spread and greedy decoding has no near-ties to speak of. Its
    files name no end-of-sequence token: whoever serves it stops by length alone.
    """
    folder.mkdir(parents=True)
    shutil.copy(tokenizer_from / "tokenizer.json", folder / "tokenizer.json")
    tokenizer = json.loads((tokenizer_from / "tokenizer_config.json").read_text())
    tokenizer["eos_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    vocab = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    head_dim = shape.hidden // shape.heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": str(dtype).removeprefix("mlx.core."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {"model.embed_tokens.weight": (vocab, shape.hidden)}
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (shape.heads * head_dim, shape.hidden),
            f"{name}.self_attn.k_proj.weight": (shape.kv_heads * head_dim, shape.hidden),
            f"{name}.self_attn.v_proj.weight": (shape.kv_heads * head_dim, shape.hidden),
            f"{name}.self_attn.o_proj.weight": (shape.hidden, shape.heads * head_dim),
            f"{name}.mlp.gate_proj.weight": (shape.mlp, shape.hidden),
            f"{name}.mlp.up_proj.weight": (shape.mlp, shape.hidden),
            f"{name}.mlp.down_proj.weight": (shape.hidden, shape.mlp),
        }
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {
        name: (mx.random.normal(size, key=key) * size[-1] ** -0.5).astype(dtype)
        for (name, size), key in zip(shapes.items(), keys, strict=True)
    }
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(shape.layers)
             for n in ("input", "post_attention")]  # fmt: skip
    weights |= {f"{n}.weight": mx.ones(shape.hidden, dtype) for n in [*norms, "model.norm"]}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return sum(array.size for array in weights.values())


def main() -> None:
    """Write a model for a caller that must not import MLX itself.

    FOLDER TOKENIZER_FROM SEED CONTEXT, then bfloat16 or float32, then one of `SHAPES`; bfloat16 and
    small if left out.
    """
    folder, source, seed, context, *rest = sys.argv[1:]
    form, name = [*rest, *("bfloat16", "small")[len(rest) :]]
    count = write_random_llama(
        Path(folder),
        tokenizer_from=Path(source),
        shape=replace(SHAPES[name], context=int(context)),
        seed=int(seed),
        dtype=mx.float32 if form == "float32" else mx.bfloat16,
    )
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    main()
