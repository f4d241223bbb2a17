"""A model's folder of any size that takes no disk: true headers, and weights that are holes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_models.sizes.weight_forms import FloatType
from tests.support.tiny_model import write_json, write_text_files

HUGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16_384,
    "intermediate_size": 65_536,
    "num_hidden_layers": 80,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


def write_hollow(
    folder: Path, config: dict[str, Any] = HUGE, *, stored: FloatType = FloatType.F32
) -> Path:
    """Write a folder that says weights of `config`, none of which is there."""
    write_text_files(folder)
    write_json(folder / "config.json", config)
    architecture = find_family(REGISTRY, architecture_of(config))
    header: dict[str, object] = {}
    end = 0
    for spec in architecture.tensors(architecture.parse(config)):
        if spec.required:
            start, end = end, end + stored.nbytes * math.prod(spec.shape)
            header[spec.name] = {
                "dtype": stored,
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return folder
