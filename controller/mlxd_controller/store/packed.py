"""What stored tensors stand for, where they are packed: values, and bytes that a load keeps.

Invariants:
- A weight's scales and offsets add no values: they are known by the weight that they stand beside.
- What is stored as it lives counts as it is stored; 8-bit floats in blocks live as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from mlxd_controller.store.fields import invalid
from mlxd_models.families.common.packing_on_load import GROUP_SIZES, packable_values, packs
from mlxd_models.files.weights import TensorFact
from mlxd_models.fit.facts import Packable
from mlxd_models.sizes.packed_weights import unpacked_weight_values

WORD_BITS: Final = 32
FP8: Final = "F8_E4M3"
FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by its type."""

_SCALES = ("scales", "biases", "global_scale")
_BLOCK_SCALES = "weight_scale_inv"
_OWN_SCALES = ("weight_scale", "weight_scale_2", "input_scale")
_BITS_DEFAULT = {"mxfp8": 8}
"""Of a setting that names none, where they are not 4."""


def is_aside(tensor: TensorFact, names: Collection[str]) -> bool:
    """Tell whether a tensor is a part of a packed weight, beside its values."""
    stem, _, part = tensor.name.rpartition(".")
    if part in _SCALES:
        return f"{stem}.scales" in names
    if part == _BLOCK_SCALES or part in _OWN_SCALES:
        return f"{stem}.weight" in names
    return part.endswith("_scales") and f"{tensor.name.removesuffix('_scales')}_blocks" in names


def values_of(values: Mapping[str, Any], tensor: TensorFact, names: Collection[str]) -> int:
    """Return the values that a tensor adds to the model.

    Raises:
        InvalidModel: it is packed, and the config does not say how.
    """
    if is_aside(tensor, names):
        return 0
    count, bits = math.prod(tensor.shape), _packed_bits(values, tensor, names)
    return count if bits is None else tensor.nbytes * 8 // bits


def kept_bytes_of(tensor: TensorFact, names: Collection[str], *, item_bytes: int) -> int:
    """Return what a tensor takes where weights live as they are stored."""
    stem, _, part = tensor.name.rpartition(".")
    if tensor.dtype == FP8 and f"{stem}.{_BLOCK_SCALES}" in names:
        return item_bytes * math.prod(tensor.shape)
    dropped = part in (_BLOCK_SCALES, "input_scale") and is_aside(tensor, names)
    return 0 if dropped else tensor.nbytes


def packed_weights(
    values: Mapping[str, Any], tensors: Sequence[TensorFact]
) -> list[tuple[str, int]]:
    """Return each packed weight, and how many values it stands for."""
    names = {tensor.name for tensor in tensors}
    return [
        (tensor.name, values_of(values, tensor, names))
        for tensor in tensors
        if not is_aside(tensor, names) and _packed_bits(values, tensor, names) is not None
    ]


def packed_bytes(values: Mapping[str, Any], tensors: Sequence[TensorFact]) -> int:
    """Return what packed weights take as they are stored, scales and all."""
    names = {tensor.name for tensor in tensors}
    return sum(
        tensor.nbytes
        for tensor in tensors
        if _packed_bits(values, tensor, names) is not None
        or (is_aside(tensor, names) and not tensor.name.endswith(_BLOCK_SCALES))
    )


def packable(values: Mapping[str, Any], tensors: Sequence[TensorFact]) -> dict[int, Packable]:
    """Return what a load can pack, by the size of groups."""
    names = {tensor.name for tensor in tensors}
    stored = packed_weights(values, tensors)
    plain = [
        (tensor.name, tensor.shape)
        for tensor in tensors
        if not is_aside(tensor, names) and (tensor.dtype in FLOATS or tensor.dtype == FP8)
    ]
    found: dict[int, Packable] = {}
    for size in GROUP_SIZES:
        made = [(n, math.prod(shape)) for n, shape in plain if packs(n, shape, group_size=size)]
        unpacked = unpacked_weight_values([*stored, *made])
        found[size] = Packable(packable_values(plain, group_size=size), unpacked)
    return found


def _packed_bits(
    values: Mapping[str, Any], tensor: TensorFact, names: Collection[str]
) -> int | None:
    """Return how many bits a tensor has for each value; None where it is not packed."""
    stem, _, part = tensor.name.rpartition(".")
    if tensor.dtype == "U32" and f"{stem}.scales" in names:
        return _bits(values, stem)
    if tensor.dtype != "U8":
        return None
    blocks = part.endswith("_blocks") and f"{tensor.name.removesuffix('_blocks')}_scales" in names
    own = part == "weight" and f"{stem}.weight_scale" in names
    return 4 if blocks or own else None


def _bits(values: Mapping[str, Any], stem: str) -> int:
    quantization = values.get("quantization")
    if quantization is None and isinstance(values.get("quantization_config"), dict):
        quantization = {"mode": values["quantization_config"].get("quant_method")}
    if not isinstance(quantization, dict):
        raise invalid("quantization", f"missing, and {stem} is stored packed")
    own = quantization.get(stem)
    stated = own if isinstance(own, dict) else quantization
    mode = stated.get("mode")
    bits = stated.get("bits", _BITS_DEFAULT.get(mode, 4) if isinstance(mode, str) else 4)
    if type(bits) is not int or bits not in range(1, 33):
        raise invalid("quantization", f"bits of {stem} are {bits!r}")
    return bits
