"""Several devices: where a model is placed, who goes for it, and what one device leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.report import report
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import ModelTooLarge, NoRoom
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts, need_mib

ONE = need_mib(10, kind="cuda")


def gpus(*rooms: float, kind: str = "cuda") -> tuple[Device, ...]:
    """Devices with room for so many models of the usual size."""
    return tuple(
        device(int(room * ONE), kind=kind, name=f"gpu{index}") for index, room in enumerate(rooms)
    )


def home(talk: Conversation, name: str) -> str:
    """Where a model is placed."""
    plan = talk.model(name).plan
    assert plan is not None
    return plan.device


def load_for(talk: Conversation, name: str, load_s: float) -> None:
    """Leave a model ready and unused whose load took so long: it is as dear to bring back."""
    ticket, _ = talk.arrive(name)
    talk.wait(load_s)
    talk.ready(name)
    talk.release(name, ticket)


def measure(
    talk: Conversation, *usable: float, arrays_mib: dict[str, int] | None = None
) -> tuple[a.Action, ...]:
    """Memory is measured: what is usable of each device, and what workers say they hold."""
    devices = tuple(
        replace(known, usable_bytes=int(room * ONE) * MIB)
        for known, room in zip(talk.state.devices, usable, strict=True)
    )
    arrays_bytes = {talk.worker(name): mib * MIB for name, mib in (arrays_mib or {}).items()}
    return talk.send(ev.MemoryRead(devices, arrays_bytes))


def test_a_model_goes_where_most_room_is_left() -> None:
    """Each load takes the device with most room after it, and the first of equals."""
    talk = Conversation(*gpus(2, 3, 2))
    for name in ("m", "n", "o", "p"):
        talk.make_idle(name)

    assert [home(talk, name) for name in ("m", "n", "o", "p")] == ["gpu1", "gpu0", "gpu1", "gpu2"]
    assert {talk.phase(name) for name in ("m", "n", "o", "p")} == {phases.Ready}


def test_what_fits_on_another_device_evicts_nobody() -> None:
    """A full device is no reason to evict while another has room."""
    talk = Conversation(*gpus(2, 1))
    for name in ("m", "n", "o"):
        talk.make_idle(name)

    assert {talk.phase(name) for name in ("m", "n", "o")} == {phases.Ready}
    assert sorted(home(talk, name) for name in ("m", "n", "o")) == ["gpu0", "gpu0", "gpu1"]


def test_the_cheapest_eviction_of_all_devices_makes_room() -> None:
    """One that is dear to bring back stays, though it was used longest ago, on whatever device."""
    talk = Conversation(*gpus(1, 1))
    load_for(talk, "dear", 60.0)
    load_for(talk, "cheap", 1.0)
    assert (home(talk, "dear"), home(talk, "cheap")) == ("gpu0", "gpu1")

    _, wanted = talk.arrive("new")

    assert wanted == (a.StopWorker(talk.worker("cheap"), "cheap", StopReason.ROOM),)
    talk.note_gone("cheap")
    assert home(talk, "new") == "gpu1"


def test_priority_counts_before_cost_across_devices() -> None:
    """A model of higher priority goes only where no device has enough of lower priority."""
    talk = Conversation(*gpus(1, 1))
    talk.load("high", LoadSpec(priority=5))
    talk.ready("high")
    load_for(talk, "low", 60.0)

    _, wanted = talk.arrive("new")

    assert wanted == (a.StopWorker(talk.worker("low"), "low", StopReason.ROOM),)


def test_two_gpus_load_side_by_side_and_each_one_at_a_time() -> None:
    """A load waits for another's end on its own GPU only."""
    talk = Conversation(*gpus(2, 2))
    for name in ("m", "n", "o", "p"):
        talk.arrive(name)
    seen = [talk.phase(name) for name in ("m", "n", "o", "p")]
    assert seen == [phases.Loading, phases.Loading, phases.Queued, phases.Queued]

    talk.ready("n")

    assert talk.phase("o") is phases.Loading
    assert home(talk, "o") == home(talk, "n")
    assert talk.phase("p") is phases.Queued


def test_a_model_waits_for_who_leaves_and_nobody_else_goes() -> None:
    """While a victim is on its way out no second one is taken, on whatever device."""
    talk = Conversation(*gpus(1, 1))
    talk.make_idle("m")
    talk.make_idle("n")
    _, (stopped,) = talk.arrive("new")
    assert isinstance(stopped, a.StopWorker)

    assert talk.wait(5) == ()
    assert measure(talk, 1, 1) == ()

    assert (
        sum(isinstance(model.phase, phases.Unloading) for model in talk.state.models.values()) == 1
    )


