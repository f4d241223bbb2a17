"""Streams on trained models, cut and resumed: the rest is what the whole stream brought."""

from __future__ import annotations

import random

import pytest

from tests.support.effort import examples
from tests.support.resuming import Tally, compare_resumed, cuts_of
from tests.support.trained import MODELS, Trained, train_model

STREAMS = examples(20, few=4, in_ci=8)
CUTS = 3
PREFIX_NBYTES = 1 << 28


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Trained:
    """Each trained model."""
    return train_model(request.param)


def test_streams_go_on_from_any_cut(model: Trained) -> None:
    """With and without memory of the stream, guesses and neighbours: equal, but for near ties."""
    tally = Tally()
    draws = random.Random(1)
    engines = [
        model.engine(rows_max=3, chunk=chunk, prefix_nbytes=nbytes)
        for chunk, nbytes in ((512, 0), (32, PREFIX_NBYTES))
    ]
    for number in range(STREAMS):
        whole = model.alone(number)
        possible = cuts_of(whole)
        for cut in draws.sample(possible, min(CUTS, len(possible))):
            tiny = draws.choice(engines)
            if draws.random() < 0.5:
                model.submit(tiny, number + 1)
                tiny.engine.step()
            guesses = draws.choice((0, 4))
            _, rest = model.submit(tiny, number, resumed=whole.ids[:cut], speculation_depth=guesses)
            tiny.run()
            compare_resumed(whole, rest, cut=cut, tally=tally)
    assert tally.diverged <= max(1.0, tally.cuts / 500), str(tally)
    assert tally.tokens > 20 * STREAMS, str(tally)


def test_replaying_the_steps_leaves_nothing_to_rounding(model: Trained) -> None:
    """A lone stream whose tokens are decoded again, each in the shape of its first time, goes on
    bit for bit.
    """
    tally = Tally()
    draws = random.Random(2)
    for number in range(STREAMS):
        whole = model.alone(number)
        possible = cuts_of(whole)
        for cut in draws.sample(possible, min(CUTS, len(possible))):
            tiny = model.engine()
            _, rest = model.submit(tiny, number, forced=tuple(whole.ids[:cut]))
            tiny.run()
            assert rest.drawn == whole.drawn[cut:]
            assert rest.logprobs == whole.logprobs[cut:]
            compare_resumed(whole, rest, cut=cut, tally=tally)
    assert tally.diverged == 0, str(tally)
