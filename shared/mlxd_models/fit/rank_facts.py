"""What one rank has of a model, by how many ranks share it, as facts for plans. Pure."""

from __future__ import annotations

from dataclasses import replace

from mlxd_models.describe import Description
from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.fit.described import facts_of, taken_of
from mlxd_models.fit.facts import ModelFacts, Parts
from mlxd_models.fit.shares import check_divides, rank_description
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import LoadSpec, Weights


def whole_facts(described: Description) -> ModelFacts:
    """Return the facts, with what a load makes of each tensor."""
    return replace(facts_of(described), taken=taken_of(described))


def parts_of_ranks(described: Description) -> Parts:
    """Return the facts of each rank's part, by how many ranks there are.

    What cannot be divided has no part, and the reason stands in its place. Takes as long as
    `whole_facts` for each number of ranks, and longer.
    """
    parts: dict[int, ModelFacts] = {}
    undivided: dict[tuple[int, Weights], str] = {}
    for ranks in config.RANKS_SERVED:
        if ranks == 1:
            continue
        problem = _problem(described, Weights.AUTO, ranks)
        if problem:
            undivided |= {(ranks, weights): problem for weights in Weights}
            continue
        parts[ranks] = whole_facts(rank_description(described, ranks))
        for weights in ON_LOAD:
            if problem := _problem(described, weights, ranks):
                undivided[ranks, weights] = problem
    return Parts(parts, undivided)


def _problem(described: Description, weights: Weights, ranks: int) -> str:
    try:
        check_divides(described, LoadSpec(weights=weights), ranks)
    except MlxdError as error:
        return error.describe()
    return ""
