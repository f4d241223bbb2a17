"""The tensors of a checkpoint, each read once, converted and evaluated as it is taken.

Invariants:
- Tensors are read one at a time and nothing else keeps a reference: the peak is the finished
  weights plus what the one being made is made of.
- What is stored as numbers is read to where it ends, joined and widened, wherever that rounds
  nothing; anything else is read as it is stored, and converted then.
- A packed weight is taken through `linear` and `experts` alone; one of 8-bit floats in blocks,
  which becomes numbers as it is read, through anything.
- What is made of a tensor that is stored in place of others goes by the others' names.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import mlx.core as mx

from mlxd_models.families.common.fields import some_names
from mlxd_models.families.common.packing import FP8_DTYPE, Packing, block_scales_name
from mlxd_models.families.common.tensors import Stack, TensorSpec
from mlxd_models.files.weights import TensorFact
from mlxd_models.fit.parts import Part, fact_of_part
from mlxd_worker.models.weights.by_pieces import numbers_of, numbers_of_blocks, packed_of
from mlxd_worker.models.weights.direct_reading import WORDS
from mlxd_worker.models.weights.expert_linear import (
    ExpertLinear,
    ExpertProjection,
    ExpertsSideBySide,
    PackedExpertLinear,
)
from mlxd_worker.models.weights.layouts import apply_operation, joined_slabs, stack_of
from mlxd_worker.models.weights.lazy_tensors import LazyTensors, Slab, why_not_read
from mlxd_worker.models.weights.linear import (
    Linear,
    PackedLinear,
    PackedWeight,
    Projection,
    SideBySide,
)

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after every tensor; may raise to give the load up."""


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
        on_load: Mapping[str, Packing] = MappingProxyType({}),
        parts: Mapping[str, Part] = MappingProxyType({}),
    ) -> None:
        """Know the tensors of `facts`, which `specs` describe; nothing is read yet.

        on_load: how weights are packed that are stored in numbers, by name. parts: what is here of
        stored tensors that are not here whole, by name: to everyone these are the tensors.
        """
        packings = {spec.name: spec.packing for spec in specs if spec.packing is not None}
        self._packing = {spec.name: packings[spec.name] for spec in specs if spec.packed}
        self._packing |= on_load
        self._on_load = on_load
        self._blocks = {spec.name: packings[spec.name] for spec in specs if spec.dtype == FP8_DTYPE}
        self.keeps_packed = keep_packed
        """Whether weights that are packed stay so."""
        self._facts = {fact.name: fact_of_part(fact, parts.get(fact.name)) for fact in facts}
        self.dtype = dtype
        """What floating weights become."""
        self._progress = progress
        self._total_nbytes = sum(fact.nbytes for fact in self._facts.values())
        self._read_nbytes = 0
        self._lazy = LazyTensors(facts, parts)
        self._rename(specs)

    def take_stored(self) -> dict[str, mx.array]:
        """Return all tensors that nobody has taken, as stored, lazy: to make others of them."""
        return {name: self._lazy.pop(name) for name in list(self._lazy)}

    def evaluate(self, arrays: Mapping[str, mx.array]) -> None:
        """Evaluate what was made from all tensors; each counts for its share of the reading.

        Raises:
            InvalidModel: a file cannot be read.
        """
        total, done = sum(array.nbytes for array in arrays.values()), 0
        for name, array in arrays.items():
            try:
                mx.eval(array)
            except RuntimeError as error:
                of = [self._facts[name]] if name in self._facts else self._facts.values()
                raise why_not_read(of, error, field=name) from error
            done += array.nbytes
            self._progress(self._total_nbytes * done // total, self._total_nbytes)

    def has(self, name: str) -> bool:
        """Tell whether a tensor is stored under this name."""
        return name in self._facts

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is stored."""
        return self._facts[name].shape

    def take(self, name: str) -> mx.array:
        """Return one tensor, evaluated, as `dtype`."""
        return self._join([name], self.dtype)

    def take_float32(self, name: str) -> mx.array:
        """Return one small tensor, evaluated, as float32, whatever `dtype` is."""
        return self._join([name], mx.float32)

    def take_stacked(self, names: Sequence[str]) -> mx.array:
        """Return tensors joined along their first axis, as `dtype`, evaluated; parts go."""
        return self._join(names, self.dtype)

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return linears over one input as one, their outputs in this order.

        A stem is a weight's name without `.weight`. Packed where they are and are to stay so.
        """
        packings = [self._packing.get(f"{stem}.weight") for stem in stems]
        unlike = len(set(packings)) > 1 or self._own_scales(stems)
        if len(stems) > 1 and unlike and self.keeps_packed:
            return SideBySide(tuple(self._linear([stem], has_bias=has_bias) for stem in stems))
        return self._linear(stems, has_bias=has_bias)

    def experts(self, stacks: Sequence[Stack], *, has_bias: bool = False) -> ExpertProjection:
        """Return experts' linears over one input as one, as `linear`."""
        stored = [self._stored_stems(stack) for stack in stacks]
        packing = self._packing.get(f"{stored[0][0]}.weight")  # as of all: the description says so
        if packing is not None and self.keeps_packed:
            if not any(f"{stem}.global_scale" in self._lazy for stems in stored for stem in stems):
                return self._packed_experts(stored, packing, has_bias=has_bias)
            parts = [self._packed_experts([stems], packing, has_bias=has_bias) for stems in stored]
            return parts[0] if len(parts) == 1 else ExpertsSideBySide(tuple(parts))
        bias = self._stack(stored, "bias", self.dtype) if has_bias else None
        if packing is None:
            return ExpertLinear(self._stack(stored, "weight", self.dtype), bias)
        return ExpertLinear(self._unpack_experts(stored, packing), bias)

    def check_copies(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse a stored copy that differs from its original: dropping it would change results."""
        for spec in specs:
            if spec.copy_of is None or spec.name not in self._facts:
                continue
            # Opened for this alone: comparing materialises both, and the original is read again.
            original, copy = self._lazy.reopen(spec.copy_of), self._lazy.reopen(spec.name)
            equal = mx.array_equal(original, copy)
            self._evaluate(equal, [spec.name])
            if not equal.item():
                problem = f"differs from {spec.copy_of}, to which the config ties it"
                raise self._facts[spec.name].error(problem)
            self._lazy.discard(spec.name)

    def finish(self, specs: Sequence[TensorSpec]) -> None:
        """Assert that the architecture took all that it said it needs."""
        required = {spec.name for spec in specs if spec.required}
        left = required & set(self._lazy)
        if left:
            raise AssertionError(f"never taken: {some_names(left)}")
        self._lazy.clear()
        self._progress(self._total_nbytes, self._total_nbytes)

    def _linear(self, stems: Sequence[str], *, has_bias: bool) -> Linear | PackedLinear:
        bias = self.take_stacked([f"{stem}.bias" for stem in stems]) if has_bias else None
        packing = self._packing.get(f"{stems[0]}.weight")
        if packing is not None and self.keeps_packed:
            return self._packed_linear(stems, packing, bias)
        return Linear(self._plain_weight(stems), bias).turn_once()

    def _plain_weight(self, stems: Sequence[str]) -> mx.array:
        """Return weights as numbers, joined, evaluated; those that are packed are unpacked."""
        names = [f"{stem}.weight" for stem in stems]
        packings = [self._packing.get(name) for name in names]
        if not any(packings):
            return self.take_stacked(names)
        if packings[0] is not None and len(set(packings)) == 1 and not self._own_scales(stems):
            return self._unpack(stems, packings[0])
        parts = [
            self.take(name) if packing is None else self._unpack([stem], packing)
            for stem, name, packing in zip(stems, names, packings, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        weight = mx.concatenate(parts, axis=0)
        self._evaluate(weight, names)
        return weight

    def _packed_linear(
        self, stems: Sequence[str], packing: Packing, bias: mx.array | None
    ) -> PackedLinear:
        self._pack(stems, packing)
        parts = self._packed_parts(stems, packing, scales_as=self.dtype)
        own = self._own_scale(stems)
        own = None if own is None else own.reshape(())
        form = None if packing.has_offsets else self.dtype
        return PackedLinear(*parts, packing, bias, own, form)

    def _pack(self, stems: Sequence[str], packing: Packing) -> None:
        """Put the packed parts of weights that are stored in numbers in their place."""
        parts = ("weight", "scales", "biases") if packing.has_offsets else ("weight", "scales")
        for stem in stems:
            names = [f"{stem}.{part}" for part in parts]
            if names[0] not in self._on_load:
                continue
            plain, fact = self._pop(names[0]), self._facts[names[0]]
            self._evaluate(plain, names)
            packed = packed_of(plain, packing)
            del plain
            self._lazy.put(dict(zip(names, packed, strict=True)))
            self._facts |= {name: replace(fact, name=name, nbytes=0) for name in names[1:]}

    def _packed_experts(
        self, stored: Sequence[Sequence[str]], packing: Packing, *, has_bias: bool
    ) -> PackedExpertLinear:
        for stems in stored:
            self._pack(stems, packing)
        parts = self._packed_parts(stored, packing, scales_as=self.dtype)
        bias = self._stack(stored, "bias", self.dtype) if has_bias else None
        form = None if packing.has_offsets else self.dtype
        return PackedExpertLinear(*parts, packing, bias, self._own_scale(stored[0]), form)

    def _packed_parts(
        self,
        stored: Sequence[str] | Sequence[Sequence[str]],
        packing: Packing,
        *,
        scales_as: mx.Dtype,
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return words, scales and offsets of linears that are joined, or of stacks of experts'.

        scales_as: what scales and offsets are read as, unless they are bytes.
        """

        def take(part: str, dtype: mx.Dtype) -> mx.array:
            if isinstance(stored[0], str):
                return self._join([f"{stem}.{part}" for stem in stored], dtype)
            return self._stack(stored, part, dtype)

        kind = scales_as if packing.has_offsets else mx.uint8
        words, scales = take("weight", mx.uint32), take("scales", kind)
        return words, scales, take("biases", kind) if packing.has_offsets else None

    def _stored_stems(self, stack: Stack) -> Sequence[str]:
        return [stack.stem] if f"{stack.stem}.weight" in self._facts else stack.parts

    def _own_scales(self, stems: Sequence[str]) -> bool:
        return any(f"{stem}.global_scale" in self._lazy for stem in stems)

    def _rename(self, specs: Sequence[TensorSpec]) -> None:
        """Make what is stored in place of others into these, lazily, by their names."""
        sources = {spec.name: spec.source for spec in specs if spec.source is not None}
        shares = Counter(source.name for source in sources.values())
        facts = {
            name: replace(fact, name=name, nbytes=fact.nbytes // shares[fact.name])
            for name, fact in ((name, self._facts[source.name]) for name, source in sources.items())
        }
        for name in shares:
            del self._facts[name]
        self._lazy.derive(
            {
                name: (source.name, partial(apply_operation, source))
                for name, source in sources.items()
            }
        )
        self._facts |= facts

    def _stack(self, stored: Sequence[Sequence[str]], part: str, dtype: mx.Dtype) -> mx.array:
        """Return stacks joined along their outputs, each stored as one tensor or in slices."""
        names = [[f"{stem}.{part}" for stem in stems] for stems in stored]
        whole = 2 if part == "bias" else 3
        shapes = [self._facts[group[0]].shape for group in names]
        array = self._read(*joined_slabs(names, shapes, whole=whole), dtype)
        if array is None:
            stacks = [stack_of([self._pop(name) for name in group], whole=whole) for group in names]
            array = self._join_lazily(stacks, [name for group in names for name in group], 1, dtype)
        self._finish_reading(array, [name for group in names for name in group])
        return array

    def _join(self, names: Sequence[str], dtype: mx.Dtype) -> mx.array:
        shape = self._facts[names[0]].shape
        if len(names) > 1:
            shape = (sum(self._facts[name].shape[0] for name in names), *shape[1:])
        array = self._read([(name, None) for name in names], shape, dtype)
        if array is None:
            array = self._join_lazily([self._pop(name) for name in names], names, 0, dtype)
        self._finish_reading(array, names)
        return array

    def _read(
        self, slabs: Sequence[Slab], shape: Sequence[int], dtype: mx.Dtype
    ) -> mx.array | None:
        array = self._lazy.read(slabs, shape, dtype=WORDS[dtype])
        return None if array is None else array.astype(dtype)

    def _join_lazily(
        self, parts: list[mx.array], names: Sequence[str], axis: int, dtype: mx.Dtype
    ) -> mx.array:
        """Return lazy parts joined along an axis, each let go of before the next is evaluated."""
        if len(parts) == 1:
            return parts[0].astype(dtype)
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        whole, first = mx.zeros(shape, dtype), 0
        while parts:
            part = parts.pop(0)
            place = slice(first, first + part.shape[axis])
            whole[(slice(None),) * axis + (place,)] = part.astype(dtype)
            first = place.stop
            del part
            self._evaluate(whole, names)
        return whole

    def _unpack(self, stems: Sequence[str], packing: Packing) -> mx.array:
        """Return packed weights, joined, as numbers, evaluated.

        Of those that have a scale of their own there is one.
        """
        own = self._own_scale(stems)
        return self._numbers(stems, packing, None if own is None else own.reshape(()))

    def _unpack_experts(self, stored: Sequence[Sequence[str]], packing: Packing) -> mx.array:
        if any(self._own_scales(stems) for stems in stored):
            loose = [self._numbers([stems], packing, self._own_scale(stems)) for stems in stored]
            if len(loose) == 1:
                return loose[0]
            return self._join_lazily(loose, [f"{stored[0][0]}.weight"], 1, self.dtype)
        return self._numbers(stored, packing, None)

    def _numbers(
        self,
        stored: Sequence[str] | Sequence[Sequence[str]],
        packing: Packing,
        own: mx.array | None,
    ) -> mx.array:
        """Return packed weights as `dtype`, evaluated; `own` is their own scale."""
        parts = self._packed_parts(stored, packing, scales_as=mx.float32)
        # A small float times its scale is exact, but for scales that float16 has not.
        exact = not packing.has_offsets and own is None and self.dtype != mx.float16
        packed = PackedWeight(*parts, packing, global_scale=own)
        return numbers_of(packed, exact_in=self.dtype if exact else mx.float32, dtype=self.dtype)

    def _own_scale(self, stems: Sequence[str]) -> mx.array | None:
        """Return the scales of whole weights, float32 [weights]; None where they have none."""
        if not self._own_scales(stems):
            return None
        names = [f"{stem}.global_scale" for stem in stems]
        own = mx.concatenate([self._pop(name).astype(mx.float32).reshape(-1) for name in names])
        self._finish_reading(own, names)
        return own

    def _pop(self, name: str) -> mx.array:
        """Return a tensor: lazy, unless it has to be unpacked for whoever takes it."""
        array, packing = self._lazy.pop(name), self._blocks.get(name)
        if packing is None:
            return array
        scales = self._lazy.pop(block_scales_name(name))
        pieces = []
        for piece in numbers_of_blocks(array, scales, packing, dtype=self.dtype):
            self._evaluate(piece, [name])
            pieces.append(piece)
        self._finish_reading(array, [block_scales_name(name)])
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-2)

    def _evaluate(self, array: mx.array, names: Sequence[str]) -> None:
        try:
            mx.eval(array)
        except RuntimeError as error:
            raise why_not_read([self._facts[name] for name in names], error) from error

    def _finish_reading(self, array: mx.array, names: Sequence[str]) -> None:
        self._evaluate(array, names)
        self._read_nbytes += sum(self._facts[name].nbytes for name in names)
        self._progress(self._read_nbytes, self._total_nbytes)
