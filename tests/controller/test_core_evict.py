"""The choice of victims: sufficient, no larger than needed, least recently used first."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_controller.core.evict import Victim, choose
from tests.support.effort import SAME_EACH_TIME, examples

A = Victim("a", 10, 1.0)
B = Victim("b", 20, 2.0)
C = Victim("c", 40, 3.0)

victims = st.lists(
    st.builds(
        Victim,
        digest=st.text("abcdefgh", min_size=1, max_size=3),
        nbytes=st.integers(0, 50),
        last_used_s=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    max_size=7,
    unique_by=lambda v: v.digest,
).map(tuple)


def test_the_least_recently_used_goes_first() -> None:
    """Where one victim is enough, it is the one that was used longest ago."""
    assert choose((C, A, B), shortfall_bytes=10, shortfall_slots=0) == (A,)


def test_a_victim_that_later_ones_make_superfluous_stays() -> None:
    """A small old model is not evicted in vain where a large one must go anyway."""
    assert choose((A, B, C), shortfall_bytes=40, shortfall_slots=0) == (C,)


def test_a_slot_counts_like_memory() -> None:
    """A limit on the number of models evicts as many as are too many, however small."""
    assert choose((A, B, C), shortfall_bytes=0, shortfall_slots=2) == (A, B)


def test_nobody_goes_where_all_together_are_too_few() -> None:
    """No set suffices: None, not the largest that there is."""
    assert choose((A, B, C), shortfall_bytes=71, shortfall_slots=0) is None
    assert choose((), shortfall_bytes=1, shortfall_slots=0) is None


def test_nobody_goes_where_nothing_is_short() -> None:
    """An empty set suffices for nothing."""
    assert choose((A,), shortfall_bytes=0, shortfall_slots=0) == ()


@settings(max_examples=examples(200), deadline=None, derandomize=SAME_EACH_TIME, database=None)
@given(found=victims, short_bytes=st.integers(-10, 150), short_slots=st.integers(-1, 5))
def test_a_choice_is_sufficient_minimal_and_exists_when_it_can(
    found: tuple[Victim, ...], short_bytes: int, short_slots: int
) -> None:
    """Against every subset: None only if no subset suffices; no member can be left out."""

    def sufficient(some: tuple[Victim, ...]) -> bool:
        return sum(v.nbytes for v in some) >= short_bytes and len(some) >= short_slots

    chosen = choose(found, shortfall_bytes=short_bytes, shortfall_slots=short_slots)

    assert chosen == choose(found[::-1], shortfall_bytes=short_bytes, shortfall_slots=short_slots)
    if chosen is None:
        every = itertools.chain.from_iterable(
            itertools.combinations(found, n) for n in range(len(found) + 1)
        )
        assert not any(sufficient(subset) for subset in every)
        return
    assert sufficient(chosen)
    for victim in chosen:
        assert not sufficient(tuple(v for v in chosen if v is not victim))
