"""Devices that are lost with their machines, come back, or are not spoken of any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.report import report
from mlxd_models.fit.measured import Figures
from mlxd_models.fit.plan import Device
from mlxd_models.fit.terms import reckon
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import ModelTooLarge, NoRoom, WorkerExited, WorkerLost
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.controller.core.test_adopting import make_adopted
from tests.support.model_facts import device, facts, need_mib

ONE = need_mib(10)


def machines(*rooms: float) -> tuple[Device, ...]:
    """Machines n0, n1, ... of one device each, with room for so many models of the usual size."""
    return tuple(
        replace(device(int(room * ONE), name=f"n{index}/cpu"), node=f"n{index}")
        for index, room in enumerate(rooms)
    )


def see(talk: Conversation, *lost: str, absent: tuple[str, ...] = ()) -> tuple[a.Action, ...]:
    """Memory is measured; the devices of these machines are lost, or not spoken of."""
    devices = (replace(known, lost=known.node in lost) for known in talk.state.devices)
    return talk.send(ev.MemoryRead(tuple(one for one in devices if one.node not in absent)))


def home(talk: Conversation, name: str) -> str:
    """Where a model is placed."""
    return talk.state.home_of(talk.model(name))


def put_on(talk: Conversation, *names: str) -> None:
    """Leave these models ready, each on the machine of its turn: rooms must be as large."""
    for number, name in enumerate(names):
        talk.make_idle(name)
        assert home(talk, name) == f"n{number}/cpu"


def test_a_device_that_nobody_knows_is_not_the_first_one() -> None:
    """What lives where no device is any more lives on, counts nowhere and takes its slot."""
    talk = Conversation(*machines(1, 1), max_loaded=2)
    put_on(talk, "m", "n")
    assert see(talk, absent=("n1",)) == ()

    assert talk.state.device_named("n1/cpu") is None
    assert [talk.state.reserved_on(one) > 0 for one in talk.state.devices] == [True]
    assert home(talk, "n") == "n1/cpu"
    ticket, wanted = talk.arrive("n")
    assert wanted == (a.Grant(ticket, talk.worker("n"), 0.0),)
    _, wanted = talk.arrive("o")
    assert [action.digest for action in wanted if isinstance(action, a.StopWorker)] == ["m"]
    assert report(talk.state, "n", facts(10), LoadSpec()).device.name == "n0/cpu"

    first, second = machines(1, 1)
    talk.send(ev.MemoryRead((first, replace(second, lost=True))))
    assert talk.phase("n") is phases.Failed


def test_a_ready_model_is_lost_with_its_machine() -> None:
    """It fails without a word to its worker, is no failure of its own, and is loaded elsewhere."""
    talk = Conversation(*machines(1, 1))
    put_on(talk, "m", "n")
    lease = talk.serve("n")
    for _ in range(config.RESTARTS_AT_ONCE + 1):
        lost_worker = talk.worker("n")
        assert see(talk, "n1") == ()

        assert talk.phase("n") is phases.Failed
        error = talk.model("n").error
        assert isinstance(error, WorkerLost)
        assert "n1" in str(error)
        assert (talk.model("n").failures, talk.model("n").retry_s) == (0, None)
        assert talk.phase("m") is phases.Ready
        talk.release("n", lease)
        assert talk.send(ev.WorkerDied(lost_worker, WorkerLost("n"))) == ()
        see(talk)
        lease = talk.serve("n")
        assert home(talk, "n") == "n1/cpu"


def test_who_waits_for_a_load_on_a_lost_machine_waits_for_the_next() -> None:
    """The load begins anew where there is room, for requests and operators alike."""
    talk = Conversation(*machines(1, 2))
    ticket, _ = talk.arrive("m")
    order, _ = talk.load("m", LoadSpec(pinned=True))
    before = talk.worker("m")
    assert home(talk, "m") == "n1/cpu"

    (start,) = see(talk, "n1")

    assert isinstance(start, a.StartLoad)
    assert (start.plan.device, start.restart) == ("n0/cpu", "WorkerLost")
    assert start.worker > before
    assert talk.send(ev.LoadFailed(before, WorkerExited("m", (), 3))) == ()
    talk.ready("m")
    assert isinstance(talk.answers[ticket], a.Grant)
    assert isinstance(talk.answers[order], a.Done)
    assert talk.model("m").pinned


def test_a_load_that_nobody_waits_for_is_not_begun_anew() -> None:
    """It has failed, as one whose process ended."""
    talk = Conversation(*machines(1, 2))
    ticket, _ = talk.arrive("m")
    talk.release("m", ticket)

    assert see(talk, "n1") == ()

    assert talk.phase("m") is phases.Failed


def test_what_leaves_a_lost_machine_has_left() -> None:
    """Unloads are done; who waits for the next worker of a leaving model gets it elsewhere."""
    talk = Conversation(*machines(1, 3))
    talk.serve("draining")
    unload, _ = talk.unload("draining")
    talk.make_idle("going")
    again, _ = talk.unload("going")
    assert {home(talk, name) for name in ("draining", "going")} == {"n1/cpu"}
    assert talk.phase("going") is phases.Unloading
    ticket, _ = talk.arrive("going")

    wanted = see(talk, "n1")

    assert {action.ticket for action in wanted if isinstance(action, a.Done)} == {unload, again}
    assert talk.phase("draining") is phases.Unloaded
    assert (talk.phase("going"), home(talk, "going")) == (phases.Loading, "n0/cpu")
    talk.ready("going")
    assert isinstance(talk.answers[ticket], a.Grant)


def test_who_waits_behind_a_hold_is_not_forgotten_with_the_machine() -> None:
    """A held model's own waiters get the next worker."""
    talk = Conversation(*machines(0.5, 1))
    talk.serve("m")
    talk.arrive("new")
    talk.wait(config.OVERTAKEN_MAX_S)
    assert talk.model("m").held
    ticket, _ = talk.arrive("m")

    see(talk, "n1")
    assert isinstance(talk.refusal(ticket), NoRoom)

    talk = Conversation(*machines(1, 1))
    put_on(talk, "other", "m")
    talk.serve("other")
    talk.serve("m")
    talk.arrive("new")
    talk.wait(config.OVERTAKEN_MAX_S)
    held = next(model.name for model in talk.state.models.values() if model.held)
    node = home(talk, held).partition("/")[0]
    ticket, _ = talk.arrive(held)
    see(talk, node)
    assert talk.phase(held) is phases.Queued
    assert ticket in {waiter.ticket for waiter in talk.model(held).waiters}


