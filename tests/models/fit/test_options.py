"""What a load may ask of a model: by its own facts, or by the most that a config may mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mlxd_shared
from mlxd_models.describe import describe
from mlxd_models.families.common.packing import Packing
from mlxd_models.files.model_source import files_of
from mlxd_models.fit.facts import Division, Packable
from mlxd_models.fit.options import check_options
from mlxd_models.fit.rank_facts import parts_of_ranks, whole_facts
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions, Weights
from tests.support.model_facts import facts

DEMO = describe(files_of(Path(mlxd_shared.__file__).parent / "demo_model"))
BIASED = LoadSpec(sampling=SamplingOptions(logit_bias=((63, 1.0), (64, 1.0))))


@pytest.mark.parametrize(
    ("spec", "field"),
    [(LoadSpec(weights=Weights.Q8), "weights"), (BIASED, "sampling.logit_bias[64]")],
)
def test_only_a_models_own_facts_refuse_weights_and_tokens(spec: LoadSpec, field: str) -> None:
    """Where they are the most that names may mean, the worker is left to judge."""
    with pytest.raises(InvalidRequest) as caught:
        check_options(facts(1), spec)
    assert [violation.field for violation in caught.value.violations] == [f"options.{field}"]

    check_options(facts(1), spec, exact=False)
    with pytest.raises(InvalidRequest):
        check_options(facts(1), LoadSpec(context_length=1 << 20), exact=False)


def test_ranks_that_cannot_share_a_model_are_refused_by_name() -> None:
    """By the reason that stands in the facts, for all weights or for a form of them; one may."""
    parts = parts_of_ranks(DEMO)
    demo = replace(whole_facts(DEMO), division=Division(parts))
    for ranks in (1, 2, 4):
        check_options(demo, LoadSpec(ranks=ranks))
    assert parts.of_ranks[4].elements < parts.of_ranks[2].elements < demo.elements
    for spec, named in (
        (LoadSpec(ranks=8), "num_key_value_heads"),
        (LoadSpec(ranks=2, weights=Weights.Q4), "q4"),
    ):
        with pytest.raises(InvalidRequest, match=named) as caught:
            check_options(demo, spec)
        assert caught.value.violations[0].field == "options.ranks"
    with pytest.raises(InvalidRequest):
        check_options(facts(1), LoadSpec(ranks=2))


def test_weights_that_are_packed_already_or_can_be_may_be_packed() -> None:
    """What is stored packed stays so; what is in numbers and divides into groups becomes so."""
    stored = replace(facts(1), packed_values=64)
    made = replace(facts(1), packable={Weights.Q8: Packable({Packing(64, 8): 64}, 0)})

    check_options(stored, LoadSpec(weights=Weights.Q8))
    check_options(made, LoadSpec(weights=Weights.Q8))
