"""A model's folder to the facts that fit needs, from config.json and safetensors headers.

Invariants:
- No weights are read but the digest's samples: a folder of any size takes milliseconds.
- Every problem is an InvalidModel that names the file, and the key where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxd_controller.core.fit import ModelFacts
from mlxd_controller.store.caches import cache_sizes, feed_width, projected_values
from mlxd_controller.store.fields import CONFIG_FILE, invalid, size
from mlxd_shared import config
from mlxd_shared.digest import model_digest
from mlxd_shared.errors import InvalidModel
from mlxd_shared.generation_defaults import read_generation_defaults
from mlxd_shared.model_files import parse_json_object, read_file
from mlxd_shared.packed_weights import unpacked_weight_values
from mlxd_shared.requests import SamplingOptions
from mlxd_shared.weights import TensorFact, read_model_dir

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Folder:
    """What reading a model's folder gave."""

    digest: str
    facts: ModelFacts
    defaults: SamplingOptions


def read_folder(path: Path) -> Folder:
    """Return a folder's digest and facts. Blocks on the disk.

    Raises:
        InvalidModel: config.json, generation_config.json or a weight file cannot be served.
    """
    raw = read_file(path / CONFIG_FILE, bytes_max=config.CONFIG_FILE_BYTES_MAX)
    if raw is None:
        raise InvalidModel("missing", file=CONFIG_FILE)
    values = parse_json_object(raw, file=CONFIG_FILE)
    facts = _facts(values, read_model_dir(path))
    return Folder(model_digest(path), facts, read_generation_defaults(path))


def _facts(values: Mapping[str, Any], tensors: tuple[TensorFact, ...]) -> ModelFacts:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise invalid("architectures", f"{names!r} is not a list that starts with a name")
    floats = [tensor for tensor in tensors if tensor.dtype in _FLOATS]
    return ModelFacts(
        architecture=names[0],
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        elements=_elements(values, tensors),
        item_bytes=max((_FLOATS[tensor.dtype] for tensor in floats), default=4),
        heads=size(values, "num_attention_heads"),
        caches=cache_sizes(values, names[0]),
        projected_values=projected_values(values, names[0]),
        hidden_size=size(values, "hidden_size"),
        intermediate_size=feed_width(values, names[0]),
        vocab_size=size(values, "vocab_size"),
        context_length_max=size(values, "max_position_embeddings"),
        unpacked_values=unpacked_weight_values(_packed_weights(values, tensors)),
    )


def _packed_weights(
    values: Mapping[str, Any], tensors: tuple[TensorFact, ...]
) -> list[tuple[str, int]]:
    """Return each packed weight, and how many values it stands for."""
    names = {tensor.name for tensor in tensors}
    found: list[tuple[str, int]] = []
    for tensor in tensors:
        stem, _, _ = tensor.name.rpartition(".")
        if tensor.dtype == "U32" and f"{stem}.scales" in names:
            found.append((tensor.name, math.prod(tensor.shape) * 32 // _bits(values, stem)))
    return found


def _elements(values: Mapping[str, Any], tensors: tuple[TensorFact, ...]) -> int:
    """Count values once dequantised: a packed tensor has one beside it that is named `.scales`."""
    names = {tensor.name for tensor in tensors}
    total = 0
    for tensor in tensors:
        stem, _, part = tensor.name.rpartition(".")
        packed = f"{stem}.scales" in names
        if packed and part in ("scales", "biases"):
            continue
        count = math.prod(tensor.shape)
        total += count * 32 // _bits(values, stem) if packed and tensor.dtype == "U32" else count
    return total


def _bits(values: Mapping[str, Any], stem: str) -> int:
    quantization = values.get("quantization")
    if not isinstance(quantization, dict):
        raise invalid("quantization", f"missing, and {stem} is stored packed")
    own = quantization.get(stem)
    bits = own.get("bits") if isinstance(own, dict) else quantization.get("bits")
    if type(bits) is not int or bits not in range(1, 33):
        raise invalid("quantization", f"bits of {stem} are {bits!r}")
    return bits
