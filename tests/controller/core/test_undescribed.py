"""What ranks have of a model is asked for where a plan needs it, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.adopting import adopt
from mlxd_controller.core.report import report
from mlxd_controller.core.turn import Turn
from mlxd_models.fit.facts import Division, ModelFacts, Parts, Undescribed
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.errors import InvalidRequest, ModelTooLarge
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.controller.core.test_adopting import CHOICE
from tests.controller.core.test_groups import ONE, PART, gpus, home
from tests.support.model_facts import device, facts

PARTS = Parts({2: facts(PART)})


def wide(division: Division) -> ModelFacts:
    """A model that two ranks can share, once its parts are known."""
    return replace(facts(2 * PART), division=division)


def order(division: Division) -> tuple[a.Action, ...]:
    """The one action that has them described."""
    return (a.DescribeRanks(division),)


@pytest.mark.parametrize(
    "devices",
    [gpus(2.5, 2.5), gpus(2.5, 1, 1), (device(2 * ONE),), (device(ONE),), gpus(1)],
    ids=["each holds it", "one holds it", "a CPU", "a small CPU", "a small GPU"],
)
def test_who_needs_no_ranks_asks_for_none(devices: tuple[Device, ...]) -> None:
    """A device holds it alone, or no group could: it is placed, or too large, as it is."""
    talk, division = Conversation(*devices), Division()
    ticket, wanted = talk.load("m", LoadSpec(), model=wide(division))
    begun = any(isinstance(action, a.StartLoad) for action in wanted)
    assert begun or isinstance(talk.refusal(ticket), ModelTooLarge)
    talk.load("n", LoadSpec(ranks=1), model=wide(division))
    assert not division.described


@pytest.mark.parametrize("spec", [LoadSpec(), LoadSpec(ranks=2)])
def test_nothing_is_decided_until_it_is_described(spec: LoadSpec) -> None:
    """The same event, decided again, is decided as if it had always been known."""
    talk, division = Conversation(*gpus(1, 1)), Division()
    before = talk.state
    event = ev.LoadAsked("t", "m", "m", "/m", wide(division), spec)
    assert talk.send(event) == order(division)
    assert talk.state is before

    division.fill(PARTS)
    talk.send(event)
    assert home(talk, "m") == "gpu0+gpu1"


def test_devices_that_become_others_ask_for_it() -> None:
    """Who waits for a device that is lost may live on two that are there."""
    one, pair = gpus(2.5, node="a"), gpus(1, 1, node="b")
    talk, division = Conversation(*one, *pair), Division()
    talk.make_idle("busy", 2 * PART)
    talk.serve("busy", 2 * PART)
    talk.load("m", LoadSpec(), model=wide(division))
    assert talk.phase("m") is phases.Queued

    lost = ev.MemoryRead((replace(one[0], lost=True), *pair))
    assert talk.send(lost) == order(division)
    division.fill(PARTS)
    talk.send(lost)
    assert home(talk, "m") == "b/gpu0+b/gpu1"


def test_what_could_not_be_described_is_not_divided() -> None:
    """The reason is told; the model itself is reckoned as it is."""
    division = Division()
    division.fill(Parts(), problem="its files have changed")
    talk = Conversation(*gpus(1, 1))
    ticket, _ = talk.load("m", LoadSpec(ranks=2), model=wide(division))
    assert isinstance(refused := talk.refusal(ticket), InvalidRequest)
    assert "its files have changed" in refused.describe()
    assert isinstance(talk.refusal(talk.load("m", LoadSpec(), model=wide(division))[0]),
                      ModelTooLarge)  # fmt: skip


def test_reports_and_adopted_ranks_ask_for_it() -> None:
    """Who only reckons is told so by an error; a worker of ranks is taken in afterwards."""
    talk, division = Conversation(*gpus(1, 1)), Division()
    with pytest.raises(Undescribed) as caught:
        report(talk.state, "m", wide(division), LoadSpec())
    assert caught.value.division is division

    adopted = ev.Adopted(1, "m", "m", "/m", wide(division), replace(CHOICE, ranks=2), "gpu0+gpu1",
                         LoadSpec(), 1.0)  # fmt: skip
    assert talk.send(adopted) == order(division)
    with pytest.raises(Undescribed):
        adopt(Turn(talk.state, 0.0), adopted)
    division.fill(PARTS)
    talk.send(adopted)
    assert talk.phase("m") is phases.Ready
