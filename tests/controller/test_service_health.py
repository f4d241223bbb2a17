"""Health of models, as the runtime's news tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from mlxd_controller.changes import WATCH_QUEUE_MAX
from mlxd_controller.ports import BrokenRef, ModelRef
from mlxd_controller.runtime import Runtime
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.health import follow_health
from mlxd_shared.errors import MachineShort
from mlxd_shared.serving import Health
from tests.fakes.store import FakeStore
from tests.support.controller_stack import controller_stack
from tests.support.model_facts import facts
from tests.support.turns import turned


class Told(Health):
    """What was said last of each name."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, bool] = {}

    async def set(self, name: str, *, serving: bool) -> None:
        """Note it."""
        self.states[name] = serving
        await super().set(name, serving=serving)


class ShortAtFirst(FakeStore):
    """A store that the machine cannot look into the first time."""

    looked = 0

    async def listed(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Fail once; then say what there is."""
        self.looked += 1
        if self.looked == 1:
            raise MachineShort("open files", "a store: Too many open files", 0.0)
        return await super().listed()


@asynccontextmanager
async def following(runtime: Runtime, store: FakeStore) -> AsyncIterator[Told]:
    """Have health followed around the body."""
    told = Told()
    task = asyncio.create_task(follow_health(told, Catalog(store, runtime), runtime))
    try:
        yield told
    finally:
        assert not task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.asyncio
async def test_what_was_ready_before_anybody_listened_is_healthy() -> None:
    """As the first worker of a former controller is, which is decided on before all else."""
    store = FakeStore({"a": ("d", facts(10)), "n": ("e", facts(10))})
    async with controller_stack(store=store) as stack:
        await stack.generate()
        async with following(stack.runtime, store) as told:
            await turned(lambda: told.states.get("models/a") is True)
            assert told.states["models/n"] is False


@pytest.mark.asyncio
async def test_lost_news_end_nothing() -> None:
    """Too much at once: the models are told anew."""
    store = FakeStore({"a": ("d", facts(10))})
    async with controller_stack(store=store) as stack:
        await stack.generate()
        (model,) = stack.runtime.state.models.values()
        async with following(stack.runtime, store) as told:
            await turned(lambda: told.states.get("models/a") is True)
            told.states.clear()
            for number in range(WATCH_QUEUE_MAX + 1):
                stack.runtime.changes.publish(None, replace(model, digest=str(number)))
            await turned(lambda: told.states.get("models/a") is True)


@pytest.mark.asyncio
async def test_a_machine_that_is_short_at_first_ends_nothing() -> None:
    """Health is followed once the machine can look for models."""
    store = ShortAtFirst({"a": ("d", facts(10))})
    async with controller_stack(store=FakeStore({"a": ("d", facts(10))})) as stack:
        await stack.generate()
        async with following(stack.runtime, store) as told:
            await turned(lambda: told.states.get("models/a") is True)

    assert store.looked == 2
