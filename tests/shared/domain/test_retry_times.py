"""When those come back who were refused because too many came at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxd_shared import config
from mlxd_shared.domain.retry_times import retry_after_s

PER_S = int(config.CALLS_RETRY_PER_S)
ROUND = PER_S * int(config.CALLS_RETRY_MAX_S)
"""So many have a place of their own."""
UNEVEN_MAX = 8


@example(first=1, crowd=1904, begin=1.0)
@given(first=st.integers(1, 3 * ROUND), crowd=st.integers(1, 2 * ROUND), begin=st.floats(0.0, 62.0))
def test_no_second_is_promised_to_more_than_its_share(first: int, crowd: int, begin: float) -> None:
    """Whichever second one looks at, whoever was refused before, however many there are."""
    waits = sorted(retry_after_s(number) for number in range(first, first + crowd))
    within = bisect_left(waits, begin + 1.0) - bisect_left(waits, begin)

    assert within <= PER_S * math.ceil(crowd / ROUND) + UNEVEN_MAX
    assert waits[0] >= config.CALLS_RETRY_MIN_S
    assert waits[-1] < config.CALLS_RETRY_MIN_S + config.CALLS_RETRY_MAX_S
    assert len(set(waits)) == crowd


@pytest.mark.parametrize("crowd", [10, 100, PER_S])
def test_a_small_crowd_comes_back_apart_too(crowd: int) -> None:
    """Over the first second, not at its beginning."""
    tenths = Counter(int(retry_after_s(number) / 0.1) for number in range(1, crowd + 1))

    assert len(tenths) == min(crowd, 10)
    assert max(tenths.values()) <= crowd / 10 + 3


def test_whoever_was_refused_earlier_comes_back_earlier() -> None:
    """By seconds: what is free then is for them."""
    waits = [retry_after_s(number) for number in range(1, ROUND + 1)]
    by_second = Counter(int(wait) for wait in waits)

    assert set(by_second.values()) == {PER_S}
    assert [int(wait) for wait in waits] == sorted(int(wait) for wait in waits)
