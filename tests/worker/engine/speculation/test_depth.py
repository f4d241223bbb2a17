"""How deep to guess: the worked numbers of the reference, and what one stalled step may change.

In the reference's cases a cost is told by the guesses of a step, so that plain decoding has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from mlxd_worker.engine.speculation.costs import (
    INNOVATION_MAX,
    SEEDING_SAMPLES,
    StepCosts,
    coarse,
)
from mlxd_worker.engine.speculation.depth import (
    PLAIN,
    PROBE_INTERVAL_MAX,
    PROBE_INTERVAL_MIN,
    PROBE_SHARE,
    RATE_DEFAULT,
    SKIPPED_MAX,
    Choice,
    DepthController,
    Limits,
    Offer,
    Record,
)

EVERY_WIDTH = tuple(range(1, 18))


class World:
    """One stream: what each depth costs, and how many of its guesses are right."""

    def __init__(
        self,
        cost: Callable[[int], float],
        accepted: Callable[[int], int],
        *,
        controller: DepthController | None = None,
    ) -> None:
        self.controller = controller or DepthController(widths=EVERY_WIDTH)
        self.record = Record()
        self.depths: list[int] = []
        self.guessed = 0
        self.cost = cost
        self.accepted = accepted

    def round(self, *, most: int = 16) -> int:
        """Do one step; return how many tokens it guessed."""
        offers = [Offer(most, 0, self.record)]
        choice = self.controller.choose(1, offers, lambda: Limits(17, 17))
        depth = choice.width - 1
        right = min(self.accepted(self.guessed), depth)
        if depth:
            self.guessed += 1
            self.record.note(0, judged=min(right + 1, depth), right=right)
        self.controller.learn_pass(1, depth + 1, self.cost(depth))
        self.depths.append(depth)
        return depth

    def rounds(self, count: int) -> list[int]:
        """Do `count` steps; return their depths."""
        return [self.round() for _ in range(count)]


def decaying(guess: int) -> int:
    """Mostly a few guesses are right, sometimes many: 90 % of the first, 90 % of the next ..."""
    return (9, 3, 14, 6, 1, 8, 12, 0, 5, 20)[guess % 10]


def two_of_five(guess: int) -> int:
    """The first guess is right in two rounds of five, and no other ever."""
    return (1, 0, 0, 1, 0)[guess % 5]


def usual(depths: list[int]) -> int:
    """Return the depth chosen most often."""
    return max(set(depths), key=depths.count)


def test_a_wider_step_that_costs_little_is_taken_deep() -> None:
    """210 + 2.6 a guess, and acceptance that decays: 5 or more at once."""
    world = World(lambda depth: 210 + 2.6 * depth, decaying)
    world.rounds(400)
    assert usual(world.depths[-100:]) >= 5


def test_a_wider_step_that_costs_much_is_taken_shallow() -> None:
    """30 + 19 a guess, the same acceptance: 4 at most."""
    world = World(lambda depth: 30 + 19 * depth, decaying)
    world.rounds(400)
    assert usual(world.depths[-100:]) <= 4


def test_guesses_that_are_mostly_wrong_are_given_up() -> None:
    """30 + 19 a guess, two of five right: none, so plain decoding is never slowed for long."""
    world = World(lambda depth: 30 + 19 * depth, two_of_five)
    world.rounds(400)
    assert usual(world.depths[-200:]) == 0
    assert sum(map(bool, world.depths[-200:])) <= 3


def test_the_first_rounds_feel_their_way() -> None:
    """First none, so that plain decoding's cost is known, then one, and no depth is skipped."""
    world = World(lambda depth: 210 + 2.6 * depth, lambda _: 16)
    world.rounds(30)

    assert world.depths[:2] == [0, 1]
    deepest = 0
    for depth in world.depths:
        assert depth <= deepest + 1
        deepest = max(deepest, depth)
    assert deepest == 16


def test_one_stall_moves_a_cost_little() -> None:
    """16 ms twenty times, then 49 ms: 7.5 % at most."""
    costs = StepCosts()
    for _ in range(20):
        costs.note(1, 1, 0.016)
    assert costs.time_of(1, 1) == pytest.approx(0.016)

    costs.note(1, 1, 0.049)
    assert costs.time_of(1, 1) == pytest.approx(0.016 * 1.075)
    assert INNOVATION_MAX < 1


@pytest.mark.parametrize("first_s", [0.016, 0.128])
def test_a_cost_that_has_changed_is_learnt(first_s: float) -> None:
    """32 ms sixty times: between 31 and 33, wherever it came from."""
    costs = StepCosts()
    for _ in range(SEEDING_SAMPLES):
        costs.note(1, 4, first_s)
    for _ in range(60):
        costs.note(1, 4, 0.032)
    assert 0.031 <= (costs.time_of(1, 4) or 0) <= 0.033


