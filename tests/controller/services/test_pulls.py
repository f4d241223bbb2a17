"""Who may have models pulled, and what of a request is refused before any hub is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd.v1 import model_pb2
from mlxd_controller.pulling.downloads import Downloads, Report
from mlxd_controller.pulling.wanted import Wanted
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.models import ModelService
from mlxd_shared.domain.errors import InvalidRequest, NotAllowed
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
from mlxd_shared.security.callers import current_caller
from mlxd_shared.security.keys import Caller, Key
from tests.controller.services.test_names_asked_for import Unhurried
from tests.support.controller_stack import controller_stack, store_of

UNHURRIED: Any = Unhurried()
CACHE = Path("/cache")
PULLED = PulledModel("o/m@v1", "o/m", "v1", "c", "/cache/x", "d", files=2, nbytes=10)
STEP = PullProgress(PullPhase.DOWNLOADING, "a", "sha256:1", 1, 2, 3, 4)


class Fetch:
    """A hub that has everything, at once."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []

    async def __call__(self, wanted: Wanted, report: Report) -> PulledModel:
        self.wanted.append(wanted)
        report(STEP)
        return PULLED


@pytest.fixture(name="hub")
def make_hub() -> Fetch:
    """What the service downloads from."""
    return Fetch()


@pytest_asyncio.fixture
async def service(hub: Fetch) -> AsyncIterator[ModelService]:
    """A service with a cache to fill."""
    async with controller_stack() as stack:
        catalog = Catalog(store_of({"a": 1}), stack.runtime)
        downloads = Downloads(CACHE, hub)
        yield ModelService(catalog, stack.runtime, stack.clock, downloads=downloads)
        await downloads.aclose()


async def pull(service: ModelService, **fields: Any) -> list[model_pb2.PullModelResponse]:
    """Return every message of a pull."""
    request = model_pb2.PullModelRequest(**fields)
    return [message async for message in service.PullModel(request, UNHURRIED)]


@pytest.mark.asyncio
async def test_each_step_and_the_result_are_sent_whole(service: ModelService, hub: Fetch) -> None:
    """Every field of both; what was asked for has reached the hub."""
    step, done = await pull(service, model="o/m@v1", include=["*.md"])
    assert hub.wanted == [Wanted("o/m", "v1", CACHE, ("*.md",))]
    assert step == model_pb2.PullModelResponse(
        phase=model_pb2.PullModelResponse.PHASE_DOWNLOADING,
        file="a",
        file_digest="sha256:1",
        file_done_bytes=1,
        file_size_bytes=2,
        done_bytes=3,
        total_bytes=4,
    )
    assert done == model_pb2.PullModelResponse(
        phase=model_pb2.PullModelResponse.PHASE_DONE,
        done_bytes=10,
        total_bytes=10,
        pulled=model_pb2.PulledModel(
            name="o/m@v1", repository="o/m", revision="v1", commit="c", path="/cache/x",
            digest="d", files=2, bytes=10,
        ),
    )  # fmt: skip


@pytest.mark.asyncio
async def test_what_is_wrong_is_refused_by_name(service: ModelService, hub: Fetch) -> None:
    """A name and a pattern; the hub is asked nothing."""
    for fields, field in (({"model": "../x"}, "model"), ({"model": "o/m", "include": [""]}, "inc")):
        with pytest.raises(InvalidRequest, match=field):
            await pull(service, **fields)
    assert hub.wanted == []


@pytest.mark.asyncio
async def test_a_server_without_a_cache_says_so(service: ModelService) -> None:
    """With what helps; it begins nothing."""
    async with controller_stack() as stack:
        with pytest.raises(InvalidRequest, match="--hub-cache"):
            await pull(
                ModelService(Catalog(store_of({}), stack.runtime), stack.runtime, stack.clock),
                model="o/m",
            )


@pytest.mark.asyncio
async def test_a_key_for_some_models_pulls_no_others(service: ModelService, hub: Fetch) -> None:
    """A repository's name covers its revisions."""
    current_caller.set(Caller(Key("k", "", models=frozenset({"o/m"}))))
    with pytest.raises(NotAllowed):
        await pull(service, model="o/n")
    assert hub.wanted == []
    assert len(await pull(service, model="o/m@v1")) == 2
