"""Random models whose weights are stored as any form: float32, bfloat16, or packed in four bits.

Made for measurements of memory: what they generate is nonsense, and large ones are made quickly,
since the values repeat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxd_models.families.common.stored_layouts import as_stored
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from tests.support.random_model import SPREAD
from tests.support.tiny_model import write_json, write_text_files

PACKING = {"group_size": 64, "bits": 4}
DRAWN_VALUES = 1 << 20
_ITEM_BYTES = {"F32": 4, "BF16": 2, "U32": 4}


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: float
    centre: float

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_weights(folder: Path, config: Mapping[str, Any], *, stored: str, seed: int = 1) -> Path:
    """Write a model's whole folder with the weights as `stored`; return `folder`.

    stored: float32, bfloat16 or 4-bit. The tokenizer is the tiny model's, however many tokens the
    config's vocabulary has.
    """
    write_text_files(folder)
    config = {**config, **({"quantization": PACKING} if stored == "4-bit" else {})}
    write_json(folder / "config.json", config)
    architecture = find_family(REGISTRY, architecture_of(config))
    specs = [spec for spec in architecture.tensors(architecture.parse(config)) if spec.required]
    if stored == "4-bit":
        scales = {f"{spec.name.removesuffix('.weight')}.scales" for spec in specs if spec.packing}
        specs = list(as_stored(specs, scales))
    tensors = [_make_stored(spec, "F32" if stored == "float32" else "BF16") for spec in specs]
    with (folder / "model.safetensors").open("wb") as file:
        head = json.dumps(_header(tensors)).encode()
        file.write(len(head).to_bytes(8, "little") + head)
        for content in _contents(tensors, seed):
            file.write(content)
    return folder


def _make_stored(spec: TensorSpec, form: str) -> _Stored:
    if spec.packed:
        return _Stored(spec.name, "U32", spec.shape, 0.0, 0.0)
    if "norm" in spec.name:
        return _Stored(spec.name, form, spec.shape, 0.0, 1.0)
    if spec.packing is not None and spec.name.endswith(".scales"):
        inputs = spec.shape[1] * spec.packing.group_size
        return _Stored(spec.name, form, spec.shape, 0.0, SPREAD / math.sqrt(inputs) / 8)
    if spec.packing is not None and spec.name.endswith(".biases"):
        inputs = spec.shape[1] * spec.packing.group_size
        return _Stored(spec.name, form, spec.shape, 0.0, -SPREAD / math.sqrt(inputs))
    if spec.name.endswith("A_log"):
        return _Stored(spec.name, form, spec.shape, 0.0, math.log(0.1))
    spread = 0.1 if spec.name.endswith("bias") else SPREAD / math.sqrt(spec.shape[-1])
    return _Stored(spec.name, form, spec.shape, spread, 0.0)


def _header(tensors: Sequence[_Stored]) -> dict[str, object]:
    header: dict[str, object] = {}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    return header


def _contents(tensors: Sequence[_Stored], seed: int) -> Iterator[bytes]:
    draws = np.random.Generator(np.random.PCG64(seed))
    normal = draws.standard_normal(DRAWN_VALUES, dtype=np.float32)
    words = draws.integers(0, 1 << 32, DRAWN_VALUES, dtype=np.uint32)
    for tensor in tensors:
        count = math.prod(tensor.shape)
        for first in range(0, count, DRAWN_VALUES):
            some = slice(0, min(DRAWN_VALUES, count - first))
            if tensor.dtype == "U32":
                yield words[some].astype("<u4").tobytes()
                continue
            values = normal[some] * np.float32(tensor.spread) + np.float32(tensor.centre)
            if tensor.dtype == "F32":
                yield values.astype("<f4").tobytes()
            else:
                yield (values.view(np.uint32) >> 16).astype("<u2").tobytes()
