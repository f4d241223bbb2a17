"""A real server whose models' prompts outlive them: streams that are timed, and ways to end.

What is read is read from the disk: before each timed stream the system's copies of the files are
dropped, as far as it lets a user do so.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlxd import Client, Delta
from mlxd.messages import Status, WorkerStatus
from mlxd_shared.blocks.chain import BLOCK_TOKENS
from mlxd_shared.domain.figures import PrefixDisk
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions
from tests.support.served import serve

BUDGET = "256G"
"""A worker's first share of it is 4 GiB: nothing of what is written here has to go."""
CALL_TIMEOUT_S = 3600.0
LOOK_S = 0.2
WRITE_ASKS_MAX = 20
"""So often is a prompt used until all its blocks are on disk."""
STILL_LOOKS = 15
"""After so many looks without another block it is used again."""
SETTLING_TOKENS = 64
NEW_TOKENS = 8
GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """When the first token came, which ones did, and how much of the prompt was not evaluated."""

    first_s: float
    ids: tuple[int, ...]
    cached: int


@dataclass(frozen=True, slots=True)
class Offered:
    """A model that the server offers, and how it is loaded."""

    name: str
    folder: Path
    spec: LoadSpec = field(default_factory=LoadSpec)
    vocabulary: int = 4096
    """Prompts are of ids below."""


@asynccontextmanager
async def serving(
    models: Sequence[Offered], folder: Path | None, *options: str
) -> AsyncIterator[Client]:
    """Serve models around the body, one in memory at a time, with prompts kept in `folder`."""
    own = ["--max-loaded", "1", *options]
    for model in models:
        own += ["--model", f"{model.name}={model.folder}"]
    if folder is not None:
        own += ["--prefix-disk", BUDGET, "--prefix-disk-folder", str(folder)]
    async with serve(*own) as server, Client(server.address, timeout_s=CALL_TIMEOUT_S) as client:
        yield client


def prompt_of(tokens: int, seed: int, *, vocabulary: int = 4096) -> list[int]:
    """Return a prompt of random tokens."""
    draws = random.Random(seed)
    return [draws.randrange(10, vocabulary) for _ in range(tokens)]


def whole_blocks(prompt: Sequence[int]) -> int:
    """Return how many blocks of a prompt can be read: its last token is always evaluated."""
    return (len(prompt) - 1) // BLOCK_TOKENS


async def ask(
    client: Client, model: str, prompt: list[int], *, max_tokens: int = NEW_TOKENS
) -> Answer:
    """Time one stream's first token."""
    began_s = time.perf_counter()
    first_s = 0.0
    ids: list[int] = []
    cached = 0
    async with client.generate(
        prompt, model=model, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True
    ) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                first_s = first_s or time.perf_counter() - began_s
                ids += event.token_ids
            else:
                cached = event.usage.cached_tokens
    return Answer(first_s, tuple(ids), cached)


async def worker_of(client: Client, model: str) -> WorkerStatus:
    """Return the status of a model's living worker."""
    workers = (await client.status(model)).workers
    return next(worker for worker in workers if worker.exit_code is None)


def disk_of(status: Status) -> PrefixDisk | None:
    """Return what the worker that lives keeps on disk, where it has said so."""
    living = (worker for worker in status.workers if worker.exit_code is None)
    return next((worker.prefix_disk for worker in living), None)


async def make_ready(client: Client, model: Offered, *, kept: bool = True) -> None:
    """Have a model loaded, asked once, and, where prompts are kept, given a share of the disk.

    So no load is timed, and what computing takes here is known.
    """
    async with client.load(model.name, options=model.spec) as updates:
        async for _ in updates:
            pass
    settling = prompt_of(SETTLING_TOKENS, seed=0, vocabulary=model.vocabulary)
    await ask(client, model.name, settling, max_tokens=1)
    if not kept:
        return
    async with client.watch_status(model.name, interval_s=LOOK_S) as statuses:
        async for status in statuses:
            disk = disk_of(status)
            if disk is not None and disk.budget_nbytes:
                return


async def write(client: Client, model: str, prompt: list[int], *, files: int) -> None:
    """Use a prompt until so many files are on disk.

    Raises:
        RuntimeError: they did not come.
    """
    there = 0
    for _ in range(WRITE_ASKS_MAX):
        await ask(client, model, prompt, max_tokens=1)
        there = await wait_for_files(client, model, files=files)
        if there >= files:
            return
    message = f"{there} of {files} files were written"
    raise RuntimeError(message)


async def wait_for_files(client: Client, model: str, *, files: int) -> int:
    """Wait until so many files are on disk, or no more come; return how many there are."""
    there, still = 0, 0
    async with client.watch_status(model, interval_s=LOOK_S) as statuses:
        async for status in statuses:
            disk = disk_of(status)
            blocks = 0 if disk is None else disk.blocks
            still = 0 if blocks > there else still + 1
            there = max(there, blocks)
            if there >= files or still == STILL_LOOKS:
                break
    return there


async def end_by_unload(client: Client, model: Offered) -> None:
    """Unload a model."""
    await client.unload(model.name)


async def end_by_kill(client: Client, model: Offered) -> None:
    """Kill a model's worker as the kernel would, and wait until the server has noticed.

    A load before would be one of a model that is there, and fail with it.
    """
    pid = (await worker_of(client, model.name)).pid
    os.kill(pid, signal.SIGKILL)
    async with client.watch_status(model.name, interval_s=LOOK_S) as statuses:
        async for status in statuses:
            if all(worker.pid != pid or worker.exit_code is not None for worker in status.workers):
                return


def drop_pages(folder: Path) -> None:
    """Have the system forget what it keeps in memory of the files in a folder."""
    if sys.platform != "linux":
        return
    for path in folder.glob("*/*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


async def write_models(*arguments: str) -> None:
    """Run a module that writes models, in a process of its own: this one imports no MLX.

    Raises:
        RuntimeError: it failed.
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments)
    if await process.wait():
        message = f"{arguments[0]} failed"
        raise RuntimeError(message)
