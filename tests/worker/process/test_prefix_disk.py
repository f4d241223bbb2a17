"""Worker processes with a folder for prompts: killed, ended and started again."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared.blocks.chain import BLOCK_TOKENS
from tests.support.calls import greedy
from tests.support.kept_on_disk import SLOW
from tests.support.random_model import write_dense_model
from tests.support.remembering import tokens_of
from tests.support.worker_process import WorkerProcess, running_worker

PROMPT = tokens_of(1, 400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a block is worth keeping."""
    return write_dense_model(tmp_path_factory.mktemp("slow"), shape=SLOW)


async def ask(worker: WorkerProcess) -> tuple[list[int], int]:
    """Return the answer to the prompt, and how many of its tokens were not evaluated."""
    request = greedy(max_tokens=8, tokens=inference_pb2.TokenIds(ids=PROMPT))
    messages = [message async for message in worker.inference.Generate(request)]
    return [i for message in messages for i in message.token_ids], messages[-1].usage.cached_tokens


def files_in(folder: Path) -> list[Path]:
    """Return the blocks that are there."""
    return list(folder.glob("v*/*.safetensors"))


@pytest.mark.asyncio
async def test_a_killed_worker_loses_nothing_that_was_written(model: Path, tmp_path: Path) -> None:
    """What was used twice is on disk soon; after kill -9 the next worker reads it, and says the
    same. The folder is the user's alone.
    """
    folder = tmp_path / "blocks"
    async with running_worker("--prefix-disk", str(folder)) as worker:
        await worker.load(model)
        cold, cached = await ask(worker)
        assert cached == 0
        while not files_in(folder):
            await ask(worker)
        worker.process.kill()
        await worker.wait_ended()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    async with running_worker("--prefix-disk", str(folder)) as worker:
        await worker.load(model)
        assert await ask(worker) == (cold, BLOCK_TOKENS)
        assert await ask(worker) == (cold, len(PROMPT) - 1)


@pytest.mark.asyncio
async def test_a_worker_that_is_ended_writes_first(model: Path, tmp_path: Path) -> None:
    """What was used once is on disk when the process has ended in good order."""
    folder = tmp_path / "blocks"
    async with running_worker("--prefix-disk", str(folder)) as worker:
        await worker.load(model)
        cold, _ = await ask(worker)
        assert files_in(folder) == []
        worker.process.terminate()
        assert await worker.wait_ended() == 0
    assert len(files_in(folder)) == 1

    size = ("--prefix-disk-size", "1MiB")
    async with running_worker("--prefix-disk", str(folder), *size) as worker:
        await worker.load(model)
        assert await ask(worker) == (cold, BLOCK_TOKENS)


@pytest.mark.asyncio
async def test_two_workers_share_a_folder_safely(model: Path, tmp_path: Path) -> None:
    """The second one of a model serves without, says why, and has the folder once it is free."""
    folder = tmp_path / "blocks"
    async with running_worker("--prefix-disk", str(folder)) as first:
        await first.load(model)
        async with running_worker("--prefix-disk", str(folder)) as second:
            await second.load(model)
            assert (await ask(second))[0] == (await ask(first))[0]
            assert "another process has it" in second.log
            assert "another process has it" not in first.log
    assert len(files_in(folder)) == 1
