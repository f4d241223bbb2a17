"""Prompt look-up: what is proposed after which tokens, and how much is remembered."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.engine.speculation.drafts import (
    AGREED_MAX,
    AGREED_MIN,
    CANDIDATES_MAX,
    Guess,
    PromptLookup,
)

TEXT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("tokens", "depth", "expected"),
    [
        ([], 4, None),
        ([1], 4, None),
        ([1, 2, 3, 4], 4, None),
        # A pair that occurred before, and what followed it.
        ([1, 2, 3, 4, 1, 2], 1, Guess((3,), 2)),
        ([1, 2, 3, 4, 1, 2], 2, Guess((3, 4), 2)),
        # What is proposed goes on into the tokens that were looked up, and around.
        ([1, 2, 3, 4, 1, 2], 7, Guess((3, 4, 1, 2, 3, 4, 1), 2)),
        ([7, 7, 7], 5, Guess((7,) * 5, 2)),
        # The longest run wins over the latest one ...
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, Guess((3,), 3)),
        # ... and among equals the latest.
        ([0, 1, 2, 3, 6, 1, 2, 4, 9, 1, 2], 1, Guess((4,), 2)),
        # One token in common is not enough.
        ([1, 2, 3, 9, 2], 3, None),
    ],
)
def test_what_is_proposed(tokens: list[int], depth: int, expected: Guess | None) -> None:
    """What followed the longest run of last tokens that occurred before, the latest of these."""
    assert PromptLookup(tokens).guess(depth) == expected


def test_pushing_is_the_same_as_starting_with_it() -> None:
    """A token of the output counts just as one of the prompt."""
    tokens = [*TEXT, 1, 2, *TEXT[:3]]
    grown = PromptLookup(tokens[:4])
    for token_id in tokens[4:]:
        grown.push(token_id)

    assert grown.guess(4) == PromptLookup(tokens).guess(4) == Guess((8, 9, 1, 2), 3)


def test_agreement_is_counted_to_its_bound() -> None:
    """A long copy is as sure as one of AGREED_MAX tokens."""
    guess = PromptLookup([*range(100), 1000, *range(90)]).guess(3)
    assert guess == Guess((90, 91, 92), AGREED_MAX)


def test_cutting_a_guess_keeps_what_it_is_sure_of() -> None:
    """The first tokens, and the same agreement."""
    guess = Guess((1, 2, 3), 5)

    assert guess.cut(2) == Guess((1, 2), 5)
    assert guess.cut(3) is guess
    assert guess.cut(9) is guess


def test_what_is_long_past_is_forgotten() -> None:
    """Only the last tokens are looked up in, and no more than that many are kept."""
    lookup = PromptLookup([1, 2, 3], history_tokens_max=16)
    for token_id in range(100, 1100):
        lookup.push(token_id)
        assert lookup.remembered <= 16
    lookup.push(1)
    lookup.push(2)

    assert lookup.guess(1) is None
    assert PromptLookup([1, 2, 3, *range(100, 200), 1, 2], history_tokens_max=16).guess(1) is None


def test_what_is_not_long_past_survives_the_forgetting() -> None:
    """Pairs within half of the bound are always there, however the halves lie."""
    for distance in range(2, 8):
        for start in range(40):
            lookup = PromptLookup([*range(1000, 1000 + start), 1, 2], history_tokens_max=16)
            for token_id in range(100, 100 + distance - 2):
                lookup.push(token_id)
            lookup.push(1)
            lookup.push(2)
            guess = lookup.guess(1)
            assert guess is not None, (start, distance)
            assert guess.agreed == AGREED_MIN


def naive(tokens: Sequence[int], depth: int) -> Guess | None:
    """Return the guess by comparing everything with everything."""
    end = len(tokens) - 1
    seen = [
        e for e in range(end - 1, 0, -1) if list(tokens[e - 1 : e + 1]) == list(tokens[end - 1 :])
    ]
    best, longest = -1, 0
    for position in seen[:CANDIDATES_MAX]:
        agreed = 0
        while (
            agreed < AGREED_MAX
            and position - agreed >= 0
            and tokens[position - agreed] == tokens[end - agreed]
        ):
            agreed += 1
        if agreed > longest:
            best, longest = position, agreed
    if not longest:
        return None
    follows = list(tokens)
    for step in range(depth):
        follows.append(follows[best + 1 + step])
    return Guess(tuple(follows[len(tokens) :]), longest)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_any_stream_is_looked_up_as_by_comparing_everything(tokens: list[int], depth: int) -> None:
    """The chains find what a search through all former tokens finds."""
    assert PromptLookup(tokens).guess(depth) == naive(tokens, depth)


def test_one_half_bounds_the_dictionary_too() -> None:
    """However long a stream of ever new pairs is, its memory does not grow."""
    draws = random.Random(3)
    lookup = PromptLookup((), history_tokens_max=64)
    for _ in range(2000):
        lookup.push(draws.randrange(1 << 20))

    assert lookup.entries <= 64
