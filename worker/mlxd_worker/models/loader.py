"""From a model's folder to a loaded model: every tensor is consumed or refused by name.

Invariants:
- Files are checked whole (headers, names, shapes, types) before the first weight is read.
- Which weights are packed is what the files say, where the config says how; a weight in numbers in
  a packed checkpoint stays that.
- What the checkpoint holds beyond the architecture's own list is an error, not a leftover.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd_shared.errors import InvalidModel
from mlxd_shared.model_source import Source as ModelSource
from mlxd_shared.model_source import files_of
from mlxd_shared.packed_weights import unpacked_weight_values
from mlxd_shared.packing_on_load import packs
from mlxd_shared.tensor_blobs import Copy, check_copies
from mlxd_shared.weights import SINGLE_FILE, TensorFact, read_weights
from mlxd_shared.zoo_types import is_foreign
from mlxd_worker.memory.residency import FloatType, Packed
from mlxd_worker.models.architecture import Architecture, Footprint, Source, TensorSpec
from mlxd_worker.models.base import Model
from mlxd_worker.models.config import architecture_of, read_config
from mlxd_worker.models.fields import some_names
from mlxd_worker.models.registry import REGISTRY, Registry
from mlxd_worker.models.weights.block_floats import BLOCK_SCALES, block_scales_name
from mlxd_worker.models.weights.packing import (
    BYTE_DTYPE,
    FP8_DTYPE,
    NVFP4_FULL_SCALE,
    WORD_BITS,
    WORD_DTYPE,
    Packing,
    PackingMode,
)
from mlxd_worker.models.weights.reader import Progress, Reader
from mlxd_worker.models.zoo.adapter import ZOO

KEPT_NBYTES = {WORD_DTYPE: 4, BYTE_DTYPE: 1, "F32": 4}
"""What a value of a packed weight's parts takes that stay as they are stored, by its type."""

DTYPES = {
    FloatType.F32: mx.float32,
    FloatType.F16: mx.float16,
    FloatType.BF16: mx.bfloat16,
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder, checked: config understood, every tensor accounted for, no weight read."""

    path: Path
    architecture: Architecture[Any]
    config: Any
    facts: tuple[TensorFact, ...]
    """Stored tensors, by the names that the architecture has for them."""
    specs: tuple[TensorSpec, ...]
    copies: tuple[Copy, ...] = ()
    """Tensors that a store holds again, which must be the same."""

    @property
    def weight_values(self) -> int:
        """Values of the weights that stay in memory, once unpacked."""
        specs = self.architecture.tensors(self.config)
        return sum(math.prod(spec.shape) for spec in specs if spec.required)

    @property
    def packed(self) -> Packed | None:
        """What stays in memory where packed weights stay packed; None where none are."""
        return self.packed_as(None)

    def packed_as(self, on_load: Packing | None) -> Packed | None:
        """Return the same where others are packed while they are loaded, if `on_load` says how."""
        kept_nbytes = values = 0
        weights: list[tuple[str, int]] = []
        for spec in self.specs:
            count, packing = math.prod(spec.shape), spec.packing
            if not spec.required or spec.name.endswith(f".{BLOCK_SCALES}"):
                continue
            if packing is not None and packing.stays and spec.dtype is not None:
                kept_nbytes += count * KEPT_NBYTES[spec.dtype]
                if spec.packed:
                    weights.append((spec.name, count * WORD_BITS // packing.bits))
            elif on_load is not None and packs_on_load(spec, on_load):
                groups = count // on_load.group_size
                kept_nbytes += count * on_load.bits // 8 + groups * (not on_load.has_offsets)
                values += 2 * groups * on_load.has_offsets
                weights.append((spec.name, count))
            else:
                values += count
        if not weights:
            return None
        return Packed(kept_nbytes, values, unpacked_weight_values(weights))

    @property
    def stored(self) -> FloatType:
        """The form that holds most of the bytes that are stored as numbers."""
        nbytes = dict.fromkeys(FloatType, 0)
        for fact in self.facts:
            if fact.dtype in nbytes:
                nbytes[FloatType(fact.dtype)] += fact.nbytes
        return max(nbytes, key=lambda form: nbytes[form])

    @property
    def footprint(self) -> Footprint:
        """What the model takes besides its weights."""
        return self.architecture.footprint(self.config)


def inspect_model(source: ModelSource, *, registry: Registry = REGISTRY) -> ModelFiles:
    """Check a model by its config and headers alone.

    Raises:
        InvalidModel: anything that keeps it from being served; names file and key or tensor.
    """
    stored = files_of(source)
    config = read_config(stored)
    architecture = _architecture(config, registry)
    parsed = architecture.parse(config)
    weights = read_weights(stored)
    facts = _named(weights.facts, architecture)
    try:
        specs = _checked(architecture, parsed, facts)
    except InvalidModel as error:
        own_names = {fact.name: fact.stored_name for fact in facts}
        field_name = own_names.get(error.field, error.field)
        raise InvalidModel(error.problem, file=error.file, field=field_name) from None
    return ModelFiles(
        path=stored.path,
        architecture=architecture,
        config=parsed,
        facts=facts,
        specs=specs,
        copies=weights.copies,
    )


def _architecture(config: Mapping[str, Any], registry: Registry) -> Architecture[Any]:
    """Return the architecture of our own, or mlx-lm's where it has one and we have none."""
    name = architecture_of(config)
    return registry.find(name) if name in registry.entries or not is_foreign(config) else ZOO


def _checked(
    architecture: Architecture[Any],
    config: Any,  # noqa: ANN401 - the architecture's own
    facts: Sequence[TensorFact],
) -> tuple[TensorSpec, ...]:
    """Return what the stored tensors are; nothing is missing, or left over."""
    if architecture.restore is not None:
        return architecture.restore(config, facts)
    specs = as_stored(architecture.tensors(config), {fact.name for fact in facts})
    _check_tensors(facts, specs)
    return specs


def _named(stored: Sequence[TensorFact], architecture: Architecture[Any]) -> tuple[TensorFact, ...]:
    """Return the tensors that are the architecture's, by its names.

    Raises:
        InvalidModel: two of them have one name there.
    """
    facts: dict[str, TensorFact] = {}
    for fact in stored:
        name = architecture.name_of(fact.name)
        if name is None:
            continue
        if name in facts:
            problem = f"is {name}, which is stored under another name too"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)
        facts[name] = replace(fact, name=name, own_name=fact.stored_name)
    return tuple(facts.values())


