"""Stored tensors of other libraries' models, by headers and names alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mlxd_models.families.common.fields import invalid
from mlxd_models.families.common.packing import BYTE_DTYPE, WORD_BITS, WORD_DTYPE, Packings
from mlxd_models.families.common.stored_layouts import as_stored
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.foreign_parts import ForeignConfig
from mlxd_models.files.weights import TensorFact

_ASIDE = frozenset({"scales", "biases", "global_scale", "weight_scale_inv", "weight_scale",
                    "weight_scale_2", "input_scale"})  # fmt: skip
"""The names of the parts of packed weights besides their values."""


def no_tensors(config: object) -> tuple[TensorSpec, ...]:
    """Return nothing: the stored tensors are taken as they are."""
    del config
    return ()


def foreign_specs(config: ForeignConfig, facts: Sequence[TensorFact]) -> tuple[TensorSpec, ...]:
    """Return the specs of stored tensors; raises InvalidModel if the config contradicts them."""
    names = {fact.name for fact in facts}
    tied = config.values.get("tie_word_embeddings") is True
    specs = []
    for fact in facts:
        stem, _, part = fact.name.rpartition(".")
        if part in _ASIDE and f"{stem}.weight" in names:
            continue
        left = fact.name.startswith("mtp.") or fact.name.endswith(".rotary_emb.inv_freq")
        left = left or (tied and fact.name.startswith("lm_head."))
        spec = TensorSpec(fact.name, fact.shape, required=not left, joins=_stack_of(fact.name))
        specs.append(_unpack(config.packings, spec, fact, names))
    return tuple(spec for spec in as_stored(specs, names) if spec.stored_name in names)


def _unpack(
    packings: Packings | None, spec: TensorSpec, fact: TensorFact, names: Collection[str]
) -> TensorSpec:
    """Return a tensor as it would be in numbers, and how it is packed if it is."""
    stem, _, part = fact.name.rpartition(".")
    words = fact.dtype == WORD_DTYPE and f"{stem}.scales" in names
    halves = fact.dtype == BYTE_DTYPE and f"{stem}.weight_scale" in names
    blocks = f"{stem}.weight_scale_inv" in names
    if part != "weight" or len(fact.shape) < 2 or not (words or halves or blocks):
        return spec
    packing = None if packings is None else packings.own.get(stem, packings.common)
    if packing is None:
        raise invalid("quantization", f"missing, and {stem} is stored packed")
    *outputs, inputs = fact.shape
    if words:
        return replace(spec, shape=(*outputs, inputs * WORD_BITS // packing.bits), packing=packing)
    if halves and len(fact.shape) == 2:
        return replace(spec, shape=(*outputs, 2 * inputs), packing=packing)
    return replace(spec, packing=packing if blocks else None)


def _stack_of(name: str) -> str:
    """Return the tensor into which mlx-lm joins an expert's; empty if it is not an expert's."""
    before, experts, after = name.partition(".experts.")
    number, _, inner = after.partition(".")
    return f"{before}{experts}{inner}" if experts and number.isdecimal() else ""
