"""Products with a model's weights, stored as numbers or packed in a few bits.

Invariants:
- Rows are flat `[M, inputs]`: on `[M, 1, inputs]` a packed product is M products of one row.
- A packed weight stays packed: where a product needs it unpacked, that lives for the product alone.
- Several linears over the same input are one, their rows joined while loading.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self

import mlx.core as mx

from mlxd_models.families.common.packing import NVFP4_FULL_SCALE, Packing
from mlxd_worker.kernels.packed.product import (
    PACKED_ROWS_MAX_CPU,
    packed_product,
    packed_rows_max,
    unpack_weight,
)
from mlxd_worker.kernels.vector import Norm

AddRanks = Callable[[mx.array], mx.array]
"""Adds the arrays that all ranks have at this place; lazy."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A part of a model, whose fields hold weights: arrays, norms, and parts in their turn."""

    def arrays(self) -> dict[str, mx.array]:
        """Return what the fields hold by their names, each array once; of a tuple by number."""
        named: dict[str, mx.array] = {}
        for part in [part for part in fields(self) if part.init]:
            held = getattr(self, part.name)
            if isinstance(held, tuple):
                for number, one in enumerate(held):
                    named |= named_arrays(str(number), one)
            else:
                named |= named_arrays(part.name, held)
        return named


@dataclass(frozen=True, slots=True)
class Linear(Weighted):
    """`x W^T + b` on flat rows."""

    weight: mx.array
    """[outputs, inputs]."""
    bias: mx.array | None = None
    _across: mx.array | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def dtype(self) -> mx.Dtype:
        """The weight's type."""
        return self.weight.dtype

    @property
    def across(self) -> mx.array:
        """[inputs, outputs]: the weight's own memory, turned."""
        return self.weight.T if self._across is None else self._across

    def turn_once(self) -> Self:
        """Turn the weight here and not in every pass; for one that stays. Return the linear.

        It is an operation less for a GPU's host in each product.
        """
        across = self.weight.T
        mx.eval(across)
        object.__setattr__(self, "_across", across)
        return self

    def __call__(self, rows: mx.array) -> mx.array:
        """Map [M, inputs] to [M, outputs], lazy."""
        if self.bias is None:
            return rows @ self.across
        return mx.addmm(self.bias, rows, self.across)

    def lookup(self, ids: mx.array) -> mx.array:
        """Return the weight's own rows at `ids` [M], as [M, inputs], lazy: an embedding."""
        return self.weight[ids]


@dataclass(frozen=True, slots=True)
class PackedWeight(Weighted):
    """A weight that stays packed, or a stack of them."""

    NAMES: ClassVar[Mapping[str, str]] = {"words": "weight", "offsets": "biases"}
    """What checkpoints call a field that has another name here."""
    unpacks: ClassVar[bool] = True
    """Whether it may be unpacked as a whole, for many rows."""

    words: mx.array
    """uint32 [..., outputs, packing.words(inputs)]."""
    scales: mx.array
    """[..., outputs, packing.groups(inputs)], of the type that rows have, or bytes."""
    offsets: mx.array | None
    """The same shape and type, what MLX calls biases; None where the mode has none."""
    packing: Packing
    bias: mx.array | None = None
    """[..., outputs]."""
    global_scale: mx.array | None = None
    """float32 [] or one for each of a stack: a whole weight's scale, times `NVFP4_FULL_SCALE`."""
    form: mx.Dtype | None = None
    """What it yields, where the scales do not say that."""

    @property
    def dtype(self) -> mx.Dtype:
        """The type of what it yields: the scales', unless they are bytes."""
        return self.form or self.scales.dtype

    def arrays(self) -> dict[str, mx.array]:
        """Return all that it holds, by the names that checkpoints have for it."""
        named = Weighted.arrays(self)
        return {self.NAMES.get(name, name): array for name, array in named.items()}

    def product(self, rows: mx.array, *, transpose: bool = True) -> mx.array:
        """Return the rows' product with what is packed, without its global scale; lazy."""
        how = layout_of(self.packing)
        return packed_product(
            rows, self.words, self.scales, self.offsets, transpose=transpose, **how
        )

    def cut(self, take: Callable[[mx.array], mx.array]) -> Self:
        """Return a part of it: what `take` makes of words, scales and offsets."""
        offsets = None if self.offsets is None else take(self.offsets)
        return replace(self, words=take(self.words), scales=take(self.scales), offsets=offsets)

    def numbers(self, form: mx.Dtype) -> mx.array:
        """Return it as numbers `[..., outputs, inputs]`, lazy."""
        how, own = layout_of(self.packing), self.global_scale
        return unpack_weight(
            self.words, self.scales, self.offsets, global_scale=own, dtype=form, **how
        )

    @property
    def rows_max(self) -> int:
        """Up to how many rows the product with what is packed is the faster one here."""
        how = layout_of(self.packing)
        return packed_rows_max(self.words, self.scales, self.offsets, **how)

    def stays_packed(self, rows: int) -> bool:
        """Return whether a product with so many rows leaves it packed.

        With very few any does: in a step of one stream nothing else is asked.
        """
        return rows <= PACKED_ROWS_MAX_CPU or rows <= self.rows_max


