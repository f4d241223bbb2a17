"""Write a Llama's float32 safetensors as a GGUF file that llama.cpp reads: `FOLDER OUT f32|q8_0`.

llama.cpp rotates neighbouring values of a head where checkpoints in this form rotate halves, so the
rows of the projections of queries and keys change places. Norms stay in float32.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

KINDS: Final = {"f32": "F32", "q8_0": "Q8_0"}
_PLACES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tensor_name(name: str) -> str:
    """Return what GGUF calls a checkpoint's tensor."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *place, _ = name.split(".")
    return f"blk.{layer}.{_PLACES['.'.join(place)]}.weight"


def interleave(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Return rows [heads, 2 halves, half] as [heads, half, 2]."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_gguf(folder: Path, out: Path, kind: str) -> None:
    """Write the model in `folder` with its tokenizer; kind: one of `KINDS`."""
    gguf = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    _add_tokenizer(gguf, writer, folder, config["vocab_size"])
    wanted = gguf.GGMLQuantizationType[KINDS[kind]]
    plain = gguf.GGMLQuantizationType.F32
    for name, weights in load_file(folder / "model.safetensors").items():
        array = weights.astype(np.float32)
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, heads if "q_proj" in name else kv_heads)
        if wanted is plain or array.ndim == 1:
            writer.add_tensor(tensor_name(name), array)
        else:
            packed = gguf.quants.quantize(array, wanted)
            writer.add_tensor(tensor_name(name), packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(gguf: Any, writer: Any, folder: Path, size: int) -> None:
    """Add a byte-level BPE tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()} | special
    kinds = [
        gguf.TokenType.CONTROL if number in special
        else gguf.TokenType.NORMAL if number in words
        else gguf.TokenType.UNUSED
        for number in range(size)
    ]  # fmt: skip
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(n, f"<unused{n}>").encode() for n in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
