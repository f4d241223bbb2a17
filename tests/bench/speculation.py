"""Tokens a second with guessing as the server chooses it, and without, on texts that repeat or not.

Measured at a worker's own socket, streams side by side, each round one run of either way in an
order of its own. A run before is not counted: in it the worker learns what its steps cost.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mlxd.v1 import inference_pb2, types_pb2
from tests.bench.report import json_line
from tests.support.worker_process import WorkerProcess, running_worker

NEW_TOKENS = 128
CONTEXT = 1024
STREAMS = (1, 4, 16)
ROUNDS = 5
PLAIN, GUESSING = "plain", "guessing"

NAMES = ("Tom", "Lily", "Ben", "Sue", "Max", "Anna", "Sam", "Mia",
         "Tim", "Lucy", "Jack", "Amy", "Bob", "Ella", "Dan", "Zoe")  # fmt: skip
SENTENCES = (
    "{0} has a red ball and a blue boat. ",
    "The big dog sat on the mat near the door. ",
    "{1} said that the old king lost his golden key. ",
    "They ran to the tall tree and saw a little bird. ",
    "{0} and {1} ate a warm cake with honey. ",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of several streams."""

    tokens_per_s: float
    """After each stream's first token."""
    drafted: int
    accepted: int


def story(index: int) -> str:
    """Return the beginning of a story: nothing in it to be copied."""
    return f"Once upon a time, {NAMES[index % len(NAMES)]} went to the"


def repeat_text(index: int) -> str:
    """Return a text that has been said twice and begins once more."""
    names = NAMES[index % len(NAMES)], NAMES[(index + 5) % len(NAMES)]
    order = random.Random(index).sample(SENTENCES, len(SENTENCES))
    said = "".join(order).format(*names)
    return 2 * said + said[: len(said) // 6]


PROMPTS = MappingProxyType({"story": story, "copy": repeat_text})


async def speculation_lines(models: Mapping[str, Path], *, rounds: int = ROUNDS) -> list[str]:
    """Measure each model on each kind of text; return JSON lines."""
    lines: list[str] = []
    for name, folder in models.items():
        async with running_worker() as worker:
            await worker.load(folder, context_length=CONTEXT, rows_max=max(STREAMS))
            for kind in PROMPTS:
                for streams in STREAMS:
                    lines += await _compare(worker, f"{name}.{kind}.{streams}", rounds=rounds)
    return lines


async def _compare(worker: WorkerProcess, case: str, *, rounds: int) -> list[str]:
    _, kind, streams = case.split(".")
    prompts = [PROMPTS[kind](index) for index in range(int(streams))]
    by_way: dict[str, list[Measured]] = {PLAIN: [], GUESSING: []}
    ways = list(by_way)
    for round_ in range(rounds + 1):
        random.Random(round_).shuffle(ways)
        for way in ways:
            measured = await _run(worker, prompts, depth=0 if way == PLAIN else None)
            if round_:
                by_way[way].append(measured)
    plain, guessing = (
        statistics.median(one.tokens_per_s for one in by_way[way]) for way in (PLAIN, GUESSING)
    )
    drafted = sum(one.drafted for one in by_way[GUESSING])
    accepted = sum(one.accepted for one in by_way[GUESSING])
    values = {
        "plain_tokens_per_s": plain,
        "guessing_tokens_per_s": guessing,
        "ratio": guessing / plain,
        "drafted_per_token": drafted / (rounds * len(prompts) * NEW_TOKENS),
        "accepted_of_drafted": accepted / drafted if drafted else 0.0,
    }
    sys.stderr.write(
        f"speculation, {case}: {plain:.0f} -> {guessing:.0f} tokens/s ({guessing / plain:.2f}), "
        f"{accepted} of {drafted} guesses right\n"
    )
    return [
        json_line("speculation", key=f"speculation.{case}.{name}", value=value)
        for name, value in values.items()
    ]


async def _run(worker: WorkerProcess, prompts: Sequence[str], *, depth: int | None) -> Measured:
    """Run one stream a prompt, side by side."""
    first_s: list[float] = []
    usages: list[types_pb2.Usage] = []

    async def stream(prompt: str) -> None:
        request = inference_pb2.GenerateRequest(
            text=prompt,
            sampling=types_pb2.SamplingOptions(temperature=0),
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
        if depth is not None:
            request.speculation.depth_max = depth
        begun = False
        async for message in worker.inference.Generate(request):
            if message.token_ids and not begun:
                begun = True
                first_s.append(time.perf_counter())
            if message.HasField("usage"):
                usages.append(message.usage)

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(stream(prompt))
    ended_s = time.perf_counter()
    assert {usage.completion_tokens for usage in usages} == {NEW_TOKENS}
    return Measured(
        tokens_per_s=len(prompts) * (NEW_TOKENS - 1) / (ended_s - min(first_s)),
        drafted=sum(usage.drafted_tokens for usage in usages),
        accepted=sum(usage.accepted_draft_tokens for usage in usages),
    )
