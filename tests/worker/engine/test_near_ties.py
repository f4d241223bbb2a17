"""The judge of near ties: by hand for each cut, and against the sampler under small pushes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.sampling.sampler import Draw, Purpose, gumbel_noise, sample
from tests.support.effort import examples
from tests.support.near_ties import Step, slack_of
from tests.support.reference_sampler import draw_key

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
GREEDY = replace(PLAIN, temperature=0.0)
ROUNDING = 1e-5
PUSHES = 8
TOKENS = 9


def step_of(logits: Sequence[float], sampling: Sampling, **given_values: Any) -> Step:
    """Return a stream's first draw."""
    values = {"position": 0, "before": (), **given_values}
    return Step(np.array(logits, dtype=np.float32), sampling, **values)


def noise_of(sampling: Sampling, size: int) -> NDArray[np.float64]:
    """Return the noise of a stream's first draw."""
    words = draw_key(seed=sampling.seed, choice=0, position=0, purpose=Purpose.SAMPLE)
    keys, ids = mx.array([words], dtype=mx.uint32), mx.arange(size, dtype=mx.uint32)[None]
    noise: NDArray[np.float64] = np.array(gumbel_noise(keys, ids), dtype=np.float64)
    return noise.reshape(-1)


def favouring(token: int, sampling: Sampling, *, size: int) -> Sampling:
    """Return the options with the first seed whose noise puts `token` far ahead of all others."""
    for seed in range(100_000):
        seeded = replace(sampling, seed=seed)
        noise = noise_of(seeded, size)
        if noise[token] > 4 + np.delete(noise, token).max():
            return seeded
    raise AssertionError("no such seed")


def test_a_greedy_draws_slack_is_the_gap_of_logits() -> None:
    """The best token needs no slack, another one what it lacks; temperature has no say."""
    step = step_of([1.0, 3.0, 2.5], GREEDY)

    assert slack_of(step, [1]) == 0
    assert slack_of(step, [2]) == pytest.approx(0.5)
    assert slack_of(step, [0, 2]) == pytest.approx(2)


def test_noise_and_temperature_count() -> None:
    """A drawn token's slack is the gap of logit / T + noise."""
    sampling = replace(PLAIN, temperature=0.5, seed=3)
    final = 2 * np.array([0.3, 0.2, 0.1]) + noise_of(sampling, 3)
    step = step_of([0.3, 0.2, 0.1], sampling)

    for token in range(3):
        assert slack_of(step, [token]) == pytest.approx(final.max() - final[token], abs=1e-6)


def test_bias_and_penalties_count() -> None:
    """Scores are compared after bias and penalties on the window alone."""
    sampling = replace(
        GREEDY,
        logit_bias=((0, 2.0),),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repeat_last_n=3,
    )
    # Scores: 1 + 2; 3 / 2 - 0.25 - 2 * 0.5; -1 * 2 - 0.25 - 0.5; 2.5.
    step = step_of([1.0, 3.0, -1.0, 2.5], sampling, before=(3, 3, 1, 2, 1))

    slacks = [slack_of(step, [token]) for token in range(4)]
    assert slacks == pytest.approx([0, 2.75, 5.75, 0.5])


def test_an_end_that_may_not_come_yet_is_never_near() -> None:
    """No slack brings back what may not be drawn."""
    step = step_of([1.0, 3.0, 2.5], GREEDY, ends=(1,), min_tokens=1)

    assert [slack_of(step, [token]) for token in range(3)] == [1.5, math.inf, 0]


@pytest.mark.parametrize(
    ("cut", "slack"),
    [
        ({"top_k": 2}, math.log(0.3 / 0.2)),
        # Before the token there is 0.8, where the cut wants less than 0.75 ...
        ({"top_p": 0.75}, math.log(0.8 / 0.2) - math.log(0.75 / 0.25)),
        # ... or it overtakes the one before it, which is nearer where the cut is further.
        ({"top_p": 0.6}, math.log(0.3 / 0.2)),
        ({"min_p": 0.6}, math.log(0.6) - math.log(0.2 / 0.5)),
    ],
    ids=["top_k", "top_p", "top_p by rank", "min_p"],
)
def test_a_cut_that_lets_a_token_in(cut: dict[str, Any], slack: float) -> None:
    """A token that would be drawn had it not been cut needs what brings it across the cut."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    step = step_of(logits, favouring(2, replace(PLAIN, **cut), size=3))

    assert slack_of(step, [2]) == pytest.approx(slack, rel=1e-5)


@pytest.mark.parametrize(
    ("cut", "slack"),
    [
        ({"top_k": 2}, math.log(0.3 / 0.2)),
        ({"top_p": 0.6}, math.log(0.6 / 0.4)),
        ({"min_p": 0.5}, math.log(0.3 / 0.5) - math.log(0.5)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_cut_that_drops_the_token(cut: dict[str, Any], slack: float) -> None:
    """Another token is near where the drawn one is near a cut, however far ahead it is."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    step = step_of(logits, favouring(1, replace(PLAIN, **cut), size=3))

    assert slack_of(step, [1]) == 0
    assert min(slack_of(step, [token]) for token in (0, 2)) == pytest.approx(slack, rel=1e-5)


