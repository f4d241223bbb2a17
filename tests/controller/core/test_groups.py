"""Groups: models whose ranks share several devices of one machine, or one CPU."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.placement.victims import GROUPS_SEARCHED, Short, cheapest
from mlxd_controller.core.report import report
from mlxd_controller.core.state import Model
from mlxd_models.fit.facts import Division, ModelFacts, Parts
from mlxd_models.fit.groups import group_of, groups_of
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import InvalidRequest, ModelTooLarge, NoRoom
from mlxd_shared.domain.requests import LoadSpec, Weights
from tests.controller.core.conversation import Conversation
from tests.controller.core.test_adopting import CHOICE, make_adopted
from tests.support.model_facts import device, facts, need_mib

PART = 1000
ONE = need_mib(PART, kind="cuda")
"""What a rank of `wide` needs, in MiB; the whole of it needs almost twice that."""


def wide(ranks: int = 2, mib: int = PART) -> ModelFacts:
    """A model that so many ranks, and more, can share; a rank of so many has so much of it."""
    parts = {each: facts(mib * ranks // each) for each in (2, 4, 8) if each >= ranks}
    return replace(facts(ranks * mib), division=Division(Parts(parts)))


def gpus(*rooms: float, node: str = "", first: int = 0) -> tuple[Device, ...]:
    """GPUs of one machine, with room for so many ranks of `wide`."""
    prefix = f"{node}/" if node else ""
    return tuple(
        replace(device(int(room * ONE), kind="cuda", name=f"{prefix}gpu{first + at}"), node=node)
        for at, room in enumerate(rooms)
    )


def home(talk: Conversation, name: str) -> str:
    """Where a model is placed."""
    return talk.state.home_of(talk.model(name))


def test_one_device_is_taken_before_two_and_two_before_four() -> None:
    """Ranks are as few as can be, and more only where fewer could never hold the model."""
    talk = Conversation(*gpus(2.5, 1, 1, 1, 1))
    talk.load("alone", LoadSpec(), model=wide(2))
    assert home(talk, "alone") == "gpu0"

    talk = Conversation(*gpus(1, 1, 1, 1, 1))
    talk.load("two", LoadSpec(), model=wide(2))
    assert home(talk, "two") == "gpu0+gpu1"
    assert talk.model("two").reserved_bytes == 2 * talk.model("two").reserved_on("gpu1")
    talk.load("four", LoadSpec(), model=wide(4))
    plans = talk.model("four").phase
    assert isinstance(plans, phases.Queued)
    assert {plan.ranks for plan in plans.plans} == {4}
    assert len(plans.plans) == 5


def test_a_full_device_makes_no_group() -> None:
    """A model that one device can hold waits for that one, however many have room together."""
    talk = Conversation(*gpus(2.5, 1, 1))
    talk.make_idle("busy", 2 * PART)
    talk.serve("busy", 2 * PART)
    ticket, _ = talk.load("wide", LoadSpec(), model=wide())
    assert talk.phase("wide") is phases.Queued
    talk.wait(config.ROOM_WAIT_MAX_S)
    assert isinstance(talk.refusal(ticket), NoRoom)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_can_be_asked_for(ranks: int) -> None:
    """So many devices are taken, though fewer would do; with one the model is not divided."""
    talk = Conversation(*gpus(2.5, 2.5, 2.5, 2.5))
    talk.load("m", LoadSpec(ranks=ranks), model=wide())
    assert len(home(talk, "m").split("+")) == ranks
    assert talk.load("m", LoadSpec(ranks=8))[1][0] == a.Refuse("t2", talk.refusal("t2"))

    talk = Conversation(*gpus(1, 1))
    ticket, _ = talk.load("m", LoadSpec(ranks=1), model=wide())
    assert isinstance(talk.refusal(ticket), ModelTooLarge)


def test_a_cpu_has_all_ranks_and_none_without_being_asked() -> None:
    """On one memory ranks take what they take there together; they help nobody to fit."""
    need = need_mib(PART)
    talk = Conversation(device(2 * need))
    talk.load("m", LoadSpec(ranks=2), model=wide())
    assert home(talk, "m") == "cpu+cpu"
    reserved = talk.state.reserved_on(talk.state.devices[0])
    assert reserved == talk.model("m").reserved_bytes > 2 * PART * MIB
    talk.send(ev.MemoryRead(talk.state.devices, {talk.worker("m"): 7}))
    assert talk.state.held_on(talk.state.devices[0]) == 14

    talk = Conversation(device(need + PART // 2))
    ticket, _ = talk.load("m", LoadSpec(), model=wide())
    assert isinstance(talk.refusal(ticket), ModelTooLarge)

    talk = Conversation(*gpus(0.1, 0.1))
    ticket, _ = talk.load("m", LoadSpec(), model=wide())
    assert "for models on each of 2 devices" in talk.refusal(ticket).describe()


def test_devices_of_two_machines_make_no_group() -> None:
    """Nor do those that others start workers on; who asks for ranks there is told so."""
    talk = Conversation(*gpus(1, node="a"), *gpus(1, node="b"))
    ticket, _ = talk.load("m", LoadSpec(), model=wide())
    assert isinstance(talk.refusal(ticket), ModelTooLarge)
    ticket, _ = talk.load("m", LoadSpec(ranks=2), model=wide())
    assert isinstance(talk.refusal(ticket), InvalidRequest)
    attached = tuple(replace(each, workers=("w",)) for each in gpus(1, 1))
    assert not groups_of(attached, 2)


def test_room_is_made_on_each_device_of_the_group() -> None:
    """Victims are the cheapest that free all of them; a group counts as one victim for several."""
    talk = Conversation(*gpus(1, 1, 1))
    talk.load("first", LoadSpec(), model=wide())
    talk.ready("first")
    talk.make_idle("alone", PART)
    assert (home(talk, "first"), home(talk, "alone")) == ("gpu0+gpu1", "gpu2")

    _, wanted = talk.load("second", LoadSpec(), model=wide())
    assert wanted == (a.StopWorker(talk.worker("first"), "first", StopReason.ROOM),)
    talk.note_gone("first")
    assert home(talk, "second") == "gpu0+gpu1"
    talk.ready("second")
    talk.serve("alone", PART)

    _, wanted = talk.arrive("other", PART)
    assert wanted == (a.StopWorker(talk.worker("second"), "second", StopReason.ROOM),)


def test_two_go_where_each_of_two_devices_lacks_room() -> None:
    """One victim that frees one device of a pair is not enough."""
    talk = Conversation(*gpus(1, 1))
    for name in ("m", "n"):
        talk.make_idle(name, PART)
    answer = report(talk.state, "w", wide(), LoadSpec())
    assert (answer.device.name, answer.plan.ranks, answer.fits_now) == ("gpu0+gpu1", 2, False)
    assert sorted(answer.would_evict) == ["m", "n"]
    _, wanted = talk.load("w", LoadSpec(), model=wide())
    assert [action.digest for action in wanted if isinstance(action, a.StopWorker)] == ["m", "n"]


def test_a_group_that_waits_for_loads_is_not_overtaken_there() -> None:
    """No later load begins on its devices: they would never all be at rest."""
    talk = Conversation(*gpus(3, 3))
    talk.arrive("m", PART // 2)
    talk.arrive("n", PART // 2)
    talk.load("w", LoadSpec(ranks=2), model=wide())
    talk.arrive("late", PART // 4)
    assert talk.phase("w") is phases.Queued
    talk.ready("m")
    assert talk.phase("late") is phases.Queued
    talk.ready("n")
    assert talk.phase("w") is phases.Loading
    talk.ready("w")
    assert talk.phase("late") is phases.Loading


def test_pressure_on_one_device_has_the_group_shrink() -> None:
    """Its ranks hold equally much, and each is told what the device with the pressure lacks."""
    talk = Conversation(*gpus(1, 1))
    talk.load("w", LoadSpec(), model=wide())
    talk.ready("w")
    held = talk.model("w").reserved_on("gpu1")
    first, second = talk.state.devices
    short = replace(second, usable_bytes=held - 200 * MIB)
    wanted = talk.send(ev.MemoryRead((first, short), {talk.worker("w"): held}))
    assert wanted == (a.Shrink(talk.worker("w"), "w", held - 200 * MIB),)
    assert talk.state.pressed == {"gpu1"}
    ticket, _ = talk.load("w2", LoadSpec(ranks=2), model=wide(mib=10))
    assert ticket not in talk.answers


@pytest.mark.parametrize("lacks", [(150 * MIB, 300 * MIB), (300 * MIB, 150 * MIB)])
def test_a_group_gives_back_what_each_of_its_devices_lacks(lacks: tuple[int, int]) -> None:
    """It is told once, of the device that lacks most, and is not unloaded for the other one."""
    talk = Conversation(*gpus(1, 1))
    talk.load("w", LoadSpec(), model=wide())
    talk.ready("w")
    held = talk.model("w").reserved_on("gpu1")
    short = tuple(
        replace(each, usable_bytes=held - lack)
        for each, lack in zip(talk.state.devices, lacks, strict=True)
    )
    wanted = talk.send(ev.MemoryRead(short, {talk.worker("w"): held}))
    assert talk.state.pressed == {"gpu0", "gpu1"}
    assert wanted == (a.Shrink(talk.worker("w"), "w", held - 300 * MIB),)


def test_ranks_of_one_memory_give_back_a_part_each() -> None:
    """What the memory lacks is divided between those that are there."""
    talk = Conversation(device(2 * need_mib(PART)))
    talk.load("m", LoadSpec(ranks=2), model=wide())
    talk.ready("m")
    held = talk.model("m").reserved_bytes // 2
    short = (replace(talk.state.devices[0], usable_bytes=2 * held - 300 * MIB),)
    wanted = talk.send(ev.MemoryRead(short, {talk.worker("m"): held}))
    assert wanted == (a.Shrink(talk.worker("m"), "m", held - 150 * MIB),)


def test_a_group_that_waits_for_memory_leaves_its_other_device_to_others() -> None:
    """Where one of its devices is above its marks, what fits on the other one begins there.

    Also once it has been overtaken for long enough to have a claim on what comes free.
    """
    talk = Conversation(*gpus(3, 3))
    talk.serve("m", PART)
    assert home(talk, "m") == "gpu0"
    above = talk.state.devices[0].usable_bytes + 300 * MIB  # more than it was promised
    talk.send(ev.MemoryRead(talk.state.devices, {talk.worker("m"): above}))
    assert talk.state.pressed == {"gpu0"}
    talk.load("w", LoadSpec(ranks=2), model=wide(mib=10))
    talk.wait(config.OVERTAKEN_MAX_S + 1)
    talk.arrive("late", PART // 4)
    assert talk.phase("w") is phases.Queued
    assert (talk.phase("late"), home(talk, "late")) == (phases.Loading, "gpu1")


def test_victims_are_looked_for_on_so_many_groups() -> None:
    """Of many groups those with most room are weighed, and each device alone; the rest are not."""
    looked_at: set[str] = set()

    class Watched(Model):
        def reserved_on(self, device: str) -> int:
            looked_at.add(device)
            return super().reserved_on(device)

    talk = Conversation(*gpus(1))
    talk.make_idle("m", PART)
    known = talk.model("m")
    offered: list[Model] = [
        Watched(**{each.name: getattr(known, each.name) for each in fields(known)})
    ]
    devices = gpus(*[1] * 4 * GROUPS_SEARCHED, first=1)
    groups = [group_of(devices[at : at + 2]) for at in range(0, len(devices), 2)]
    alone = talk.state.devices[0]
    shorts = [Short(each, MIB, 0) for each in (*groups, alone)]

    chosen = cheapest(talk.state, offered, shorts)

    assert chosen is not None
    assert (chosen[0].name, [victim.digest for victim in chosen[1]]) == ("gpu0", ["m"])
    weighed = {group.name for group in groups[:GROUPS_SEARCHED]}
    assert looked_at == {*weighed, "gpu0"}


def test_what_ranks_cannot_share_is_refused_before_room_is_made() -> None:
    """Also where ranks and weights come from different requests: then no door has seen both."""
    talk = Conversation(*gpus(1, 1))
    talk.make_idle("m", PART)
    parts = replace(wide().division.parts, undivided={(2, Weights.Q8): "no whole groups"})
    packed = replace(wide(), division=Division(parts))
    ticket, wanted = talk.load("w", LoadSpec(ranks=2, weights=Weights.Q8), model=packed)
    assert isinstance(error := talk.refusal(ticket), InvalidRequest)
    assert "no whole groups" in error.describe()
    assert not any(isinstance(action, a.StopWorker) for action in wanted)
    ticket, _ = talk.load("n", LoadSpec(ranks=2), model=facts(PART))
    assert "it is not divided over 2 ranks" in talk.refusal(ticket).describe()


def test_more_ranks_are_taken_for_a_useful_context() -> None:
    """One device that holds little but the weights is left where two have the whole context."""
    caches = replace(wide().caches, kv_values_per_token=1 << 16)  # a quarter of a MiB

    def longer(model: ModelFacts) -> ModelFacts:
        return replace(model, context_length_max=1 << 14, caches=caches)

    whole = wide()
    parts = {ranks: longer(part) for ranks, part in whole.division.parts.of_ranks.items()}
    model = replace(longer(whole), division=Division(Parts(parts)))
    talk = Conversation(*gpus(3.5, 3.5))
    talk.load("w", LoadSpec(), model=model)
    assert home(talk, "w") == "gpu0+gpu1"
    talk = Conversation(*gpus(3.5))
    talk.load("w", LoadSpec(), model=model)
    assert home(talk, "w") == "gpu0"


def test_a_lost_machine_takes_its_group() -> None:
    """It is placed anew on another machine; where there is none, it is out of reach."""
    devices = (*gpus(1, 1, node="a"), *gpus(1, 1, node="b"))
    talk = Conversation(*devices)
    talk.load("w", LoadSpec(), model=wide())
    talk.ready("w")
    lost = tuple(replace(each, lost=each.node == "a") for each in devices)
    talk.send(ev.MemoryRead(lost))
    assert talk.phase("w") is phases.Failed
    talk.load("w", LoadSpec(), model=wide())
    assert home(talk, "w") == "b/gpu0+b/gpu1"
    ticket, _ = talk.load("v", LoadSpec(ranks=2), model=wide())
    talk.send(ev.MemoryRead(tuple(replace(each, lost=True) for each in devices)))
    assert isinstance(error := talk.refusal(ticket), NoRoom)
    assert error.lost


def test_a_group_of_a_former_controller_stays_where_all_of_it_fits() -> None:
    """What it takes counts on each of its devices; a second one there is unloaded."""
    talk = Conversation(*gpus(1, 1))
    event = make_adopted("w", 1, choice=replace(CHOICE, ranks=2), on="gpu0+gpu1")
    talk.send(replace(event, facts=wide()))
    assert (talk.phase("w"), home(talk, "w")) == (phases.Ready, "gpu0+gpu1")
    talk.send(make_adopted("v", 2, mib=PART, on="gpu1"))
    assert talk.phase("v") is phases.Unloading


def test_many_devices_are_weighed_in_neighbours() -> None:
    """Of eight any four are weighed; of sixteen those that do not overlap."""
    assert len(groups_of(gpus(*[1] * 8), 4)) == config.RANK_GROUPS_MAX
    few = groups_of(gpus(*[1] * 16), 4)
    assert [group.members[0] for group in few] == ["gpu0", "gpu4", "gpu8", "gpu12"]
    tight = group_of(gpus(1, 0.5))
    assert (tight.budget_bytes, tight.ranks) == (gpus(0.5)[0].budget_bytes, 2)
