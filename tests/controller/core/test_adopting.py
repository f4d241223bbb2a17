"""Workers of a former controller in the scheduler: used as they are, or unloaded, never doubled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_models.fit.plan import Choice, Device
from mlxd_models.fit.terms import reckon
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts, need_mib

CHOICE = Choice(Weights.FLOAT32, 1024, 4, KVFormat.MODEL, prefix_bytes=0)
ROOM_FOR_TWO = device(2 * need_mib(10))


def make_adopted(
    name: str,
    number: int,
    *,
    mib: int = 10,
    spec: LoadSpec | None = None,
    choice: Choice = CHOICE,
    on: str = "cpu",
) -> ev.Adopted:
    """Return the news of a worker that holds `name`."""
    return ev.Adopted(
        number, name, name, f"/{name}", facts(mib), choice, on, spec or LoadSpec(), load_s=3.0
    )


def test_a_request_is_served_by_an_adopted_worker_at_once() -> None:
    """Ready without a load, under its own plan; the next launch has a number of its own."""
    talk = Conversation(device(1000))
    assert talk.send(make_adopted("m", 7, choice=replace(CHOICE, context_length=256))) == ()
    model = talk.model("m")
    assert (type(model.phase), model.worker, model.load_s) == (phases.Ready, 7, 3.0)
    assert model.plan == reckon(
        facts(10), talk.state.devices[0], replace(CHOICE, context_length=256)
    )

    ticket, wanted = talk.arrive("m")
    assert wanted == (a.Grant(ticket, 7, 0.0),)
    _, (start,) = talk.arrive("other")
    assert isinstance(start, a.StartLoad)
    assert start.worker == 8


def test_it_counts_on_the_device_that_it_lives_on() -> None:
    """Beside one on another GPU it stays; a second one where it lives is too many."""
    gpus = tuple(
        device(need_mib(10, kind="cuda"), kind="cuda", name=f"gpu{index}") for index in range(2)
    )
    talk = Conversation(*gpus)
    for number, (name, on) in enumerate([("a", "gpu1"), ("b", "gpu0"), ("c", "gpu1")], start=1):
        talk.send(make_adopted(name, number, on=on))
    seen = [talk.phase(name) for name in "abc"]
    assert seen == [phases.Ready, phases.Ready, phases.Unloading]
    assert [talk.state.home_of(talk.model(name)) for name in "ab"] == ["gpu1", "gpu0"]


def test_what_was_fixed_for_it_holds() -> None:
    """Pinned stays pinned, keep-alive goes on, and another context is a conflict as before."""
    talk = Conversation(device(need_mib(10)), keep_alive_s=300.0)
    spec = LoadSpec(context_length=1024, pinned=True, keep_alive_s=60.0)
    talk.send(make_adopted("m", 1, spec=spec))
    assert talk.arrive("other")[1] == ()  # it waits: what is pinned is not evicted
    ticket, _ = talk.load("m", LoadSpec(context_length=512))
    assert isinstance(talk.refusal(ticket), InvalidRequest)

    talk.wait(59)
    assert talk.phase("m") is phases.Ready
    assert talk.wait(1)[:1] == (a.StopWorker(1, "m", StopReason.EXPIRED),)


def test_without_one_of_its_own_it_has_this_controllers_keep_alive() -> None:
    """What nobody fixed is not taken over from the controller before."""
    talk = Conversation(device(1000), keep_alive_s=5.0)
    talk.send(make_adopted("m", 1))
    assert talk.wait(5) == (a.StopWorker(1, "m", StopReason.EXPIRED),)


@pytest.mark.parametrize(
    ("machine", "max_loaded"), [(ROOM_FOR_TWO, None), (device(1000), 2)], ids=["bytes", "slots"]
)
def test_the_surplus_is_unloaded(machine: Device, max_loaded: int | None) -> None:
    """Within new limits the first stay, pinned or not; the rest ends, and counts until then."""
    talk = Conversation(machine, max_loaded=max_loaded)
    assert talk.send(make_adopted("a", 1)) == ()
    assert talk.send(make_adopted("b", 2)) == ()
    spec = LoadSpec(pinned=True)
    assert talk.send(make_adopted("c", 3, spec=spec)) == (a.StopWorker(3, "c", StopReason.SURPLUS),)
    assert [talk.phase(name) for name in "abc"] == [phases.Ready, phases.Ready, phases.Unloading]

    assert talk.arrive("c")[1] == ()  # not two workers of one model
    wanted = talk.note_gone("c")
    assert [type(action) for action in wanted] == [a.StopWorker]
    talk.note_gone(wanted[0].digest if isinstance(wanted[0], a.StopWorker) else "")
    assert talk.phase("c") is phases.Loading


def test_a_small_one_stays_behind_a_large_one_that_does_not() -> None:
    """What leaves takes no room from those that come after it."""
    talk = Conversation(ROOM_FOR_TWO)
    assert len(talk.send(make_adopted("huge", 1, mib=4000))) == 1
    assert talk.send(make_adopted("m", 2)) == ()
    assert talk.phase("m") is phases.Ready


def test_one_that_comes_too_late_is_ended() -> None:
    """A model that is loaded, or a controller that stops, takes no worker from outside."""
    talk = Conversation(device(1000))
    talk.make_idle("m")
    assert talk.send(make_adopted("m", 9)) == (a.StopWorker(9, "m", StopReason.SURPLUS),)
    assert talk.phase("m") is phases.Ready
    talk.send(ev.Unloaded(9))
    talk.send(ev.ShutDown(0.0))
    assert talk.send(make_adopted("late", 10)) == (a.StopWorker(10, "late", StopReason.SURPLUS),)


def test_its_death_is_a_death() -> None:
    """It fails as any worker does, and the next request loads the model."""
    talk = Conversation(device(1000))
    talk.send(make_adopted("m", 1))
    talk.die("m")
    assert talk.phase("m") is phases.Failed
    _, (start,) = talk.arrive("m")
    assert isinstance(start, a.StartLoad)
