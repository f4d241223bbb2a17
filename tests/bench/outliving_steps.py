"""Steps of a stream beside a disk that is read and written, and with the tier on and off."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mlxd import Client, Delta
from tests.bench.outliving_server import (
    GREEDY,
    SETTLING_TOKENS,
    Offered,
    ask,
    drop_pages,
    make_ready,
    prompt_of,
    serving,
    wait_for_files,
    whole_blocks,
    worker_of,
    write,
)

SHORT_MEMORY_NBYTES = 1 << 20
"""Memory for prompts that keeps none of a long one, so that each use reads the whole of it."""
DECODE_TOKENS = 192
ENDLESS_TOKENS = 400
"""Of a stream beside the disk; another one follows as long as it takes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a stream, as its client sees it."""

    at_s: float
    took_s: float


async def stream_steps(client: Client, model: str, *, tokens: int, seed: int = 99) -> list[Step]:
    """Return the steps of one stream after a short prompt, the first token's left out.

    None of several tokens: how many of them there are depends on who decodes beside it.
    """
    steps: list[Step] = []
    last_s = 0.0
    async with client.generate(
        prompt_of(SETTLING_TOKENS, seed=seed),
        model=model,
        max_tokens=tokens,
        sampling=GREEDY,
        ignore_eos=True,
        speculation_depth=0,
    ) as stream:
        async for event in stream:
            now_s = time.perf_counter()
            if isinstance(event, Delta) and event.token_ids:
                if last_s:
                    each_s = (now_s - last_s) / len(event.token_ids)
                    steps += [Step(now_s, each_s)] * len(event.token_ids)
                last_s = now_s
    return steps


async def measure_steps(
    model: Offered, folder: Path, prompt: list[int], *, steps: int, moved_nbytes: int
) -> AsyncIterator[tuple[str, float]]:
    """Yield milliseconds of another stream's steps: alone, and while blocks are read and written.

    All but one of the prompt's tokens are in whole blocks. Where they are not on disk yet, they are
    computed and written first. Of the steps beside reading some are beside the row that reads: as
    it joins, evaluates its last token over all that was read, and leaves. Of a prompt of 32,000
    tokens they are above the 99th percentile, of one of 6,000 they make it.
    """
    short = replace(model, spec=replace(model.spec, prefix_cache_nbytes=SHORT_MEMORY_NBYTES))
    files = whole_blocks(prompt)
    async with serving([model], folder) as client:
        await make_ready(client, model)
        await write(client, model.name, prompt, files=files)
        alone = await stream_steps(client, model.name, tokens=steps)
        for figure in _figures("alone", alone):
            yield figure
        alone_ms = _p99_ms(alone)

        async def count_written() -> int:
            return (await _disk_nbytes(client, model.name))[1]

        async def write_again() -> float:
            await client.prefixes.drop(model.name)
            await make_ready(client, model)
            await ask(client, model.name, prompt, max_tokens=1)
            began_s = time.perf_counter()
            await wait_for_files(client, model.name, files=files)
            return began_s

        beside = await _beside(client, model.name, write_again, count_written, moved_nbytes)
    for figure in _figures("writing", beside):
        yield figure
    yield "steps_p99.writing_of_alone", _p99_ms(beside) / alone_ms
    async with serving([model], folder) as client:
        await make_ready(client, short)

        async def count_read() -> int:
            return (await _disk_nbytes(client, model.name))[0]

        async def read_again() -> float:
            drop_pages(folder)
            began_s = time.perf_counter()
            await ask(client, model.name, prompt, max_tokens=1)
            return began_s

        beside = await _beside(client, model.name, read_again, count_read, moved_nbytes)
    for figure in _figures("reading", beside):
        yield figure
    yield "steps_p99.reading_of_alone", _p99_ms(beside) / alone_ms


async def measure_decode(
    model: Offered, folder: Path, *, rounds: int
) -> AsyncIterator[tuple[str, float]]:
    """Yield milliseconds of a lone stream's step with the tier on and off, and their ratio.

    Two servers, asked by turns, in another order each round: medians of the rounds' medians. Of two
    equal ones that which was started first takes 7 % longer, so both are, once each.
    """
    medians: dict[str, list[float]] = {"on": [], "off": []}
    ratios: list[float] = []
    for order in (("on", "off"), ("off", "on")):
        times = await _decode_by_turns(model, folder, order, rounds=rounds)
        for name, values in times.items():
            medians[name] += values
        pairs = zip(times["on"], times["off"], strict=True)
        ratios.append(statistics.median(on / off for on, off in pairs))
    for name, values in medians.items():
        yield f"decode_step_ms.{name}", statistics.median(values)
    yield "decode_step.on_of_off", statistics.geometric_mean(ratios)


async def _decode_by_turns(
    model: Offered, folder: Path, order: Sequence[str], *, rounds: int
) -> dict[str, list[float]]:
    """Start a server with the tier and one without in this order; return each round's medians."""
    medians: dict[str, list[float]] = {name: [] for name in order}
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                serving([model], folder if name == "on" else None)
            )
            for name in order
        }
        for name, client in clients.items():
            await make_ready(client, model, kept=name == "on")
            await stream_steps(client, model.name, tokens=DECODE_TOKENS)
        for number in range(rounds):
            for name in order if number % 2 else reversed(order):
                steps = await stream_steps(
                    clients[name], model.name, tokens=DECODE_TOKENS, seed=100 + number
                )
                medians[name].append(statistics.median(step.took_s for step in steps) * 1e3)
    return medians


async def _beside(
    client: Client,
    model: str,
    work: Callable[[], Awaitable[float]],
    moved: Callable[[], Awaitable[int]],
    moved_nbytes: int,
) -> list[Step]:
    """Return a stream's steps while `work` is done, as often as moves so many bytes.

    work: returns since when the disk was busy; it is until `work` returns. moved: tells how much
    was moved since the load.
    """
    steps: list[Step] = []
    busy: list[tuple[float, float]] = []
    ends = asyncio.Event()

    async def decode() -> None:
        while not ends.is_set():
            steps.extend(await stream_steps(client, model, tokens=ENDLESS_TOKENS))

    decoding = asyncio.create_task(decode())
    try:
        start_nbytes = await moved()
        while await moved() - start_nbytes < moved_nbytes:
            began_s = await work()
            busy.append((began_s, time.perf_counter()))
    finally:
        ends.set()
        await decoding
    return [step for step in steps if any(low < step.at_s < high for low, high in busy)]


async def _disk_nbytes(client: Client, model: str) -> tuple[int, int]:
    """Return what was read, and written, since the load."""
    disk = (await worker_of(client, model)).prefix_disk
    assert disk is not None, "the server keeps prompts"
    return disk.read_nbytes, disk.written_nbytes


def _figures(name: str, steps: Sequence[Step]) -> list[tuple[str, float]]:
    times = [step.took_s * 1e3 for step in steps]
    return [
        (f"steps_p50_ms.{name}", statistics.median(times)),
        (f"steps_p90_ms.{name}", statistics.quantiles(times, n=10)[8]),
        (f"steps_p99_ms.{name}", _p99_ms(steps)),
        (f"steps_most_ms.{name}", max(times)),
        (f"steps.{name}", float(len(steps))),
    ]


def _p99_ms(steps: Sequence[Step]) -> float:
    return statistics.quantiles([step.took_s for step in steps], n=100)[98] * 1e3
