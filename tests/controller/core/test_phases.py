"""A phase has its own fields and no others; what it does not have cannot be put into it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import get_args

import pytest

from mlxd_controller.core import phases
from mlxd_controller.core.demand import NO_DEMAND, Demand, Fixed, Waiter, Want
from mlxd_controller.core.state import Model
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.errors import WorkerLost
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from tests.support.model_facts import device, facts

PLAN = plan_load(facts(10), LoadSpec(), device(1 << 14))
FIRST, SECOND = Waiter("first", Want.LEASE, 1.0), Waiter("second", Want.LOAD, 2.0)
DEMAND = Demand((FIRST, SECOND), wanted=True)
UNLOADERS = ("third", "fourth")

HELD = phases.Ready(1, PLAN, 0.0, hold=phases.Hold(5.0, DEMAND))
AWAITED: tuple[phases.Phase, ...] = (
    phases.Queued((PLAN,), 1, 0.0, DEMAND),
    phases.Loading(1, PLAN, 0.0, DEMAND, LoadProgress()),
    HELD,
    phases.Unloading(1, PLAN, phases.StopReason.ROOM, DEMAND, UNLOADERS),
)
DRAINING = phases.Draining(1, PLAN, frozenset({"stream"}), 9.0, phases.StopReason.ASKED, UNLOADERS)
AWAITED_BY_NOBODY: tuple[phases.Phase, ...] = (
    phases.UNLOADED,
    phases.Failed(WorkerLost("m", cause="signal 9")),
    phases.Ready(1, PLAN, 0.0),
    DRAINING,
)


def name_of(phase: phases.Phase) -> str:
    """Return what a case is called."""
    return type(phase).__name__


@pytest.mark.parametrize("kind", [Model, *get_args(phases.Phase)])
def test_no_figure_stands_for_none(kind: type) -> None:
    """What there may not be is None by its type; no infinite moment says so."""
    moments = [f.default for f in fields(kind) if isinstance(f.default, float)]
    assert not any(math.isinf(moment) for moment in moments)


@pytest.mark.parametrize("phase", AWAITED, ids=name_of)
def test_a_demand_is_kept_where_it_was_put(phase: phases.Phase) -> None:
    """Of the phases in which somebody can wait each gives back its demand, and loses nothing."""
    assert phases.demand_of(phase) == DEMAND
    emptied = phases.with_demand(phase, NO_DEMAND)
    assert phases.demand_of(emptied) == NO_DEMAND
    assert phases.with_demand(emptied, DEMAND) == phase


@pytest.mark.parametrize("phase", AWAITED_BY_NOBODY, ids=name_of)
def test_nobody_is_lost_in_a_phase_without_a_demand(phase: phases.Phase) -> None:
    """To have somebody wait in it is a fault, not silence; to have nobody wait changes nothing."""
    assert phases.with_demand(phase, NO_DEMAND) is phase
    with pytest.raises(AssertionError, match="nobody can wait"):
        phases.with_demand(phase, DEMAND)


@pytest.mark.parametrize("phase", AWAITED, ids=name_of)
def test_who_leaves_takes_nobody_along(phase: phases.Phase) -> None:
    """One waiter goes; the other stays, and the load that a LoadModel asked for is still wanted."""
    left = phases.demand_of(phases.without_ticket(phase, "second"))
    assert left == Demand((FIRST,), wanted=True)


@pytest.mark.parametrize("phase", [AWAITED[3], DRAINING], ids=name_of)
def test_an_unload_may_leave_too(phase: phases.Draining | phases.Unloading) -> None:
    """One of those who wait for an unload goes, and the other stays."""
    left = phases.without_ticket(phase, "third")
    assert isinstance(left, phases.Draining | phases.Unloading)
    assert left.unloaders == ("fourth",)


def test_a_demand_remembers_what_was_fixed_before_its_first_options() -> None:
    """Later options replace earlier ones of the same demand, so the first `before` is restored."""
    first, second = Fixed(LoadSpec(), False, 1.0), Fixed(LoadSpec(), True, 2.0)
    demand = NO_DEMAND.add(FIRST, None).add(SECOND, first).add(FIRST, second)
    assert demand == Demand((FIRST, SECOND, FIRST), wanted=True, before=first)


def test_a_load_is_called_for_by_waiters_or_by_an_operator() -> None:
    """An operator's load stands though its caller has gone; a request's does not."""
    assert NO_DEMAND.add(FIRST, None).stands
    assert not NO_DEMAND.add(FIRST, None).drop("first").stands
    assert NO_DEMAND.add(SECOND, None).drop("second").stands
    assert not NO_DEMAND.stands


def test_a_moment_that_there_is_not_does_not_lie_ahead() -> None:
    """None has never to be waited for; a moment lies ahead until it has come."""
    assert not phases.lies_ahead(None, 0.0)
    assert phases.lies_ahead(1.0, 0.5)
    assert not phases.lies_ahead(1.0, 1.0)
