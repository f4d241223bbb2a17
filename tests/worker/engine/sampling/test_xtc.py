"""xtc: which tokens it leaves out, where it leaves all alone, and what its chance depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.sampling.sampler import Draw, Purpose
from tests.support.reference_sampler import draw_key
from tests.worker.draws import counts_of, options, tokens_of

POSITIONS = 256
FOUR = (0.4, 0.3, 0.2, 0.1)
WAYS: dict[str, dict[str, Any]] = {
    "the whole vocabulary": {},
    "a support": {"top_k": 4},
    "all of it sorted": {"top_p": 0.9999},
}


def support(
    sampling: Sampling, probabilities: Sequence[float] = FOUR, ends: tuple[int, ...] = ()
) -> set[int]:
    """Return all tokens that come at any position."""
    logits = mx.array([[math.log(p) for p in probabilities] + [-50.0] * 3], dtype=mx.float32)
    rows = mx.broadcast_to(logits, (POSITIONS, len(probabilities) + 3))
    return set(tokens_of(rows, [Draw(sampling, p, ends=ends) for p in range(POSITIONS)]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("threshold", "ends", "left"),
    [
        (0.15, (), {2, 3}),
        (0.25, (), {1, 2, 3}),
        (0.35, (), {0, 1, 2, 3}),  # one top choice: the least likely of them is itself
        (0.5, (), {0, 1, 2, 3}),
        (0.05, (), {3}),
        (0.15, (0,), {0, 1, 2, 3}),  # an end would be left out: nothing is
        (0.15, (6, 1), {0, 1, 2, 3}),
        (0.15, (2,), {2, 3}),  # this one stays anyway
        (0.15, (3,), {2, 3}),
    ],
)
def test_the_top_choices_go_but_the_least_likely(
    way: str, threshold: float, ends: tuple[int, ...], left: set[int]
) -> None:
    """At chance 1, by hand, on every way of drawing."""
    sampling = options(xtc_probability=1.0, xtc_threshold=threshold, **WAYS[way])
    assert support(sampling, ends=ends) == left


def test_a_threshold_of_zero_leaves_the_least_likely_token() -> None:
    """Every token that the other cuts left is a top choice then."""
    assert support(options(xtc_probability=1.0, xtc_threshold=0.0)) == {6}
    assert support(options(xtc_probability=1.0, xtc_threshold=0.0, top_k=3)) == {2}


def test_probabilities_are_those_after_the_other_cuts() -> None:
    """Of two that top-k left, 4/7 and 3/7 count; min-p and top-p come before, too."""
    for cut in ({"top_k": 2}, {"min_p": 0.6}, {"top_p": 0.6}):
        assert support(options(xtc_probability=1.0, xtc_threshold=0.42, **cut)) == {1}
        assert support(options(xtc_probability=1.0, xtc_threshold=0.44, **cut)) == {0, 1}


@pytest.mark.parametrize("way", WAYS)
def test_of_equals_the_one_with_the_highest_id_is_left(way: str) -> None:
    """The rank of a token is by its logit and then its id, here as in every cut."""
    sampling = options(xtc_probability=1.0, xtc_threshold=0.2, **WAYS[way])
    assert support(sampling, (0.25,) * 4) == {3}
    assert support(sampling, (0.25,) * 4, ends=(3,)) == {3}
    assert support(sampling, (0.25,) * 4, ends=(2,)) == {0, 1, 2, 3}


def test_greedy_takes_the_best_whatever_xtc_says() -> None:
    """At temperature 0 one token has all the probability, and one top choice stays."""
    assert support(options(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0)) == {0}


def test_a_forbidden_end_spares_nothing() -> None:
    """What cannot be drawn is no top choice, so it does not keep the others."""
    logits = mx.broadcast_to(mx.array([[math.log(p) for p in FOUR]]), (POSITIONS, 4))
    sampling = options(xtc_probability=1.0, xtc_threshold=0.3)  # 3/6 and 2/6 of the other three
    draws = [Draw(sampling, p, forbidden=(0,), ends=(0,)) for p in range(POSITIONS)]
    assert set(tokens_of(logits, draws)) == {2, 3}


def test_the_chance_is_by_seed_and_position_alone() -> None:
    """It is the first 53 bits of a draw of its own purpose, whatever the logits and neighbours."""
    sampling = options(xtc_probability=0.5, xtc_threshold=0.0, top_k=2)
    expected = []
    for position in range(POSITIONS):
        words = draw_key(seed=sampling.seed, choice=0, position=position, purpose=Purpose.XTC)
        expected.append((words[0] << 21 | words[1] >> 11) < (1 << 52))
    # The best of two has e^20 : 1 against it only where xtc takes it out.
    for best in (0, 1):
        logits = mx.where(mx.arange(2) == best, 20.0, 0.0)[None]
        rows = mx.broadcast_to(logits, (POSITIONS, 2))
        for purpose in (Purpose.SAMPLE, Purpose.DRAFT):
            draws = [Draw(sampling, p, purpose=purpose) for p in range(POSITIONS)]
            acted = [token != best for token in tokens_of(rows, draws)]
            assert acted == expected
    assert 90 < sum(expected) < 166


def test_xtc_and_the_draw_are_independent() -> None:
    """Where it acts and where it does not, the same tokens come equally often."""
    sampling = options(xtc_probability=0.5, xtc_threshold=0.5)  # acts, and finds one top choice
    rows = mx.zeros((4_000, 3))
    draws = [Draw(sampling, position) for position in range(4_000)]
    drawn = tokens_of(rows, draws)
    acting = [
        draw_key(seed=sampling.seed, choice=0, position=p, purpose=Purpose.XTC)[0] < (1 << 31)
        for p in range(4_000)
    ]
    for state in (True, False):
        counts = counts_of([t for t, a in zip(drawn, acting, strict=True) if a is state], 3)
        assert all(abs(count - sum(counts) / 3) < 4 * math.sqrt(sum(counts) * 2 / 9)
                   for count in counts)  # fmt: skip
