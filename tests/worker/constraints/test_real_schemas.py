"""A sample of the real schemas; all of them are tried in tests/soak/test_schemas.py."""

from __future__ import annotations

from tests.real_inputs import real_input
from tests.support.schema_runs import DATA, shard

STEP = 75
WALKS = 2


def test_a_sample_of_real_schemas() -> None:
    """Most compile; valid instances are accepted, invalid ones and invalid output are not."""
    outcomes = shard(real_input(*DATA), 7, STEP, WALKS)
    compiled = [found for found in outcomes if not found.refused]

    assert len(compiled) >= len(outcomes) - 1 >= 79
    assert [found.name for found in compiled if not found.right] == []
    assert [output for found in compiled for output in found.invalid] == []
    assert sum(found.walks["complete"] for found in compiled) >= len(compiled)
