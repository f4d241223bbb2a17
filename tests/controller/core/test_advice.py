"""What is suggested would make it fit: each suggestion is followed, and none was guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core.advice import suggestions
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_shared.config import MIB
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from mlxd_shared.domain.units import parse_bytes
from tests.support.model_facts import device, facts

WIDE = device(1 << 20)
LONG = replace(
    facts(10, context_max=1 << 16), caches=CacheSizes(4 * 2 * 64, kv_heads=1, head_dim=64)
)
ASKED = LoadSpec(1 << 16, 8, weights=Weights.FLOAT32, prefix_cache_nbytes=0)


def need(model: ModelFacts, spec: LoadSpec) -> int:
    """Return what a life that was asked for needs."""
    return plan_load(model, spec, WIDE).need_bytes


def advice(model: ModelFacts, spec: LoadSpec, budget_bytes: int) -> tuple[str, ...]:
    """Return what is suggested where there is so much memory."""
    small = replace(WIDE, budget_bytes=budget_bytes, usable_bytes=budget_bytes)
    return suggestions(model, plan_load(model, spec, small), small)


@pytest.mark.parametrize("context", [256, 4096, 1 << 15])
def test_a_context_is_the_longest_power_of_two_that_fits(context: int) -> None:
    """It fits to the byte, and the next one would not."""
    enough = need(LONG, replace(ASKED, context_length=context))
    assert advice(LONG, ASKED, enough)[0] == f"a context of {context} tokens"
    assert f"a context of {context} tokens" not in advice(LONG, ASKED, enough - 1)


@pytest.mark.parametrize(
    ("rows", "text"), [(1, "one stream at a time (rows_max 1)"), (5, "5 streams (rows_max 5)")]
)
def test_rows_are_as_many_as_fit(rows: int, text: str) -> None:
    """One byte less, and it is one row less."""
    enough = need(LONG, replace(ASKED, rows_max=rows))
    assert text in advice(LONG, ASKED, enough)
    assert text not in advice(LONG, ASKED, enough - 1)


@pytest.mark.parametrize(
    ("kv_format", "text"),
    [
        (KVFormat.Q8, "keys and values in 8 bits (kv_format q8)"),
        (KVFormat.Q4, "keys and values in 4 bits (kv_format q4)"),
    ],
)
def test_the_least_loss_of_keys_and_values_that_fits(kv_format: KVFormat, text: str) -> None:
    """Eight bits where they do, else four."""
    enough = need(LONG, replace(ASKED, kv_format=kv_format))
    assert text in advice(LONG, ASKED, enough)


def test_heads_that_do_not_divide_are_never_told_to_pack() -> None:
    """Of heads 8 wide quantised keys and values cannot be had."""
    narrow = replace(LONG, caches=CacheSizes(4 * 2 * 64, kv_heads=8, head_dim=8))
    advices = advice(narrow, ASKED, need(narrow, replace(ASKED, rows_max=1)))
    assert not any("bits" in text for text in advices)


def test_other_weights_are_those_that_fit() -> None:
    """As stored and as bfloat16 where both do; in numbers alone, where stored weights are these."""
    model = replace(facts(400), stored_bytes=100 * MIB, item_bytes=2)
    spec = LoadSpec(weights=Weights.FLOAT32)
    half = need(model, replace(spec, weights=Weights.BFLOAT16))
    assert "weights as bfloat16" in advice(model, spec, half)
    stored = need(model, replace(spec, weights=Weights.STORED))
    assert stored < half
    advices = advice(model, spec, stored)
    assert "weights as stored" in advices
    assert "weights as bfloat16" not in advices
    whole = facts(400)
    advices = advice(whole, spec, need(whole, replace(spec, weights=Weights.BFLOAT16)))
    assert "weights as bfloat16" in advices
    assert "weights as stored" not in advices


def test_a_prefix_cache_may_be_all_that_is_too_much() -> None:
    """One that was asked for, and that does not fit, is told to be smaller."""
    spec = LoadSpec(prefix_cache_nbytes=900 * MIB)
    assert "a smaller prefix cache" in advice(facts(10), spec, 500 * MIB)


def test_where_one_change_is_not_enough_all_are_named_together() -> None:
    """With the longest context that they leave; whoever follows them fits."""
    least = replace(ASKED, context_length=512, rows_max=1, kv_format=KVFormat.Q4)
    least = replace(least, weights=Weights.BFLOAT16)
    enough = need(LONG, least)
    (text,) = advice(LONG, ASKED, enough)
    assert text == (
        "a context of 512 tokens, one stream at a time (rows_max 1), weights bfloat16,"
        " kv_format q4, all together"
    )


def test_where_nothing_would_fit_the_memory_needed_is_named() -> None:
    """No change helps a model whose weights alone are too large for the machine."""
    small = device(50)
    (text,) = suggestions(facts(500), plan_load(facts(500), LoadSpec(), small), small)
    assert text.startswith("a machine with ")


def test_where_a_limit_alone_is_too_small_another_one_is_named() -> None:
    """The machine has the memory: an operator has kept it back. Whoever follows that fits."""
    (text,) = advice(facts(500), LoadSpec(), 50 * MIB)
    limit = text.rpartition("--memory-limit ")[2].removesuffix("`)")
    assert text == f"a memory limit of {limit} (`mlxd serve --memory-limit {limit}`)"
    for limit_bytes, fits in ((parse_bytes(limit), True), (parse_bytes(limit) - MIB, False)):
        followed = replace(WIDE, budget_bytes=limit_bytes, usable_bytes=limit_bytes)
        plan = plan_load(facts(500), LoadSpec(), followed)
        assert (plan.need_bytes <= limit_bytes) is fits
