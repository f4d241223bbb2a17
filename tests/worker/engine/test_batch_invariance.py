"""A stream on a trained model gets the tokens of its lone run, whoever shares the batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.support.batch_mixes import Mix, Tally, compare, mixes
from tests.support.effort import examples
from tests.support.near_ties import NEAR_TIE, slack_of
from tests.support.trained import MODELS, Trained, train_model

STREAMS = 30
MIXES = examples(4, few=1)
CHECKED = examples(12, few=4)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Trained:
    """Each trained model."""
    return train_model(request.param)


def test_a_row_is_the_same_in_any_batch(model: Trained) -> None:
    """Whoever comes, goes and cancels beside it, a row's tokens are those of its lone run, but for
    ties nearer than 1e-3 of noise and all cuts.
    """
    tally = Tally()

    @settings(max_examples=MIXES)
    @given(mixes(streams=STREAMS, members_min=5, members_max=12, rows_max=8))
    def check(mix: Mix) -> None:
        compare(model, mix, tally)

    check()
    assert tally.within_bound, str(tally)


def test_lone_draws_follow_the_definition(model: Trained) -> None:
    """Every token of a lone run is the one that bias, penalties, cuts and noise make the best."""
    checked = 0
    for number in range(CHECKED):
        alone = model.alone(number).drawn
        for step, token in zip(model.steps(number), alone, strict=True):
            assert slack_of(step, [token]) < NEAR_TIE, (number, step.position, token)
            checked += 1
    assert checked > 8 * CHECKED
