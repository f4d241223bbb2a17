"""Log-probabilities: of the raw logits, for those who ask, aligned with the ids they belong to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxd_shared.domain.requests import FinishReason
from mlxd_worker.engine.request import Failed, PositionLogprobs
from mlxd_worker.engine.sampling.drawing import draw_all
from mlxd_worker.engine.sampling.sampler import SUPPORT_WIDTHS, TOKEN_INVALID, Draw
from tests.support.engines import GREEDY, Collected
from tests.worker.draws import PLAIN, options
from tests.worker.engine.test_cases import EOS, chain_engine

VOCABULARY = 3_000


def some_logits(rows: int, seed: int = 0) -> mx.array:
    """Return logits with many equals among them, as bfloat16 makes them."""
    logits = 4 * mx.random.normal((rows, VOCABULARY), key=mx.random.key(seed))
    return logits.astype(mx.bfloat16).astype(mx.float32)


def naive(row: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the log-softmax in double precision."""
    shifted = row.astype(np.float64) - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def test_they_are_the_log_softmax_of_the_raw_logits() -> None:
    """To float32 precision, best first, equals by id, whatever the sampler makes of them."""
    logits = some_logits(6)
    changed = replace(
        PLAIN, top_k=5, temperature=1.7, presence_penalty=3.0, logit_bias=((9, 50.0),)
    )
    draws = [Draw(changed, row, recent={1: 2}, forbidden=(3, 4)) for row in range(6)]
    drawn = draw_all(logits, draws, [20] * 6)
    for row, drawn_row in zip(np.array(logits), drawn, strict=True):
        assert drawn_row.logprobs is not None
        exact = naive(row)
        ranked = np.argsort(-row, kind="stable")[:20]
        assert drawn_row.logprobs.chosen.token_id == drawn_row.token_id
        assert drawn_row.logprobs.chosen.logprob == pytest.approx(
            exact[drawn_row.token_id], abs=2e-5
        )
        assert [token.token_id for token in drawn_row.logprobs.top] == ranked.tolist()
        values = [token.logprob for token in drawn_row.logprobs.top]
        assert values == pytest.approx(exact[ranked].tolist(), abs=2e-5)


def test_only_those_who_ask_get_them_and_all_get_the_same_tokens() -> None:
    """A row's tokens and values do not depend on who else asks, or for how many."""
    logits = some_logits(5)
    draws = [Draw(options(top_k=9), row) for row in range(5)]
    plain = draw_all(logits, draws, [None] * 5)
    mixed = draw_all(logits, draws, [None, 0, 3, None, 20])
    assert [drawn_row.token_id for drawn_row in mixed] == [
        drawn_row.token_id for drawn_row in plain
    ]
    assert [drawn_row.logprobs is None for drawn_row in mixed] == [True, False, False, True, False]
    for row, count in ((1, 0), (2, 3), (4, 20)):
        (alone,) = draw_all(logits[row : row + 1], draws[row : row + 1], [count])
        assert alone == mixed[row]
        assert alone.logprobs is not None
        assert len(alone.logprobs.top) == count


def test_more_than_the_vocabulary_has_are_all_of_it() -> None:
    """A tiny vocabulary has fewer alternatives than may be asked for."""
    (drawn,) = draw_all(mx.array([[1.0, 3.0, 3.0]]), [Draw(PLAIN, 0)], [20])
    assert drawn.logprobs is not None
    assert [token.token_id for token in drawn.logprobs.top] == [1, 2, 0]


def test_a_row_that_fails_leaves_its_neighbours_theirs() -> None:
    """Logits that are no numbers fail one row; what the others are told stays the same."""
    logits = some_logits(2)
    draws = [Draw(PLAIN, 0), Draw(PLAIN, 1)]
    whole = draw_all(logits, draws, [2, 2])
    logits[0] = mx.array(float("nan"))
    failed, other = draw_all(logits, draws, [2, 2])
    assert failed.token_id == TOKEN_INVALID
    assert other == whole[1]


def test_a_row_drawn_twice_is_told_of_its_own_token() -> None:
    """A nucleus beyond the widest support is drawn again, with its log-probability."""
    logits = mx.concatenate([mx.zeros((1, VOCABULARY)), some_logits(1)])
    draws = [Draw(options(top_p=0.9), row) for row in range(2)]
    wide, narrow = draw_all(logits, draws, [1, 1])
    assert wide.token_id >= 0
    assert wide.logprobs is not None
    assert wide.logprobs.chosen.token_id == wide.token_id
    assert wide.logprobs.chosen.logprob == pytest.approx(-np.log(VOCABULARY), abs=1e-5)
    assert narrow.logprobs is not None
    assert narrow.logprobs.chosen.token_id == narrow.token_id
    assert SUPPORT_WIDTHS[-1] < 0.9 * VOCABULARY


def logprobs_of_stream(sink: Collected) -> list[PositionLogprobs]:
    """Return all positions of a stream, each event's aligned with its ids."""
    logprobs: list[PositionLogprobs] = []
    for event in sink.events:
        assert not isinstance(event, Failed)
        assert [position.chosen.token_id for position in event.logprobs] == list(event.ids)
        logprobs += event.logprobs
    return logprobs


def test_each_id_comes_with_its_own_to_the_end(tmp_path: Path) -> None:
    """Also the last ones: at the length, before an end of sequence, in a held-back stop string."""
    tiny = chain_engine(tmp_path)
    by_length = tiny.alone([1], max_tokens=2, top_logprobs=1)
    assert len(logprobs_of_stream(by_length)) == 2
    by_eos = tiny.alone([1], max_tokens=9, eos_ids=frozenset({EOS}), top_logprobs=2)
    assert (by_eos.ids, len(logprobs_of_stream(by_eos))) == ([2, 3, 4], 3)
    by_stop = tiny.alone([1], max_tokens=9, stop=("345",), top_logprobs=0)
    assert (by_stop.reason, by_stop.text) == (FinishReason.STOP_STRING, "2")
    assert [position.chosen.token_id for position in logprobs_of_stream(by_stop)] == [2, 3, 4, 5]
    assert not any(position.top for position in logprobs_of_stream(by_stop))
    nobody = tiny.alone([1], max_tokens=3)
    assert not any(event.logprobs for event in nobody.events if not isinstance(event, Failed))


def test_rows_side_by_side_are_told_their_own(tmp_path: Path) -> None:
    """In one batch, each stream has what it would have alone, and who did not ask has none."""
    tiny = chain_engine(tmp_path)
    counts = [None, 0, 3, 20]
    sinks = [
        tiny.submit([1 + i], max_tokens=5, sampling=GREEDY, top_logprobs=count)[1]
        for i, count in enumerate(counts)
    ]
    tiny.run()
    for index, count in enumerate(counts):
        if count is not None:
            together = logprobs_of_stream(sinks[index])
            assert together == logprobs_of_stream(
                tiny.alone([1 + index], max_tokens=5, top_logprobs=count)
            )
            assert {len(position.top) for position in together} == {count}
