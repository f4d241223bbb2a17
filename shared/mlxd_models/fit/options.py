"""What a load may ask of a model, by what its files state: one rule of who plans and who loads."""

from __future__ import annotations

from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.fit.facts import ModelFacts
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import LoadSpec


def check_options(facts: ModelFacts, spec: LoadSpec, *, exact: bool = True) -> None:
    """Refuse what is asked for and cannot be had of this model.

    exact: whether `facts` are the model's own, not the most that its config may mean.

    Raises:
        InvalidRequest: such an option; names it and the limit.
    """
    wanted, most = spec.context_length, facts.context_length_max
    if wanted is not None and wanted > most:
        limit = f"{wanted} is above the model's maximum of {most} tokens"
        raise InvalidRequest.of("options.context_length", limit)
    problem = facts.caches.kv_format_problem(spec.kv_format)
    if problem is not None:
        raise InvalidRequest.of("options.kv_format", problem)
    if spec.ranks is not None:
        problem = facts.division_problem(spec.ranks, spec.weights)
        if problem is not None:
            raise InvalidRequest.of("options.ranks", f"{spec.ranks}: {problem}")
    if not exact:
        return
    vocab = facts.passes.vocab
    bad = next((token for token, _ in spec.sampling.logit_bias if token >= vocab), None)
    if bad is not None:
        field = f"options.sampling.logit_bias[{bad}]"
        raise InvalidRequest.of(field, f"the vocabulary has {vocab} tokens")
    packed_values = facts.packed_values + facts.packed_on_load(spec.weights).values
    if spec.weights in ON_LOAD and not packed_values:
        problem = f"{spec.weights.value}: no weights of this model can be packed while loading"
        raise InvalidRequest.of("options.weights", problem)
