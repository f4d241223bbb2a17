"""When two ways agree and when one is slower, by figures alone."""

from __future__ import annotations

import math

import pytest

from mlxd_worker.proof.judging import Tolerance, disagreement, divergence, is_fair, slowness

ALLOWED = Tolerance(relative=0.01, near_tie=0.5)


@pytest.mark.parametrize(
    ("errors", "routes", "agree"),
    [
        ([0.0, 0.01], False, True),
        ([0.0, 0.011], False, False),
        ([0.0, math.nan], False, False),
        ([0.0, 0.0, 0.0, 0.0, 1.0], True, True),
        ([0.0, 0.0, 0.0, 1.0], True, False),
    ],
)
def test_logits(errors: list[float], *, routes: bool, agree: bool) -> None:
    """Every token within rounding; of a model with experts a few may have gone to others."""
    assert (disagreement(errors, ALLOWED, routes=routes) is None) is agree


@pytest.mark.parametrize(
    ("plain", "margins", "other", "agree"),
    [
        ([1, 2, 3], [1.0, 1.0, 1.0], [1, 2, 3], True),
        ([1, 2, 3], [1.0, 1.0, 1.0], [1, 4, 3], False),
        ([1, 2, 3], [1.0, 0.4, 1.0], [1, 4, 5], True),
        ([1, 2, 3], [0.4, 1.0, 1.0], [1, 4, 5], False),
        ([1, 2, 3], [1.0, 1.0, 1.0], [1, 2], False),
    ],
)
def test_streams(plain: list[int], margins: list[float], other: list[int], *, agree: bool) -> None:
    """The first token that differs stands at a near tie, or the streams disagree."""
    assert (divergence(plain, margins, other, ALLOWED) is None) is agree


@pytest.mark.parametrize(
    ("with_s", "without_s", "slow"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False),
        ([1.2, 1.2, 1.2], [1.0, 1.0, 1.0], True),
        ([1.05, 1.05, 1.05], [1.0, 1.0, 1.0], False),
        ([1.0, 9.0, 9.0], [1.0, 1.0, 1.0], False),
    ],
)
def test_times(with_s: list[float], without_s: list[float], *, slow: bool) -> None:
    """A path is slower whose median and whose best run both are: others may be at work here too."""
    assert (slowness(with_s, without_s) is not None) is slow


@pytest.mark.parametrize(
    ("with_s", "fair"), [([0.5, 0.6], True), ([1.0, 1.0], True), ([1.0, 1.2], False)]
)
def test_what_is_not_timed_again(with_s: list[float], *, fair: bool) -> None:
    """A path whose median is a twentieth slower or more gets more rounds before it is judged."""
    assert is_fair(with_s, [1.0, 1.0]) is fair
