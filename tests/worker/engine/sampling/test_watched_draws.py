"""Draws that are watched: which of them were too near to call, by hand and by the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.masks.masks import AllowedTokens
from mlxd_worker.engine.sampling.drawing import Drawn, draw_all
from mlxd_worker.engine.sampling.sampler import (
    NEAR_TIE,
    SUPPORT_WIDTHS,
    TOKEN_NONE,
    Draw,
    gumbel_noise,
)
from tests.worker.draws import PLAIN, keys_of

GREEDY = replace(PLAIN, temperature=0.0)
BELOW, ABOVE = 0.9 * NEAR_TIE, 1.1 * NEAR_TIE


def draw_watched(logits: Sequence[float], sampling: Sampling, **options: Any) -> Drawn:
    """Return one watched draw."""
    draw = Draw(sampling, **{"position": 0, "watched": True, **options})
    (only,) = draw_all(mx.array([list(logits)], dtype=mx.float32), [draw], [None])
    return only


def logits_for(scores: Sequence[float], sampling: Sampling) -> list[float]:
    """Return the logits whose final scores at position 0 are these."""
    noise = gumbel_noise(keys_of(1), mx.arange(len(scores), dtype=mx.uint32)[None])
    values = np.asarray(scores) - np.array(noise, dtype=np.float64).reshape(-1)
    return [float(value) * sampling.temperature for value in values]


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (BELOW, True), (ABOVE, False)])
def test_a_greedy_draw_is_judged_by_its_logits(gap: float, *, near: bool) -> None:
    """The two best are compared, and the first is drawn whatever comes of it."""
    assert draw_watched([1.0, 3.0, 3.0 - gap], GREEDY) == Drawn(1, None, near_tie=near)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("gap", "near"), [(BELOW, True), (ABOVE, False)])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9999}, {"min_p": 1e-9}], ids=str)
def test_a_sampled_draw_is_judged_by_its_final_scores(
    temperature: float, gap: float, cut: dict[str, Any], *, near: bool
) -> None:
    """Logit over T and noise together, for each way of cutting."""
    sampling = replace(PLAIN, temperature=temperature, **cut)
    logits = logits_for([4.0, 9.0, 9.0 - gap, 2.0], sampling)
    assert draw_watched(logits, sampling) == Drawn(1, None, near_tie=near)


@pytest.mark.parametrize(("gap", "near"), [(BELOW, True), (ABOVE, False)])
@pytest.mark.parametrize("logit", [3.0, -3.0])
def test_penalties_come_before_the_judgement(logit: float, gap: float, *, near: bool) -> None:
    """A repeated token is compared as it is penalised, divided or multiplied."""
    sampling = replace(GREEDY, repetition_penalty=1.5, presence_penalty=0.25)
    score = (logit / 1.5 if logit > 0 else logit * 1.5) - 0.25
    one = draw_watched([logit, score - gap, -9.0], sampling, recent={0: 1})
    other = draw_watched([logit, score + gap, -9.0], sampling, recent={0: 1})
    assert (one, other) == (Drawn(0, None, near_tie=near), Drawn(1, None, near_tie=near))


def test_what_may_not_be_drawn_is_no_rival() -> None:
    """A token that is forbidden, or that the mask leaves out, was never near."""
    assert draw_watched([3.0, 3.0, 1.0], GREEDY).near_tie
    assert not draw_watched([3.0, 3.0, 1.0], GREEDY, forbidden=(1,)).near_tie
    mask = AllowedTokens((0b101).to_bytes(4, "little"))
    assert not draw_watched([3.0, 3.0, 1.0], GREEDY, mask=mask).near_tie
    nothing = AllowedTokens(bytes(4))
    assert draw_watched([3.0, 3.0, 1.0], GREEDY, mask=nothing) == Drawn(TOKEN_NONE)


def test_only_watched_rows_are_judged() -> None:
    """Neighbours are drawn as ever, and so is the row itself."""
    logits = mx.array([[3.0, 3.0, 1.0]] * 3, dtype=mx.float32)
    draws = [Draw(GREEDY, 0), Draw(GREEDY, 0, watched=True), Draw(GREEDY, 0)]
    drawn_rows = draw_all(logits, draws, [None] * 3)
    assert [drawn_row.near_tie for drawn_row in drawn_rows] == [False, True, False]
    assert {drawn_row.token_id for drawn_row in drawn_rows} == {0}


def test_a_nucleus_beyond_the_support_is_judged_in_full() -> None:
    """Where all of the vocabulary must be looked at, ties are found there, too."""
    vocab = 4 * SUPPORT_WIDTHS[-1]
    sampling = replace(PLAIN, top_p=0.999)
    scores = [0.0] * vocab
    for gap, near in ((BELOW, True), (ABOVE, False)):
        scores[10], scores[2000] = 9.0, 9.0 - gap
        logits = logits_for(scores, sampling)
        assert draw_watched(logits, sampling) == Drawn(10, None, near_tie=near)


def test_many_draws_are_judged_as_the_definition_says() -> None:
    """Of thousands of draws those are near ties whose two best final scores are: no other."""
    rows, vocab = 12_000, 48
    logits = np.random.default_rng(3).normal(size=(rows, vocab)).astype(np.float32)
    draws = [Draw(PLAIN, position, watched=True) for position in range(rows)]
    noise = gumbel_noise(keys_of(rows), mx.arange(vocab, dtype=mx.uint32)[None])
    final = np.sort(logits.astype(np.float64) + np.array(noise, dtype=np.float64), axis=-1)
    gaps = final[:, -1] - final[:, -2]

    near_ties = [
        drawn_row.near_tie for drawn_row in draw_all(mx.array(logits), draws, [None] * rows)
    ]
    sure = np.abs(gaps - NEAR_TIE) > NEAR_TIE / 100
    assert [t for t, s in zip(near_ties, sure, strict=True) if s] == list(gaps[sure] < NEAR_TIE)
    assert sum(near_ties) > 3
