"""Time that this process did not see counts against nobody."""

from __future__ import annotations

from mlxd_shared import config
from mlxd_worker.distributed.patience import LOOK_COUNTS_S, LOOK_S, Patience


def look_for(patience: Patience, now_s: float, seconds: float) -> tuple[float, str]:
    """Look as often as one should for so long; return the time, and the first problem."""
    end_s = now_s + seconds
    while now_s < end_s:
        now_s += LOOK_S
        if problem := patience.look(now_s):
            return now_s, problem
    return now_s, ""


def test_nobody_is_silent_before_all_have_met() -> None:
    """Ranks that join cannot beat; from when they have met, each is counted from then."""
    patience = Patience(0.0)
    now_s, problem = look_for(patience, 0.0, 5 * config.RANK_SILENT_S)
    assert not problem
    patience.meet([1, 2])
    now_s, problem = look_for(patience, now_s, config.RANK_SILENT_S)
    assert not problem
    patience.hear(1)
    assert look_for(patience, now_s, 1.0)[1] == "rank 2 is silent"


def test_what_is_due_is_missed_by_less_than_two_looks() -> None:
    """A limit holds, begins again with each step, and ends with what it was for."""
    patience = Patience(0.0)
    patience.begin(10.0)
    now_s, problem = look_for(patience, 0.0, 9.0)
    patience.begin(10.0)
    now_s, problem = look_for(patience, now_s, 9.0)
    assert not problem
    at_s, problem = look_for(patience, now_s, 9.0)
    assert problem == "a step is not over in time"
    assert at_s - now_s <= 1.0 + 2 * LOOK_S
    patience.end()
    assert not look_for(patience, at_s, 60.0)[1]


def test_a_pause_of_this_process_is_nobody_s_silence() -> None:
    """An hour between two looks counts as one second, of silence and of what is due."""
    patience = Patience(0.0)
    patience.meet([1])
    patience.begin(10.0)
    now_s, problem = look_for(patience, 0.0, config.RANK_SILENT_S - 2 * LOOK_COUNTS_S)
    assert not problem
    assert not patience.look(now_s + 3600.0)
    patience.hear(1)
    assert look_for(patience, now_s + 3600.0, 60.0)[1] == "a step is not over in time"
