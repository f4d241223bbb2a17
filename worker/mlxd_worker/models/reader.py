"""The tensors of a checkpoint, each read once, converted and evaluated as it is taken.

Invariants:
- Tensors are read and converted one at a time and nothing else keeps a reference: the peak is the
  finished weights plus the parts of the one being made.
- A packed weight is taken through `linear` and `experts` alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from mlxd_shared.errors import InvalidModel
from mlxd_shared.weights import TensorFact
from mlxd_worker.models.architecture import Stack, TensorSpec
from mlxd_worker.models.expert_linear import ExpertLinear, ExpertProjection, PackedExpertLinear
from mlxd_worker.models.linear import Linear, PackedLinear, Projection, SideBySide, unpacked
from mlxd_worker.models.packing import Packing

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after every tensor; may raise to give the load up."""

NAMES_SHOWN_MAX = 5


class Reader:
    """The tensors of a checkpoint, each to be taken once."""

    def __init__(
        self,
        facts: Sequence[TensorFact],
        specs: Sequence[TensorSpec],
        *,
        dtype: mx.Dtype,
        keep_packed: bool,
        progress: Progress,
    ) -> None:
        """Open the files of `facts`, which `specs` describe; nothing is read yet."""
        self._packing = {spec.name: spec.packing for spec in specs if spec.packed}
        self._keep_packed = keep_packed
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
        return self._joined(names, self._dtype)

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return linears over one input as one, packed where they are and are to stay so."""
        packings = [self._packing.get(f"{stem}.weight") for stem in stems]
        if len(set(packings)) > 1 and self._keep_packed:
            return SideBySide(tuple(self._linear([stem], has_bias=has_bias) for stem in stems))
        return self._linear(stems, has_bias=has_bias)

    def experts(self, stacks: Sequence[Stack]) -> ExpertProjection:
        """Return experts' linears over one input as one, packed where they are and stay so.

        Raises:
            InvalidModel: some of them are packed unlike others.
        """
        stored = [[s.stem] if f"{s.stem}.weight" in self._facts else s.parts for s in stacks]
        packing = self._one_packing([stem for stems in stored for stem in stems])
        if packing is not None and self._keep_packed:
            words = self._stacked(stored, "weight", mx.uint32)
            scales = self._stacked(stored, "scales", self._dtype)
            offsets = self._stacked(stored, "biases", self._dtype)
            return PackedExpertLinear(words, scales, offsets, packing)
        if packing is None:
            return ExpertLinear(self._stacked(stored, "weight", self._dtype))
        loose = [_stack([self._unpacked(stem, packing) for stem in stems]) for stems in stored]
        weight = mx.concatenate(loose, axis=1)
        self._evaluate(weight, [f"{stored[0][0]}.weight"])
        return ExpertLinear(weight)

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
            raise AssertionError(f"never taken: {some_names(left)}")
        self._lazy.clear()
        self._progress(self._total_nbytes, self._total_nbytes)

    def _linear(self, stems: Sequence[str], *, has_bias: bool) -> Linear | PackedLinear:
        names = [f"{stem}.weight" for stem in stems]
        bias = self.take_stacked([f"{stem}.bias" for stem in stems]) if has_bias else None
        packings = [self._packing.get(name) for name in names]
        if not any(packings):
            return Linear(self.take_stacked(names), bias)
        if packings[0] is not None and self._keep_packed:
            words = self._joined(names, mx.uint32)
            scales = self.take_stacked([f"{stem}.scales" for stem in stems])
            offsets = self.take_stacked([f"{stem}.biases" for stem in stems])
            return PackedLinear(words, scales, offsets, packings[0], bias)
        parts = [
            self.take(name) if packing is None else self._unpacked(stem, packing)
            for stem, name, packing in zip(stems, names, packings, strict=True)
        ]
        weight = mx.concatenate(parts, axis=0)
        self._evaluate(weight, names)
        return Linear(weight, bias)

    def _one_packing(self, stems: Sequence[str]) -> Packing | None:
        packings = [self._packing.get(f"{stem}.weight") for stem in stems]
        for stem, packing in zip(stems, packings, strict=True):
            if packing != packings[0]:
                name = f"{stem}.weight"
                problem = f"packed unlike {stems[0]}, with which it is one here"
                raise InvalidModel(problem, file=self._facts[name].file.name, field=name)
        return packings[0]

    def _stacked(self, stored: Sequence[Sequence[str]], part: str, dtype: mx.Dtype) -> mx.array:
        """Return stacks joined along their outputs, each stored as one tensor or in slices."""
        names = [[f"{stem}.{part}" for stem in stems] for stems in stored]
        stacks = [_stack([self._pop(name).astype(dtype) for name in group]) for group in names]
        array = mx.concatenate(stacks, axis=1)
        self._finish_reading(array, [name for group in names for name in group])
        return array

    def _taken(self, name: str, dtype: mx.Dtype) -> mx.array:
        array = self._pop(name).astype(dtype)
        self._finish_reading(array, [name])
        return array

    def _joined(self, names: Sequence[str], dtype: mx.Dtype) -> mx.array:
        array = mx.concatenate([self._pop(name).astype(dtype) for name in names], axis=0)
        self._finish_reading(array, names)
        return array

    def _unpacked(self, stem: str, packing: Packing) -> mx.array:
        """Return one packed weight as `dtype`, evaluated; reckoned in float32."""
        names = [f"{stem}.{part}" for part in ("weight", "scales", "biases")]
        words, scales, offsets = (self._pop(name) for name in names)
        scales, offsets = scales.astype(mx.float32), offsets.astype(mx.float32)
        array = unpacked(words, scales, offsets, packing).astype(self._dtype)
        self._finish_reading(array, names)
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


def _stack(parts: Sequence[mx.array]) -> mx.array:
    """Return slices as one array; a part that is three-dimensional is a stack already."""
    return parts[0] if parts[0].ndim == 3 else mx.stack(list(parts))


def _open(file: Path) -> Mapping[str, mx.array]:
    try:
        loaded = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        reason = str(error).replace(str(file), file.name)  # where it lies is nobody's business
        raise InvalidModel(f"could not be opened: {reason}", file=file.name) from error
    assert isinstance(loaded, dict)
    return loaded


def some_names(names: Collection[str]) -> str:
    """Return the first names, and how many there are besides."""
    shown = ", ".join(sorted(names)[:NAMES_SHOWN_MAX])
    rest = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {rest} more" if rest > 0 else shown
