"""What clients can pile up in the controller has a bound, with an error of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest

from mlxd.v1 import inference_pb2, model_pb2, status_pb2
from mlxd_controller.core.events import Arrived
from mlxd_controller.core.schedule import decide
from mlxd_controller.core.state import Model
from mlxd_controller.runtime.changes import Changes
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from mlxd_shared.domain.retry_times import retry_after_s
from tests.controller.core.conversation import Conversation
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack
from tests.support.model_facts import device, facts

LONG = "x" * (config.PATH_CHARS_MAX + 1)


def test_waits_for_an_unload_are_bounded() -> None:
    """One more is refused by name; the others are answered when the model is gone."""
    talk = Conversation(device(1 << 14))
    talk.serve("m")
    waiting = [talk.unload("m")[0] for _ in range(config.UNLOAD_WAITERS_MAX)]
    late, _ = talk.unload("m")

    error = talk.refusal(late)
    assert isinstance(error, QueueFull)
    assert error.limit == config.UNLOAD_WAITERS_MAX
    assert talk.model("m").unloaders == tuple(waiting)


def test_those_whom_a_full_queue_refuses_come_back_apart() -> None:
    """Requests and unloads, each at a time of its own; once the queue has emptied they start again.

    Half a queue must have gone for that, so that a crowd is one however it ebbs and flows.
    """
    talk = Conversation(device(1 << 14))
    waiting = [talk.arrive("m")[0] for _ in range(config.LOAD_WAITERS_MAX)]
    late = [talk.arrive("m")[0] for _ in range(5)]
    talk.release("m", waiting.pop())
    waiting.append(talk.arrive("m")[0])
    late += [talk.arrive("m")[0] for _ in range(5)]
    assert [retry_of(talk, ticket) for ticket in late] == [retry_after_s(n) for n in range(1, 11)]

    talk.ready("m")
    assert talk.state.refused == 0
    unloading = [talk.unload("m")[0] for _ in range(config.UNLOAD_WAITERS_MAX)]
    late = [talk.unload("m")[0] for _ in range(5)]
    assert [retry_of(talk, ticket) for ticket in late] == [retry_after_s(n) for n in range(1, 6)]
    assert not set(unloading) & set(talk.answers)


def retry_of(talk: Conversation, ticket: str) -> float:
    """Return when whoever was refused is to come back."""
    error = talk.refusal(ticket)
    assert isinstance(error, QueueFull)
    return error.retry_after_s


def test_watchers_are_bounded() -> None:
    """One more is refused by name; there is room again when one has gone."""
    changes = Changes()
    with ExitStack() as watching:
        for _ in range(config.WATCHERS_MAX):
            watching.enter_context(changes.subscribe())
        with pytest.raises(QueueFull) as caught, changes.subscribe():
            pass
        assert caught.value.limit == config.WATCHERS_MAX
    with changes.subscribe():
        pass


@pytest.mark.asyncio
async def test_watchers_of_the_status_are_bounded() -> None:
    """RESOURCE_EXHAUSTED for one more."""
    async with controller_stack() as stack:
        calls = [
            stack.status.WatchStatus(status_pb2.WatchStatusRequest())
            for _ in range(config.STATUS_WATCHERS_MAX)
        ]
        for call in calls:
            await anext(aiter(call))
        late = stack.status.WatchStatus(status_pb2.WatchStatusRequest())
        assert isinstance(await error_of(late), QueueFull)
        assert await late.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


def calls_with_a_long_name(stack: Stack) -> list[Any]:
    """Return a call of every method that names a model."""
    return [
        stack.models.GetModel(model_pb2.GetModelRequest(model=LONG)),
        stack.models.LoadModel(model_pb2.LoadModelRequest(model=LONG)),
        stack.models.LoadModel(model_pb2.LoadModelRequest(model="/" + LONG)),
        stack.models.UnloadModel(model_pb2.UnloadModelRequest(model=LONG)),
        stack.models.WatchModels(model_pb2.WatchModelsRequest(model=LONG)),
        stack.status.GetStatus(status_pb2.GetStatusRequest(model=LONG)),
        stack.status.WatchStatus(status_pb2.WatchStatusRequest(model=LONG)),
        stack.inference.Tokenize(inference_pb2.TokenizeRequest(model=LONG, text="x")),
        stack.inference.Detokenize(inference_pb2.DetokenizeRequest(model=LONG, token_ids=[1])),
        stack.inference.Generate(inference_pb2.GenerateRequest(model=LONG, text="x")),
    ]


@pytest.mark.asyncio
async def test_the_name_of_a_model_is_bounded_everywhere() -> None:
    """No log line and no answer carries a name of megabytes."""
    async with controller_stack() as stack:
        calls = [(call, "model") for call in calls_with_a_long_name(stack)]
        forget = stack.models.ForgetModel(model_pb2.ForgetModelRequest(name=LONG))
        for call, field in [*calls, (forget, "name")]:
            error = await error_of(call)
            assert isinstance(error, InvalidRequest)
            assert [violation.field for violation in error.violations] == [field]


def test_models_that_were_are_forgotten() -> None:
    """A folder that is trained on and asked for again and again is a new model each time."""
    talk = Conversation(device(1 << 14))
    talk.serve("used")
    cold = Model("", "", "/m", facts(10), keep_alive_s=300.0)
    known = {
        name: replace(cold, digest=name, name=name, last_used_s=10.0 + number)
        for number, name in enumerate(f"m{i}" for i in range(config.MODELS_KNOWN_MAX - 1))
    }
    before = replace(talk.state, models={**known, **talk.state.models})

    after, _ = decide(before, Arrived("t", "new", "new", "/new", facts(10)), talk.now_s)
    assert before.models.keys() - after.models.keys() == {"m0"}
    assert after.models.keys() - before.models.keys() == {"new"}
    again, _ = decide(after, Arrived("u", "used", "used", "/used", facts(10)), talk.now_s)
    assert again.models.keys() == after.models.keys()
