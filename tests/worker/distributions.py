"""Whether counts fit a distribution: the chi-squared test, in double precision."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fit_probability(counts: Sequence[int], expected: Sequence[float]) -> float:
    """Return the probability of a chi-squared statistic as large as that of `counts`, or larger.

    0.0 where something was drawn that cannot be. Cells that expect fewer than five are pooled.
    """
    draws = sum(counts)
    cells: list[tuple[float, float]] = []
    rare_count = rare_expected = 0.0
    for count, probability in zip(counts, expected, strict=True):
        if probability == 0.0 and count:
            return 0.0
        if probability * draws < 5:
            rare_count, rare_expected = rare_count + count, rare_expected + probability * draws
        else:
            cells.append((count, probability * draws))
    if rare_expected >= 5:
        cells.append((rare_count, rare_expected))
    statistic = math.fsum((count - mean) ** 2 / mean for count, mean in cells)
    return chi_squared_tail(statistic, len(cells) - 1)


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """Return the upper tail of the chi-squared distribution: the regularised gamma function Q."""
    if freedom < 1:
        return 1.0
    shape, at = freedom / 2, statistic / 2
    if at <= 0:
        return 1.0
    scale = math.exp(shape * math.log(at) - at - math.lgamma(shape))
    if at < shape + 1:
        return 1.0 - scale * _series(shape, at)
    return scale * _fraction(shape, at)


def _series(shape: float, at: float) -> float:
    term = total = 1.0 / shape
    step = shape
    while term > total * 1e-16:
        step += 1
        term *= at / step
        total += term
    return total


def _fraction(shape: float, at: float) -> float:
    """Evaluate the continued fraction of Q by Lentz's method."""
    tiny = 1e-300
    denominator = at + 1 - shape
    front, back = 1 / tiny, 1 / denominator
    value = back
    for step in range(1, 10_000):
        factor = -step * (step - shape)
        denominator += 2
        back = 1 / (factor * back + denominator or tiny)
        front = denominator + factor / front or tiny
        value *= back * front
        if abs(back * front - 1) < 1e-15:
            break
    return value
