"""Who may drop and check what is on disk of prompts, and of which models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd.v1 import model_pb2
from mlxd_controller.prefixes.keeper import open_keeper
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.models import ModelService
from mlxd_controller.settings import DiskBudget
from mlxd_shared.blocks.about import About
from mlxd_shared.domain.errors import NotAllowed
from mlxd_shared.security.callers import current_caller
from mlxd_shared.security.keys import Caller, Key
from tests.controller.services.test_names_asked_for import Unhurried
from tests.shared.blocks.made_blocks import chain_of, files_in, open_blocks
from tests.support.controller_stack import controller_stack, store_of

UNHURRIED: Any = Unhurried()


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[ModelService]:
    """A service whose folder has three blocks of `old`, of which no digest is known."""
    store = open_blocks(tmp_path)
    store.describe(About(model="old"))
    assert all(store.write(block) for block in chain_of(1, 3))
    store.close()
    keeper = open_keeper(DiskBudget(tmp_path, 1 << 20))
    async with controller_stack() as stack:
        await keeper.share_out([], stack.runtime.metrics)
        catalog = Catalog(store_of({"a": 1}), stack.runtime)
        yield ModelService(catalog, stack.runtime, stack.clock, keeper=keeper)
    keeper.close()


def leave_another(folder: Path) -> Path:
    """Leave a file in another form's folder, that says nothing of itself."""
    other = folder / f"v1-{32 * 'b'}"
    other.mkdir(mode=0o700)
    kept = other / files_in(folder)[0].name
    kept.write_bytes(b"another model's")
    return kept


def restrict(*models: str) -> None:
    """Have a key for these models make the calls of this test."""
    current_caller.set(Caller(Key("k", "", models=frozenset(models))))


@pytest.mark.asyncio
async def test_a_key_for_some_models_checks_and_drops_no_others(
    service: ModelService, tmp_path: Path
) -> None:
    """It hears nothing of other models' prompts, and removes none of them."""
    restrict("a")
    with pytest.raises(NotAllowed):
        await anext(service.VerifyPrefixes(model_pb2.VerifyPrefixesRequest(), UNHURRIED))
    for request in (
        model_pb2.DropPrefixesRequest(all=True),
        model_pb2.DropPrefixesRequest(model="old"),
    ):
        with pytest.raises(NotAllowed):
            await service.DropPrefixes(request, UNHURRIED)
    dropped = await service.DropPrefixes(model_pb2.DropPrefixesRequest(model="a"), UNHURRIED)
    assert dropped.blocks == 0
    assert len(files_in(tmp_path)) == 3


@pytest.mark.asyncio
async def test_a_model_without_a_digest_is_dropped_alone(
    service: ModelService, tmp_path: Path
) -> None:
    """A folder that says a name alone is dropped by it, and no reason to drop all models'."""
    kept = leave_another(tmp_path)
    dropped = await service.DropPrefixes(model_pb2.DropPrefixesRequest(model="old"), UNHURRIED)
    assert dropped.blocks == 3
    assert files_in(tmp_path) == [kept]
