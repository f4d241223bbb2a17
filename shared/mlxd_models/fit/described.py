"""From a model's description to what plans reckon with. Pure."""

from __future__ import annotations

import math

from mlxd_models.describe import Description, packs_on_load
from mlxd_models.families.common.packing import ON_LOAD, WORD_BITS, Packing
from mlxd_models.fit.facts import ModelFacts, Packable
from mlxd_models.sizes.weight_forms import Packed


def facts_of(described: Description) -> ModelFacts:
    """Return the facts; none of making tensors while loading, which a load in place does not count.

    Numbers live in the form that most are stored in, whatever each one is stored in.
    """
    footprint, item_bytes = described.footprint, described.stored.nbytes
    packed = described.packed or Packed(0, described.weight_values, 0)
    packed_values = _packed_values(described)
    elements = described.weight_values
    return ModelFacts(
        architecture=described.family.builder,
        stored_bytes=packed.kept_nbytes + packed.values * item_bytes,
        elements=elements,
        item_bytes=item_bytes,
        heads=footprint.passes.heads,
        caches=footprint.caches,
        projected_values=footprint.passes.projected,
        hidden_size=footprint.passes.hidden,
        intermediate_size=footprint.passes.mlp,
        vocab_size=footprint.vocab,
        context_length_max=footprint.context_max,
        unpacked_values=packed.unpacked_values,
        recurrent_values=footprint.passes.recurrent,
        packed_values=packed_values,
        packed_bytes=packed.kept_nbytes,
        packed_scales=packed.values - (elements - packed_values),
        packable={each.group_size: _packable(described, each) for each in ON_LOAD.values()},
    )


def _packed_values(described: Description) -> int:
    """Return how many values are stored packed, and stay so."""
    return sum(
        math.prod(spec.shape) * WORD_BITS // spec.packing.bits
        for spec in described.specs
        if spec.required and spec.packed and spec.packing is not None and spec.packing.stays
    )


def _packable(described: Description, packing: Packing) -> Packable:
    made = (s for s in described.specs if s.required and not s.packed and packs_on_load(s, packing))
    packed = described.packed_as(packing)
    unpacked_values = 0 if packed is None else packed.unpacked_values
    return Packable(sum(math.prod(spec.shape) for spec in made), unpacked_values)
