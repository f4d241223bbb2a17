"""The replay of eviction and queueing: its clock by hand, its bound by brute force, its targets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.eviction import CLAIRVOYANT, CLASSIC, SLOW, compare
from tests.bench.eviction_bound import cheapest_cover, least_load
from tests.bench.eviction_cells import MODELS, Cell, Request, make_cell, read_arrivals
from tests.bench.eviction_collated import FAIRNESS_BOUND_S, replay_collated
from tests.bench.eviction_policies import POLICIES
from tests.bench.eviction_replay import in_order
from tests.bench.mooncake import TRACE
from tests.real_inputs import real_input
from tests.support.effort import SAME_EACH_TIME, examples

A, B = 0, 1


def cell_of(requests: list[Request], *, capacity: int = 4) -> Cell:
    """Return a cell whose models are all of size 4: a load takes 6 s."""
    return Cell(1.0, 1, (4,) * MODELS, capacity, tuple(requests))


def alternating(*, service_s: float = 0.0) -> Cell:
    """Return A B A B, a second apart, with room for one model."""
    models = (A, B, A, B)
    return cell_of([Request(float(at), m, 0.5, service_s) for at, m in enumerate(models)])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_in_order_each_change_of_model_is_a_load(policy: str) -> None:
    """A B A B with room for one takes four loads, one after the other, whoever chooses."""
    outcome = in_order(alternating(), policy)

    assert outcome.reload_s == 24.0
    assert outcome.wait_max_s == 24.0 - 3.0
    assert outcome.ttft_mean_s == 0.5 + (6 + 11 + 16 + 21) / 4


def test_in_order_a_victim_ends_its_service_first() -> None:
    """The clock goes on to the end of a service before its model is evicted."""
    outcome = in_order(alternating(service_s=10.0), "lru")

    assert outcome.reload_s == 24.0
    assert outcome.wait_max_s == 4 * 6.0 + 3 * 10.0 - 3.0


def test_collated_one_load_serves_all_who_wait() -> None:
    """A B A B with room for one takes two loads."""
    outcome = replay_collated(alternating())

    assert outcome.reload_s == 12.0
    assert outcome.wait_max_s == 11.0
    assert outcome.passed_over == 0


def test_a_model_in_use_makes_room_when_the_bound_is_reached() -> None:
    """Whoever has waited for the bound gets the model in use closed, and waits for its end only."""
    busy = [Request(float(at), A, 0.0, 2.0) for at in range(100)]
    lone = Request(10.0, B, 0.0, 0.0)
    cell = cell_of(sorted([*busy, lone], key=lambda r: r.at_s))

    outcome = replay_collated(cell)

    assert outcome.reload_s == 18.0  # A, B, and A again for those whom it was closed to
    assert outcome.drain_max_s <= 2.0
    assert outcome.wait_max_s == pytest.approx(
        FAIRNESS_BOUND_S + outcome.drain_max_s + 6.0, abs=6.0
    )


def test_all_policies_serve_equal_cells_equally() -> None:
    """A replay depends on its cell alone."""
    cell = alternating(service_s=1.5)

    assert [in_order(cell, name) for name in POLICIES] == [
        in_order(cell, name) for name in POLICIES
    ]
    assert replay_collated(cell) == replay_collated(cell)


@settings(max_examples=examples(100), deadline=None, derandomize=SAME_EACH_TIME, database=None)
@given(
    times=st.lists(st.integers(0, 60), min_size=1, max_size=7).map(sorted),
    load_s=st.sampled_from([0.5, 3.0, 18.0]),
    stay=st.sampled_from([0.0, 0.25, 1.0]),
    wait_s=st.sampled_from([0.0, 5.0, 30.0]),
)
def test_a_cover_is_the_cheapest_of_all(
    times: list[int], load_s: float, stay: float, wait_s: float
) -> None:
    """Against every way to cut the arrivals into stays."""
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(times)), n) for n in range(len(times))
    )
    every = []
    for cut in cuts:
        edges = [0, *cut, len(times)]
        spans = [times[stop - 1] - times[start] for start, stop in itertools.pairwise(edges)]
        every.append(sum(load_s + stay * max(0.0, span - wait_s) for span in spans))

    cost = cheapest_cover([float(at) for at in times], load_s=load_s, stay=stay, wait_s=wait_s)

    assert cost == pytest.approx(min(every))


def test_what_can_be_served_in_time_is_not_called_impossible() -> None:
    """The bound of a cell that is served within a time stays below 1."""
    cell = alternating()

    assert least_load(cell, wait_s=replay_collated(cell).wait_max_s) <= 1.0


def test_the_targets_hold_in_one_real_cell() -> None:
    """On the real trace: the targets of eviction in arrival order, and those of collation."""
    cell = make_cell(read_arrivals(real_input(*TRACE)), alpha=1.0, seed=1)

    outcome = compare(cell)

    assert outcome.reload_s("past") <= outcome.reload_s(*CLASSIC)
    assert (
        outcome.reload_s("ours") <= outcome.reload_s("past") <= 1.1 * outcome.reload_s(*CLAIRVOYANT)
    )
    assert outcome.collated.reload_s <= 0.5 * outcome.reload_s(*CLAIRVOYANT)
    for name in SLOW:
        assert outcome.collated.ttft_mean_s < outcome.in_order[name].ttft_mean_s
        assert outcome.collated.ttft_p99_s < outcome.in_order[name].ttft_p99_s
    assert outcome.collated.passed_over == 0
