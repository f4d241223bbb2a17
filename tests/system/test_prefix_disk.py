"""A controller whose models' prompts outlive them: unloads, evictions, kills, a restart."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from mlxd_shared.blocks.chain import BLOCK_TOKENS
from tests.support.calls import greedy
from tests.support.cli import mlxd
from tests.support.kept_on_disk import SLOW
from tests.support.random_model import write_dense_model
from tests.support.remembering import tokens_of
from tests.support.served import Served, serve

PROMPT = tokens_of(1, 400)
BUDGET = "64M"


@dataclass(frozen=True, slots=True)
class Models:
    """Two models of which a block is worth keeping."""

    slow: Path
    other: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two such models, of other weights each."""
    return Models(
        write_dense_model(tmp_path_factory.mktemp("slow"), shape=SLOW),
        write_dense_model(tmp_path_factory.mktemp("other"), shape=SLOW, seed=9),
    )


@dataclass(frozen=True, slots=True)
class Session:
    """A server with a folder, and a connection to it."""

    server: Served
    inference: inference_pb2_grpc.InferenceServiceAsyncStub
    models: model_pb2_grpc.ModelServiceAsyncStub
    status: status_pb2_grpc.StatusServiceAsyncStub

    async def ask(self, model: str = "slow", *, max_tokens: int = 8) -> tuple[list[int], int]:
        """Return the answer to the prompt, and how many of its tokens were not evaluated."""
        tokens = inference_pb2.TokenIds(ids=PROMPT)
        call = self.inference.Generate(greedy(model=model, max_tokens=max_tokens, tokens=tokens))
        messages = [message async for message in call]
        ids = [i for message in messages for i in message.token_ids]
        return ids, messages[-1].usage.cached_tokens

    async def unload(self, model: str = "slow") -> None:
        """Unload a model."""
        await self.models.UnloadModel(model_pb2.UnloadModelRequest(model=model))

    async def read(self) -> status_pb2.Status:
        """Return the status."""
        return (await self.status.GetStatus(status_pb2.GetStatusRequest())).status

    async def worker(self, model: str = "slow") -> status_pb2.WorkerStatus:
        """Return the status of a model's living worker."""
        (worker,) = [
            worker
            for worker in (await self.read()).workers
            if worker.model_name == model and not worker.HasField("exit_code")
        ]
        return worker

    async def wait_for_share(self, model: str = "slow") -> None:
        """Wait until a model's worker may write to the disk."""
        while not (await self.worker(model)).prefix_disk.budget_bytes:
            pass

    async def write_all(self, model: str = "slow") -> None:
        """Ask until the prompt's first block is on disk."""
        while not (await self.worker(model)).prefix_disk.blocks:
            await self.ask(model)


@asynccontextmanager
async def serving(folder: Path, models: Models, *options: str) -> AsyncIterator[Session]:
    """Serve both models around the body, with a folder for prompts."""
    own = ("--prefix-disk", BUDGET, "--prefix-disk-folder", str(folder), *options)
    offered = ("--model", f"slow={models.slow}", "--model", f"other={models.other}")
    async with serve(*own, *offered) as server, grpc.aio.insecure_channel(server.address) as wire:
        yield Session(
            server,
            inference_pb2_grpc.InferenceServiceStub(wire),
            model_pb2_grpc.ModelServiceStub(wire),
            status_pb2_grpc.StatusServiceStub(wire),
        )


@pytest.mark.asyncio
async def test_a_prompt_outlives_its_model(models: Models, tmp_path: Path) -> None:
    """After an unload, an eviction and a restart of the server the beginning is read, with equal
    tokens, and the folder is the user's alone.
    """
    folder = tmp_path / "prefixes"
    async with serving(folder, models, "--max-loaded", "1") as session:
        cold = await session.ask()
        assert cold[1] == 0
        await session.wait_for_share()
        await session.unload()
        assert await session.ask() == (cold[0], BLOCK_TOKENS)
        other = await session.ask("other")  # the first one is evicted for it
        assert other[1] == 0
        await session.wait_for_share("other")
        assert await session.ask() == (cold[0], BLOCK_TOKENS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    async with serving(folder, models) as session:
        assert await session.ask() == (cold[0], BLOCK_TOKENS)
        assert await session.ask("other") == (other[0], BLOCK_TOKENS)


@pytest.mark.asyncio
async def test_a_stream_that_moves_reads_its_prompt(models: Models, tmp_path: Path) -> None:
    """kill -9 of a worker in the middle of a stream: the stream goes on with equal tokens on the
    next worker, which reads the prompt's beginning and does not compute it.
    """
    async with serving(tmp_path / "prefixes", models) as session:
        undisturbed, _ = await session.ask(max_tokens=400)
        await session.write_all()
        killed = await session.worker()
        tokens = inference_pb2.TokenIds(ids=PROMPT)
        call = session.inference.Generate(greedy(model="slow", max_tokens=400, tokens=tokens))
        ids: list[int] = []
        async for message in call:
            if not ids:
                os.kill(killed.pid, signal.SIGKILL)
            assert message.offset == len(ids)
            ids += message.token_ids
        assert ids == undisturbed
        worker = await session.worker()
        assert worker.pid != killed.pid
        assert worker.prefix_disk.hit_tokens == BLOCK_TOKENS


@pytest.mark.asyncio
async def test_a_second_server_is_refused(models: Models, tmp_path: Path) -> None:
    """Two servers never share a folder: the second says which, why, and does not start."""
    folder = tmp_path / "prefixes"
    async with serving(folder, models):
        own = ("--prefix-disk", BUDGET, "--prefix-disk-folder", str(folder))
        second = await mlxd("serve", "--address", "127.0.0.1:0", *own)
    assert second.code != 0
    assert "--prefix-disk-folder" in second.err
    assert "another server has it" in second.err
