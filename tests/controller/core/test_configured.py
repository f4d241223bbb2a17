"""What the configuration fixes for a model: in force from its first request on, and anew."""

from __future__ import annotations

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core.state import Model
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts

CONFIGURED = LoadSpec(
    context_length=64,
    rows_max=2,
    sampling=SamplingOptions(temperature=0.5),
    keep_alive_s=7.0,
    pinned=True,
)


def load_of(actions: tuple[a.Action, ...]) -> a.StartLoad:
    """The one load among actions."""
    (load,) = (action for action in actions if isinstance(action, a.StartLoad))
    return load


def arrive(talk: Conversation) -> tuple[a.Action, ...]:
    """A request for the configured model."""
    return talk.send(ev.Arrived(talk.ticket(), "m", "m", "/m", facts(10), configured=CONFIGURED))


def model_of(talk: Conversation) -> Model:
    """The model as the scheduler knows it."""
    return talk.state.models["m"]


def test_a_request_loads_as_is_configured() -> None:
    """Nobody else has fixed anything."""
    talk = Conversation(device(1 << 10))
    load = load_of(arrive(talk))

    assert load.spec == CONFIGURED
    assert (load.plan.context_length, load.plan.rows_max) == (64, 2)
    assert (model_of(talk).pinned, model_of(talk).keep_alive_s) == (True, 7.0)


def test_what_a_load_asks_for_goes_before() -> None:
    """Option by option; the rest is as configured."""
    talk = Conversation(device(1 << 10))
    spec = LoadSpec(context_length=32, pinned=False, keep_alive_s=9.0)
    load = load_of(
        talk.send(
            ev.LoadAsked(talk.ticket(), "m", "m", "/m", facts(10), spec, configured=CONFIGURED)
        )
    )

    assert (load.spec.context_length, load.spec.rows_max) == (32, 2)
    assert load.spec.sampling == CONFIGURED.sampling
    assert (model_of(talk).pinned, model_of(talk).keep_alive_s) == (False, 9.0)


def test_an_unload_brings_it_back() -> None:
    """What an operator fixed for one load is gone with it."""
    talk = Conversation(device(1 << 10))
    spec = LoadSpec(context_length=32, keep_alive_s=9.0)
    talk.send(ev.LoadAsked(talk.ticket(), "m", "m", "/m", facts(10), spec, configured=CONFIGURED))
    talk.unload("m", force=True)

    assert model_of(talk).spec == CONFIGURED
    assert (model_of(talk).pinned, model_of(talk).keep_alive_s) == (True, 7.0)


def test_a_model_that_is_not_configured_keeps_the_defaults() -> None:
    """The server's keep-alive, and nothing else."""
    talk = Conversation(device(1 << 10), keep_alive_s=123.0)
    talk.arrive("m")

    assert model_of(talk).spec == LoadSpec()
    assert (model_of(talk).pinned, model_of(talk).keep_alive_s) == (False, 123.0)
