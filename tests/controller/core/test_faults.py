"""Faults that other schedulers had to mend, as conversations: none of them can happen here.

The numbers are those of the table in docs/evidence/caches.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import InvalidRequest, ModelUnloaded, NoRoom, WorkerExited
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts, need_mib

ROOMY = device(need_mib(10) * 8)
TWO = device(need_mib(10) * 2)
GPU = device(need_mib(10, kind="cuda") * 8, kind="cuda")


def kinds(wanted: tuple[a.Action, ...]) -> list[str]:
    """Return the actions' names."""
    return [type(action).__name__ for action in wanted]


def test_two_models_without_a_path_are_two_models() -> None:
    """Fault 34: a model is its digest; an empty path or an equal name makes no two of them one."""
    talk = Conversation(ROOMY)
    starts: list[a.Action] = []
    for digest in ("first", "second"):
        event = ev.Arrived(talk.ticket(), digest, "same name", "", facts(10))
        starts += talk.send(event)

    assert kinds(tuple(starts)) == ["StartLoad", "StartLoad"]
    assert {start.digest for start in starts if isinstance(start, a.StartLoad)} == {
        "first",
        "second",
    }
    assert talk.worker("first") != talk.worker("second")


def test_a_load_cancelled_and_asked_for_with_other_options_leaves_no_orphan() -> None:
    """Fault 36: the first worker is stopped before the second starts; its late news are nothing."""
    talk = Conversation(ROOMY)
    client, _ = talk.load("m", LoadSpec(context_length=512))
    first = talk.worker("m")
    talk.release("m", client)  # the client goes; the load is not its own
    conflict, wanted = talk.load("m", LoadSpec(context_length=256))
    assert kinds(wanted) == ["Refuse"]
    assert isinstance(talk.refusal(conflict), InvalidRequest)

    unload, wanted = talk.unload("m")
    assert wanted == (a.StopWorker(first, "m", StopReason.ASKED),)
    again, wanted = talk.load("m", LoadSpec(context_length=256))
    assert wanted == ()
    late: tuple[ev.Event, ...] = (
        ev.Progressed(first, LoadProgress("reading weights", 1, 2)),
        ev.Ready(first),
        ev.LoadFailed(first, WorkerExited("m", code=1)),
    )
    assert [talk.send(event) for event in late] == [(), (), ()]

    done, start = talk.note_gone("m")
    assert done == a.Done(unload, 0)
    assert isinstance(start, a.StartLoad)
    assert (start.plan.context_length, start.worker) == (256, talk.worker("m"))
    assert start.worker != first
    assert talk.send(ev.Unloaded(first)) == ()
    talk.ready("m")
    assert isinstance(talk.answers[again], a.Done)


def test_a_second_expiry_of_the_same_model_is_nothing() -> None:
    """Fault 36: time goes on while an expired model's worker ends; it is stopped once."""
    talk = Conversation(ROOMY)
    talk.make_idle("m")
    assert kinds(talk.wait(300)) == ["StopWorker"]
    assert talk.wait(0) == talk.wait(300) == ()
    assert talk.note_gone("m") == ()
    assert talk.wait(300) == ()


def test_requests_without_options_never_reload() -> None:
    """Fault 38: absent options mean what is loaded, also where they would be derived otherwise."""
    long = facts(10, context_max=1 << 20)
    short_of = Conversation(TWO)
    short_of.load("m", LoadSpec(), model=long)
    short_of.ready("m")
    plan = short_of.model("m").plan
    assert plan is not None
    assert plan.context_length < long.context_length_max  # derived from the room that there was

    short_of.send(ev.MemoryRead((replace(ROOMY, usable_bytes=ROOMY.budget_bytes - MIB),)))
    wanted = [
        *short_of.load("m", LoadSpec(), model=long)[1],
        *short_of.load("m", LoadSpec(keep_alive_s=5.0, pinned=False), model=long)[1],
        *short_of.arrive("m")[1],
        *short_of.arrive("m", keep_alive_s=60.0)[1],
    ]
    assert kinds(tuple(wanted)) == ["Done", "Done", "Grant", "Grant"]
    assert short_of.model("m").plan is plan


def test_keep_alive_once_said_holds_for_later_requests() -> None:
    """Fault 39: requests that say nothing keep the earlier value, for ever included."""
    talk = Conversation(ROOMY, keep_alive_s=300.0)
    ticket, _ = talk.arrive("m", keep_alive_s=math.inf)
    talk.ready("m")
    talk.release("m", ticket)
    for _ in range(3):
        talk.make_idle("m")
        assert talk.wait(10_000) == ()
    ticket, _ = talk.arrive("m", keep_alive_s=7.0)
    talk.release("m", ticket)
    talk.make_idle("m")
    assert talk.wait(6) == ()
    assert kinds(talk.wait(1)) == ["StopWorker"]


