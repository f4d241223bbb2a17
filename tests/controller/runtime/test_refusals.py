"""Loads that are refused for memory: each figure and each term is a field, and nothing is done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxd.v1 import model_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_models.fit.plan import TERMS
from mlxd_shared import config
from mlxd_shared.domain.errors import ModelTooLarge, NoRoom
from mlxd_shared.domain.units import format_bytes
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack, store_of
from tests.support.model_facts import device, need_mib

ONE_OF_TEN = device(need_mib(10) + 1)


async def load(stack: Stack, model: str, **fields: Any) -> list[model_pb2.LoadModelResponse]:
    """Load to the end and return every message."""
    call = stack.models.LoadModel(model_pb2.LoadModelRequest(model=model, **fields))
    return [message async for message in call]


def terms_of(error: ModelTooLarge | NoRoom) -> dict[str, int]:
    """Return the terms that an error carries, by name."""
    terms = vars(error)
    return {name: terms[f"{name}_bytes"] for name in TERMS}


@pytest.mark.asyncio
async def test_a_load_that_would_overcommit_is_refused_with_each_term() -> None:
    """Need, what there is, the reserve and every term, as the report has them; nobody is evicted,
    no process is started, and nothing was said before it."""
    memory = device(200)
    async with controller_stack(store=store_of({"a": 10, "huge": 5000}), memory=memory) as stack:
        await load(stack, "a")
        (reckoned,) = await load(stack, "huge", validate_only=True)
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="huge"))
        error = await error_of(call)

        assert isinstance(error, ModelTooLarge)
        assert error.need_bytes == reckoned.fit.need_bytes == sum(terms_of(error).values())
        assert error.budget_bytes == memory.budget_bytes
        assert error.reserve_bytes == memory.reserve_bytes
        assert terms_of(error) == {term.name: term.bytes for term in reckoned.fit.terms}
        text = error.describe()
        assert f"needs {format_bytes(error.need_bytes)} (weights 4.9 GiB, kv " in text
        assert "200.0 MiB available after 200.0 MiB reserved" in text
        assert isinstance(stack.model("a").phase, phases.Ready)
        assert len(stack.workers.launcher.processes) == 1


@pytest.mark.asyncio
async def test_no_room_now_is_told_with_each_term() -> None:
    """After the wait: what is free after the reserve, and what cannot be done without."""
    store = store_of({"a": 10, "b": 10})
    async with controller_stack(store=store, memory=ONE_OF_TEN) as stack:
        await load(stack, "a", options=types_pb2.LoadOptions(pinned=True))
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="b"))
        refused = asyncio.create_task(error_of(call))
        await stack.until("b", phases.Queued)
        stack.pass_time(config.ROOM_WAIT_MAX_S)
        error = await refused

        assert isinstance(error, NoRoom)
        assert error.available_bytes < error.need_bytes == sum(terms_of(error).values())
        assert error.reserve_bytes == ONE_OF_TEN.reserve_bytes
        assert terms_of(error)["weights"] == 10 << 20
        reserve = format_bytes(ONE_OF_TEN.reserve_bytes)
        assert f"available now after {reserve} reserved" in error.describe()


@pytest.mark.asyncio
async def test_a_model_is_placed_as_a_whole_or_not_at_all() -> None:
    """require_full says what is so anyway; without it a part would do, but there are no parts."""
    async with controller_stack() as stack:
        for required in (True, False):
            messages = await load(stack, "a", require_full=required)
            assert messages[-1].model.state == types_pb2.MODEL_STATE_READY
    async with controller_stack(memory=device(20)) as stack:
        for required in (True, False):
            request = model_pb2.LoadModelRequest(model="a", require_full=required)
            assert isinstance(await error_of(stack.models.LoadModel(request)), ModelTooLarge)
