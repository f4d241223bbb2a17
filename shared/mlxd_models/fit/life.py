"""What a load makes of the weights to follow a plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_models.describe import Description
from mlxd_models.families.common.packing import ON_LOAD, Packing
from mlxd_models.fit.plan import Plan
from mlxd_models.fit.terms import form_of_numbers
from mlxd_models.sizes.weight_forms import AS_NUMBERS, FloatType
from mlxd_shared.domain.requests import Weights


@dataclass(frozen=True, slots=True)
class Life:
    """What a load makes of the weights."""

    weights: Weights
    """As the status has it: numbers of one form are told by their form, stored so or not."""
    form: FloatType
    """What numbers become, scales and offsets among them."""
    packed: bool
    """Whether weights that are stored packed stay so."""
    on_load: Packing | None
    """What others become then."""


def life_of(plan: Plan, described: Description, *, on_cpu: bool) -> Life:
    """Return what a load makes of the weights to follow a plan."""
    form = form_of_numbers(plan.weights, on_cpu=on_cpu) or described.stored
    on_load = ON_LOAD.get(plan.weights)
    weights, packed = plan.weights, on_load is not None
    if weights is Weights.STORED:
        packed = described.packed is not None
        if not packed:
            weights = next(each for each, its_form in AS_NUMBERS.items() if its_form is form)
    return Life(weights, form, packed, on_load)