@pytest.mark.parametrize("order", [("x", "y", "z"), ("z", "y", "x"), ("y", "z", "x")])
def test_models_leave_in_one_order_whatever_the_order_they_came_in(order: tuple[str, ...]) -> None:
    """Fault 40: of equal last use, the order of digests decides; for room and at a shutdown."""
    room = Conversation(device(need_mib(10) * 3))
    for name in order:
        room.serve(name)
    for ticket, name in zip(tuple(room.answers), order, strict=True):
        room.release(name, ticket)
    assert stopped_models(room.arrive("m")[1]) == ["x"]
    assert stopped_models(room.send(ev.ShutDown(0.0))) == ["y", "z"]


def stopped_models(wanted: tuple[a.Action, ...]) -> list[str]:
    """Return which models' workers are stopped, in order."""
    return [action.digest for action in wanted if isinstance(action, a.StopWorker)]


def test_no_two_loads_at_once_on_one_gpu() -> None:
    """Fault 41: the second begins when the first is over, well or badly, though both have room."""
    talk = Conversation(GPU)
    assert kinds(talk.arrive("x")[1]) == ["StartLoad"]
    assert kinds(talk.arrive("y")[1]) == []
    assert kinds(talk.arrive("z")[1]) == []
    assert talk.phase("y") is talk.phase("z") is phases.Queued

    assert kinds(talk.ready("x")) == ["Grant", "StartLoad"]
    assert talk.phase("y") is phases.Loading
    failed = ev.LoadFailed(talk.worker("y"), WorkerExited("y", code=3))
    assert kinds(talk.send(failed)) == ["Refuse", "StartLoad"]
    assert talk.phase("z") is phases.Loading


def test_a_load_on_a_gpu_waits_until_the_worker_before_is_gone() -> None:
    """After fault 43: what a killed process held is the driver's until it has been reaped."""
    talk = Conversation(GPU)
    talk.arrive("x")
    talk.arrive("y")
    assert kinds(talk.unload("x")[1]) == ["Refuse", "StopWorker"]
    assert talk.phase("y") is phases.Queued
    assert kinds(talk.note_gone("x")) == ["Done", "StartLoad"]


def test_a_cpu_loads_side_by_side_what_fits_together() -> None:
    """Host memory is reserved before a load begins: there one load waits for no other."""
    talk = Conversation(ROOMY)
    assert kinds(talk.arrive("x")[1] + talk.arrive("y")[1]) == ["StartLoad", "StartLoad"]


def test_the_fit_is_bounded_by_the_free_memory_of_the_system() -> None:
    """After fault 43: a plan within the budget is no load where others hold the memory now."""
    talk = Conversation(replace(ROOMY, usable_bytes=(need_mib(10) - 1) * MIB))
    ticket, wanted = talk.arrive("m")
    assert wanted == ()
    talk.wait(config.ROOM_WAIT_MAX_S)
    assert isinstance(talk.refusal(ticket), NoRoom)
    talk.send(ev.MemoryRead((replace(ROOMY, usable_bytes=need_mib(10) * MIB),)))
    assert kinds(talk.arrive("m")[1]) == ["StartLoad"]


def test_an_idle_model_is_the_victim_and_never_a_busy_one() -> None:
    """Of a busy model kept 1 s and an idle one kept 2 s the idle one goes, however soon the other.

    With both busy nobody goes: the request waits until one of them is idle.
    """
    talk = Conversation(TWO)
    busy, _ = talk.arrive("busy", keep_alive_s=1.0)
    talk.ready("busy")
    talk.wait(1)
    idle, _ = talk.arrive("idle", keep_alive_s=2.0)
    talk.ready("idle")
    assert talk.arrive("m")[1] == ()
    assert stopped_models(talk.release("idle", idle)) == ["idle"]
    assert busy in talk.model("busy").leases


def test_an_unload_beside_a_load_answers_who_waits() -> None:
    """Fault 36: whoever waited for the load that an operator ended is told, exactly once."""
    talk = Conversation(ROOMY)
    first, _ = talk.arrive("m")
    talk.unload("m")
    second, _ = talk.arrive("m")
    assert isinstance(talk.refusal(first), ModelUnloaded)
    talk.note_gone("m")
    talk.ready("m")
    assert isinstance(talk.answers[second], a.Grant)
