"""Places: how many models a device can hold, whatever they take."""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.report import report
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain.errors import NoRoom
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.controller.core.test_adopting import make_adopted
from tests.support.model_facts import device, facts, need_mib

ONE = need_mib(10)


def machines(*rooms: tuple[float, int | None]) -> tuple[Device, ...]:
    """Machines of one device each: room for so many models of the usual size, and places."""
    return tuple(
        replace(
            device(int(room * ONE), name=f"n{index}/cpu"), node=f"n{index}", models_max=models_max
        )
        for index, (room, models_max) in enumerate(rooms)
    )


def homes(talk: Conversation, *names: str) -> list[str]:
    """Where these models are placed."""
    return [talk.state.home_of(talk.model(name)) for name in names]


def test_a_model_goes_where_a_place_is_though_elsewhere_is_more_room() -> None:
    """Room without a place is none; a place that is taken by a load counts as well."""
    talk = Conversation(*machines((9, 1), (2, 2)))
    talk.arrive("m")
    talk.make_idle("n")
    talk.make_idle("o")
    assert homes(talk, "m", "n", "o") == ["n0/cpu", "n1/cpu", "n1/cpu"]


def test_a_place_is_made_on_the_device_that_lacks_it() -> None:
    """The cheapest of those who live there goes, though it is not for want of memory."""
    talk = Conversation(*machines((9, 1), (9, 1)))
    talk.make_idle("m")
    talk.make_idle("n")
    talk.serve("m")

    _, wanted = talk.arrive("o")

    assert wanted == (a.StopWorker(talk.worker("n"), "n", StopReason.ROOM),)
    assert talk.arrive("p")[1] == ()  # who leaves leaves one place, which is taken
    talk.note_gone("n")
    assert (talk.phase("o"), homes(talk, "o")) == (phases.Loading, ["n1/cpu"])


def test_no_place_is_had_on_another_device() -> None:
    """Who was used longest ago leaves a slot, but lives elsewhere: the one in the place goes."""
    talk = Conversation(*machines((9, 1), (2, 1)), max_loaded=2)
    talk.make_idle("m")
    talk.make_idle("n")
    talk.wait(1)
    talk.make_idle("m")
    assert homes(talk, "m", "n") == ["n0/cpu", "n1/cpu"]

    _, wanted = talk.arrive("large", mib=500)

    assert wanted == (a.StopWorker(talk.worker("m"), "m", StopReason.ROOM),)


def test_a_place_that_comes_is_one_models_own() -> None:
    """Who waits for it has nobody else go; the next in line needs another one."""
    talk = Conversation(*machines((9, 2)))
    talk.make_idle("m")
    talk.wait(1)
    talk.make_idle("n")
    _, wanted = talk.arrive("first")
    assert wanted == (a.StopWorker(talk.worker("m"), "m", StopReason.ROOM),)
    assert talk.wait(1) == ()

    _, wanted = talk.arrive("second")

    assert wanted == (a.StopWorker(talk.worker("n"), "n", StopReason.ROOM),)


def test_who_waits_for_a_place_is_told_when_to_come_back() -> None:
    """Models in use are waited for as for memory; then it is NoRoom."""
    talk = Conversation(*machines((9, 1)))
    talk.serve("m")
    ticket, wanted = talk.arrive("n")
    assert wanted == ()
    talk.wait(config.ROOM_WAIT_MAX_S)
    assert isinstance(talk.refusal(ticket), NoRoom)


def test_a_device_without_a_place_is_waited_for() -> None:
    """A machine whose workers are silent takes nothing; with the first one's word it does."""
    (none,) = machines((9, 0))
    talk = Conversation(none)
    _, wanted = talk.arrive("m")
    assert wanted == ()
    (start,) = talk.send(ev.MemoryRead((replace(none, models_max=1),)))
    assert isinstance(start, a.StartLoad)


def test_workers_beyond_the_places_do_not_stay() -> None:
    """One that is offered is ended where those who stay have all places."""
    talk = Conversation(*machines((9, 1), (9, 1)))
    assert talk.send(make_adopted("a", 1, on="n0/cpu")) == ()
    surplus = talk.send(make_adopted("b", 2, on="n0/cpu"))
    assert surplus == (a.StopWorker(2, "b", StopReason.SURPLUS),)
    assert talk.send(make_adopted("c", 3, on="n1/cpu")) == ()


def test_a_report_reckons_with_places() -> None:
    """Who would go for a place is said, and nothing is advised where only a place is lacking."""
    talk = Conversation(*machines((9, 1)))
    talk.make_idle("m")
    answer = report(talk.state, "n", facts(10), LoadSpec())
    assert (answer.fits_now, answer.fits_ever, answer.would_evict) == (False, True, ("m",))
    assert report(talk.state, "m", facts(10), LoadSpec()).fits_now
    talk.serve("m")
    answer = report(talk.state, "n", facts(10), LoadSpec())
    assert (answer.fits_now, answer.would_evict, answer.suggestions) == (False, (), ())