def test_nothing_is_placed_on_a_lost_machine() -> None:
    """Though it had most room; and once it is back it has that again."""
    talk = Conversation(*machines(1, 3))
    see(talk, "n1")
    talk.make_idle("m")
    assert home(talk, "m") == "n0/cpu"
    _, wanted = talk.arrive("n")
    assert [action.digest for action in wanted if isinstance(action, a.StopWorker)] == ["m"]

    wanted = see(talk)

    assert [action.plan.device for action in wanted if isinstance(action, a.StartLoad)] == [
        "n1/cpu"
    ]


def test_queued_models_are_planned_anew_when_the_devices_change() -> None:
    """In their places: who was first in the line is first on the new machine as well."""
    first, second, more = machines(1, 1, 1)
    talk = Conversation(first, second)
    talk.serve("m")
    talk.serve("n")
    talk.arrive("first")
    talk.wait(1)
    talk.arrive("second")
    before = talk.model("second").phase
    assert isinstance(before, phases.Queued)
    talk.wait(1)

    (start,) = talk.send(ev.MemoryRead((first, second, more)))

    assert isinstance(start, a.StartLoad)
    assert (start.digest, start.plan.device) == ("first", "n2/cpu")
    queued = talk.model("second").phase
    assert isinstance(queued, phases.Queued)
    assert [plan.device for plan in queued.plans] == ["n0/cpu", "n1/cpu", "n2/cpu"]
    assert (queued.place, queued.since_s) == (before.place, before.since_s)
    assert talk.send(ev.MemoryRead((replace(first, lost=True), second, more))) == ()
    queued = talk.model("second").phase
    assert isinstance(queued, phases.Queued)
    assert [plan.device for plan in queued.plans] == ["n1/cpu", "n2/cpu"]


