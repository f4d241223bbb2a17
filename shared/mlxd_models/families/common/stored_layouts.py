"""Specs as a checkpoint has them: packed or in numbers, whole or in slices, under other names.

Invariants:
- Which weights are packed is what the files say, where the config says how; a weight in numbers in
  a packed checkpoint stays that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mlxd_models.families.common.packing import (
    BYTE_DTYPE,
    FP8_DTYPE,
    WORD_DTYPE,
    Packing,
    PackingMode,
    block_scales_name,
)
from mlxd_models.families.common.tensors import Operation, Source, TensorSpec


def as_stored(specs: Sequence[TensorSpec], stored: Collection[str]) -> tuple[TensorSpec, ...]:
    """Return the specs as the checkpoint has them.

    A weight that it stores packed becomes its parts, such as words, scales and offsets; one that it
    stores in slices, or in another layout, becomes what is made of these.
    """
    expanded: list[TensorSpec] = []
    # Once each: two tensors may have the same one in their place.
    for spec in dict.fromkeys(part for whole in specs for part in _slices(whole, stored)):
        stem = spec.name.removesuffix(".weight")
        if spec.packing is None or spec.packed or spec.source is not None:
            expanded.append(spec)
        elif spec.packing.stays and f"{stem}.scales" in stored:
            expanded += _packed_parts(spec, spec.packing, stem, stored)
        elif spec.packing.mode is PackingMode.NVFP4 and f"{stem}.weight_scale" in stored:
            expanded += _modelopt_parts(spec, spec.packing, stem)
        elif not spec.packing.stays and block_scales_name(spec.name) in stored:
            expanded += _block_parts(spec, spec.packing)
        else:
            expanded.append(spec)
    return tuple(expanded)


def _slices(spec: TensorSpec, stored: Collection[str]) -> list[TensorSpec]:
    """Return a tensor, or those that are stored in its place."""
    for layout in spec.instead:
        if any(part.stored_name in stored for part in layout):
            return [replace(part, required=spec.required) for part in layout]
    if spec.name in stored or not any(part in stored for part in spec.parts):
        return [spec]
    joins = spec.joins or spec.name.removesuffix(".weight")
    one = replace(spec, shape=spec.shape[1:], parts=(), instead=(), joins=joins)
    return [replace(one, name=part) for part in spec.parts]


def _packed_parts(
    spec: TensorSpec, packing: Packing, stem: str, stored: Collection[str]
) -> list[TensorSpec]:
    *outputs, inputs = spec.shape
    groups = (*outputs, packing.groups(inputs))
    parts: dict[str, tuple[tuple[int, ...], str | None]] = {
        "weight": ((*outputs, packing.words(inputs)), WORD_DTYPE),
        "scales": (groups, None if packing.has_offsets else BYTE_DTYPE),
    }
    factor = f"{stem}.weight_scale_2"
    if packing.has_offsets:
        parts["biases"] = (groups, None)
    elif packing.mode is PackingMode.NVFP4 and (
        f"{stem}.global_scale" in stored or factor in stored
    ):
        parts["global_scale"] = (tuple(outputs[:-1]), "F32")
    original = None if spec.copy_of is None else spec.copy_of.removesuffix(".weight")
    return [
        replace(
            spec,
            name=f"{stem}.{part}",
            shape=shape,
            copy_of=None if original is None else f"{original}.{part}",
            other_shape=None,
            packing=packing,
            packed=part == "weight",
            beside=part != "weight",
            packable=False,
            dtype=dtype,
            source=(
                Source(factor, shape, Operation.FULL_SCALE)
                if part == "global_scale" and factor in stored
                else None
            ),
        )
        for part, (shape, dtype) in parts.items()
    ]


def _modelopt_parts(spec: TensorSpec, packing: Packing, stem: str) -> list[TensorSpec]:
    """Return words and scales as they follow from ModelOpt's, whose bytes are in the same order."""
    outputs, inputs = spec.shape
    words, groups = (outputs, packing.words(inputs)), (outputs, packing.groups(inputs))

    def part_of(
        name: str, shape: tuple[int, ...], dtype: str, source: Source, *, packed: bool = False
    ) -> TensorSpec:
        return replace(
            spec,
            name=f"{stem}.{name}",
            shape=shape,
            packing=packing,
            packed=packed,
            beside=not packed,
            packable=False,
            dtype=dtype,
            source=source,
        )

    stored = Source(f"{stem}.weight", (outputs, inputs // 2), Operation.WORDS, BYTE_DTYPE)
    scales = Source(f"{stem}.weight_scale", groups, Operation.KEEP, FP8_DTYPE)
    whole = Source(f"{stem}.weight_scale_2", (), Operation.FULL_SCALE)
    return [
        part_of("weight", words, WORD_DTYPE, stored, packed=True),
        part_of("scales", groups, BYTE_DTYPE, scales),
        part_of("global_scale", (), "F32", whole),
        # Other libraries round inputs with this; here inputs stay as they are.
        TensorSpec(f"{stem}.input_scale", (), required=False, beside=True),
    ]


def _block_parts(spec: TensorSpec, packing: Packing) -> list[TensorSpec]:
    *stack, outputs, inputs = spec.shape
    squares = (*stack, -(-outputs // packing.block_rows), packing.groups(inputs))
    name = block_scales_name(spec.name)
    scales = TensorSpec(name, squares, required=spec.required, beside=True, joins=spec.joins)
    return [replace(spec, dtype=FP8_DTYPE), scales]
