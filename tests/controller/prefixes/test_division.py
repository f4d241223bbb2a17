"""How one budget is divided: within it at all times, and to what is worth most in the end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_controller.prefixes.division import (
    RATIO_MIN,
    STEPS_OF_BUDGET,
    Division,
    Holder,
    Idle,
    divide,
    step_nbytes,
)

BUDGET = 6400
STEP = BUDGET // STEPS_OF_BUDGET


def holder(form: str, nbytes: int, share: int, worth: float = 1.0, **more: object) -> Holder:
    """Return a worker's folder."""
    return replace(Holder(form, nbytes, share, worth), **more)  # type: ignore[arg-type]


_WORTHS = st.sampled_from([0.0, 1e-9, 0.5, 1.0, 1.2, 4.0, math.inf])
_SIZES = st.integers(0, 3 * BUDGET)
_HOLDERS = st.lists(
    st.builds(
        Holder,
        st.uuids().map(str),
        _SIZES,
        _SIZES,
        _WORTHS,
        st.integers(0, BUDGET),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
)
_IDLE = st.lists(st.builds(Idle, st.uuids().map(str), _SIZES, _WORTHS), max_size=5)


@given(st.integers(0, 2 * BUDGET), _HOLDERS, _IDLE)
def test_what_is_given_is_free_now(budget: int, holders: list[Holder], idle: list[Idle]) -> None:
    """Shares that grow take no more than is free, nothing is below 0, and only changes are said."""
    division = divide(budget, holders, idle)
    of_form = {one.form: one for one in holders}
    taken = sum(one.taken_nbytes for one in holders) + sum(one.nbytes for one in idle)
    grown = sum(
        max(share - of_form[form].share_nbytes, 0) for form, share in division.shares.items()
    )
    assert grown <= max(budget - taken, 0)
    assert all(share >= 0 for share in division.shares.values())
    assert all(share != of_form[form].share_nbytes for form, share in division.shares.items())
    nbytes_of = {one.form: one.nbytes for one in idle}
    assert all(0 <= kept < nbytes_of[form] for form, kept in division.keep.items())


@given(st.integers(0, 2 * BUDGET), _HOLDERS, _IDLE)
def test_what_is_beyond_goes_at_once(budget: int, holders: list[Holder], idle: list[Idle]) -> None:
    """Once all orders of one round are carried out, everything is within the budget."""
    division = divide(budget, holders, idle)
    shares = [min(division.shares.get(one.form, one.share_nbytes), BUDGET * 9) for one in holders]
    sizes = [min(one.nbytes, share) for one, share in zip(holders, shares, strict=True)]
    kept = sum(division.keep.get(one.form, one.nbytes) for one in idle)
    taken = sum(max(pair) for pair in zip(sizes, shares, strict=True)) + kept
    assert taken <= budget


def test_free_room_goes_to_who_is_full() -> None:
    """Of two workers only the one without room to grow gets a step, and later one more."""
    holders = [holder("full", 300, 300), holder("idle", 100, 400)]
    assert divide(BUDGET, holders, []) == Division({"full": 300 + STEP})


def test_a_full_disk_is_given_nothing() -> None:
    """A worker whose disk has no room gets none, though it evicts; another one gets it."""
    limited = holder("limited", 300, 300, 9.0, evicts=True, is_limited=True)
    assert divide(BUDGET, [limited, holder("full", 300, 300)], []).shares == {"full": 300 + STEP}


def test_a_new_model_gets_room_for_some_blocks() -> None:
    """A step holds a few of a model's blocks, however small the budget's part is."""
    assert step_nbytes(BUDGET, holder("a", 0, 0, block_nbytes=500)) == 2000
    assert divide(BUDGET, [holder("a", 0, 0, math.inf, block_nbytes=500)], []).shares == {"a": 2000}


def test_what_is_not_used_goes_before_what_is_there() -> None:
    """Room that a worker does not use is taken back, but for a step; nothing of value goes."""
    holders = [holder("full", 1000, 1000, 9.0), holder("roomy", 400, BUDGET - 1000, 1.0)]
    assert divide(BUDGET, holders, [Idle("old", 0, 0.1)]) == Division({"roomy": 5300})


def test_the_least_worth_goes_first() -> None:
    """Of two idle folders the one worth less makes room, and the share grows a round later."""
    full = holder("full", 4000, 4000, 9.0)
    idle = [Idle("better", 1400, 2.0), Idle("worse", 1000, 1.0)]
    assert divide(BUDGET, [full], idle) == Division({}, {"worse": 900})
    idle[1] = Idle("worse", 900, 1.0)
    assert divide(BUDGET, [full], idle) == Division({"full": 4000 + STEP})


def test_a_worker_of_less_worth_makes_room() -> None:
    """A full worker takes from another full one whose least is worth less, and not in return."""
    holders = [holder("dear", 3200, 3200, 2.0), holder("cheap", 3200, 3200, 1.0)]
    assert divide(BUDGET, holders, []) == Division({"cheap": 3200 - STEP})


@pytest.mark.parametrize("ratio", [1.0, RATIO_MIN - 0.01])
def test_equals_leave_each_other_alone(ratio: float) -> None:
    """What is worth about as much makes no room: else two would take by turns for ever."""
    holders = [holder("a", 3200, 3200, ratio), holder("b", 3200, 3200, 1.0)]
    assert divide(BUDGET, holders, [Idle("c", 0, 0.0)]) == Division()


def test_a_smaller_budget_takes_the_least_worth() -> None:
    """What is beyond goes in one round, from the least worth on, a step from each by turns."""
    holders = [holder("a", 3000, 3200, 5.0), holder("b", 3000, 3200, 1.0)]
    division = divide(BUDGET - 600, holders, [])
    assert division == Division({"a": 2910, "b": 2890})
    assert divide(BUDGET - 430, holders, []) == Division({"a": 3000, "b": 2970})


@dataclass
class _World:
    """Workers that write as fast as they may, and carry orders out late."""

    sizes: dict[str, int]
    shares: dict[str, int]
    idle: dict[str, int]
    worths: dict[str, float]

    def look(self) -> tuple[list[Holder], list[Idle]]:
        return (
            [Holder(f, self.sizes[f], self.shares[f], self.worths[f]) for f in self.sizes],
            [Idle(f, nbytes, self.worths[f]) for f, nbytes in self.idle.items() if nbytes],
        )


@given(st.integers(0, 1 << 30))
def test_the_budget_holds_at_any_moment(seed: int) -> None:
    """Workers that fill their shares, orders that are lost now and then, folders that become idle:
    never is more on disk than the budget, and in the end who is worth most has most of it.
    """
    draws = random.Random(seed)
    forms = ["a", "b", "c"]
    world = _World(
        sizes=dict.fromkeys(forms, 0),
        shares=dict.fromkeys(forms, 0),
        idle={"old": draws.randrange(BUDGET)},
        worths={"a": 1.0, "b": 2.0, "c": 8.0, "old": 0.5},
    )
    for _ in range(400):
        division = divide(BUDGET, *world.look())
        world.idle.update(division.keep)
        for form, share in division.shares.items():
            if draws.random() < 0.8:
                world.shares[form] = share
                world.sizes[form] = min(world.sizes[form], share)
        for form in forms:
            room = world.shares[form] - world.sizes[form]
            world.sizes[form] += draws.randint(0, room)
        assert sum(world.sizes.values()) + sum(world.idle.values()) <= BUDGET
        assert sum(world.shares.values()) + sum(world.idle.values()) <= BUDGET
    assert world.idle["old"] == 0
    assert world.shares["c"] > world.shares["b"] + world.shares["a"]
