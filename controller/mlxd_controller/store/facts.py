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
from mlxd_shared import config
from mlxd_shared.digest import model_digest
from mlxd_shared.errors import InvalidModel
from mlxd_shared.generation_defaults import read_generation_defaults
from mlxd_shared.model_files import parse_json_object, read_file
from mlxd_shared.requests import SamplingOptions
from mlxd_shared.weights import TensorFact, read_model_dir

CONFIG_FILE = "config.json"
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SIZE_MAX = 1 << 24


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
        raise _invalid("architectures", f"{names!r} is not a list that starts with a name")
    hidden = _size(values, "hidden_size")
    heads = _size(values, "num_attention_heads")
    floats = [tensor for tensor in tensors if tensor.dtype in _FLOATS]
    return ModelFacts(
        architecture=names[0],
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        elements=_elements(values, tensors),
        item_bytes=max((_FLOATS[tensor.dtype] for tensor in floats), default=4),
        layers=_size(values, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(values, "num_key_value_heads", default=heads),
        head_dim=_size(values, "head_dim", default=max(1, hidden // heads)),
        hidden_size=hidden,
        intermediate_size=_size(values, "intermediate_size"),
        vocab_size=_size(values, "vocab_size"),
        context_length_max=_size(values, "max_position_embeddings"),
    )


def _size(values: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise _invalid(key, "missing")
    if type(value) is not int or not 1 <= value <= _SIZE_MAX:
        raise _invalid(key, f"{value!r} is not an integer in 1..{_SIZE_MAX}")
    return value


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
        raise _invalid("quantization", f"missing, and {stem} is stored packed")
    own = quantization.get(stem)
    bits = own.get("bits") if isinstance(own, dict) else quantization.get("bits")
    if type(bits) is not int or bits not in range(1, 33):
        raise _invalid("quantization", f"bits of {stem} are {bits!r}")
    return bits


def _invalid(field: str, problem: str) -> InvalidModel:
    return InvalidModel(problem, file=CONFIG_FILE, field=field)
