"""How near a draw was to giving another token: what rounding may decide, and what it may not.

Invariants:
- Only the noise is the sampler's own. Bias, penalties, cuts and xtc are computed here anew, in
  float64, from what the wire documents.
- A slack is a difference of two tokens' scores, each a logit after bias and penalties over the
  temperature: what may happen within a slack of e is what may happen where no two scores have moved
  by more than e against each other. A greedy draw's scores are the logits themselves.
- A nucleus ends where the odds of the probability before a token reach those of top-p: moving the
  tokens before it by e against the others multiplies these odds by exp(e). So do a token's own odds
  where xtc asks for its probability.
- What every cut may do within a slack is judged by itself, so that a slack is never too large.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.sampling.sampler import Purpose, gumbel_noise
from tests.support.reference_sampler import draw_key

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

NEAR_TIE = 1e-3
"""The slack below which rounding may decide."""
SLACK_MIN, SLACK_MAX = 1e-12, 500.0
"""What is looked at: less is none, and more is infinite; exp(SLACK_MAX) is a number."""
BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Step:
    """One draw of a stream, with all that decides it."""

    logits: NDArray[np.float32]
    """Raw, of the whole vocabulary."""
    sampling: Sampling
    position: int
    """Index among the generated tokens."""
    before: Sequence[int]
    """Prompt and output so far."""
    ends: Sequence[int] = ()
    """Tokens that would end the stream."""
    min_tokens: int = 0
    """Before this position none of `ends` may be drawn."""
    mask: bytes | None = None
    """One bit a token, lowest first, of those that a constraint allows; None for all."""


def slack_of(step: Step, tokens: Iterable[int]) -> float:
    """Return the least slack within which each of `tokens` may have been drawn; inf for none."""
    scores = _Scores(step)
    return max(_slack_of_one(scores, token) for token in tokens)


def may_have_drawn(step: Step, token: int, *, slack: float = NEAR_TIE) -> bool:
    """Tell whether `token` may have been drawn within `slack`."""
    return _Scores(step).may_give(token, slack)


def _slack_of_one(scores: _Scores, token: int) -> float:
    if scores.may_give(token, SLACK_MIN):
        return 0.0
    if not scores.may_give(token, SLACK_MAX):
        return math.inf
    low, high = math.log(SLACK_MIN), math.log(SLACK_MAX)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if scores.may_give(token, math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)


class _Scores:
    """The scores of all tokens at one step, and which of them the cuts leave."""

    def __init__(self, step: Step) -> None:
        sampling = step.sampling
        logits = _adjust(step)
        self._sampling = sampling
        self._scores: Floats = (logits - logits.max()) / (sampling.temperature or 1.0)
        noise = 0.0 if sampling.temperature == 0 else _noise(step)
        self._final: Floats = self._scores + noise
        self._ends = step.ends
        self._excluding = sampling.temperature > 0 and _excludes(step)
        self._rising: Floats = np.sort(self._scores)
        weights = np.exp(self._rising[::-1])
        if sampling.top_k:
            weights[sampling.top_k :] = 0.0
        self._sums: Floats = np.concatenate([[0.0], np.cumsum(weights)])

    def may_give(self, token: int, slack: float) -> bool:
        """Tell whether `token` may be the draw within `slack`: kept, and no sure rival better."""
        if not math.isfinite(self._scores[token]) or not self._leaves(slack)[token]:
            return False
        better = self._final > self._final[token] + slack
        return not bool((better & self._leaves(-slack)).any())

    def _leaves(self, favour: float) -> Flags:
        """Return which tokens may be drawn, each judged as if it stood better by `favour`."""
        kept = self._keeps(favour)
        if not self._excluding:
            return kept
        slack = abs(favour)
        surely, maybe = self._drops(slack)
        spared = any((maybe if favour > 0 else surely)[token] for token in self._ends)
        return kept if spared else kept & ~(surely if favour > 0 else maybe)

    def _keeps(self, favour: float) -> Flags:
        """Return which tokens the cuts leave, each judged as if it stood better by `favour`."""
        sampling = self._sampling
        kept = np.isfinite(self._scores)
        if sampling.temperature == 0:
            return kept
        ahead = self._ahead(favour)
        if sampling.top_k:
            kept &= ahead < sampling.top_k
        if 0.0 < sampling.top_p < 1.0:
            kept &= self._in_nucleus(ahead, favour)
        if sampling.min_p > 0.0:
            best, second = self._rising[-1], self._rising[-2]
            rival = np.where(self._scores == best, second, best)
            kept &= self._scores - rival + favour >= math.log(sampling.min_p)
        return kept

    def _drops(self, slack: float) -> tuple[Flags, Flags]:
        """Return what xtc drops surely and what maybe: all before another top choice."""
        scores, bound = self._scores, self._sampling.xtc_threshold
        sure, maybe = self._keeps(-slack), self._keeps(slack)
        least = _log_odds(bound, 1.0) if bound else -math.inf
        heavy = sure & (_log_odds(np.exp(scores), np.exp(scores[maybe]).sum()) - slack > least)
        light = maybe & (_log_odds(np.exp(scores), np.exp(scores[sure]).sum()) + slack >= least)
        last = np.min(scores, where=heavy, initial=np.inf)
        last_two = np.sort(np.append(scores[light], [np.inf, np.inf]))[:2]
        rival = np.where(light & (scores == last_two[0]), last_two[1], last_two[0])
        return scores - slack > last, scores + slack > rival

    def _ahead(self, favour: float) -> NDArray[np.int64]:
        """Return how many others stand before each token."""
        before = self._rising.size - np.searchsorted(self._rising, self._scores + favour, "right")
        return before - (favour < 0)  # a token that stands worse is before itself

    def _in_nucleus(self, ahead: NDArray[np.int64], favour: float) -> Flags:
        top_p = self._sampling.top_p
        head = self._sums[ahead]
        if favour < 0:  # its own weight, and not that of the last one before it, is left over
            own = np.exp(self._scores)
            head = np.maximum(self._sums[ahead + 1] - own, 0.0)
        tail = np.maximum(self._sums[-1] - head, 0.0)
        return np.asarray(head * math.exp(-favour) * (1.0 - top_p) < top_p * tail)


def _adjust(step: Step) -> Floats:
    """Return the logits after bias and penalties; a forbidden token has none."""
    sampling = step.sampling
    logits = np.asarray(step.logits, dtype=np.float64).copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if sampling.penalises:
        window = sampling.repeat_last_n
        recent = step.before if window < 0 else step.before[max(len(step.before) - window, 0) :]
        for token, count in Counter(recent).items():
            value = logits[token]
            factor = sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
            lowered = sampling.presence_penalty + sampling.frequency_penalty * count
            logits[token] = value - lowered
    if step.position < step.min_tokens:
        logits[list(step.ends)] = -np.inf
    if step.mask is not None:
        bits = np.unpackbits(np.frombuffer(step.mask, dtype=np.uint8), bitorder="little")
        logits[bits[: logits.size] == 0] = -np.inf
    return logits


def _log_odds(part: Any, whole: Any) -> Floats:
    """Return log(part / (whole - part)); -inf for no part, inf for one that is the whole."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(part) - np.log(np.maximum(whole - part, 0.0))
    return np.where(np.asarray(part) > 0, odds, -np.inf)


def _noise(step: Step) -> Floats:
    """Return the noise of all tokens at this step, as the sampler documents it."""
    key = mx.array([_key(step, Purpose.SAMPLE)], dtype=mx.uint32)
    ids = mx.arange(step.logits.size, dtype=mx.uint32)[None]
    noise: Floats = np.asarray(gumbel_noise(key, ids), dtype=np.float64)
    return noise.reshape(-1)


def _excludes(step: Step) -> bool:
    """Tell whether xtc acts at this step: by chance, as the sampler documents it."""
    high, low = _key(step, Purpose.XTC)
    return (high * 2.0**32 + low) * 2.0**-64 < step.sampling.xtc_probability


def _key(step: Step, purpose: Purpose) -> tuple[int, int]:
    return draw_key(seed=step.sampling.seed, choice=0, position=step.position, purpose=purpose)
