"""On the trained models: guessing gives the tokens of plain decoding, greedy and drawn.

A wider step multiplies more rows at once and so rounds differently: where a stream parts from its
plain run, the two tokens have to be a nearer tie than `NEAR_TIE`.
"""

from __future__ import annotations

import pytest

from mlxd_worker.cache.base import RowId
from mlxd_worker.engine.speculation.drafts import MakeDrafter, PromptLookup
from tests.support.effort import examples
from tests.support.engines import Collected
from tests.support.near_ties import NEAR_TIE, slack_of
from tests.support.trained import MODELS, Trained, train_model
from tests.worker.engine.speculation.guessing import drafter_for, guessing_engine
from tests.worker.tiny import caches_of, floats, forced_logits

STREAMS = examples(10, few=5)
ROWS_MAX = 6
NEW_TOKENS = 24
BEGINNINGS = (
    "Once upon a time",
    "The dog and the cat",
    "Tom said",
    "One day, a little girl",
)
COPIED = (
    "The king had a red ball. The queen had a big hat. ",
    "Lily likes the sun. Tim likes the moon. ",
    "no no no no no no ",
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Trained:
    """Each trained model."""
    return train_model(request.param)


def prompts_of(model: Trained) -> list[tuple[int, ...]]:
    """Return beginnings as they are, and behind sentences that were said before."""
    texts = [*BEGINNINGS, *(3 * text + text[:17] for text in COPIED)]
    texts += [2 * copied + beginning for copied in COPIED for beginning in BEGINNINGS[:1]]
    return [tuple(model.tokenizer.encode(text)) for text in texts]


def run_all(
    model: Trained,
    prompts: list[tuple[int, ...]],
    *,
    depths: list[int],
    make_drafter: MakeDrafter = PromptLookup,
) -> list[Collected]:
    """Run prompts side by side, each with a depth of its own; return their sinks."""
    tiny = guessing_engine(
        model.model,
        model.tokenizer,
        make_drafter=make_drafter,
        rows_max=ROWS_MAX,
        context_length=model.context_length,
    )
    sinks = [
        tiny.submit(prompt, speculation_depth=depth, max_tokens=NEW_TOKENS)[1]
        for prompt, depth in zip(prompts, depths, strict=True)
    ]
    tiny.run()
    tiny.rest()
    return sinks


def test_greedy_token_for_token(model: Trained) -> None:
    """Beginnings of stories, and texts that repeat themselves, beside rows that never guess.

    Every other prompt's text is looked up; the others' is known, and mistaken now and then.
    """
    prompts = prompts_of(model)
    plain = run_all(model, prompts, depths=[0] * len(prompts))
    known = {prompt: sink.ids for prompt, sink in zip(prompts[::2], plain[::2], strict=True)}
    guessed = run_all(
        model,
        prompts,
        depths=[(15, 15, 7, 0)[i % 4] for i in range(len(prompts))],
        make_drafter=drafter_for(known, wrong=0.2),
    )

    for prompt, one, other in zip(prompts, plain, guessed, strict=True):
        place = next((i for i in range(NEW_TOKENS) if one.ids[i] != other.ids[i]), None)
        if place is not None:
            tokens = (one.ids[place], other.ids[place])
            assert gap(model, (*prompt, *one.ids[:place]), tokens) < NEAR_TIE, (prompt, place)
    usages = [sink.finished.usage for sink in guessed]
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    assert accepted > len(known) * NEW_TOKENS / 3, "many steps took several tokens"
    assert accepted < sum(usage.drafted_tokens for usage in usages), "and some guesses were wrong"


def gap(model: Trained, tokens: tuple[int, ...], pair: tuple[int, int]) -> float:
    """Return by how much the logits of two tokens differ behind `tokens`."""
    logits = forced_logits(model.model, caches_of(model.model), RowId(0), tokens, ())
    first, second = (floats(logits[-1])[token] for token in pair)
    return abs(first - second)


def test_drawn_with_any_options_token_for_token(model: Trained) -> None:
    """The same seed gives the same tokens, whatever the options, and whoever guesses beside."""
    tiny = guessing_engine(
        model.model, model.tokenizer, rows_max=ROWS_MAX, context_length=model.context_length
    )
    sinks = [model.submit(tiny, number)[1] for number in range(STREAMS)]
    tiny.run()

    accepted = 0
    for number, sink in enumerate(sinks):
        alone = model.alone(number)
        compared = min(len(alone.drawn), len(sink.drawn))
        place = next((i for i in range(compared) if alone.drawn[i] != sink.drawn[i]), None)
        if place is None:
            assert (sink.drawn, sink.text, sink.reason) == (alone.drawn, alone.text, alone.reason)
            accepted += sink.finished.usage.accepted_draft_tokens
            continue
        tokens = (alone.drawn[place], sink.drawn[place])
        assert slack_of(model.steps(number)[place], tokens) < NEAR_TIE, (number, place)
    assert accepted > 0