def packs_on_load(spec: TensorSpec, packing: Packing) -> bool:
    """Tell whether a weight that is stored in numbers is packed so, where the load is told to."""
    return spec.packable and packs(spec.name, spec.shape, group_size=packing.group_size)


def as_stored(specs: Sequence[TensorSpec], stored: Collection[str]) -> tuple[TensorSpec, ...]:
    """Return the specs as the checkpoint has them.

    A weight that it stores packed becomes its parts, such as words, scales and offsets; one that it
    stores in slices, or in another layout, becomes what is made of these.
    """
    found: list[TensorSpec] = []
    # Once each: two tensors may have the same one in their place.
    for spec in dict.fromkeys(part for whole in specs for part in _slices(whole, stored)):
        stem = spec.name.removesuffix(".weight")
        if spec.packing is None or spec.packed or spec.source is not None:
            found.append(spec)
        elif spec.packing.stays and f"{stem}.scales" in stored:
            found += _packed_parts(spec, spec.packing, stem, stored)
        elif spec.packing.mode is PackingMode.NVFP4 and f"{stem}.weight_scale" in stored:
            found += _modelopt_parts(spec, spec.packing, stem)
        elif not spec.packing.stays and block_scales_name(spec.name) in stored:
            found += _block_parts(spec, spec.packing)
        else:
            found.append(spec)
    return tuple(found)


