"""From a model's description to what plans reckon with, and from a plan to what a load makes. Pure.

Invariants:
- Numbers live in the form that most are stored in, whatever each one is stored in; what is packed
  stays as it is.
- What a builder joins, or takes apart, is there twice for a moment (`TensorSpec.joins`).
- The order is a load's: the embedding, then layer by layer the mixer and the feed-forward; then the
  norm and the head.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlxd_models.describe import Description, kept_of
from mlxd_models.families.common.packing import ON_LOAD, Packing, Recipe
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.fit.facts import ModelFacts, Packable, Taken
from mlxd_models.fit.plan import Plan
from mlxd_models.fit.terms import form_of_numbers
from mlxd_models.sizes.weight_forms import (
    AS_NUMBERS,
    LAYER_PREFIX,
    TOWER_PREFIX,
    FloatType,
    unpacked_weight_values,
)
from mlxd_shared.domain.requests import Weights


def facts_of(described: Description) -> ModelFacts:
    """Return the facts, but for what a load makes of each tensor (`taken_of`)."""
    footprint, item_bytes = described.footprint, described.stored.nbytes
    elements, kept = described.weight_values, described.kept
    packed = [(s.name, s.values) for s in described.specs if s.required and s.packed]
    packed_values = sum(values for _, values in packed)
    return ModelFacts(
        architecture=described.architecture,
        stored_bytes=described.stored_nbytes,
        elements=elements,
        item_bytes=item_bytes,
        caches=footprint.caches,
        passes=footprint.passes,
        context_length_max=footprint.context_max,
        unpacked_values=unpacked_weight_values(packed),
        tokenizer_bytes=described.tokenizer_nbytes,
        dropped_bytes=described.stored_nbytes - kept.nbytes(item_bytes),
        packed_values=packed_values,
        packed_bytes=kept.fixed_nbytes,
        packed_scales=kept.values - (elements - packed_values),
        exact_values=sum(spec.values for spec in described.specs if spec.required and spec.exact),
        packable=_packable(described.specs, packed),
        sight=footprint.sight,
        unseeing=described.unseeing,
    )


def _packable(
    specs: Iterable[TensorSpec], stored: list[tuple[str, int]]
) -> dict[Weights, Packable]:
    """Return what a load can pack in each form, besides what is stored packed."""
    plain = [spec for spec in specs if spec.required and spec.packable]
    packables: dict[Weights, Packable] = {}
    for weights, recipe in ON_LOAD.items():
        made: list[tuple[str, int]] = []
        parts: Counter[Packing] = Counter()
        for tensor in plain:
            packing = recipe.of(tensor.name, tensor.shape)
            if packing is not None:
                made.append((tensor.name, tensor.values))
                parts[packing] += tensor.values
        packables[weights] = Packable(dict(parts), unpacked_weight_values([*stored, *made]))
    return packables


def taken_of(model: Description) -> tuple[Taken, ...]:
    """Return what a load makes of the tensors: of each size what it makes last."""
    stored = {fact.name: fact.nbytes for fact in model.facts}
    groups: dict[str, list[TensorSpec]] = {}
    for spec in _in_turn(spec for spec in model.specs if spec.required):
        groups.setdefault(spec.joins or spec.name.rpartition(".")[0], []).append(spec)
    last: dict[tuple[int, int, bool], Taken] = {}
    later_values = later_bytes = 0
    for parts in reversed(groups.values()):
        count = sum(part.values for part in parts)
        nbytes = sum(stored[name] for name in {part.stored_name for part in parts})
        kept = sum(kept_of(part).nbytes(model.stored.nbytes) for part in parts)
        joined = any(part.joins for part in parts)
        widened = None if kept == nbytes else kept
        taken = Taken(count, nbytes, joined, later_values, later_bytes, widened)
        last.setdefault((count, nbytes, joined), taken)
        later_values, later_bytes = later_values + count, later_bytes + kept
    return tuple(last.values())


def _in_turn(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors as a load takes them."""
    layers: dict[str, int] = {}

    def turn(spec: TensorSpec) -> tuple[int, bool]:
        if not spec.name.startswith(LAYER_PREFIX):
            is_first = "embed" in spec.name and not spec.name.startswith(TOWER_PREFIX)
            return (-1 if is_first else sys.maxsize), False
        layer, _, inner = spec.name.removeprefix(LAYER_PREFIX).partition(".")
        return layers.setdefault(layer, len(layers)), inner.startswith("mlp.")

    return sorted(specs, key=turn)


@dataclass(frozen=True, slots=True)
class Life:
    """What a load makes of the weights."""

    weights: Weights
    """As in the status: weights in numbers are named by their form, stored so or not."""
    form: FloatType
    """What numbers become, scales and offsets among them."""
    packed: bool
    """Whether weights that are stored packed stay so."""
    on_load: Recipe | None
    """How others are packed then."""


def life_of(plan: Plan, described: Description, *, on_cpu: bool) -> Life:
    """Return what a load makes of the weights to follow a plan."""
    form = form_of_numbers(plan.weights, on_cpu=on_cpu) or described.stored
    on_load = ON_LOAD.get(plan.weights)
    weights, packed = plan.weights, on_load is not None
    if weights is Weights.STORED:
        packed = described.packed
        if not packed:
            weights = next(each for each, its_form in AS_NUMBERS.items() if its_form is form)
    return Life(weights, form, packed, on_load)
