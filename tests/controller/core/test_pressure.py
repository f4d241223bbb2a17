"""Marks on memory: what is given back above them, by whom first, and what is never touched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.report import report
from mlxd_controller.core.state import next_wake_s
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import NoRoom
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts

BUDGET_MIB = 1000
HARD_MIB = int(BUDGET_MIB * config.HARD_MARK_FRACTION)


def talk_of(*, age_min_s: float = 0.0, kind: str = "cpu") -> Conversation:
    """Return a scheduler with room for several models."""
    return Conversation(device(BUDGET_MIB, kind=kind), age_min_s=age_min_s)


def measure(talk: Conversation, usable_mib: int, **arrays_mib: int) -> tuple[a.Action, ...]:
    """Memory is measured: what is usable, and what the workers of these models say they hold."""
    arrays = {talk.worker(name): mib * MIB for name, mib in arrays_mib.items()}
    measured = replace(talk.state.devices[0], usable_bytes=usable_mib * MIB)
    return talk.send(ev.MemoryRead((measured,), arrays))


def answer_shrink(talk: Conversation, name: str) -> tuple[a.Action, ...]:
    """The worker of a model has answered."""
    return talk.send(ev.Shrunk(talk.worker(name), MIB, 0))


def order(talk: Conversation, name: str, target_mib: int) -> a.Shrink:
    """The order that a model's worker should get."""
    return a.Shrink(talk.worker(name), name, target_mib * MIB)


def test_nothing_happens_up_to_the_hard_mark() -> None:
    """What is between the marks is left alone; one byte above the hard one is not."""
    talk = talk_of()
    talk.make_idle("m")

    assert measure(talk, 100, m=100 + HARD_MIB) == ()
    assert not talk.state.pressed
    assert measure(talk, 99, m=100 + HARD_MIB) == (order(talk, "m", 99),)


def test_once_above_the_hard_mark_it_goes_on_to_the_soft_one() -> None:
    """A worker that gave too little is followed by the next, though the hard mark is not passed."""
    talk = talk_of()
    talk.make_idle("m")
    talk.wait(1.0)
    talk.make_idle("n")
    assert measure(talk, 200, m=200, n=200) == (order(talk, "m", 0),)

    measure(talk, 200, m=20, n=200)

    assert answer_shrink(talk, "m") == (order(talk, "n", 180),)
    measure(talk, 200, m=20, n=180)
    assert not talk.state.pressed
    assert answer_shrink(talk, "n") == ()


def test_the_idle_shrink_before_the_busy_and_one_at_a_time() -> None:
    """Whoever was used longest ago first; while one shrinks, what is measured moves nobody else."""
    talk = talk_of()
    talk.serve("busy")
    talk.wait(1.0)
    talk.make_idle("older")
    talk.wait(1.0)
    talk.make_idle("newer")
    held = {"busy": 200, "older": 200, "newer": 200}

    assert measure(talk, 300, **held) == (order(talk, "older", 0),)
    assert measure(talk, 300, **held) == ()
    assert answer_shrink(talk, "older") == (order(talk, "newer", 0),)
    assert answer_shrink(talk, "newer") == (order(talk, "busy", 0),)


def test_an_answer_that_never_comes_is_waited_for_so_long() -> None:
    """Then the next is told; the scheduler wakes up for it by itself."""
    talk = talk_of()
    talk.make_idle("m")
    talk.wait(1.0)
    talk.make_idle("n")
    measure(talk, 100, m=200, n=200)

    assert next_wake_s(talk.state) == talk.now_s + config.SHRINK_TIMEOUT_S
    assert talk.wait(config.SHRINK_TIMEOUT_S / 2) == ()
    assert talk.wait(config.SHRINK_TIMEOUT_S / 2) == (order(talk, "n", 0),)


def test_idle_models_go_when_all_have_shrunk_and_only_as_many_as_it_takes() -> None:
    """The cheapest set by what is measured; the pinned and the busy stay."""
    talk = talk_of()
    talk.load("pinned", LoadSpec(pinned=True))
    talk.ready("pinned")
    talk.serve("busy")
    talk.make_idle("small", mib=10)
    talk.wait(1.0)
    talk.make_idle("large", mib=80)
    held = {"pinned": 100, "busy": 100, "small": 100, "large": 170}
    (first,) = measure(talk, 400, **held)
    actions = [first, *(answer_shrink(talk, name)[0] for name in ("pinned", "small", "large"))]
    assert [action.digest for action in actions if isinstance(action, a.Shrink)] == [
        "pinned", "small", "large", "busy"
    ]  # fmt: skip

    (went,) = answer_shrink(talk, "busy")

    assert isinstance(went, a.StopWorker)
    assert (went.digest, went.reason) == ("small", StopReason.PRESSURE)
    measure(talk, 400, pinned=100, busy=100, large=170)
    assert talk.note_gone("small") == ()
    assert not talk.state.pressed


