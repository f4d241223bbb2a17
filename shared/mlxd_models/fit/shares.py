"""One model over several ranks: what each has of it, and which models cannot be divided. Pure.

Invariants:
- All ranks have equally much: heads, and the inner values of a feed-forward, are divided evenly.
- Experts are divided inside: each rank has a part of every one, and the whole router.
- The embedding, the head and the norms are whole on every rank.
- What cannot be divided is refused by name, before any weight is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mlxd_models.describe import Description
from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.experts import ExpertsConfig
from mlxd_models.families.common.packing import ON_LOAD, Recipe
from mlxd_models.fit.parts import (
    COLUMNS,
    ROWS,
    Side,
    fact_of_part,
    parts_of,
    side_of,
    spec_of_rank,
    uneven_problem,
)
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_shared.domain.requests import LoadSpec

__all__ = [
    "COLUMNS",
    "DIVIDED_BUILDER",
    "ROWS",
    "check_divides",
    "rank_config",
    "rank_description",
]

DIVIDED_BUILDER: Final = "mlxd_worker.models.families.llama"
"""What builds the models that can be divided."""


def check_divides(described: Description, spec: LoadSpec, ranks: int) -> None:
    """Refuse a model, or a form of its weights, that `ranks` ranks cannot share.

    Raises:
        InvalidModel: names the key of config.json, the kind of layer, or the tensor.
        InvalidRequest: names the option.
    """
    its = described.config
    if described.family.builder != DIVIDED_BUILDER or not isinstance(its, DecoderConfig):
        problem = f"its layers are of a kind that is not divided over {ranks} ranks"
        whole = f"{described.architecture}: {problem}"
        raise InvalidModel(whole, file="config.json", field="architectures")
    sizes = {"num_attention_heads": its.heads, "num_key_value_heads": its.kv_heads}
    if its.experts is None or not all(its.experts.layers):
        sizes["intermediate_size"] = its.mlp
    for key, size in sizes.items():
        if size % ranks:
            problem = f"{size} cannot be divided over {ranks} ranks"
            raise InvalidModel(problem, file="config.json", field=key)
    facts = {fact.name: fact for fact in described.facts}
    for tensor in described.specs:
        if tensor.required and (problem := uneven_problem(tensor, ranks)):
            fact = facts[tensor.stored_name]
            raise fact.error(problem, field=fact.stored_name)
    if spec.weights in ON_LOAD:
        _check_packs(described, spec, ranks, ON_LOAD[spec.weights])


def _check_packs(described: Description, spec: LoadSpec, ranks: int, recipe: Recipe) -> None:
    """Refuse to pack, on loading, what would have groups that lie on two ranks."""
    for tensor in described.specs:
        if not tensor.packable or tensor.packed or side_of(tensor.name) is not Side.INPUTS:
            continue
        packing, inputs = recipe.of(tensor.name, tensor.shape), tensor.shape[-1]
        if packing is not None and not packing.suits(inputs // ranks):
            groups = f"not whole groups of {packing.group_size} on each"
            problem = f"{inputs} inputs of {tensor.name} over {ranks} ranks are {groups}"
            raise InvalidRequest.of("options.weights", f"{spec.weights.value}: {problem}")


def rank_config(its: DecoderConfig, ranks: int) -> DecoderConfig:
    """Return the config of the part that one of the ranks has; they divide it."""
    experts = None if its.experts is None else _rank_experts(its.experts, ranks)
    return replace(
        its,
        heads=its.heads // ranks,
        kv_heads=its.kv_heads // ranks,
        mlp=its.mlp // ranks,
        experts=experts,
    )


def _rank_experts(its: ExpertsConfig, ranks: int) -> ExpertsConfig:
    shared = its.shared
    shared = None if shared is None else replace(shared, mlp=shared.mlp // ranks)
    return replace(its, mlp=its.mlp // ranks, shared=shared)


def rank_description(described: Description, ranks: int) -> Description:
    """Return the description of what one of the ranks has, for the fit alone.

    The form of the numbers is the whole's: it follows from most of what is stored.
    """
    parts = parts_of(described.specs, 0, ranks)
    facts = tuple(fact_of_part(fact, parts.get(fact.name)) for fact in described.facts)
    elsewhere = sum(fact.nbytes for fact in described.facts) - sum(fact.nbytes for fact in facts)
    return replace(
        described,
        config=rank_config(described.config, ranks),
        facts=facts,
        specs=tuple(spec_of_rank(spec, ranks) for spec in described.specs),
        stored_nbytes=described.stored_nbytes - elsewhere,
        stored_as=described.stored,
    )