def _slices(spec: TensorSpec, stored: Collection[str]) -> list[TensorSpec]:
    """Return a tensor, or those that are stored in its place."""
    for layout in spec.instead:
        if any(part.stored_name in stored for part in layout):
            return [replace(part, required=spec.required) for part in layout]
    if spec.name in stored or not any(part in stored for part in spec.parts):
        return [spec]
    one = replace(spec, shape=spec.shape[1:], parts=(), instead=())
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
    if packing.has_offsets:
        parts["biases"] = (groups, None)
    elif packing.mode is PackingMode.NVFP4 and f"{stem}.global_scale" in stored:
        parts["global_scale"] = (tuple(outputs[:-1]), "F32")
    factor = f"{stem}.weight_scale_2"
    if packing.mode is PackingMode.NVFP4 and factor in stored:
        parts["global_scale"] = (tuple(outputs[:-1]), "F32")
    original = None if spec.copy_of is None else spec.copy_of.removesuffix(".weight")
    return [
        TensorSpec(
            f"{stem}.{part}",
            shape,
            required=spec.required,
            copy_of=None if original is None else f"{original}.{part}",
            packing=packing,
            packed=part == "weight",
            dtype=dtype,
            source=(
                Source(factor, shape, _full_scale)
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

    def made(
        part: str, shape: tuple[int, ...], dtype: str, source: Source, *, packed: bool = False
    ) -> TensorSpec:
        return TensorSpec(
            f"{stem}.{part}",
            shape,
            required=spec.required,
            packing=packing,
            packed=packed,
            dtype=dtype,
            source=source,
        )

    stored = Source(f"{stem}.weight", (outputs, inputs // 2), _words, BYTE_DTYPE)
    scales = Source(f"{stem}.weight_scale", groups, lambda it: it, FP8_DTYPE)
    whole = Source(f"{stem}.weight_scale_2", (), _full_scale)
    return [
        made("weight", words, WORD_DTYPE, stored, packed=True),
        made("scales", groups, BYTE_DTYPE, scales),
        made("global_scale", (), "F32", whole),
        # By this others round what is multiplied; here that stays as it is.
        TensorSpec(f"{stem}.input_scale", (), required=False),
    ]


def _words(stored: mx.array) -> mx.array:
    return stored.view(mx.uint32)


def _full_scale(stored: mx.array) -> mx.array:
    return stored.astype(mx.float32) * NVFP4_FULL_SCALE


def _block_parts(spec: TensorSpec, packing: Packing) -> list[TensorSpec]:
    *stack, outputs, inputs = spec.shape
    squares = (*stack, -(-outputs // packing.block_rows), packing.groups(inputs))
    scales = TensorSpec(block_scales_name(spec.name), squares, required=spec.required)
    return [replace(spec, dtype=FP8_DTYPE), scales]


def load_model(
    files: ModelFiles,
    *,
    form: FloatType,
    progress: Progress,
    packed: bool = False,
    on_load: Packing | None = None,
    context: int | None = None,
) -> Model:
    """Read the weights in the given form and return the model; engine thread.

    packed: weights that are stored packed stay so, and `form` is what their scales become. on_load:
    what others become then, but for those that are kept. context: no row will be longer than
    that; None: than the model allows.

    Raises:
        InvalidModel: a file changed or could not be read after all; or of experts' weights that
            are one here some are packed unlike others.
        Whatever `progress` raises: the load is given up and holds nothing.
    """
    check_copies(files.copies)
    reader = Reader(
        files.facts,
        files.specs,
        dtype=DTYPES[form],
        keep_packed=packed,
        progress=progress,
        on_load={
            spec.name: on_load
            for spec in files.specs
            if on_load is not None and not spec.packed and packs_on_load(spec, on_load)
        },
    )
    reader.check_copies(files.specs)
    settled = files.config if context is None else files.config.within(context)
    model: Model = files.architecture.build(settled, reader)
    reader.finish(files.specs)
    return model


def _check_tensors(facts: Sequence[TensorFact], specs: Sequence[TensorSpec]) -> None:
    wanted = {spec.stored_name: spec for spec in specs}
    stored = {fact.name: fact for fact in facts}
    missing = {spec.stored_name for spec in specs if spec.required} - stored.keys()
    if missing:
        file = facts[0].file.name if facts else SINGLE_FILE
        raise InvalidModel(f"missing tensors: {some_names(missing)}", file=file, field=min(missing))
    unexpected = stored.keys() - wanted.keys()
    if unexpected:
        first = stored[min(unexpected)]
        problem = f"tensors of no use to this config: {some_names(unexpected)}"
        raise InvalidModel(problem, file=first.file.name, field=first.name)
    for fact in facts:
        spec = wanted[fact.name]
        told = spec if spec.source is None else spec.source
        if fact.shape not in (told.shape, spec.other_shape):
            problem = f"shape {list(fact.shape)}, the config says {list(told.shape)}"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)
        allowed = tuple(FloatType) if told.dtype is None else (told.dtype,)
        if fact.dtype not in allowed:
            problem = f"dtype {fact.dtype} is not one of {', '.join(allowed)}"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)
