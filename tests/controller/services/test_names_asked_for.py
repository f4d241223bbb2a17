"""The name of a model that somebody has just asked for, before the scheduler knows of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxd.v1 import inference_pb2, model_pb2
from mlxd_controller.runtime.ports import ModelRef
from mlxd_controller.services.allowances import Allowances
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.inference import InferenceService
from mlxd_controller.services.models import ModelService
from mlxd_controller.store.model_library import Library
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound
from mlxd_shared.domain.requests import LoadSpec
from tests.support.controller_stack import Stack, controller_stack, request
from tests.support.tiny_model import write_tiny_model


class Overheard(Library):
    """A store that has something done at the moment at which it has found a name."""

    def __init__(self) -> None:
        super().__init__(())
        self.on_found: Callable[[], None] = lambda: None

    async def resolve(self, name: str) -> ModelRef:
        """Find, and tell."""
        ref = await super().resolve(name)
        self.on_found()
        return ref


class Unhurried:
    """A call that has no deadline."""

    def time_remaining(self) -> None:
        """Return that there is none."""


@dataclass(slots=True)
class Services:
    """A controller's services without a connection, over a folder that is named "a"."""

    stack: Stack
    store: Overheard
    catalog: Catalog
    models: ModelService
    inference: InferenceService
    digest: str


@asynccontextmanager
async def services(folder: Path) -> AsyncIterator[Services]:
    """Run them around the body; the model was loaded once, and is not any more."""
    store = Overheard()
    async with controller_stack(store=store) as stack:
        catalog = Catalog(store, stack.runtime)
        models = ModelService(catalog, stack.runtime, stack.clock)
        allowances = Allowances(stack.clock, stack.runtime.metrics)
        inference = InferenceService(catalog, stack.runtime, stack.clock, allowances=allowances)
        digest = (await store.add(folder, name="a")).digest
        yield Services(stack, store, catalog, models, inference, digest)


async def load_named(its: Services) -> None:
    """Load the model by its name."""
    request = model_pb2.LoadModelRequest(model="a")
    async for _ in its.models.LoadModel(request, context=_context()):
        pass


async def generate(its: Services) -> None:
    """Have the model say something."""
    async for _ in its.inference.Generate(request("a"), _context()):
        pass


async def tokenize(its: Services) -> None:
    """Have the model's tokenizer asked."""
    request = inference_pb2.TokenizeRequest(model="a", text="once")
    await its.inference.Tokenize(request, _context())


def _context() -> Any:
    return Unhurried()


@pytest.mark.asyncio
@pytest.mark.parametrize("ask", [load_named, generate, tokenize])
async def test_a_name_that_was_just_asked_for_is_not_forgotten(
    ask: Callable[[Services], Awaitable[None]], tmp_path: Path
) -> None:
    """A model that is about to be loaded would otherwise live without any name."""
    async with services(write_tiny_model(tmp_path / "m")) as its:
        tasks: list[asyncio.Task[tuple[str, ...]]] = []

        def forget() -> None:  # runs before the scheduler does
            tasks.append(asyncio.create_task(its.catalog.forget("a")))

        its.store.on_found = forget
        await ask(its)
        (forgetting,) = tasks
        with pytest.raises(InvalidRequest, match="in use"):
            await forgetting
        its.store.on_found = lambda: None
        assert its.store.find_known(its.digest) is not None
        assert (await its.catalog.find("a")).digest == its.digest


@pytest.mark.asyncio
async def test_a_loaded_model_is_found_by_its_digest_cut_short(tmp_path: Path) -> None:
    """As by its name: whatever happens to its files."""
    folder = write_tiny_model(tmp_path / "m")
    async with services(folder) as its:
        await load_named(its)
        shutil.rmtree(folder)
        for name in ("a", its.digest, its.digest[:12]):
            assert (await its.catalog.find(name)).digest == its.digest


@pytest.mark.asyncio
async def test_what_nobody_asks_for_any_more_may_be_forgotten(tmp_path: Path) -> None:
    """A request counts until it has ended, however it ends."""
    async with services(write_tiny_model(tmp_path / "m")) as its:
        await load_named(its)
        await generate(its)
        await its.stack.unload(its.digest)
        with pytest.raises(InvalidRequest):
            await its.inference.Tokenize(
                inference_pb2.TokenizeRequest(model="a", worker_incarnation="w"), _context()
            )
        await its.stack.settle()
        assert await its.catalog.forget("a") == ()
        assert its.store.find_known(its.digest) is None


@pytest.mark.asyncio
async def test_a_load_whose_client_left_at_once_keeps_the_name(tmp_path: Path) -> None:
    """The scheduler will decide on it all the same."""
    async with services(write_tiny_model(tmp_path / "m")) as its:
        ref = await its.catalog.find("a")
        async with its.stack.runtime.loading(ref, LoadSpec()):
            pass
        with pytest.raises(InvalidRequest, match="in use"):
            await its.catalog.forget("a")


@pytest.mark.asyncio
async def test_what_is_forgotten_while_its_files_are_read_is_not_found(tmp_path: Path) -> None:
    """Nobody is given a model that has no name any more."""
    library = await of_two(tmp_path)
    finding = asyncio.create_task(library.resolve("a"))
    await asyncio.sleep(0)
    await library.forget("a")
    with pytest.raises(ModelNotFound, match="forgotten"):
        await finding
    assert [ref.name for ref in await library.list_models()] == ["b"]


@pytest.mark.asyncio
async def test_what_is_forgotten_while_all_is_looked_at_is_not_listed(tmp_path: Path) -> None:
    """Not in that list, and not known by its digest after it."""
    library = await of_two(tmp_path)
    digest = (await library.resolve("a")).digest
    listing = asyncio.create_task(library.list_models())
    await asyncio.sleep(0)
    await library.forget("a")
    assert [ref.name for ref in await listing] == ["b"]
    assert library.find_known(digest) is None
    with pytest.raises(ModelNotFound):
        await library.resolve(digest)


async def of_two(root: Path) -> Library:
    """Return a store with "a" and "b", both named by loads."""
    library = Library(())
    for seed, name in enumerate("ab"):
        await library.add(write_tiny_model(root / name, seed=seed), name=name)
    return library


@pytest.mark.asyncio
async def test_a_model_in_use_is_known_by_its_digest_where_its_last_name_goes(
    tmp_path: Path,
) -> None:
    """Its folder has other files by then, and another name for them; it can still be unloaded."""
    folder = write_tiny_model(tmp_path / "m")
    async with services(folder) as its:
        await load_named(its)
        write_tiny_model(folder, seed=9)
        assert (await its.store.add(folder, name="b")).digest != its.digest

        assert await its.catalog.forget("a") == ("b",)
        known = its.store.find_known(its.digest)
        assert known is not None
        assert (known.name, known.aliases) == (its.digest, ())
        with pytest.raises(ModelNotFound):
            await its.catalog.find("a")
        assert await its.catalog.find(its.digest) == known
