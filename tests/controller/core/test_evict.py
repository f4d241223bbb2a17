"""The choice of victims: sufficient, the cheapest there is, by priority first."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_controller.core.placement.evict import Victim, choose
from mlxd_shared import config
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
        cost=st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]),
        priority=st.integers(-1, 1),
        places=st.integers(0, 1),
    ),
    max_size=7,
    unique_by=lambda v: v.digest,
).map(tuple)


def test_the_least_recently_used_goes_first() -> None:
    """Where one victim is enough and all cost the same, the one used longest ago goes."""
    assert choose((C, A, B), shortfall_bytes=10, shortfall_slots=0) == (A,)


def test_a_victim_that_later_ones_make_superfluous_stays() -> None:
    """A small old model is not evicted in vain where a large one must go anyway."""
    assert choose((A, B, C), shortfall_bytes=40, shortfall_slots=0) == (C,)


def test_the_cheapest_set_goes_however_recently_used() -> None:
    """Two that cost less together go before one that was used longer ago but costs more."""
    old = Victim("old", 40, 0.0, cost=3.0)
    one, two = Victim("one", 20, 9.0, cost=1.0), Victim("two", 20, 8.0, cost=1.5)

    assert choose((old, one, two), shortfall_bytes=40, shortfall_slots=0) == (two, one)


def test_a_higher_priority_stays_while_lower_ones_suffice() -> None:
    """The higher priority goes only where the lower ones are too few, however much cheaper."""
    cheap = Victim("cheap", 40, 0.0, cost=0.0, priority=1)
    dear = Victim("dear", 40, 9.0, cost=9.0)

    assert choose((cheap, dear), shortfall_bytes=40, shortfall_slots=0) == (dear,)
    assert choose((cheap, dear), shortfall_bytes=41, shortfall_slots=0) == (cheap, dear)


def test_more_than_can_be_searched_are_still_enough() -> None:
    """Beyond the bound of the search the choice is sufficient, and no member of it superfluous."""
    many = tuple(
        Victim(f"{n:03d}", 1 + n % 7, float(n), cost=1.0 + n * 37 % 11)
        for n in range(50 * config.VICTIMS_SEARCHED_MAX)
    )
    short = sum(victim.nbytes for victim in many) - 20

    chosen = choose(many, shortfall_bytes=short, shortfall_slots=0)

    assert chosen is not None
    freed = sum(victim.nbytes for victim in chosen)
    assert freed >= short
    assert all(freed - victim.nbytes < short for victim in chosen)


def test_a_slot_counts_like_memory() -> None:
    """A limit on the number of models evicts as many as are too many, however small."""
    assert choose((A, B, C), shortfall_bytes=0, shortfall_slots=2) == (A, B)


def test_a_place_is_made_by_who_lives_there() -> None:
    """Who lives elsewhere leaves a slot, however cheap, and no place."""
    there = Victim("there", 0, 0.0, places=0)
    assert choose((there, A, B), shortfall_bytes=0, shortfall_slots=1) == (there,)
    assert choose((there, A, B), shortfall_bytes=0, shortfall_slots=1, shortfall_places=1) == (A,)
    assert choose((there,), shortfall_bytes=0, shortfall_slots=0, shortfall_places=1) is None


def test_nobody_goes_where_all_together_are_too_few() -> None:
    """No set suffices: None, not the largest that there is."""
    assert choose((A, B, C), shortfall_bytes=71, shortfall_slots=0) is None
    assert choose((), shortfall_bytes=1, shortfall_slots=0) is None


def test_nobody_goes_where_nothing_is_short() -> None:
    """An empty set suffices for nothing."""
    assert choose((A,), shortfall_bytes=0, shortfall_slots=0) == ()


@settings(max_examples=examples(200), deadline=None, derandomize=SAME_EACH_TIME, database=None)
@given(
    victims=victims,
    short_bytes=st.integers(-10, 150),
    short_slots=st.integers(-1, 5),
    short_places=st.integers(-1, 3),
)
def test_a_choice_is_sufficient_minimal_and_exists_when_it_can(
    victims: tuple[Victim, ...], short_bytes: int, short_slots: int, short_places: int
) -> None:
    """Against every subset: None if none suffices; else the cheapest of the lowest priority."""

    def sufficient(some: tuple[Victim, ...]) -> bool:
        places = sum(v.places for v in some)
        enough_bytes = sum(v.nbytes for v in some) >= short_bytes
        return enough_bytes and len(some) >= short_slots and places >= short_places

    def chosen_of(offered: tuple[Victim, ...]) -> tuple[Victim, ...] | None:
        return choose(
            offered,
            shortfall_bytes=short_bytes,
            shortfall_slots=short_slots,
            shortfall_places=short_places,
        )

    every = itertools.chain.from_iterable(
        itertools.combinations(victims, n) for n in range(len(victims) + 1)
    )
    enough = [subset for subset in every if sufficient(subset)]
    chosen = chosen_of(victims)

    assert chosen == chosen_of(victims[::-1])
    if chosen is None:
        assert not enough
        return
    assert sufficient(chosen)
    for victim in chosen:
        assert not sufficient(tuple(v for v in chosen if v is not victim))
    lowest = min((v.priority for v in victims), default=0)
    highest = min(max([lowest, *(v.priority for v in subset)]) for subset in enough)
    least = min(
        sum(v.cost for v in subset)
        for subset in enough
        if all(v.priority <= highest for v in subset)
    )
    assert sum(v.cost for v in chosen) == least