@dataclass(frozen=True, slots=True)
class PackedLinear(PackedWeight):
    """`Linear` with a weight `[outputs, inputs]` that stays packed."""

    def __call__(self, rows: mx.array) -> mx.array:
        """Map [M, inputs] to [M, outputs]; unpacks the weight where that is faster."""
        # Without its global scale a product may be beyond float16.
        unsafe = self.global_scale is not None and rows.dtype == mx.float16
        if unsafe or not self.stays_packed(rows.shape[0]):
            result = rows @ self.numbers(self.dtype).T
        else:
            result = self.product(rows)
            if self.global_scale is not None:
                result = (result * (self.global_scale / NVFP4_FULL_SCALE)).astype(rows.dtype)
        return result if self.bias is None else result + self.bias

    def lookup(self, ids: mx.array) -> mx.array:
        """Return the weight's rows at `ids`, unpacked."""
        return self.cut(lambda array: array[ids]).numbers(self.dtype)


@dataclass(frozen=True, slots=True)
class SideBySide(Weighted):
    """Several linears over the same input that are stored in forms that cannot be joined."""

    parts: tuple[Linear | PackedLinear, ...]

    @property
    def dtype(self) -> mx.Dtype:
        """The first one's."""
        return self.parts[0].dtype

    def __call__(self, rows: mx.array) -> mx.array:
        """Map [M, inputs] to [M, outputs of all]."""
        return mx.concatenate([part(rows) for part in self.parts], axis=-1)

    def lookup(self, ids: mx.array) -> mx.array:
        """Raise: an embedding is one weight, in one form."""
        raise AssertionError(f"{ids.size} rows looked up in a weight of {len(self.parts)} parts")


@dataclass(frozen=True, slots=True)
class Summed(Weighted):
    """A linear whose inputs are divided among ranks: each one's products are a part of the sum."""

    part: Linear | PackedLinear
    """This rank's inputs, without the bias, which is added once, to the sum."""
    add: AddRanks
    bias: mx.array | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """The weight's type."""
        return self.part.dtype

    def __call__(self, rows: mx.array) -> mx.array:
        """Map this rank's [M, inputs / ranks] to [M, outputs], the same on all ranks; lazy."""
        whole = self.add(self.part(rows))
        return whole if self.bias is None else whole + self.bias

    def lookup(self, ids: mx.array) -> mx.array:
        """Raise: an embedding is whole on every rank."""
        raise AssertionError(f"{ids.size} rows looked up in a weight that is divided")


Projection = Linear | PackedLinear | SideBySide | Summed
"""A weight `[outputs, inputs]`, however it is stored."""


def reorder_outputs(projection: Projection, orders: Sequence[Sequence[int]]) -> Projection:
    """Return a projection without biases whose outputs are in another order, evaluated.

    orders: of each linear that it was made of, where its outputs are.
    """
    if isinstance(projection, SideBySide):
        pairs = zip(projection.parts, orders, strict=True)
        return SideBySide(tuple(_reorder(part, [order]) for part, order in pairs))
    assert not isinstance(projection, Summed), "such models are not divided"
    return _reorder(projection, orders)


def _reorder(part: Linear | PackedLinear, orders: Sequence[Sequence[int]]) -> Linear | PackedLinear:
    places: list[int] = []
    for order in orders:
        first = len(places)
        places += [first + place for place in order]
    take = partial(mx.take, indices=mx.array(places, dtype=mx.int32), axis=0)
    if isinstance(part, Linear):
        weight = take(part.weight)
        taken: Linear | PackedLinear = replace(part, weight=weight).turn_once()
    else:
        taken = part.cut(take)
    mx.eval(list(taken.arrays().values()))
    return taken


def packed_rows_least(held: object) -> int | None:
    """Return beyond how many rows the first weight is unpacked, of a part or several.

    None: none ever is.
    """
    if isinstance(held, PackedWeight):
        return held.rows_max if held.unpacks else None
    if isinstance(held, Weighted):
        parts: Iterable[object] = (getattr(held, part.name) for part in fields(held))
    else:
        parts = held if isinstance(held, tuple) else ()
    limits = map(packed_rows_least, parts)
    return min((limit for limit in limits if limit is not None), default=None)


def named_arrays(name: str, held: object) -> dict[str, mx.array]:
    """Return a field's arrays, those of a part under `name.`; none of what holds no weights."""
    if isinstance(held, mx.array):
        return {name: held}
    if isinstance(held, Norm):
        return {name: held.weight}
    parts = held.arrays() if isinstance(held, Weighted) else {}
    return {f"{name}.{part}": array for part, array in parts.items()}


def layout_of(packing: Packing) -> dict[str, Any]:
    """Return a packing as MLX's functions take it."""
    return {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode.value}
