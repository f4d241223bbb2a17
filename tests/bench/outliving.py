"""What prompts on disk are worth: first tokens after an unload, a kill, a restart; others' steps.

    python -m tests.bench.outliving [--tokens N] [--runs N] [--moved BYTES] [--out FILE]

A real controller with a random Llama of about 100 MB, on this machine's CPU. Of a prompt of 32,000
tokens the time to its first token is taken cold, with memory warm, after an unload, after `kill -9`
of the worker, and after a restart of the controller; the tokens must be the same each time. Then
another stream's steps are timed alone, and beside such prompts that are written and read by turns.
For a quiet machine: each cold prompt takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxd import Client, Delta
from mlxd.messages import Status, WorkerStatus
from mlxd_shared.domain.figures import PrefixDisk
from mlxd_shared.domain.requests import SamplingOptions
from tests.bench.__main__ import random_llama
from tests.bench.report import json_line
from tests.support.served import serve

PROMPT_TOKENS = 32_000
CONTEXT = 33_024
NEW_TOKENS = 8
SHORT_TOKENS = 64
STEPS = 1500
MOVED_NBYTES = 2 << 30
"""Others' steps are timed while so much at least is read and written."""
VOCABULARY = 4096
LOOK_S = 0.2
WRITE_S = 2.0
"""Between two looks at how many blocks are on disk: a share grows once a second."""
NAME = "long"
GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """When the first token came, and which ones did."""

    first_s: float
    ids: tuple[int, ...]


@asynccontextmanager
async def serving(model: Path, folder: Path) -> AsyncIterator[Client]:
    """Serve the model around the body, with prompts kept in `folder`."""
    options = ("--prefix-disk", "64G", "--prefix-disk-folder", str(folder))
    async with (
        serve("--model", f"{NAME}={model}", *options) as server,
        Client(server.address, timeout_s=3600.0) as client,
    ):
        yield client


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Return a prompt of random tokens."""
    draws = random.Random(seed)
    return [draws.randrange(10, VOCABULARY) for _ in range(tokens)]


async def ask(client: Client, prompt: list[int], *, max_tokens: int = NEW_TOKENS) -> Answer:
    """Time one stream's first token."""
    began_s = time.perf_counter()
    first_s = 0.0
    ids: list[int] = []
    async with client.generate(
        prompt, model=NAME, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True
    ) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                first_s = first_s or time.perf_counter() - began_s
                ids += event.token_ids
    return Answer(first_s, tuple(ids))


async def worker_of(client: Client) -> WorkerStatus:
    """Return the status of the worker that lives."""
    workers = (await client.status(NAME)).workers
    return next(worker for worker in workers if worker.exit_code is None)


def disk_of(status: Status) -> PrefixDisk | None:
    """Return what the worker that lives keeps on disk, where it has said so."""
    living = (worker for worker in status.workers if worker.exit_code is None)
    return next((worker.prefix_disk for worker in living), None)


async def load(client: Client) -> None:
    """Have the model loaded and its worker given a share, so that no load is timed."""
    await ask(client, prompt_of(SHORT_TOKENS, seed=0), max_tokens=1)
    async with client.watch_status(NAME, interval_s=LOOK_S) as statuses:
        async for status in statuses:
            disk = disk_of(status)
            if disk is not None and disk.budget_nbytes:
                return


async def write(client: Client, prompt: list[int]) -> None:
    """Use a prompt until its blocks are on disk: as long as their number grows."""
    before = -1
    async with client.watch_status(NAME, interval_s=WRITE_S) as statuses:
        async for status in statuses:
            disk = disk_of(status)
            if disk is not None and disk.blocks == before:
                return
            before = 0 if disk is None else disk.blocks
            await ask(client, prompt, max_tokens=1)


async def first_tokens(model: Path, folder: Path, *, tokens: int, runs: int) -> dict[str, float]:
    """Return the median seconds to the first token, by what came before."""
    times: dict[str, list[float]] = {}
    for run in range(runs):
        prompt = prompt_of(tokens, seed=run + 1)

        def note(name: str, answer: Answer, of: tuple[int, ...]) -> None:
            assert answer.ids == of, f"{name}: other tokens"
            times.setdefault(name, []).append(answer.first_s)

        async with serving(model, folder) as client:
            await load(client)
            cold = await ask(client, prompt)
            note("cold", cold, cold.ids)
            note("memory", await ask(client, prompt), cold.ids)
            await write(client, prompt)
            await client.unload(NAME)
            await load(client)
            note("unload", await ask(client, prompt), cold.ids)
            os.kill((await worker_of(client)).pid, signal.SIGKILL)
            await load(client)
            note("kill", await ask(client, prompt), cold.ids)
        async with serving(model, folder) as client:
            await load(client)
            note("restart", await ask(client, prompt), cold.ids)
    return {name: statistics.median(of) for name, of in times.items()}


async def steps(client: Client) -> list[float]:
    """Return the times between the tokens of one stream, in seconds."""
    gaps: list[float] = []
    last_s = 0.0
    async with client.generate(
        prompt_of(SHORT_TOKENS, seed=99),
        model=NAME,
        max_tokens=STEPS,
        sampling=GREEDY,
        ignore_eos=True,
    ) as stream:
        async for event in stream:
            now_s = time.perf_counter()
            if isinstance(event, Delta) and last_s:
                gaps += [(now_s - last_s) / len(event.token_ids)] * len(event.token_ids)
            last_s = now_s
    return gaps


async def steps_beside_disk(
    model: Path, folder: Path, *, tokens: int, moved_nbytes: int
) -> dict[str, float]:
    """Return the p99 of another row's steps, in milliseconds: alone, and beside the disk's work."""
    prompts = [prompt_of(tokens // 4, seed=200 + number) for number in range(4)]
    async with serving(model, folder) as client:
        await load(client)
        for prompt in prompts:
            await ask(client, prompt, max_tokens=1)
            await write(client, prompt)
        alone = await steps(client)
        await client.unload(NAME)
        await load(client)
        before = (await worker_of(client)).prefix_disk
        assert before is not None, "the server keeps prompts"
        beside: list[float] = []
        moved = 0
        while moved < moved_nbytes:
            timing = asyncio.create_task(steps(client))
            for prompt in prompts:
                await ask(client, prompt, max_tokens=1)
            beside += await timing
            after = (await worker_of(client)).prefix_disk
            assert after is not None, "the server keeps prompts"
            moved += after.read_nbytes + after.written_nbytes
            await client.unload(NAME)
            await load(client)
    return {"alone": _p99_ms(alone), "beside": _p99_ms(beside), "moved_bytes": float(moved)}


def _p99_ms(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98] * 1e3


async def main() -> None:
    """Measure, and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--moved", type=int, default=MOVED_NBYTES, help="bytes beside steps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = await random_llama(Path(place) / "model", context=CONTEXT)
        folder = Path(place) / "prefixes"
        first = await first_tokens(model, folder, tokens=args.tokens, runs=args.runs)
        p99 = await steps_beside_disk(model, folder, tokens=args.tokens, moved_nbytes=args.moved)
    lines = [json_line("disk", key=f"first_token_s.{name}", value=s) for name, s in first.items()]
    lines += [
        json_line("disk", key=f"first_token_of_cold.{name}", value=s / first["cold"])
        for name, s in first.items()
    ]
    lines += [json_line("disk", key=f"steps_p99.{name}", value=ms) for name, ms in p99.items()]
    text = "".join(f"{line}\n" for line in lines)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
