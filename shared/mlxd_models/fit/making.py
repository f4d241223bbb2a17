"""What a load makes of stored tensors, and in which order: from their specs. Pure.

Invariants:
- What a builder joins, or takes apart, is there twice for a moment (`TensorSpec.joins`).
- The order is a load's: the embedding, then layer by layer the mixer and the feed-forward; then the
  norm and the head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from mlxd_models.describe import Description, kept_of
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.fit.facts import Taken
from mlxd_models.sizes.packed_weights import LAYER_PREFIX


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
            return (-1 if "embed" in spec.name else sys.maxsize), False
        layer, _, inner = spec.name.removeprefix(LAYER_PREFIX).partition(".")
        return layers.setdefault(layer, len(layers)), inner.startswith("mlp.")

    return sorted(specs, key=turn)