def test_only_what_no_device_can_hold_is_too_large() -> None:
    """The sum of all devices is nobody's room; the refusal tells of the largest of them."""
    talk = Conversation(*gpus(1, 2))
    talk.make_idle("m")
    ticket, wanted = talk.arrive("huge", mib=10 + 2 * ONE)
    assert isinstance(talk.refusal(ticket), ModelTooLarge)
    assert talk.refusal(ticket).budget_bytes == 2 * ONE * MIB  # type: ignore[attr-defined]
    assert len(wanted) == 1

    _, wanted = talk.arrive("large", mib=ONE - 150)  # with its pool the second can hold it, alone
    assert [action.digest for action in wanted if isinstance(action, a.StopWorker)] == ["m"]
    talk.note_gone("m")
    assert home(talk, "large") == "gpu1"


def test_a_device_that_shortens_the_context_is_left_out_where_another_does_not() -> None:
    """A model is not placed with less context than is useful because some device is small."""
    model = facts(10, context_max=1 << 20)
    tight = device(ONE, kind="cuda", name="gpu0")
    wide = device(1 << 14, kind="cuda", name="gpu1")
    talk = Conversation(tight, wide)

    talk.load("m", LoadSpec(), model=model)

    assert home(talk, "m") == "gpu1"


def test_a_slot_may_come_free_on_any_device() -> None:
    """With max_loaded the cheapest goes, also from where the new model is not to live."""
    talk = Conversation(*gpus(1, 3), max_loaded=2)
    talk.make_idle("m")
    talk.make_idle("n")
    assert (home(talk, "m"), home(talk, "n")) == ("gpu1", "gpu1")
    talk.serve("m")

    _, wanted = talk.arrive("new")

    assert [action.digest for action in wanted if isinstance(action, a.StopWorker)] == ["n"]
    talk.note_gone("n")
    assert talk.phase("new") is phases.Loading


def test_pressure_on_one_device_leaves_the_other_alone() -> None:
    """Only who lives on it shrinks and goes, and loads begin on the other meanwhile."""
    talk = Conversation(*gpus(1, 2.1))
    for name in ("m", "n", "o"):
        talk.make_idle(name)
    assert [home(talk, name) for name in ("m", "n", "o")] == ["gpu1", "gpu1", "gpu0"]
    full = {"m": ONE, "n": ONE, "o": ONE}

    (order,) = measure(talk, 0.5, 2, arrays_mib=full)

    assert isinstance(order, a.Shrink)
    assert order.digest == "o"
    assert talk.state.pressed == {"gpu0"}
    measure(talk, 0.5, 2, arrays_mib=full)
    gone = talk.send(ev.Shrunk(talk.worker("o")))
    assert gone == (a.StopWorker(talk.worker("o"), "o", StopReason.PRESSURE),)
    _, wanted = talk.arrive("new")
    assert [action.digest for action in wanted if isinstance(action, a.StopWorker)] == ["m"]


def test_each_device_relieves_itself() -> None:
    """Two devices above their marks have one order each, at the same time."""
    talk = Conversation(*gpus(1, 1))
    talk.make_idle("m")
    talk.make_idle("n")

    orders = measure(talk, 0.5, 0.5, arrays_mib={"m": ONE, "n": ONE})

    assert [order.digest for order in orders if isinstance(order, a.Shrink)] == ["m", "n"]


def test_models_in_use_are_held_on_one_device_only() -> None:
    """Who has waited long enough has models held where that costs least; the others serve on."""
    talk = Conversation(*gpus(1, 1))
    talk.serve("m")
    talk.serve("n")
    ticket, _ = talk.arrive("new")

    talk.wait(config.OVERTAKEN_MAX_S)

    assert sum(model.held for model in talk.state.models.values()) == 1
    talk.wait(config.ROOM_WAIT_MAX_S)
    assert isinstance(talk.refusal(ticket), NoRoom)


@pytest.mark.parametrize("full", [0, 1])
def test_the_report_tells_the_device_that_a_load_would_get(full: int) -> None:
    """What fits goes where most room is; what does not, where the cheapest eviction is."""
    talk = Conversation(*gpus(1, 1))
    fit_report = report(talk.state, "new", facts(10), LoadSpec())
    assert (fit_report.device.name, fit_report.plan.device, fit_report.fits_now) == (
        "gpu0",
        "gpu0",
        True,
    )
    talk.make_idle("m")
    fit_report = report(talk.state, "new", facts(10), LoadSpec())
    assert (fit_report.device.name, fit_report.fits_now, fit_report.would_evict) == (
        "gpu1",
        True,
        (),
    )

    talk.make_idle("n")
    talk.serve(("m", "n")[full])
    fit_report = report(talk.state, "new", facts(10), LoadSpec())

    assert (fit_report.fits_now, fit_report.fits_ever) == (False, True)
    assert (fit_report.device.name, fit_report.would_evict) == (
        ("gpu1", ("n",)) if full == 0 else ("gpu0", ("m",))
    )
    huge = report(talk.state, "huge", facts(10 + 2 * ONE), LoadSpec())
    assert (huge.fits_ever, huge.would_evict) == (False, ())
