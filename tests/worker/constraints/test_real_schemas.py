"""A sample of the real schemas; all of them are tried in tests/soak/test_schemas.py."""

from __future__ import annotations

from tests.real_inputs import real_input
from tests.support.effort import IN_CI, IN_SOAK
from tests.support.schema_runs import DATA, LEFT_OUT, shard

STEP = 20 if IN_SOAK else 40 if IN_CI else 100
WALKS = 2
REFUSED_MAX = 0.02


def test_a_sample_of_real_schemas() -> None:
    """98 % compile; valid instances are accepted, invalid ones and invalid output are not."""
    outcomes = shard(real_input(*DATA), 7, STEP, WALKS)
    compiled = [outcome for outcome in outcomes if not outcome.refused]

    assert len(outcomes) >= 60
    assert len(outcomes) - len(compiled) <= REFUSED_MAX * len(outcomes)
    assert [
        outcome.name for outcome in compiled if not outcome.right and outcome.name not in LEFT_OUT
    ] == []
    assert [t for outcome in compiled for t in outcome.tests if t.as_written and not t.label] == []
    assert [output for outcome in compiled for output in outcome.invalid] == []
    assert sum(outcome.walks["complete"] for outcome in compiled) >= len(compiled)
