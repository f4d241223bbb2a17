"""Trained models go on alike with and without what is remembered: greedy, and with a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_shared.domain.requests import Sampling
from tests.real_inputs import real_input
from tests.support.effort import IN_FULL, spread_evenly
from tests.support.engines import GREEDY
from tests.support.remembering import answer_of, remembering

DEMO = Path(__file__).parents[3] / "shared" / "mlxd_shared" / "demo_model"
BEGINNING = (
    "Once upon a time there was a little girl named Lily. She lived with her mother in a small "
    "house near the wood."
)
TURNS = ("", " One day a fox came by.", " The king said to him,")
ANSWER_TOKENS = 50 if IN_FULL else 16
SEEDED = Sampling(0.8, 40, 0.9, 0.0, seed=7)
CASES = [
    pytest.param("demo", GREEDY, id="demo-greedy"),
    pytest.param("demo", SEEDED, id="demo-seeded"),
    pytest.param("stories260k", SEEDED, id="stories260k-seeded"),
    pytest.param("stories260k", GREEDY, id="stories260k-greedy"),
]


@pytest.mark.parametrize(("model", "sampling"), spread_evenly(CASES, 2))
def test_a_story_goes_on_alike(model: str, sampling: Sampling) -> None:
    """A draw depends on its position alone: a turn has the tokens of an engine that starts anew.

    Prompts are evaluated in other pieces then, so this holds up to ties of float32; there are none.
    """
    folder = DEMO if model == "demo" else real_input("models", model)
    with remembering(folder, context_length=512) as scene:
        said: tuple[int, ...] = ()
        for turn, text in enumerate(TURNS):
            said += tuple(scene.tiny.tokenizer.encode(text or BEGINNING))[1 if turn else 0 :]
            first = scene.ask(said, max_tokens=ANSWER_TOKENS, sampling=sampling)
            assert first.cached > 0 or turn == 0
            again = answer_of(scene.tiny.alone(said, max_tokens=ANSWER_TOKENS, sampling=sampling))
            assert (again.ids, again.left) == (first.ids, 1)
            said += first.ids
