"""From a model's description to what plans reckon with. Pure.

Invariants:
- Numbers live in the form that most are stored in, whatever each one is stored in; what is packed
  stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_models.describe import Description, kept_of
from mlxd_models.families.common.packing_on_load import GROUP_SIZES, packs
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.fit.facts import ModelFacts, Packable
from mlxd_models.sizes.cache_sizes import Held
from mlxd_models.sizes.packed_weights import unpacked_weight_values


def facts_of(described: Description) -> ModelFacts:
    """Return the facts, but for what a load makes of each tensor (`fit.making`)."""
    footprint, item_bytes = described.footprint, described.stored.nbytes
    elements, packed_values = described.weight_values, _packed_values(described.specs)
    packed = described.packed
    kept = sum((kept_of(spec) for spec in described.specs), start=Held(0, 0))
    return ModelFacts(
        architecture=described.architecture,
        stored_bytes=described.stored_nbytes,
        elements=elements,
        item_bytes=item_bytes,
        caches=footprint.caches,
        passes=footprint.passes,
        context_length_max=footprint.context_max,
        unpacked_values=0 if packed is None else packed.unpacked_values,
        tokenizer_bytes=described.tokenizer_nbytes,
        dropped_bytes=described.stored_nbytes - kept.nbytes(item_bytes),
        packed_values=packed_values,
        packed_bytes=kept.fixed_nbytes,
        packed_scales=kept.values - (elements - packed_values),
        exact_values=sum(spec.values for spec in described.specs if spec.required and spec.exact),
        packable=_packable(described.specs),
    )


def _packed_values(specs: Iterable[TensorSpec]) -> int:
    """Return how many values are stored packed."""
    return sum(spec.values for spec in specs if spec.required and spec.packed)


def _packable(specs: Iterable[TensorSpec]) -> dict[int, Packable]:
    """Return what a load can pack, by the size of groups."""
    stored = [(spec.name, spec.values) for spec in specs if spec.required and spec.packed]
    plain = [spec for spec in specs if spec.required and spec.packable]
    packables: dict[int, Packable] = {}
    for size in GROUP_SIZES:
        made = [
            (tensor.name, tensor.values)
            for tensor in plain
            if packs(tensor.name, tensor.shape, group_size=size)
        ]
        unpacked = unpacked_weight_values([*stored, *made])
        packables[size] = Packable(sum(count for _, count in made), unpacked)
    return packables
