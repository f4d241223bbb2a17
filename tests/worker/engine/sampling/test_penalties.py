"""Penalties on recent tokens: the numeric cases, the window, and a naive reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.sampling.penalties import RecentTokens, penalise
from mlxd_worker.engine.sampling.sampler import Draw, sample

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def options(**changes: Any) -> Sampling:
    return replace(GREEDY, **changes)


@pytest.mark.parametrize(
    ("logits", "sampling", "recent", "expected"),
    [
        ((0.0, 5.0, 4.0), options(presence_penalty=6.0), (1,), 2),
        ((0.0, 5.0, 4.0), options(repetition_penalty=2.0), (1,), 2),
        ((-5.0, -1.0, -3.0), options(repetition_penalty=4.0), (1,), 2),
        ((0.0, 5.0, 4.0), options(frequency_penalty=2.0), (1, 1), 2),
        ((0.0, 5.0, 4.0), options(frequency_penalty=2.0), (1,), 2),
        ((0.0, 5.0, 4.0), options(frequency_penalty=0.9), (1,), 1),
        ((0.0, 5.0, 4.0), options(presence_penalty=6.0, repeat_last_n=0), (1,), 1),
        ((0.0, 5.0, 4.0), options(presence_penalty=6.0, repeat_last_n=-1), (1, 0, 0, 0), 2),
        ((0.0, 5.0, 4.0), options(presence_penalty=6.0, repeat_last_n=3), (1, 0, 0, 0), 1),
        ((0.0, 5.0, 4.0), options(presence_penalty=0.5), (1, 1, 1, 1), 1),
    ],
)
def test_numeric_case(
    logits: tuple[float, ...], sampling: Sampling, recent: tuple[int, ...], expected: int
) -> None:
    """Each penalty changes the greedy token exactly where its arithmetic says."""
    draw = Draw(sampling, position=0, recent=RecentTokens(sampling, recent).counts)
    assert sample(mx.array([logits]), [draw]).tolist() == [expected]


@given(
    prompt=st.lists(st.integers(0, 9), max_size=30),
    output=st.lists(st.integers(0, 9), max_size=30),
    window=st.integers(-1, 12),
)
def test_the_window_slides_over_prompt_and_output(
    prompt: list[int], output: list[int], window: int
) -> None:
    """What counts is the last tokens of prompt + output, as many as the window holds."""
    sampling = options(presence_penalty=1.0, repeat_last_n=window)
    recent = RecentTokens(sampling, tuple(prompt))
    for token_id in output:
        recent.push(token_id)
    seen = prompt + output
    expected = seen if window < 0 else seen[len(seen) - min(window, len(seen)) :]
    assert dict(recent.counts) == dict(Counter(expected))


@given(data=st.data())
def test_penalties_equal_a_naive_loop_and_leave_neighbours_alone(data: st.DataObject) -> None:
    """Every penalised logit is as the formula says; rows without penalties keep theirs exactly."""
    value = st.floats(-8, 8, width=32)
    rows = data.draw(st.lists(st.lists(value, min_size=6, max_size=6), min_size=1, max_size=4))
    row_penalties = [
        (
            options(
                repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.3])),
                presence_penalty=data.draw(st.sampled_from([0.0, 1.5, -2.0])),
                frequency_penalty=data.draw(st.sampled_from([0.0, 0.25])),
            ),
            Counter(data.draw(st.lists(st.integers(0, 5), max_size=8))),
        )
        for _ in rows
    ]
    logits = mx.array(rows)
    got = cast("list[list[float]]", penalise(logits, row_penalties).tolist())
    assert logits.tolist() == rows, "the input keeps its values"
    for row, (sampling, counts), result in zip(rows, row_penalties, got, strict=True):
        for token_id, logit in enumerate(row):
            wanted = logit
            if sampling.penalises and counts[token_id]:
                factor = sampling.repetition_penalty
                wanted = logit / factor if logit > 0 else logit * factor
                wanted -= sampling.presence_penalty + sampling.frequency_penalty * counts[token_id]
                assert result[token_id] == pytest.approx(wanted, abs=1e-5)
            else:
                assert result[token_id] == logit


def test_a_banned_token_stays_banned() -> None:
    """A logit of minus infinity is not a number's business: it stays what it is."""
    sampling = options(repetition_penalty=2.0, presence_penalty=1.0)
    result = penalise(mx.array([[-mx.inf, 1.0]]), [(sampling, {0: 1})])
    assert result.tolist() == [[-mx.inf, 1.0]]


def test_nothing_is_counted_where_nothing_is_penalised() -> None:
    """A stream without penalties keeps no window."""
    recent = RecentTokens(options(repeat_last_n=-1), (1, 2, 3))
    recent.push(4)
    assert not recent.counts
