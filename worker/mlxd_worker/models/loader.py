"""From a model's folder to a loaded model: every tensor is consumed or refused by name.

Invariants:
- Files are checked whole (headers, names, shapes, types) before the first weight is read.
- Weights are read and converted one tensor at a time and evaluated at once, and nothing else keeps
  a reference: the peak is the finished weights plus the parts of the one being made.
- What the checkpoint holds beyond the architecture's own list is an error, not a leftover.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd_shared.errors import InvalidModel
from mlxd_shared.weights import SINGLE_FILE, TensorFact, read_model_dir
from mlxd_worker.memory.residency import FloatType
from mlxd_worker.models.architecture import Architecture, Footprint, TensorSpec
from mlxd_worker.models.base import Model
from mlxd_worker.models.config import architecture_of, read_config
from mlxd_worker.models.registry import REGISTRY, Registry

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after every tensor; may raise to give the load up."""

DTYPES = {
    FloatType.F32: mx.float32,
    FloatType.F16: mx.float16,
    FloatType.BF16: mx.bfloat16,
}
NAMES_SHOWN_MAX = 5


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
        """Values that stay in memory: the required tensors'."""
        return sum(math.prod(spec.shape) for spec in self.specs if spec.required)

    @property
    def stored(self) -> FloatType:
        """The form that holds most of the stored bytes."""
        nbytes = dict.fromkeys(FloatType, 0)
        for fact in self.facts:
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
    specs = architecture.tensors(parsed)
    _check_tensors(facts, specs)
    return ModelFiles(
        path=path,
        architecture=architecture,
        config=parsed,
        facts=facts,
        specs=specs,
    )


def load_model(files: ModelFiles, *, form: FloatType, progress: Progress) -> Model:
    """Read the weights in the given form and return the model; engine thread.

    Raises:
        InvalidModel: a file changed or could not be read after all.
        Whatever `progress` raises: the load is given up and holds nothing.
    """
    reader = _Reader(files.facts, dtype=DTYPES[form], progress=progress)
    reader.check_copies(files.specs)
    model: Model = files.architecture.build(files.config, reader)
    reader.finish(files.specs)
    return model


class _Reader:
    """The tensors of a checkpoint, each to be taken once."""

    def __init__(self, facts: Sequence[TensorFact], *, dtype: mx.Dtype, progress: Progress) -> None:
        self._facts = {fact.name: fact for fact in facts}
        self._dtype = dtype
        self._progress = progress
        self._total_nbytes = sum(fact.nbytes for fact in facts)
        self._read_nbytes = 0
        # Lazy: mx.load maps names to arrays that read their part of the file when evaluated.
        self._lazy: dict[str, mx.array] = {}
        for file in sorted({fact.file for fact in facts}):
            self._lazy.update(_open(file))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is stored."""
        return self._facts[name].shape

    def take(self, name: str) -> mx.array:
        """Return one tensor, evaluated, as `dtype`."""
        return self._taken(name, self._dtype)

    def take_float32(self, name: str) -> mx.array:
        """Return one tensor, evaluated, as float32."""
        return self._taken(name, mx.float32)

    def take_stacked(self, names: Sequence[str]) -> mx.array:
        """Return tensors joined along their first axis, evaluated, as `dtype`."""
        array = mx.concatenate([self._pop(name).astype(self._dtype) for name in names], axis=0)
        self._finish_reading(array, names)
        return array

    def check_copies(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse a stored copy that differs from its original: dropping it would change results."""
        for spec in specs:
            if spec.copy_of is None or spec.name not in self._facts:
                continue
            original, copy = self._lazy[spec.copy_of], self._lazy[spec.name]
            equal = mx.array_equal(original, copy)
            self._evaluate(equal, [spec.name])
            if not equal.item():
                fact = self._facts[spec.name]
                problem = f"differs from {spec.copy_of}, to which the config ties it"
                raise InvalidModel(problem, file=fact.file.name, field=spec.name)
            # Comparing has materialised both: the original is read again when it is taken.
            del self._lazy[spec.name]
            self._lazy[spec.copy_of] = _open(self._facts[spec.copy_of].file)[spec.copy_of]

    def finish(self, specs: Sequence[TensorSpec]) -> None:
        """Assert that the architecture took all that it said it needs."""
        required = {spec.name for spec in specs if spec.required}
        left = required & self._lazy.keys()
        if left:
            raise AssertionError(f"never taken: {_some(left)}")
        self._lazy.clear()
        self._progress(self._total_nbytes, self._total_nbytes)

    def _taken(self, name: str, dtype: mx.Dtype) -> mx.array:
        array = self._pop(name).astype(dtype)
        self._finish_reading(array, [name])
        return array

    def _pop(self, name: str) -> mx.array:
        return self._lazy.pop(name)

    def _evaluate(self, array: mx.array, names: Sequence[str]) -> None:
        try:
            mx.eval(array)
        except RuntimeError as error:
            file = self._facts[names[0]].file.name
            raise InvalidModel(f"could not be read: {error}", file=file, field=names[0]) from error

    def _finish_reading(self, array: mx.array, names: Sequence[str]) -> None:
        self._evaluate(array, names)
        self._read_nbytes += sum(self._facts[name].nbytes for name in names)
        self._progress(self._read_nbytes, self._total_nbytes)


def _open(file: Path) -> Mapping[str, mx.array]:
    try:
        loaded = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        reason = str(error).replace(str(file), file.name)  # where it lies is nobody's business
        raise InvalidModel(f"could not be opened: {reason}", file=file.name) from error
    assert isinstance(loaded, dict)
    return loaded


def _check_tensors(facts: Sequence[TensorFact], specs: Sequence[TensorSpec]) -> None:
    wanted = {spec.name: spec for spec in specs}
    stored = {fact.name: fact for fact in facts}
    missing = {spec.name for spec in specs if spec.required} - stored.keys()
    if missing:
        file = facts[0].file.name if facts else SINGLE_FILE
        raise InvalidModel(f"missing tensors: {_some(missing)}", file=file, field=min(missing))
    unexpected = stored.keys() - wanted.keys()
    if unexpected:
        first = stored[min(unexpected)]
        problem = f"tensors of no use to this config: {_some(unexpected)}"
        raise InvalidModel(problem, file=first.file.name, field=first.name)
    for fact in facts:
        spec = wanted[fact.name]
        if fact.shape not in (spec.shape, spec.other_shape):
            problem = f"shape {list(fact.shape)}, the config says {list(spec.shape)}"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)
        if fact.dtype not in set(FloatType):
            problem = f"dtype {fact.dtype} is not one of {', '.join(FloatType)}"
            raise InvalidModel(problem, file=fact.file.name, field=fact.name)


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN_MAX])
    rest = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {rest} more" if rest > 0 else shown
