"""What a token's distribution should be, written plainly in double precision, step by step.

    final_distribution(logits, sampling, recent=counts)   # the exact probability of each token

The order is that of `mlxd_worker.engine.sampling.sampler`: bias, penalties, allowed and forbidden
tokens, top-k, softmax at T, top-p, min-p, xtc. Each step is a function of its own, so that a test
can look at what a cut leaves. Nothing here shares code with the sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mlxd_shared.domain.requests import Sampling

Vector = npt.NDArray[np.float64]
"""One value for each token of the vocabulary."""


_MASK_64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Return SplitMix64's output function of a 64-bit value."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def draw_key(*, seed: int, choice: int, position: int, purpose: int) -> tuple[int, int]:
    """Return the two words (high, low) that key one draw's noise, as the product promises them."""
    state = 0
    for word in (seed & _MASK_64, choice, position, purpose):
        state = mix64(((state ^ word) + 0x9E3779B97F4A7C15) & _MASK_64)
    return state >> 32, state & 0xFFFFFFFF


def final_distribution(
    logits: Sequence[float] | npt.NDArray[np.floating],
    sampling: Sampling,
    *,
    recent: Mapping[int, int] | None = None,
    forbidden: Collection[int] = (),
    allowed: Collection[int] | None = None,
    ends: Collection[int] = (),
) -> Vector:
    """Return each token's probability at one position.

    recent: how often each token occurs in the penalties' window. forbidden: ids that cannot be
    drawn. allowed: the only ids that can, None for all. ends: where xtc would drop one of these
    ids, it drops nothing.

    With xtc it is the mixture of both cases by the chance given; greedy has all on one token.
    """
    adjusted = adjusted_logits(
        logits, sampling, recent=recent, forbidden=forbidden, allowed=allowed
    )
    if sampling.temperature == 0.0:
        greedy = np.zeros_like(adjusted)
        greedy[rank(adjusted)[0]] = 1.0
        return greedy
    kept = survivors(adjusted, sampling)
    dropped = without_top_choices(kept, sampling.xtc_threshold, ends=ends)
    chance = sampling.xtc_probability
    return chance * dropped + (1.0 - chance) * kept


def adjusted_logits(
    logits: Sequence[float] | npt.NDArray[np.floating],
    sampling: Sampling,
    *,
    recent: Mapping[int, int] | None = None,
    forbidden: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> Vector:
    """Return the logits after bias, penalties and masks; what cannot be drawn is at -inf."""
    adjusted: Vector = np.array(logits, dtype=np.float64)
    for token, bias in sampling.logit_bias:
        adjusted[token] += bias
    if sampling.repeat_last_n != 0:
        for token, count in (recent or {}).items():
            value, factor = adjusted[token], sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
            value -= sampling.presence_penalty + sampling.frequency_penalty * count
            adjusted[token] = value
    barred = set(forbidden)
    if allowed is not None:
        barred |= set(range(len(adjusted))) - set(allowed)
    adjusted[sorted(barred)] = -np.inf
    return adjusted


def rank(values: Vector) -> npt.NDArray[np.intp]:
    """Return the ids, the largest value first and equals by id."""
    return np.argsort(-values, kind="stable")


def survivors(adjusted: Vector, sampling: Sampling) -> Vector:
    """Return the probabilities that top-k, T, top-p and min-p leave, summing to one."""
    order = rank(adjusted)
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    weights = np.exp((adjusted[order] - adjusted[order[0]]) / sampling.temperature)
    kept = np.ones(len(order), dtype=bool)
    if 0.0 < sampling.top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        kept &= before < sampling.top_p * weights.sum()
    kept &= weights >= sampling.min_p * weights[0]
    result = np.zeros_like(adjusted)
    result[order[kept]] = weights[kept] / weights[kept].sum()
    return result


def without_top_choices(
    probabilities: Vector, threshold: float, *, ends: Collection[int] = ()
) -> Vector:
    """Return the distribution after xtc has acted: of the top choices only the least likely stays.

    Where that would drop one of `ends`, nothing is dropped.
    """
    order = rank(probabilities)
    tops = [token for token in order if probabilities[token] >= threshold and probabilities[token]]
    if set(tops[:-1]) & set(ends):
        return probabilities
    result = probabilities.copy()
    result[tops[:-1]] = 0.0
    result /= result.sum()
    return result
