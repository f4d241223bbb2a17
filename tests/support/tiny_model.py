"""A tiny Llama with random weights and a byte-level tokenizer, the same on every machine.

Its text is nonsense, but everything about it is real: config, tokenizer, safetensors, EOS.
"""

from __future__ import annotations

import array
import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.worker.made_tokenizers import BOS_ID, EOS_ID, byte_level, with_bos

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 32, 2, 4, 2, 64
VOCAB = 320
HEAD_DIM = HIDDEN // HEADS
_SPREAD = 1.5
"""Of the weights: wide enough that greedy output does not fall into a loop at once."""


def write_tiny_model(
    folder: Path, *, context_max: int = 512, seed: int = 1, nan_token: int | None = None
) -> Path:
    """Write the model into `folder` (made if need be) and return it.

    nan_token: a token whose embedding is not a number, so that whoever reads it fails.
    """
    write_text_files(folder)
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": HIDDEN,
            "intermediate_size": MLP,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": VOCAB,
            "max_position_embeddings": context_max,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        },
    )
    draws = random.Random(seed)
    tensors = {
        name: _values(draws, shape, row=nan_token if name.startswith("model.embed") else None)
        for name, shape in _shapes().items()
    }
    write_float32(folder / "model.safetensors", _shapes(), tensors.values())
    return folder


def write_text_files(folder: Path) -> None:
    """Write the tokenizer, of `VOCAB` tokens, and the defaults of generation; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with_bos(byte_level()).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID, "temperature": 0.7})


def write_float32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], contents: Iterable[bytes]
) -> None:
    """Write a safetensors file of float32 tensors; `contents` in the order of `shapes`."""
    header: dict[str, object] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for content in contents:
            file.write(content)


def write_json(path: Path, value: object) -> None:
    """Write one of a model's JSON files."""
    path.write_text(json.dumps(value), encoding="utf-8")


def _shapes() -> dict[str, tuple[int, ...]]:
    keys = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (keys, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (keys, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (MLP, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, MLP),
        }
    return shapes


def _values(draws: random.Random, shape: tuple[int, ...], *, row: int | None) -> bytes:
    if len(shape) == 1:
        return array.array("f", [1.0] * shape[0]).tobytes()
    spread = _SPREAD / math.sqrt(shape[1])
    values = array.array("f", (draws.gauss(0, spread) for _ in range(math.prod(shape))))
    if row is not None:
        values[row * shape[1] : (row + 1) * shape[1]] = array.array("f", [math.nan] * shape[1])
    return values.tobytes()