def test_another_machine_of_the_same_name_has_models_planned_anew() -> None:
    """What could live on the former one may be too large for the one that is called so now."""
    (former,) = machines(1)
    former = replace(former, models_max=0)  # its worker is being started again
    talk = Conversation(former)
    waiting, _ = talk.arrive("m")

    talk.send(ev.MemoryRead((replace(former, node="other", budget_bytes=ONE // 4),)))

    assert isinstance(talk.refusal(waiting), ModelTooLarge)


def test_who_has_no_machine_left_is_told_when_to_come_back() -> None:
    """NoRoom at once for those who wait and those who come, with the machines; then as before."""
    talk = Conversation(*machines(1, 1))
    waiting, _ = talk.arrive("m")
    order, _ = talk.load("m", LoadSpec(pinned=True))

    see(talk, "n0", "n1")

    late, _ = talk.arrive("m")
    late_order, _ = talk.load("other", LoadSpec(pinned=True))
    for ticket in (waiting, order, late, late_order):
        error = talk.refusal(ticket)
        assert isinstance(error, NoRoom)
        assert error.retry_after_s == config.NO_ROOM_RETRY_AFTER_S
        assert (error.available_bytes, error.lost) == (0, "n0/cpu, n1/cpu")
        assert error.need_bytes > error.weights_bytes > 0
    assert "other" not in talk.state.models
    see(talk)
    _, (start,) = talk.arrive("m")
    assert isinstance(start, a.StartLoad)


def test_the_workers_that_have_gone_are_named() -> None:
    """Where somebody else starts them: who reads it knows what has to be there again."""
    first, second = machines(1, 1)
    talk = Conversation(replace(first, workers=("w0", "w1")), second)
    see(talk, "n0", "n1")
    ticket, _ = talk.arrive("m")
    error = talk.refusal(ticket)
    assert isinstance(error, NoRoom)
    assert error.lost == "n0/cpu (w0, w1), n1/cpu"
    assert str(error).endswith("and what could hold it is lost: n0/cpu (w0, w1), n1/cpu")


def test_too_large_is_only_what_the_lost_could_not_hold_either() -> None:
    """A model for the lost machine alone comes back later; one for none is too large."""
    talk = Conversation(*machines(1, 2))
    see(talk, "n1")

    ticket, _ = talk.arrive("large", mib=15 + 10)
    error = talk.refusal(ticket)
    assert isinstance(error, NoRoom)
    assert error.lost == "n1/cpu"
    ticket, _ = talk.arrive("huge", mib=4000)
    assert isinstance(talk.refusal(ticket), ModelTooLarge)


def test_a_short_context_is_no_substitute_for_a_long_one_out_of_reach() -> None:
    """Whose device is lost comes back later; one that has but a tight device lives there."""
    model = facts(10, context_max=1 << 20)
    tight, wide = machines(1.0, 1000.0)
    talk = Conversation(tight, wide)
    see(talk, "n1")
    ticket, _ = talk.load("m", LoadSpec(), model=model)
    error = talk.refusal(ticket)
    assert isinstance(error, NoRoom)
    assert error.lost == "n1/cpu"
    talk = Conversation(tight)
    talk.load("m", LoadSpec(), model=model)
    assert home(talk, "m") == "n0/cpu"


def test_a_lost_machine_is_above_no_mark() -> None:
    """What its last figures say sends nobody an order; its pressure ends with it."""
    talk = Conversation(*machines(1, 1))
    put_on(talk, "m", "n")
    n1 = talk.state.devices[1]
    full = replace(n1, usable_bytes=0, held_bytes=n1.budget_bytes)
    wanted = talk.send(
        ev.MemoryRead((talk.state.devices[0], full), {talk.worker("n"): n1.budget_bytes})
    )
    assert [type(action) for action in wanted] == [a.Shrink]
    assert talk.state.pressed == {"n1/cpu"}

    assert talk.send(ev.MemoryRead((talk.state.devices[0], replace(full, lost=True)))) == ()

    assert talk.state.pressed == frozenset()
    assert talk.state.held_on(talk.state.devices[1]) == 0
    assert talk.wait(config.SHRINK_PAUSE_S) == ()


def test_a_report_says_that_it_fits_but_not_now() -> None:
    """On a lost device nothing is free, and nobody's leaving would help."""
    talk = Conversation(*machines(1, 2))
    talk.make_idle("m")
    see(talk, "n1")
    answer = report(talk.state, "large", facts(25), LoadSpec())
    assert (answer.device.name, answer.fits_now, answer.fits_ever) == ("n1/cpu", False, True)
    assert (answer.available_bytes, answer.would_evict, answer.suggestions) == (0, (), ())
    assert report(talk.state, "small", facts(10), LoadSpec()).device.name == "n0/cpu"


def test_a_worker_that_came_back_with_its_machine_is_the_models_own() -> None:
    """Ready again without a load; what the model was measured to take, and its uses, hold on."""
    talk = Conversation(*machines(1, 1))
    put_on(talk, "m", "n")
    figures = Figures(weights=10 * MIB, peak=0, process=MIB)
    talk.send(ev.Measured(talk.worker("n"), figures))
    before = talk.model("n")
    assert before.plan is not None
    see(talk, "n1")
    see(talk)

    assert talk.send(make_adopted("n", 9, on="n1/cpu", choice=before.plan.choice)) == ()

    model = talk.model("n")
    assert (type(model.phase), model.worker, model.plan) == (phases.Ready, 9, before.plan)
    assert model.plan != reckon(facts(10), talk.state.devices[1], before.plan.choice)
    assert (model.usage, model.measured) == (before.usage, before.measured)
    ticket, wanted = talk.arrive("n")
    assert wanted == (a.Grant(ticket, 9, 0.0),)


@pytest.mark.parametrize("known", [True, False])
def test_a_worker_on_a_device_that_is_not_there_is_not_taken_in(*, known: bool) -> None:
    """One that nobody knows is ended; to a lost one nothing is said."""
    talk = Conversation(*machines(1, 1))
    see(talk, "n1")
    wanted = talk.send(make_adopted("m", 9, on="n1/cpu" if known else "gpu7"))
    assert wanted == (() if known else (a.StopWorker(9, "m", StopReason.SURPLUS),))
    assert "m" not in talk.state.models
    _, (start,) = talk.arrive("m")
    assert isinstance(start, a.StartLoad)
    assert start.worker == 10
