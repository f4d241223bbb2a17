"""From a model's folder to a loaded model: every tensor is consumed or refused by name.

Invariants:
- Files are checked whole (headers, names, shapes, types) before the first weight is read.
- Which weights are packed is what the files say, where the config says how; a weight in numbers in
  a packed checkpoint stays that.
- What the checkpoint holds beyond the architecture's own list is an error, not a leftover.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd_shared.errors import InvalidModel
from mlxd_shared.packed_weights import unpacked_weight_values
from mlxd_shared.weights import SINGLE_FILE, TensorFact, read_model_dir
from mlxd_worker.memory.residency import FloatType, Packed
from mlxd_worker.models.architecture import Architecture, Footprint, TensorSpec
from mlxd_worker.models.base import Model
from mlxd_worker.models.config import architecture_of, read_config
from mlxd_worker.models.packing import WORD_BITS, WORD_DTYPE, Packing
from mlxd_worker.models.reader import Progress, Reader, some_names
from mlxd_worker.models.registry import REGISTRY, Registry

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
    specs: tuple[TensorSpec, ...]

    @property
    def weight_values(self) -> int:
        """Values of the weights that stay in memory, once unpacked."""
        specs = self.architecture.tensors(self.config)
        return sum(math.prod(spec.shape) for spec in specs if spec.required)

    @property
    def packed(self) -> Packed | None:
        """What stays in memory where packed weights stay packed; None where none are."""
        kept = [spec for spec in self.specs if spec.required]
        words = sum(math.prod(spec.shape) for spec in kept if spec.packed)
        if not words:
            return None
        values = sum(math.prod(spec.shape) for spec in kept if not spec.packed)
        return Packed(
            words_nbytes=words * WORD_BITS // 8,
            values=values,
            unpacked_values=unpacked_weight_values(
                (spec.name, math.prod(spec.shape) * WORD_BITS // spec.packing.bits)
                for spec in kept
                if spec.packed and spec.packing is not None
            ),
        )

    @property
    def stored(self) -> FloatType:
        """The form that holds most of the bytes that are stored as numbers."""
        nbytes = dict.fromkeys(FloatType, 0)
        for fact in self.facts:
            if fact.dtype != WORD_DTYPE:
                nbytes[FloatType(fact.dtype)] += fact.nbytes
        return max(nbytes, key=lambda form: nbytes[form])

    @property
    def footprint(self) -> Footprint:
        """What the model takes besides its weights."""
        return self.architecture.footprint(self.config)


def inspect_model(path: Path, *, registry: Registry = REGISTRY) -> ModelFiles:
    """Check a model's folder by its config and headers alone.

    Raises:
        InvalidModel: anything that keeps it from being served; names file and key or tensor.
    """
    config = read_config(path)
    architecture = registry.find(architecture_of(config))
    parsed = architecture.parse(config)
    facts = read_model_dir(path)
    specs = as_stored(architecture.tensors(parsed), {fact.name for fact in facts})
    _check_tensors(facts, specs)
    return ModelFiles(
        path=path,
        architecture=architecture,
        config=parsed,
        facts=facts,
        specs=specs,
    )


def as_stored(specs: Sequence[TensorSpec], stored: Collection[str]) -> tuple[TensorSpec, ...]:
    """Return the specs as the checkpoint has them.

    A weight that it stores packed becomes three, words, scales and offsets; one that it stores in
    slices becomes these.
    """
    found: list[TensorSpec] = []
    for spec in (part for whole in specs for part in _slices(whole, stored)):
        stem = spec.name.removesuffix(".weight")
        if spec.packing is None or f"{stem}.scales" not in stored:
            found.append(spec)
        else:
            found += _packed_parts(spec, spec.packing, stem)
    return tuple(found)


def _slices(spec: TensorSpec, stored: Collection[str]) -> list[TensorSpec]:
    """Return a tensor, or those that are stored in its place."""
    if spec.name in stored or not any(part in stored for part in spec.parts):
        return [spec]
    return [replace(spec, name=part, shape=spec.shape[1:], parts=()) for part in spec.parts]


def _packed_parts(spec: TensorSpec, packing: Packing, stem: str) -> list[TensorSpec]:
    *outputs, inputs = spec.shape
    groups = (*outputs, packing.groups(inputs))
    parts = {"weight": (*outputs, packing.words(inputs)), "scales": groups, "biases": groups}
    original = None if spec.copy_of is None else spec.copy_of.removesuffix(".weight")
    return [
        TensorSpec(
            f"{stem}.{part}",
            shape,
            required=spec.required,
            copy_of=None if original is None else f"{original}.{part}",
            packing=packing,
            packed=part == "weight",
        )
        for part, shape in parts.items()
    ]


def load_model(
    files: ModelFiles, *, form: FloatType, progress: Progress, packed: bool = False
) -> Model:
    """Read the weights in the given form and return the model; engine thread.

    packed: weights that are stored packed stay so, and `form` is what their scales become.

    Raises:
        InvalidModel: a file changed or could not be read after all; or of experts' weights that
            are one here some are packed unlike others.
        Whatever `progress` raises: the load is given up and holds nothing.
    """
    reader = Reader(
        files.facts, files.specs, dtype=DTYPES[form], keep_packed=packed, progress=progress
    )
    reader.check_copies(files.specs)
    model: Model = files.architecture.build(files.config, reader)
    reader.finish(files.specs)
    return model


def _check_tensors(facts: Sequence[TensorFact], specs: Sequence[TensorSpec]) -> None:
    wanted = {spec.name: spec for spec in specs}
    stored = {fact.name: fact for fact in facts}
    missing = {spec.name for spec in specs if spec.required} - stored.keys()
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
        if fact.shape not in (spec.shape, spec.other_shape):
            problem = f"shape {list(fact.shape)}, the config says {list(spec.shape)}"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)
        allowed = (WORD_DTYPE,) if spec.packed else tuple(FloatType)
        if fact.dtype not in allowed:
            problem = f"dtype {fact.dtype} is not one of {', '.join(allowed)}"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)
