"""The scheduler evicts by what it has seen: how often a model is used, how long its load took."""

from __future__ import annotations

from mlxd_controller.core import events as ev
from mlxd_controller.core.report import report
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.controller.core.test_faults import TWO, stopped_models
from tests.support.model_facts import facts


def load_idle(talk: Conversation, name: str, *, load_s: float) -> None:
    """Load a model in this time and leave it idle."""
    ticket, _ = talk.arrive(name)
    talk.wait(load_s)
    talk.ready(name)
    talk.release(name, ticket)


def test_the_model_that_is_seldom_used_goes_before_the_one_used_longer_ago() -> None:
    """Of two that load equally fast the one with fewer uses goes, though it was used last."""
    talk = Conversation(TWO)
    load_idle(talk, "often", load_s=3.0)
    for _ in range(5):
        talk.make_idle("often")
    talk.wait(1)
    load_idle(talk, "seldom", load_s=3.0)
    talk.wait(1)

    assert stopped_models(talk.arrive("m")[1]) == ["seldom"]


def test_the_model_that_loads_fast_goes_before_the_one_used_longer_ago() -> None:
    """Of two that are used equally often the one that was loaded sooner goes."""
    talk = Conversation(TWO)
    load_idle(talk, "slow", load_s=30.0)
    load_idle(talk, "fast", load_s=1.0)
    talk.wait(1)

    assert stopped_models(talk.arrive("m")[1]) == ["fast"]


def test_uses_outlive_an_eviction() -> None:
    """A model that comes back is known by its former uses."""
    talk = Conversation(TWO)
    load_idle(talk, "a", load_s=3.0)
    for _ in range(5):
        talk.make_idle("a")
    talk.unload("a")
    talk.note_gone("a")
    load_idle(talk, "a", load_s=3.0)
    load_idle(talk, "b", load_s=3.0)
    talk.make_idle("b")

    assert stopped_models(talk.arrive("m")[1]) == ["b"]


def say_prompts(talk: Conversation, **prompts_s: float) -> None:
    """Workers say what their prompts would cost again."""
    seconds = {talk.worker(name): cost_s for name, cost_s in prompts_s.items()}
    talk.send(ev.MemoryRead(talk.state.devices, {}, seconds))


def test_the_model_whose_prompts_are_on_disk_goes_before_the_one_loaded_faster() -> None:
    """Of two that are used equally often the one goes whose load and prompts cost less together:
    with prompts in memory alone a fast load is no reason to go.
    """
    talk = Conversation(TWO)
    load_idle(talk, "kept", load_s=5.0)
    load_idle(talk, "lost", load_s=4.0)
    talk.wait(1)
    say_prompts(talk, kept=0.5, lost=20.0)
    (absence,) = report(talk.state, "m", facts(10), LoadSpec()).absences
    assert (absence.digest, absence.load_s, absence.prompts_s) == ("kept", 5.0, 0.5)
    assert stopped_models(talk.arrive("m")[1]) == ["kept"]


def test_what_is_said_of_prompts_counts_for_the_worker_that_said_it() -> None:
    """A model that has been loaded again is not judged by what its former worker kept."""
    talk = Conversation(TWO)
    load_idle(talk, "a", load_s=3.0)
    say_prompts(talk, a=60.0)
    talk.unload("a")
    talk.note_gone("a")
    load_idle(talk, "a", load_s=3.0)
    load_idle(talk, "b", load_s=30.0)
    talk.wait(1)
    assert stopped_models(talk.arrive("m")[1]) == ["a"]
