"""The contract of every kind of cache, by random programs against the whole history."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.effort import SAME_EACH_TIME, examples, spread_evenly
from tests.support.mlx_memory import live_nbytes
from tests.worker.cache.pair import pair
from tests.worker.cache.programs import program_of, run
from tests.worker.cache.subjects import SUBJECTS, Subject

MODES = {
    "as-it-comes": {"probe": False, "bounded_shapes": False},
    "attending-at-every-step": {"probe": True, "bounded_shapes": False},
    "few-shapes": {"probe": False, "bounded_shapes": True},
}
"""Whether each step is followed by a token for every row; whether shapes are kept few."""
CASES = spread_evenly(
    [
        pytest.param(subject, mode, id=f"{name}-{subject.name}")
        for name, mode in MODES.items()
        for subject in SUBJECTS
    ],
    10,
    in_ci=10,
)
"""Ten have every subject and every mode among them."""


@pytest.mark.parametrize(("subject", "mode"), CASES)
@settings(
    max_examples=examples(1),
    derandomize=SAME_EACH_TIME,
    # A seed cannot be made simpler; a failure names it, and the step.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_program_matches_the_whole_history(
    subject: Subject, mode: dict[str, bool], seed: int
) -> None:
    """Whatever is done, rows and snapshots hold and attend to exactly their own tokens."""
    before_nbytes = live_nbytes()

    run(
        pair(subject, bounded_shapes=mode["bounded_shapes"]),
        program_of(seed),
        probe=mode["probe"],
    )

    gc.collect()
    assert mx.get_active_memory() == before_nbytes
