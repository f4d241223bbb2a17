"""The bench of mixed lengths serves its rows: nothing else runs it but who measures."""

from __future__ import annotations

from tests.bench.mixed import SHORT_STEPS, Ours
from tests.bench.server import DEMO


def test_rows_of_mixed_lengths_are_served_to_their_ends() -> None:
    """Steps in which all rows decode are timed, and what they hold is counted."""
    measured = Ours(DEMO).run([[1, 2, 3], [4, 5, 6, 7, 8]])

    assert measured.ids is not None
    assert len(measured.ids) == SHORT_STEPS
    assert measured.steps_s
    assert measured.kv_nbytes > 0
