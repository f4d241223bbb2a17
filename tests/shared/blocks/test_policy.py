"""What is written and read follows from rates alone, and is never slower than computing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlxd_shared.blocks.policy import (
    OPEN_S,
    PAUSE_S,
    SLOW_FACTOR,
    USES_MIN,
    Meter,
    Offer,
    Rates,
    choose_offer,
    is_worth_writing,
    patience_s,
    read_s,
)
from tests.support.effort import SAME_EACH_TIME, examples

RATES = st.builds(
    Rates,
    read_nbytes_s=st.floats(1e5, 1e11),
    token_s=st.floats(1e-7, 1.0),
)
STEPS = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 1 << 34)), min_size=1, max_size=12)
TRIED = settings(max_examples=examples(300), deadline=None, derandomize=SAME_EACH_TIME)
SLACK = 1 + 1e-9


def offers_of(start: int, steps: list[tuple[int, int]]) -> list[Offer]:
    """Return offers that go further and take more, one after another."""
    offers, tokens, nbytes = [], start, 0
    for number, (more_tokens, more_nbytes) in enumerate(steps, start=1):
        tokens, nbytes = tokens + more_tokens, nbytes + more_nbytes
        offers.append(Offer(tokens, nbytes, number))
    return offers


def total_s(rates: Rates, start: int, end: int, chosen: Offer | None) -> float:
    """Return what a prompt takes from `start` to `end`: read, then compute the rest."""
    if chosen is None:
        return (end - start) * rates.token_s
    reading_s = read_s(rates, chosen.nbytes, files=chosen.files)
    return reading_s + (end - chosen.tokens) * rates.token_s


@TRIED
@given(RATES, st.integers(0, 1 << 17), STEPS)
def test_no_choice_is_quicker(rates: Rates, start: int, steps: list[tuple[int, int]]) -> None:
    """Neither computing all, nor any other length that is on the disk."""
    offers = offers_of(start, steps)
    end = offers[-1].tokens + 1

    chosen = choose_offer(rates, start, offers)

    best_s = min(total_s(rates, start, end, other) for other in (None, *offers))
    assert total_s(rates, start, end, chosen) <= best_s * SLACK


@TRIED
@given(RATES, st.integers(0, 1 << 17), STEPS, st.floats(1.01, 100.0))
def test_a_faster_disk_gives_no_less(
    rates: Rates, start: int, steps: list[tuple[int, int]], faster: float
) -> None:
    """Nor does a slower machine: what pays now pays then, to the same length at least."""
    offers = offers_of(start, steps)
    chosen = choose_offer(rates, start, offers)
    assume(chosen is not None)
    assert chosen is not None

    for better in (
        replace(rates, read_nbytes_s=rates.read_nbytes_s * faster),
        replace(rates, token_s=rates.token_s * faster),
    ):
        then = choose_offer(better, start, offers)
        assert then is not None
        if then.tokens < chosen.tokens:  # two that save the same but for rounding
            end = offers[-1].tokens
            assert total_s(better, start, end, chosen) <= total_s(better, start, end, then) * SLACK


@TRIED
@given(RATES, st.integers(0, 1 << 17), STEPS)
def test_what_is_there_already_is_not_read(
    rates: Rates, start: int, steps: list[tuple[int, int]]
) -> None:
    """Lengths that memory reaches are no offers, known rates or not."""
    offers = offers_of(start, steps)
    end = offers[-1].tokens

    for known in (rates, replace(rates, token_s=0.0)):
        assert choose_offer(known, end, offers) is None
        assert choose_offer(known, start, []) is None


@TRIED
@given(RATES, st.integers(1, 4096), st.integers(0, 1 << 34), st.integers(0, 9), st.booleans())
def test_what_would_not_be_read_is_not_written(
    rates: Rates, tokens: int, nbytes: int, uses: int, leaving: bool
) -> None:
    """Written is what was used twice, or is about to go, and only where it would be read then."""
    written = is_worth_writing(rates, tokens=tokens, nbytes=nbytes, uses=uses, leaving=leaving)

    read = choose_offer(rates, 0, [Offer(tokens, nbytes, 1)]) is not None
    assert written == (read and (leaving or uses >= USES_MIN))


@TRIED
@given(RATES, st.integers(1, 4096), st.integers(0, 1 << 34), st.floats(1.01, 100.0))
def test_a_faster_disk_never_stops_writing(
    rates: Rates, tokens: int, nbytes: int, faster: float
) -> None:
    """More is worth writing the faster it comes back, and the slower it is computed."""
    assume(is_worth_writing(rates, tokens=tokens, nbytes=nbytes, uses=2))

    for better in (
        replace(rates, read_nbytes_s=rates.read_nbytes_s * faster),
        replace(rates, token_s=rates.token_s * faster),
    ):
        assert is_worth_writing(better, tokens=tokens, nbytes=nbytes, uses=2)


def test_where_nothing_was_computed_the_disk_is_trusted() -> None:
    """After a restart the longest is read; nothing is written."""
    fresh = Rates()
    offers = [Offer(256, 1 << 30, 1), Offer(512, 1 << 40, 2)]

    assert choose_offer(fresh, 0, offers) == offers[1]
    assert not is_worth_writing(fresh, tokens=256, nbytes=1, uses=9, leaving=True)


def test_a_read_is_waited_for_as_long_as_computing_takes() -> None:
    """So that one that was foretold wrongly costs as much again, at most."""
    offer = Offer(768, 1 << 40, 3)
    assert patience_s(Rates(token_s=0.5), offer, start=256) == 256.0
    assert read_s(Rates(read_nbytes_s=100.0), 200, files=3) == pytest.approx(2 + 3 * OPEN_S)


@TRIED
@given(st.floats(1e3, 1e11), st.integers(0, 1 << 34), st.integers(1, 999))
def test_no_disk_is_waited_for_for_ever(read_nbytes_s: float, nbytes: int, files: int) -> None:
    """Where nothing was computed yet: a few times what the read should take, and no end is none."""
    rates = Rates(read_nbytes_s=read_nbytes_s)
    expected_s = read_s(rates, nbytes, files=files)

    waited_s = patience_s(rates, Offer(256 * files, nbytes, files), start=0)

    assert SLOW_FACTOR * expected_s < waited_s <= SLOW_FACTOR * (expected_s + PAUSE_S)


def test_a_meter_follows_what_was_measured_lately() -> None:
    """By bytes, so that a small file that took long says little; nothing tells nothing."""
    meter = Meter()
    assert meter.nbytes_s is None
    meter.note(0, 1.0)
    meter.note(100, 0.0)
    assert meter.nbytes_s is None

    meter.note(1000, 1.0)
    assert meter.nbytes_s == 1000.0
    meter.note(1, 0.001)
    assert meter.nbytes_s == pytest.approx(1000.0)
    for _ in range(40):
        meter.note(4000, 1.0)
    assert meter.nbytes_s == pytest.approx(4000.0, rel=1e-3)
