"""What clients are told of a model's states comes in order, and of one load at a time."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import model_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_controller.core.report import report
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.models import ModelService
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.fakes.store import FakeStore
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack, store_of
from tests.support.model_facts import device, facts

READY = types_pb2.MODEL_STATE_READY
NO_CONTEXT = cast("Any", None)


def service_of(stack: Stack, store: FakeStore) -> ModelService:
    """Return the service itself, whose messages are read one by one."""
    return ModelService(Catalog(store, stack.runtime), stack.runtime, stack.clock)


async def load(stack: Stack, model: str = "a", **fields: Any) -> list[model_pb2.LoadModelResponse]:
    """Load to the end and return every message."""
    call = stack.models.LoadModel(model_pb2.LoadModelRequest(model=model, **fields))
    return [message async for message in call]


@pytest.mark.asyncio
async def test_a_loaded_model_may_be_loaded_with_keep_alive_zero() -> None:
    """It was ready, which the last message says; that it goes then is no part of the load."""
    store = store_of({"a": 10})
    async with controller_stack(store=store) as stack:
        await load(stack)
        options = types_pb2.LoadOptions(keep_alive=Duration())
        request = model_pb2.LoadModelRequest(model="a", options=options)
        async with aclosing(service_of(stack, store).LoadModel(request, NO_CONTEXT)) as messages:
            states = [(await anext(messages)).model.state]
            await stack.until("a", phases.Unloaded)
            states += [message.model.state async for message in messages]

    assert states == [READY]


@pytest.mark.asyncio
async def test_a_slow_watcher_is_not_sent_back_in_time() -> None:
    """The list is of one moment: a load while it is read comes after it, whole."""
    store = store_of({"a": 10, "b": 10})
    async with controller_stack(store=store) as stack:
        watch = service_of(stack, store).WatchModels(model_pb2.WatchModelsRequest(), NO_CONTEXT)
        async with aclosing(watch) as messages:
            assert (await anext(messages)).model.name == "a"
            await load(stack, "b")
            states = [(await anext(messages)).model.state]
            while states[-1] != READY:
                states.append((await anext(messages)).model.state)

    assert states == [types_pb2.MODEL_STATE_UNLOADED, types_pb2.MODEL_STATE_LOADING, READY]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "field"),
    [
        (types_pb2.LoadOptions(context_length=512), "context_length"),
        (types_pb2.LoadOptions(rows_max=1), "rows_max"),
        (types_pb2.LoadOptions(weights=types_pb2.WEIGHTS_FORMAT_STORED), "weights"),
    ],
)
async def test_reckoning_refuses_what_the_load_would_be_refused_for(
    options: types_pb2.LoadOptions, field: str
) -> None:
    """Options that a loaded model does not have are not passed over, but named."""
    async with controller_stack() as stack:
        await load(stack)
        request = model_pb2.LoadModelRequest(model="a", options=options, validate_only=True)
        error = await error_of(stack.models.LoadModel(request))

        assert isinstance(error, InvalidRequest)
        assert [violation.field for violation in error.violations] == [f"options.{field}"]


def test_a_report_about_a_model_on_its_way_out_is_about_the_next_load() -> None:
    """Its memory counts as free, and what is asked for is what is reckoned."""
    talk = Conversation(device(1 << 14))
    talk.make_idle("x")
    talk.unload("x")
    assert talk.phase("x") is phases.Unloading
    fit_report = report(talk.state, "x", facts(10), LoadSpec(context_length=256))

    assert fit_report.plan.context_length == 256
    assert fit_report.fits_now
