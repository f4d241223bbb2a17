"""What ends a stream inside of a run of guesses: nothing beyond it is told, recorded or kept.

The model is a chain: each token is followed by the next higher one. The numbers of faults are those
of the table in docs/evidence/caches.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.engine.request import Failed, Tokens
from mlxd_worker.engine.speculation.speculator import SpeculationCounts
from mlxd_worker.models.base import Model
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.engines import Collected, TinyEngine
from tests.worker.engine.speculation.guessing import Oracle, guessing_engine
from tests.worker.engine.test_cases import Digits, chain_engine
from tests.worker.tiny import load

AMPLE = 1 << 24
ODD = (40, 41, 42)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    """The model of the chain."""
    folder = tmp_path_factory.mktemp("chain")
    chain_engine(folder)
    return load(folder), load_tokenizer(folder)


def engine(chain: tuple[Model, Tokenizer], proposed: tuple[int, ...], **options: Any) -> TinyEngine:
    """Return an engine whose rows guess `proposed`, less what they have generated."""
    return guessing_engine(
        *chain,
        make_drafter=lambda prompt: Oracle(prompt, proposed),
        make_decoder=lambda _: Digits(),
        **options,
    )


def steps(tiny: TinyEngine) -> int:
    """Run to the end; return how many steps it took."""
    count = 0
    while tiny.engine.busy:
        tiny.engine.step()
        count += 1
    return count


def test_an_end_in_a_run_of_guesses(chain: tuple[Model, Tokenizer]) -> None:
    """Case "EOS in a draft": of 2, 3, EOS, 0 the text is "23"; what is behind EOS is not judged.

    Faults 14 and 15: what is kept is the prompt and 2, 3, as plain decoding keeps it.
    """
    counts = SpeculationCounts()
    tiny = engine(chain, (2, 3, 4, 0), prefix_nbytes=AMPLE, counts=counts)
    _, sink = tiny.submit([1], max_tokens=50, eos_ids=frozenset({4}))

    assert steps(tiny) == 1
    assert (sink.text, sink.ids, sink.reason) == ("23", [2, 3], FinishReason.EOS)
    assert sink.finished.stop_token_id == 4
    usage = sink.finished.usage
    assert (usage.drafted_tokens, usage.accepted_draft_tokens) == (2, 2)
    assert (counts.drafted_tokens, counts.accepted_tokens) == (2, 2)
    assert tiny.prefix.count_known((1, 2, 3, 4, 0, 9)) == 3


def test_a_stop_string_in_a_run_of_guesses(chain: tuple[Model, Tokenizer]) -> None:
    """Fault 14: tokens behind the stop are neither told nor counted nor kept."""
    tiny = engine(chain, tuple(range(2, 20)), prefix_nbytes=AMPLE)
    _, sink = tiny.submit([1], max_tokens=50, stop=("34",))

    assert steps(tiny) == 1
    assert (sink.text, sink.ids, sink.reason) == ("2", [2, 3, 4], FinishReason.STOP_STRING)
    assert sink.finished.usage.completion_tokens == 3
    assert sink.finished.usage.accepted_draft_tokens == 3
    assert tiny.prefix.count_known(tuple(range(1, 20))) == 3, "1, 2 and 3 were needed for 4"


@pytest.mark.parametrize("kind", ["plain", "guessing"])
def test_a_stop_token_in_a_run_of_guesses(chain: tuple[Model, Tokenizer], kind: str) -> None:
    """Guessing and plain decoding tell and keep the same at a stop token."""
    tiny = engine(chain, tuple(range(2, 20)), prefix_nbytes=AMPLE)
    depth = 15 if kind == "guessing" else 0
    _, sink = tiny.submit(
        [1], max_tokens=50, stop_token_ids=frozenset({5}), speculation_depth=depth
    )

    assert steps(tiny) == (1 if depth else 4)
    assert (sink.text, sink.reason) == ("234", FinishReason.STOP_TOKEN)
    assert tiny.prefix.count_known(tuple(range(1, 20))) == 4


@pytest.mark.parametrize("most", [1, 2, 5, 16, 17])
def test_the_length_bounds_the_guesses(chain: tuple[Model, Tokenizer], most: int) -> None:
    """No more is guessed than may still be generated, and the last token is never evaluated."""
    tiny = engine(chain, tuple(range(2, 40)), prefix_nbytes=AMPLE)
    _, sink = tiny.submit([1], max_tokens=most)
    steps(tiny)

    assert sink.ids == list(range(2, 2 + most))
    assert sink.reason is FinishReason.LENGTH
    assert sink.finished.usage.drafted_tokens <= most - 1
    assert tiny.prefix.count_known(tuple(range(1, 60))) == most


def test_the_context_bounds_the_guesses(chain: tuple[Model, Tokenizer]) -> None:
    """A run stops where the context does, for its row and for one beside it."""
    tiny = engine(chain, tuple(range(2, 60)), context_length=24)
    _, long = tiny.submit([1] * 12)
    _, sink = tiny.submit([1], max_tokens=None)
    _, other = tiny.submit([1] * 20, max_tokens=None)
    steps(tiny)

    assert sink.ids == list(range(2, 25))
    assert other.ids == [2, 3, 4, 5]
    assert (sink.reason, other.reason) == (FinishReason.CONTEXT, FinishReason.CONTEXT)
    assert long.reason is FinishReason.LENGTH


def test_wrong_guesses_cost_nothing_but_the_step(chain: tuple[Model, Tokenizer]) -> None:
    """Up to the first wrong one they are taken, then the token that was drawn there."""
    tiny = engine(chain, (2, 3, *ODD, 7, 8, 9), prefix_nbytes=AMPLE)
    _, sink = tiny.submit([1], max_tokens=9)

    tiny.engine.step()
    assert sink.ids == [2, 3, 4]
    assert tiny.prefix.count_known(tuple(range(1, 20))) == 0, "the answer is not published"
    steps(tiny)
    assert sink.ids == list(range(2, 11))
    assert tiny.prefix.count_known(tuple(range(1, 20))) == 9
    assert tiny.prefix.count_known((1, 2, 3, *ODD, 9)) == 3, "nothing of a wrong guess is kept"


def test_each_token_of_a_run_is_an_event_of_its_own(chain: tuple[Model, Tokenizer]) -> None:
    """Offsets have no gap, so whoever reads sees no difference but in time."""
    sink = engine(chain, tuple(range(2, 40))).alone([1], max_tokens=20)

    offsets = [event.offset for event in sink.events if isinstance(event, Tokens)]
    assert offsets == list(range(19))
    assert sink.finished.offset == 19


def test_a_cancel_after_a_run_leaves_the_row_where_it_stood(
    chain: tuple[Model, Tokenizer],
) -> None:
    """Fault 14: what was told before the cancel is kept, and the next stream goes on there."""
    tiny = engine(chain, (2, 3, 4, *ODD), prefix_nbytes=AMPLE)
    request, sink = tiny.submit([1], max_tokens=50)
    tiny.engine.step()
    tiny.engine.cancel(request.stream)

    assert sink.ids == [2, 3, 4, 5]
    assert tiny.prefix.count_known((1, 2, 3, 4, 5, 6)) == 4
    again = tiny.alone([1, *sink.ids], max_tokens=3, speculation_depth=0)
    assert (again.ids, again.finished.usage.cached_tokens) == ([6, 7, 8], 4)


def test_penalties_count_the_guesses_before_them(chain: tuple[Model, Tokenizer]) -> None:
    """Fault 16: a token that repeats one guessed in the same step is penalised all the same.

    The chain's own next token scores 80, and 10 by its bias 96, less 5 for each time it came.
    """
    sampling = Sampling(
        0.0, 0, 1.0, 0.0, seed=0, frequency_penalty=5.0, repeat_last_n=-1, logit_bias=((10, 96.0),)
    )
    expected = [10, 10, 10, 10, *range(11, 19)]
    plain = engine(chain, ()).alone([3, 1], max_tokens=12, sampling=sampling)
    guessed = engine(chain, tuple(expected)).alone([3, 1], max_tokens=12, sampling=sampling)
    mistaken = engine(chain, (10,) * 12).alone([3, 1], max_tokens=12, sampling=sampling)

    assert plain.ids == guessed.ids == mistaken.ids == expected
    assert guessed.finished.usage.accepted_draft_tokens >= 9


def test_a_row_that_asks_for_log_probabilities_takes_one_token_beside_others(
    chain: tuple[Model, Tokenizer],
) -> None:
    """It never guesses, and gets what it gets alone, while another row's guesses are judged."""
    tiny = engine(chain, tuple(range(2, 40)))
    _, plain = tiny.submit([1], max_tokens=10, top_logprobs=2)
    _, other = tiny.submit([1], max_tokens=30)
    steps(tiny)

    assert plain.finished.usage.drafted_tokens == 0
    assert other.finished.usage.accepted_draft_tokens > 20
    alone = tiny.alone([1], max_tokens=10, top_logprobs=2)
    assert plain.ids == alone.ids == list(range(2, 12))
    assert [len(logprobs) for logprobs in logprobs_of(plain)] == [1] * 10
    for got, expected in zip(logprobs_of(plain), logprobs_of(alone), strict=True):
        assert got[0].chosen.logprob == pytest.approx(expected[0].chosen.logprob, abs=1e-4)


def logprobs_of(sink: Collected) -> list[tuple[Any, ...]]:
    """Return the log-probabilities of each event."""
    return [event.logprobs for event in sink.events if not isinstance(event, Failed)]


def test_nothing_is_guessed_where_the_request_says_so(chain: tuple[Model, Tokenizer]) -> None:
    """Depth 0 is plain decoding; a bound is kept to; what is absent is the engine's."""
    tiny = engine(chain, tuple(range(2, 40)), depth=3)
    assert count_drafted(tiny, speculation_depth=0) == 0
    assert count_drafted(tiny) > 0
    _, sink = tiny.submit([1], max_tokens=30, speculation_depth=1)
    while tiny.engine.busy:
        before = len(sink.ids)
        tiny.engine.step()
        assert len(sink.ids) - before <= 2


def count_drafted(tiny: TinyEngine, **options: Any) -> int:
    """Return how many guesses of one stream were judged."""
    return tiny.alone([1], max_tokens=20, **options).finished.usage.drafted_tokens