def test_the_first_step_of_a_kind_may_be_slow() -> None:
    """Of the first measurements the least counts."""
    costs = StepCosts()
    for seconds in (0.9, 0.02, 0.05):
        costs.note(4, 2, seconds)
    assert costs.time_of(4, 2) == 0.02


def park_stream() -> World:
    """A stream whose guesses have not paid for thousands of steps."""
    world = World(lambda depth: 30 + 19 * depth, two_of_five)
    world.rounds(1100)
    return world


def test_what_does_not_pay_is_tried_ever_more_seldom() -> None:
    """At most ten tries in 4,096 rounds, then one in 512, and so none in the next 400."""
    world = park_stream()

    assert sum(map(bool, world.rounds(4096))) <= 10
    while world.round() == 0:
        pass
    assert not any(world.rounds(400))
    assert PROBE_INTERVAL_MAX == 512


def test_tries_lose_no_more_than_their_share() -> None:
    """A step of two that costs ten times as much: the first try of it, then a hundredth."""
    world = World(lambda depth: 30 + 300 * depth, two_of_five)
    world.rounds(4)
    depths = world.rounds(4096)

    tried = sum(map(bool, depths))
    assert tried >= 1
    assert tried * (330 - 2 * 30) <= PROBE_SHARE * 30 * len(depths)
    assert not any(one and two for one, two in itertools.pairwise(depths))


def test_what_pays_again_is_found() -> None:
    """In a good time the guesses are back within 8,192 rounds, and tries are frequent again."""
    world = park_stream()
    world.accepted = lambda _: 16
    world.cost = lambda depth: 30 + depth

    steps = next(i for i in range(8192) if world.round() and world.round())
    assert steps <= 8192
    assert usual(world.rounds(400)) >= 5
    assert PROBE_INTERVAL_MIN == 4


def test_a_stall_of_the_host_does_not_start_guessing() -> None:
    """Fault 17: one plain step that took a hundred times as long changes no choice."""
    world = park_stream()
    while world.round() == 0:
        pass
    world.cost = lambda depth: 100 * (30 + 19 * depth)
    world.round()
    world.cost = lambda depth: 30 + 19 * depth

    assert not any(world.rounds(400))


def test_no_guess_where_plain_decoding_is_faster() -> None:
    """Fault 17: a step of two that costs twice as much is worth it for no guess whatever."""
    world = World(lambda depth: 10.0 * (depth + 1), lambda _: 16)
    world.rounds(200)
    assert sum(map(bool, world.depths[-100:])) <= 3


@pytest.fixture
def busy() -> DepthController:
    """A controller that knows what a step of 32 rows costs on a processor, and of parts of them."""
    controller = DepthController(widths=(1, 4))
    known = {1: (15, 20), 8: (28, 52), 16: (40, 86), 24: (55, 125), 31: (68, 160), 32: (70, 163)}
    for rows, (plain, wide) in known.items():
        for _ in range(SEEDING_SAMPLES):
            controller.learn_pass(rows, 1, plain / 1000)
            controller.learn_pass(rows, 4, wide / 1000)
    return controller


def sure() -> Record:
    """A stream that copies: three guesses of three are right."""
    record = Record()
    for _ in range(50):
        record.note(16, judged=3, right=3)
    return record


@pytest.mark.parametrize(
    ("guessing", "expected"),
    [(0, PLAIN), (1, PLAIN), (16, PLAIN), (24, Choice(4, apart=True)), (32, Choice(4))],
)
def test_many_rows_weigh_what_all_of_them_gain(
    busy: DepthController, guessing: int, expected: Choice
) -> None:
    """One sure row of 32 slows nobody down, nor do half; most take a pass of their own."""
    offers = [Offer(3, 16, sure())] * guessing
    assert busy.choose(32, offers, lambda: Limits(4, 4)) == expected


@pytest.mark.parametrize("rows", [11, 32])
def test_a_crowd_that_copies_nothing_looks_for_guesses_seldom(
    busy: DepthController, rows: int
) -> None:
    """One step in nine, and each again once guesses pay; few rows look in all of them."""
    looked = 0
    for _ in range(900):
        if busy.looks(rows):
            looked += 1
            assert busy.choose(rows, [], lambda: Limits(4, 4)) == PLAIN
    assert looked == 900 if rows == 11 else 100 <= looked <= 100 + SKIPPED_MAX

    while not busy.looks(rows):
        pass
    assert busy.choose(rows, [Offer(3, 16, sure())] * rows, lambda: Limits(4, 4)).width == 4
    assert busy.looks(rows)


def test_what_cannot_pay_asks_for_no_limits(busy: DepthController) -> None:
    """They are read from every row's caches; a sure row of 32 is not worth that."""

    def limits() -> Limits:
        raise AssertionError("nobody needs them")

    assert busy.choose(32, [Offer(3, 16, sure())], limits) == PLAIN


