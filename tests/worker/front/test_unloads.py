"""A worker around an engine thread: its name, and unloads that meet loads and texts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mlxd_shared import config
from mlxd_shared.domain.errors import LoadAbandoned, ModelDraining, ModelUnloaded
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.requests import LoadSpec
from mlxd_worker.process.options import parse_options
from mlxd_worker.servicers.status import device_name
from mlxd_worker.thread.facts import LoadJob
from tests.support.engine_threads import Started, kind, running_engine, worker_on
from tests.support.tiny_model import write_tiny_model


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    """A running engine thread, stopped at the end."""
    async with running_engine() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.asyncio
async def test_a_worker_calls_its_device_what_it_was_told(started: Started) -> None:
    """Its status names the device as its controller does; without one, by the kind."""
    own = "cpu" if kind().value == "cpu" else "gpu0"

    assert device_name(worker_on(started, parse_options(["--device", "gpu1"]).device)) == "gpu1"
    assert device_name(worker_on(started, parse_options([]).device)) == own


@pytest.mark.asyncio
async def test_an_unload_gives_up_a_load_that_has_not_begun(started: Started, folder: Path) -> None:
    """An unload right behind its load waits for no weights, and the load says why it ended."""
    worker = worker_on(started)
    steps = worker.load(LoadJob(folder, "tiny", "d" * 64, LoadSpec()))
    await anext(steps)

    await worker.unload()

    with pytest.raises(LoadAbandoned):
        async for _ in steps:
            pass
    assert worker.phase is ModelState.UNLOADED


@pytest.mark.asyncio
async def test_an_unload_ends_though_its_caller_leaves(started: Started, folder: Path) -> None:
    """It is not left half done: the worker is empty, and takes the next load."""
    worker = worker_on(started)
    job = LoadJob(folder, "tiny", "d" * 64, LoadSpec())
    assert [step async for step in worker.load(job)][-1].stage == "ready"
    async with started.hold():
        unload = asyncio.ensure_future(worker.unload())
        await asyncio.sleep(0)
        unload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unload
    while worker.phase is not ModelState.UNLOADED:
        await started.engine.ready()
    await started.engine.ready()  # what has ended is forgotten a turn later
    assert [step async for step in worker.load(job)][-1].stage == "ready"


@pytest.mark.asyncio
async def test_a_load_does_not_slip_into_an_unload(started: Started, folder: Path) -> None:
    """While an unload is under way a load is refused; it would be forgotten, model and all."""
    worker = worker_on(started)
    job = LoadJob(folder, "tiny", "d" * 64, LoadSpec())
    async with started.hold():
        unload = asyncio.ensure_future(worker.unload())
        await asyncio.sleep(0)
        with pytest.raises(ModelDraining):
            await anext(worker.load(job))
    await unload

    assert [step async for step in worker.load(job)][-1].stage == "ready"
    assert worker.admit("tiny").job is job


@pytest.mark.asyncio
async def test_an_unload_ends_the_texts_of_its_model(started: Started, folder: Path) -> None:
    """Whoever has one under way, or comes late with it, is told that the model was unloaded, by
    its name; with the next load texts are read again."""
    worker = worker_on(started)
    job = LoadJob(folder, "tiny", "d" * 64, LoadSpec())
    assert [step async for step in worker.load(job)][-1].stage == "ready"
    assert worker.loaded is not None
    tokenizer, command = worker.loaded.tokenizer, worker.tokens._command
    worker.tokens._command = (sys.executable, "-c", "import threading; threading.Event().wait()")
    long = "a" * (config.TOKENIZE_HERE_BYTES_MAX + 1)
    try:
        reading = asyncio.ensure_future(
            worker.tokens.encode(tokenizer, long, field="text", kind="tokenize")
        )
        await asyncio.sleep(0)
        await worker.unload()
        late = worker.tokens.encode(tokenizer, "a", field="text", kind="tokenize")
        for task in (reading, late):
            with pytest.raises(ModelUnloaded) as caught:
                await asyncio.wait_for(task, 60)
            assert caught.value.model == "tiny"

        worker.tokens._command = command
        assert [step async for step in worker.load(job)][-1].stage == "ready"
        anew = worker.loaded.tokenizer
        assert await worker.tokens.encode(anew, long, field="text", kind="tokenize")
    finally:
        await worker.tokens.close()
