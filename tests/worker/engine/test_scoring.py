"""Log-probabilities of a prompt's own tokens: of the logits before each, however it is read."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import PositionLogprobs
from mlxd_worker.engine.scoring import POSITIONS_AT_ONCE
from mlxd_worker.models.base import Batch
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.engines import Collected, TinyEngine, tiny_engine
from tests.support.tiny_model import write_tiny_model

PROMPT = [3 + index * 7 % 300 for index in range(3 * POSITIONS_AT_ONCE + 5)]
CLOSE = 1e-3


@pytest.fixture(scope="module", name="folder")
def made_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", name="wanted")
def made_wanted(folder: Path) -> list[list[float]]:
    """The log-probabilities of all tokens behind each of the prompt's, of one pass."""
    model = load_model(inspect_model(folder), form=FloatType.F32, progress=lambda *_: None)
    caches = RowCaches(model.new_caches(), context_max=512, rows_max=1)
    row = RowId(0)
    assert caches.join(row, tokens=len(PROMPT), tokens_max=512, coming=1)
    caches.reserve(row, tokens=len(PROMPT))
    logits = model.logits(model.forward(Batch.prefill(PROMPT, 0, row), caches))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    values: list[list[float]] = logprobs.tolist()  # type: ignore[assignment]
    return values


def prompt_scores(sink: Collected) -> tuple[PositionLogprobs, ...]:
    """What came with the first event."""
    first, *others = sink.events
    assert not any(getattr(event, "prompt_logprobs", ()) for event in others)
    scores: tuple[PositionLogprobs, ...] = first.prompt_logprobs  # type: ignore[union-attr]
    return scores


def check(scores: tuple[PositionLogprobs, ...], wanted: list[list[float]], begin: int) -> None:
    """Assert that scores are those of the prompt's tokens from `begin` on."""
    assert [score.chosen.token_id for score in scores] == PROMPT[begin:]
    for index, score in enumerate(scores, start=begin):
        row = wanted[index - 1]
        assert math.isclose(score.chosen.logprob, row[PROMPT[index]], abs_tol=CLOSE)
        assert math.isclose(score.top[0].logprob, max(row), abs_tol=CLOSE)
        assert len(score.top) == 2


@pytest.mark.parametrize("chunk", [8, 64])
def test_every_token_but_the_first_is_scored(
    folder: Path, wanted: list[list[float]], chunk: int
) -> None:
    """In chunks that end anywhere; the output is that of a stream that asks for nothing."""
    tiny = tiny_engine(folder, chunk=chunk)
    plain = tiny.alone(PROMPT)
    scored = tiny.alone(PROMPT, prompt_logprobs=2)

    check(prompt_scores(scored), wanted, 1)
    assert scored.ids == plain.ids
    assert not prompt_scores(plain)


def test_former_prompts_help_up_to_the_first_that_is_scored(
    folder: Path, wanted: list[list[float]]
) -> None:
    """Nothing is reused whose logits are asked for; what comes before it is."""
    tiny = tiny_engine(folder, prefix_nbytes=1 << 24)
    tiny.alone(PROMPT)
    assert tiny.alone(PROMPT).reused > 0
    whole = tiny.alone(PROMPT, prompt_logprobs=2)
    assert whole.reused == 0
    check(prompt_scores(whole), wanted, 1)
    begin = len(PROMPT) - 4
    rest = tiny.alone(PROMPT, prompt_logprobs=2, scored_from=begin)
    assert 0 < rest.reused < begin
    check(prompt_scores(rest), wanted, begin)


def test_rows_beside_it_are_left_alone(folder: Path, wanted: list[list[float]]) -> None:
    """Several at once, some of which ask: each has what it has alone."""
    tiny: TinyEngine = tiny_engine(folder, chunk=16)
    alone = tiny.alone(PROMPT[:20]).ids
    sinks = [
        tiny.submit(PROMPT, prompt_logprobs=2)[1],
        tiny.submit(PROMPT[:20])[1],
        tiny.submit(PROMPT, prompt_logprobs=2)[1],
    ]
    tiny.run()
    assert sinks[1].ids == alone
    for sink in (sinks[0], sinks[2]):
        check(prompt_scores(sink), wanted, 1)


def test_a_prompt_of_one_token_has_nothing_to_score(folder: Path) -> None:
    """There is nothing before its only token."""
    assert not prompt_scores(tiny_engine(folder).alone([5], prompt_logprobs=2))