def test_fewer_rows_than_were_ever_stepped_may_guess(busy: DepthController) -> None:
    """What a plain step of theirs takes is known well enough by those of others."""
    offers = [Offer(3, 16, sure())] * 28
    assert busy.choose(28, offers, lambda: Limits(4, 4)) == Choice(4)


def test_rows_that_can_take_no_more_are_left_in_a_plain_pass(busy: DepthController) -> None:
    """A pass that not all rows can take is run apart, and none that those with guesses cannot."""
    offers = [Offer(3, 16, sure())] * 24
    assert busy.choose(32, offers, lambda: Limits(4, 1)) == Choice(4, apart=True)
    assert busy.choose(32, offers, lambda: Limits(3, 1)) == PLAIN


def test_few_rows_share_a_pass() -> None:
    """Where a wider pass costs little more, whoever guesses nothing goes along in it."""
    controller = DepthController(widths=(1, 4))
    for rows, (plain, wide) in {1: (15, 20), 3: (19, 29), 4: (21, 33)}.items():
        for _ in range(SEEDING_SAMPLES):
            controller.learn_pass(rows, 1, plain / 1000)
            controller.learn_pass(rows, 4, wide / 1000)
    offers = [Offer(3, 16, sure())]
    assert controller.choose(4, offers * 3, lambda: Limits(4, 4)) == Choice(4)


def test_a_plain_step_is_reckoned_from_those_with_more_rows_and_fewer() -> None:
    """Between two measured numbers by their distance, elsewhere half of it by the rows."""
    costs = StepCosts()
    assert costs.plain(4) is None
    costs.note(8, 1, 0.020)
    assert costs.plain(4) == pytest.approx(0.015)
    assert costs.plain(16) == pytest.approx(0.030)
    costs.note(16, 1, 0.036)
    assert costs.plain(12) == pytest.approx(0.028)


def test_no_step_is_wider_than_its_guesses() -> None:
    """Two guesses take a width of four at most, however wide a step could be."""
    world = World(lambda depth: 30 + 0.01 * depth, lambda _: 16)
    world.controller = DepthController(widths=(1, 2, 4, 8, 16))
    for _ in range(100):
        world.round(most=16)
    assert {world.round(most=2) + 1 for _ in range(50)} == {4}
    assert {world.round(most=1) + 1 for _ in range(50)} == {2}


def test_a_record_learns_by_agreement() -> None:
    """Guesses after a long agreement are told apart from those after a short one."""
    record = Record()
    for _ in range(40):
        record.note(2, judged=1, right=0)
        record.note(9, judged=3, right=3)

    assert record.rate(2) < 0.15
    assert min(record.rate(level) for level in (9, 10, 11)) > 0.85
    assert record.gains(9, 3) == pytest.approx([record.rate(9), *record.gains(9, 3)[1:]])
    assert 2.2 < record.gains(9, 3)[-1] < 3


def test_what_follows_a_wrong_guess_tells_nothing() -> None:
    """Of four guesses with one right, two are counted: the right one and the wrong one."""
    record = Record()
    for _ in range(30):
        record.note(0, judged=4, right=1)

    assert record.rate(0) > 0.85
    assert record.rate(1) < 0.15
    assert Record().rate(3) == RATE_DEFAULT


def test_a_new_stream_starts_from_what_others_have_shown() -> None:
    """The pooled record is a stream's first guess at itself, until its own samples weigh more."""
    pooled = Record()
    other = Record(pooled=pooled)
    for _ in range(60):
        other.note(4, judged=2, right=2)
    fresh = Record(pooled=pooled)

    assert fresh.rate(4) == pytest.approx(pooled.rate(4))
    assert fresh.rate(4) > 0.85
    for _ in range(40):
        fresh.note(4, judged=1, right=0)
    assert fresh.rate(4) < 0.3


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 1), (7, 7), (8, 8), (9, 10), (16, 16), (17, 20), (33, 40), (256, 256)],
)
def test_rows_are_counted_coarsely(rows: int, expected: int) -> None:
    """Up to eight exactly, then in steps of a quarter of a power of two."""
    assert coarse(rows) == expected


def test_an_untried_width_costs_as_much_more_as_elsewhere() -> None:
    """What wider steps cost beside plain ones is taken from the nearest number of rows."""
    costs = StepCosts()
    assert costs.seconds(4, 2) is None
    costs.note(4, 1, 0.010)
    assert costs.seconds(4, 2) == 0.010, "nothing is known against it"
    costs.note(1, 1, 0.008)
    costs.note(1, 2, 0.012)
    assert costs.seconds(4, 2) == pytest.approx(0.015)
    costs.note(4, 2, 0.019)
    assert costs.seconds(4, 2) == 0.019
    assert costs.seconds(4, 4) == pytest.approx(0.037), "as the two before it go on"
