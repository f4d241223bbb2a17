"""Where a request's time went, as a trace shows it."""

from __future__ import annotations

import pytest

from mlxd_controller.metrics.phases import Phase, Waits, phases_of


def test_the_phases_follow_each_other() -> None:
    """Loaded, queued, read, answered: the last three meet, and the load stands at the beginning."""
    waits = Waits(load_s=4.0, queue_s=1.0, prompt_s=2.0)

    assert phases_of(10.0, 7.5, waits) == (
        Phase("load", 10.0, 6.0),
        Phase("queue", 5.5, 4.5),
        Phase("prompt", 4.5, 2.5),
        Phase("tokens", 2.5, 0.0),
    )


@pytest.mark.parametrize("load_s", [0.0, 3.0, 50.0])
def test_clocks_that_disagree_make_no_phase_of_less_than_nothing(load_s: float) -> None:
    """A worker's times may sum to more than the controller's: no phase leaves the request."""
    for phase in phases_of(10.0, 8.0, Waits(load_s=load_s, queue_s=7.0, prompt_s=4.0)):
        assert 10.0 >= phase.begun_ago_s >= phase.ended_ago_s >= 0.0


def test_a_stream_without_an_end_of_its_own_shows_what_is_known() -> None:
    """Without the worker's figures the wait is one phase; without a token it is all there is."""
    assert phases_of(10.0, 8.0, None) == (Phase("wait", 10.0, 2.0), Phase("tokens", 2.0, 0.0))
    assert phases_of(10.0, None, None) == (Phase("wait", 10.0, 0.0),)
