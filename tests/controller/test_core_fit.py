"""Fit: a sum of named terms, what is asked for is never changed, what is open is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core import fit
from mlxd_shared.cache_sizes import CacheSizes
from mlxd_shared.config import MIB, ROWS_MAX_DEFAULT
from mlxd_shared.requests import LoadSpec, Weights
from tests.support.model_facts import device, facts

TERMS = ("weights", "kv", "prefix", "activations", "pool", "process")
WIDE = device(1 << 20)
# 2 KiB of keys and values a token: what a context costs is easy to see.
LONG = replace(
    facts(10, context_max=1 << 16), caches=CacheSizes(kv_values_per_token=4 * 2 * 64, head_dim=8)
)
HALVES = replace(facts(100), stored_bytes=50 * MIB, item_bytes=2)


def named(plan: fit.Plan) -> dict[str, int]:
    """Return the terms by name."""
    return {term.name: term.nbytes for term in plan.terms}


def test_the_need_is_the_sum_of_its_terms() -> None:
    """Every term is there, by name, with a note, and nothing else is counted."""
    plan = fit.plan(facts(10), LoadSpec(), WIDE)

    assert tuple(term.name for term in plan.terms) == TERMS
    assert plan.need_bytes == sum(term.nbytes for term in plan.terms)
    assert all(term.note for term in plan.terms)


def test_keys_and_values_are_counted_to_the_byte() -> None:
    """KV is context (in classes of 256) x rows x layers x 2 x heads x width x item."""
    spec = LoadSpec(context_length=300, rows_max=3)
    plan = fit.plan(facts(10), spec, WIDE)

    layer = 2 * 1 * 8 * 4 * 512 * 3
    assert named(plan)["kv"] == 2 * layer


def test_what_is_left_open_is_the_models_own() -> None:
    """Without options: the model's whole context, and the default number of rows."""
    plan = fit.plan(facts(10), LoadSpec(), WIDE)

    assert (plan.context_length, plan.rows_max) == (1024, ROWS_MAX_DEFAULT)


def test_a_context_that_was_asked_for_is_never_shortened() -> None:
    """Asked for and too large: the plan says so, and keeps what was asked for."""
    small = device(200)
    plan = fit.plan(LONG, LoadSpec(context_length=1 << 16), small)

    assert plan.context_length == 1 << 16
    assert plan.need_bytes > small.budget_bytes


def test_an_open_context_is_the_largest_power_of_two_that_fits() -> None:
    """Left open and too large: the next power of two that fits; twice as much would not."""
    small = device(400)
    plan = fit.plan(LONG, LoadSpec(), small)

    assert plan.need_bytes <= small.budget_bytes
    assert plan.context_length & (plan.context_length - 1) == 0
    twice = LoadSpec(context_length=plan.context_length * 2, weights=plan.weights)
    assert fit.plan(LONG, twice, small).need_bytes > small.budget_bytes


def test_a_cpu_takes_float32_where_it_fits_and_stored_where_not() -> None:
    """On a CPU other products are scalar loops: float32 first, as stored where memory is short."""
    assert fit.plan(HALVES, LoadSpec(), WIDE).weights is Weights.FLOAT32
    tight = device(fit.plan(HALVES, LoadSpec(), WIDE).need_bytes // MIB - 20)
    plan = fit.plan(HALVES, LoadSpec(), tight)
    assert plan.weights is Weights.STORED
    assert named(plan)["weights"] == 50 * MIB


def test_a_gpu_keeps_weights_as_stored() -> None:
    """Elsewhere the stored form is the fast one."""
    gpu = replace(WIDE, kind="metal")
    assert fit.plan(HALVES, LoadSpec(), gpu).weights is Weights.STORED


@pytest.mark.parametrize("weights", [Weights.FLOAT32, Weights.BFLOAT16, Weights.STORED])
def test_a_forced_form_is_taken(weights: Weights) -> None:
    """The operator's form stands, on every device."""
    plan = fit.plan(HALVES, LoadSpec(weights=weights), WIDE)

    assert plan.weights is weights
    size = {Weights.FLOAT32: 100, Weights.BFLOAT16: 50, Weights.STORED: 50}[weights]
    assert named(plan)["weights"] == size * MIB


def test_every_suggestion_would_fit() -> None:
    """What the report suggests was reckoned: following it fits."""
    asked = LoadSpec(context_length=1 << 16)
    small = device(400)
    plan = fit.plan(LONG, asked, small)
    found = fit.suggestions(LONG, plan, small)

    assert found
    words = found[0].split()
    shorter = replace(asked, context_length=int(words[3]), weights=plan.weights)
    assert fit.plan(LONG, shorter, small).need_bytes <= small.budget_bytes


def test_where_nothing_would_fit_the_memory_needed_is_named() -> None:
    """No shorter context helps a model whose weights alone are too large."""
    small = device(50)
    plan = fit.plan(facts(500), LoadSpec(), small)
    assert fit.suggestions(facts(500), plan, small)[0].startswith("a machine with ")