def test_all_idle_models_go_where_they_are_too_few() -> None:
    """Each bit helps; streams go on."""
    talk = talk_of()
    ticket = talk.serve("busy")
    talk.make_idle("m")
    measure(talk, 50, busy=200, m=100)
    answer_shrink(talk, "m")

    (went,) = answer_shrink(talk, "busy")

    assert isinstance(went, a.StopWorker)
    assert went.digest == "m"
    assert ticket in talk.model("busy").leases


def test_the_young_stay_until_they_are_of_age() -> None:
    """Between its load and its first request a model does not go for pressure either."""
    talk = talk_of(age_min_s=5.0)
    talk.load("m", LoadSpec())
    talk.ready("m")
    measure(talk, 10, m=100)

    assert answer_shrink(talk, "m") == ()
    assert next_wake_s(talk.state) == talk.now_s + 5.0
    (went,) = talk.wait(5.0)
    assert isinstance(went, a.StopWorker)


def test_who_gave_what_it_could_is_asked_again_after_a_pause() -> None:
    """Streams may have ended meanwhile; nobody is asked again and again."""
    talk = talk_of()
    talk.serve("m")
    measure(talk, 10, m=100)
    assert answer_shrink(talk, "m") == ()
    talk.wait(config.SHRINK_PAUSE_S / 2)
    assert measure(talk, 10, m=100) == ()

    again = talk.wait(config.SHRINK_PAUSE_S / 2)

    assert again == (order(talk, "m", 10),)


def test_new_pressure_asks_everybody_anew() -> None:
    """Who reached its target may have kept much; no model goes before it is asked once more."""
    talk = talk_of()
    talk.make_idle("m")
    measure(talk, 100, m=200)
    measure(talk, 100, m=100)
    answer_shrink(talk, "m")
    assert not talk.state.pressed

    assert measure(talk, 20, m=100) == (order(talk, "m", 20),)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_device_that_tells_what_is_held_is_believed(kind: str) -> None:
    """Where only workers can tell, it is the sum of what they say."""
    talk = talk_of(kind=kind)
    talk.make_idle("m")
    arrays = {talk.worker("m"): 100 * MIB}
    held = 300 * MIB if kind == "cpu" else 0
    measured = replace(talk.state.devices[0], usable_bytes=150 * MIB, held_bytes=held)

    wanted = talk.send(ev.MemoryRead((measured,), arrays))

    assert wanted == ((order(talk, "m", 0),) if kind == "cpu" else ())


def test_no_load_begins_above_the_marks() -> None:
    """Room by promise is not enough: it waits for memory to be below the soft mark."""
    talk = talk_of()
    talk.make_idle("m")
    measure(talk, 350, m=500)

    ticket, wanted = talk.arrive("other", mib=1)

    assert wanted == ()
    assert not report(talk.state, "third", facts(1), LoadSpec()).fits_now
    (began,) = measure(talk, BUDGET_MIB, m=100)
    assert isinstance(began, a.StartLoad)
    talk.ready("other")
    assert isinstance(talk.answers[ticket], a.Grant)


def test_who_waits_in_vain_above_the_marks_is_refused_at_the_bound() -> None:
    """With nothing available to tell of."""
    talk = talk_of()
    talk.serve("busy")
    measure(talk, 10, busy=300)
    answer_shrink(talk, "busy")
    ticket, _ = talk.arrive("other")
    talk.wait(config.ROOM_WAIT_MAX_S / 2)

    talk.wait(config.ROOM_WAIT_MAX_S / 2)

    error = talk.refusal(ticket)
    assert isinstance(error, NoRoom)
    assert error.available_bytes == 0


def test_late_answers_of_former_workers_change_nothing() -> None:
    """Nor does one that comes after its time: what is measured counts."""
    talk = talk_of()
    talk.make_idle("m")
    measure(talk, 10, m=100)
    former = talk.worker("m")
    talk.die("m")
    measure(talk, BUDGET_MIB)
    talk.make_idle("m")

    assert talk.send(ev.Shrunk(former, 100, 0)) == ()
    ready = talk.model("m").phase
    assert isinstance(ready, phases.Ready)
    assert ready.shrink_until_s is None


def test_a_controller_that_stops_gives_no_orders() -> None:
    """Everything goes anyway."""
    talk = talk_of()
    talk.serve("busy")
    talk.send(ev.ShutDown(60.0))

    assert measure(talk, 10, busy=300) == ()
