"""Health of models, as the runtime's news tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from mlxd_controller.runtime.changes import WATCH_QUEUE_MAX
from mlxd_controller.runtime.ports import BrokenRef, ModelRef, ModelStore
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.health import follow_health
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.aliases import remove_alias, set_alias
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import library_of
from mlxd_shared.domain.errors import MachineShort
from mlxd_shared.serving.health import Health
from tests.fakes.store import FakeStore
from tests.support.controller_stack import controller_stack
from tests.support.model_facts import facts
from tests.support.tiny_model import write_tiny_model
from tests.support.turns import turn_until


class Told(Health):
    """What was said last of each name."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, bool] = {}

    async def set(self, name: str, *, serving: bool) -> None:
        """Note it."""
        self.states[name] = serving
        await super().set(name, serving=serving)

    def forget(self, name: str) -> None:
        """Note that too."""
        self.states.pop(name, None)
        super().forget(name)


class ShortAtFirst(FakeStore):
    """A store that the machine cannot look into the first time."""

    looked = 0

    async def list_models(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Fail once; then say what there is."""
        self.looked += 1
        if self.looked == 1:
            raise MachineShort("open files", "a store: Too many open files", 0.0)
        return await super().list_models()


@asynccontextmanager
async def following(runtime: Runtime, store: ModelStore) -> AsyncIterator[Told]:
    """Have health followed around the body."""
    registry = Told()
    task = asyncio.create_task(follow_health(registry, Catalog(store, runtime), runtime))
    try:
        yield registry
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
        async with following(stack.runtime, store) as registry:
            await turn_until(lambda: registry.states.get("models/a") is True)
            assert registry.states["models/n"] is False


@pytest.mark.asyncio
async def test_lost_news_end_nothing() -> None:
    """Too much at once: the models are told anew."""
    store = FakeStore({"a": ("d", facts(10))})
    async with controller_stack(store=store) as stack:
        await stack.generate()
        (model,) = stack.runtime.state.models.values()
        async with following(stack.runtime, store) as registry:
            await turn_until(lambda: registry.states.get("models/a") is True)
            registry.states.clear()
            for number in range(WATCH_QUEUE_MAX + 1):
                stack.runtime.changes.publish(None, replace(model, digest=str(number)))
            await turn_until(lambda: registry.states.get("models/a") is True)


@pytest.mark.asyncio
async def test_a_machine_that_is_short_at_first_ends_nothing() -> None:
    """Health is followed once the machine can look for models."""
    store = ShortAtFirst({"a": ("d", facts(10))})
    async with controller_stack(store=FakeStore({"a": ("d", facts(10))})) as stack:
        await stack.generate()
        async with following(stack.runtime, store) as registry:
            await turn_until(lambda: registry.states.get("models/a") is True)

    assert store.looked == 2


@pytest.mark.asyncio
async def test_a_forgotten_name_has_no_health_any_more(tmp_path: Path) -> None:
    """From the moment it is forgotten, by a client or for another; its model's others have theirs,
    and it has one again once it means a model that is ready."""
    store = Library(())
    folder = write_tiny_model(tmp_path / "m")
    other = write_tiny_model(tmp_path / "n", seed=2)
    async with controller_stack(store=store) as stack:
        for name in ("a", "b"):
            await store.add(folder, name=name)
        async with following(stack.runtime, store) as registry:
            await stack.generate("a")
            await turn_until(lambda: registry.states == {"models/a": True, "models/b": True})
            await store.forget("a")
            assert registry.states == {"models/b": True}
            assert registry.of("models/a") == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            await store.add(other, name="a")
            await stack.generate("a")
            await turn_until(lambda: registry.states == {"models/a": True, "models/b": True})
            await stack.unload((await store.resolve("b")).digest)
            await turn_until(lambda: registry.states["models/b"] is False)
            assert registry.states["models/a"] is True


@pytest.mark.asyncio
async def test_health_knows_no_more_names_than_there_are(tmp_path: Path) -> None:
    """However many are given and forgotten, also those that make room for others."""
    store = Library(())
    folder = write_tiny_model(tmp_path / "m")
    async with controller_stack(store=store) as stack, following(stack.runtime, store) as registry:
        for number in range(3):
            await store.add(folder, name=f"n{number}")
            await stack.generate(f"n{number}")
            await turn_until(lambda: True in registry.states.values())
            await stack.unload((await store.resolve(f"n{number}")).digest)
            await store.forget(f"n{number}")
            await stack.settle()
            assert registry.states == {}


@pytest.mark.asyncio
async def test_an_alias_that_was_taken_away_has_no_health_with_the_next_news(
    tmp_path: Path,
) -> None:
    """Nobody tells a server of that, but its model's names are looked at again."""
    write_tiny_model(tmp_path / "m")
    set_alias(tmp_path, "short", "m")
    store = library_of((), StorePlaces(tmp_path, None, None))
    async with controller_stack(store=store) as stack, following(stack.runtime, store) as registry:
        await stack.generate("short")
        await turn_until(lambda: registry.states == {"models/m": True, "models/short": True})
        remove_alias(tmp_path, "short")
        await store.list_models()
        await stack.unload(stack.model("m").digest)
        await turn_until(lambda: registry.states == {"models/m": False})
