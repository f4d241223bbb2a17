"""Expected reuse: from past uses with decay, and from what waits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_controller.core.placement.reuse import Usage, cost, requests_ahead, total
from mlxd_shared import config
from tests.support.effort import SAME_EACH_TIME, examples

times = st.lists(st.floats(0, 1e6), max_size=20).map(sorted)


def usage_of(moments: list[float]) -> Usage:
    """Return the usage after uses at these moments."""
    usage = Usage()
    for moment_s in moments:
        usage = usage.add_use(moment_s)
    return usage


def test_a_use_counts_half_after_the_half_life() -> None:
    """Decay halves the count in each half-life."""
    usage = Usage().add_use(100.0)

    assert usage.at(100.0) == 1.0
    assert usage.at(100.0 + config.USES_HALF_LIFE_S) == 0.5


def test_the_share_of_uses_says_how_far_the_next_one_is() -> None:
    """A model with a quarter of all uses is expected within four requests."""
    often, seldom = usage_of([0.0, 0.0, 0.0]), usage_of([0.0])
    all_uses = total([often, seldom], 0.0)

    assert requests_ahead(seldom, total_uses=all_uses, now_s=0.0) == pytest.approx(4.0, rel=0.01)
    assert requests_ahead(often, total_uses=all_uses, now_s=0.0) == pytest.approx(4 / 3, rel=0.01)


def test_what_waits_for_others_comes_before() -> None:
    """Requests known to be for other models put the next use off by as many."""
    assert requests_ahead(Usage().add_use(0.0), total_uses=1.0, now_s=0.0, waiting=7) == 8.0


def test_a_cost_is_the_reload_over_the_requests_it_is_spread_on() -> None:
    """Reload seconds by the chance that the next request is for the model."""
    assert cost(10.0, 4.0) == 2.5


@settings(max_examples=examples(200), deadline=None, derandomize=SAME_EACH_TIME, database=None)
@given(moments=times, others=times, later_s=st.floats(0, 1e9))
def test_a_cost_is_finite_and_one_more_use_never_lowers_it(
    moments: list[float], others: list[float], later_s: float
) -> None:
    """Whatever was used when: the cost is a number, at least 0, and rises with a use."""
    now_s = max([*moments, *others, 0.0]) + later_s
    usage, other = usage_of(moments), usage_of(others)

    def cost_of(mine: Usage) -> float:
        all_uses = total([mine, other], now_s)
        return cost(3.0, requests_ahead(mine, total_uses=all_uses, now_s=now_s))

    before, after = cost_of(usage), cost_of(usage.add_use(now_s))

    assert math.isfinite(before)
    assert 0 <= before <= after * (1 + 1e-9)
    assert after <= 3.0