def excluding(token: int, *, probabilities: Sequence[float], **given_values: Any) -> Step:
    """Return a step at which xtc acts, and whose noise puts `token` far ahead."""
    sampling = replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.2)
    logits = [math.log(p) for p in probabilities]
    return step_of(logits, favouring(token, sampling, size=len(logits)), **given_values)


def test_a_top_choice_is_near_where_the_one_after_it_is() -> None:
    """A token that xtc drops needs what takes the last top choice below the threshold, or what
    makes it the last one itself.
    """
    falls = math.log(0.25 / 0.75) - math.log(0.2 / 0.8)
    assert slack_of(excluding(0, probabilities=(0.6, 0.25, 0.15)), [0]) == pytest.approx(falls)
    step = excluding(0, probabilities=(0.5, 0.4, 0.1))
    assert slack_of(step, [0]) == pytest.approx(math.log(0.5 / 0.4))


def test_a_token_that_xtc_leaves_is_near_where_another_rises() -> None:
    """The last top choice may be dropped by one that rises above the threshold."""
    step = excluding(0, probabilities=(0.7, 0.17, 0.13))
    rises = math.log(0.2 / 0.8) - math.log(0.17 / 0.83)

    assert slack_of(step, [0]) == 0
    assert min(slack_of(step, [1]), slack_of(step, [2])) == pytest.approx(rises)


def test_xtc_spares_a_position_where_the_text_may_end() -> None:
    """Where an end would be dropped nothing is; and the end is near where the dropping is."""
    step = excluding(0, probabilities=(0.5, 0.27, 0.23), ends=(1,))
    assert slack_of(step, [0]) == 0
    # The end becomes the last top choice, and is not dropped, where it changes places with it.
    nearest = min(slack_of(step, [1]), slack_of(step, [2]))
    assert nearest == pytest.approx(math.log(0.27 / 0.23), rel=1e-5)


def test_chance_decides_whether_xtc_acts() -> None:
    """At a position where it does not act it drops nothing, however near a threshold is."""
    step = excluding(0, probabilities=(0.5, 0.4, 0.1))
    left_alone = replace(step, sampling=replace(step.sampling, xtc_probability=0.0))
    assert slack_of(left_alone, [0]) == 0


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 6]),
    top_p=st.sampled_from([1.0, 0.9, 0.6, 0.2]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    seed=st.integers(0, 1 << 20),
    xtc_probability=st.sampled_from([0.0, 0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.3]),
)
some_logits = st.lists(st.floats(-3, 3, width=32), min_size=TOKENS, max_size=TOKENS)


def draw_first(logits: NDArray[np.floating[Any]], sampling: Sampling) -> int:
    """Return what the sampler draws first."""
    return int(np.array(sample(mx.array(logits[None].astype(np.float32)), [Draw(sampling, 0)]))[0])


@settings(max_examples=examples(12))
@given(some_logits, samplings, st.randoms(use_true_random=False))
def test_pushes_within_the_slack_change_nothing(
    logits: list[float], sampling: Sampling, draws: random.Random
) -> None:
    """The sampler's own draw needs no slack, and moving all scores by less than the least slack of
    the others does not change it.
    """
    step = step_of(logits, sampling)
    token = draw_first(step.logits, sampling)
    assert slack_of(step, [token]) < ROUNDING
    slack = min(slack_of(step, [other]) for other in range(TOKENS) if other != token)
    most = min((slack - ROUNDING) / 2, 1.0) * (sampling.temperature or 1)
    assume(most > 0)

    for _ in range(PUSHES):
        push = [draws.choice([-most, most, draws.uniform(-most, most)]) for _ in logits]
        assert draw_first(step.logits + np.array(push), sampling) == token


def pushes(step: Step, by: float) -> Iterator[NDArray[np.float64]]:
    """Yield the logits with each token moved by `by`, what comes before it the other way."""
    for token in range(TOKENS):
        this = np.arange(TOKENS) == token
        lead = step.logits - step.logits[token]
        for moved in (this, np.where(this, -1, lead > 0), ~this & (lead > -by)):
            for sign in (1, -1):
                yield step.logits + sign * by * moved


@settings(max_examples=examples(12))
@given(some_logits, samplings)
def test_pushes_beyond_the_slack_change_the_draw(logits: list[float], sampling: Sampling) -> None:
    """The least slack is no smaller than it must be: moving a token by a little more, and what
    comes before it likewise where a nucleus ends, gives another token.
    """
    step = step_of(logits, sampling)
    token = draw_first(step.logits, sampling)
    slack = min(slack_of(step, [other]) for other in range(TOKENS) if other != token)
    assume(slack < 20)

    by = (slack * 1.01 + ROUNDING) * (sampling.temperature or 1)
    assert any(draw_first(pushed, sampling) != token for pushed in pushes(step, by))
