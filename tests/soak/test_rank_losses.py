"""A rank that is killed, stopped or starved of memory, again and again: its streams go on.

`MLXD_RANK_LOSSES` says how often; a third of it each way.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import resource
import signal
import statistics
import time
from collections.abc import Callable

import psutil
import pytest

from mlxd import Client, Delta, LoadSpec, SamplingOptions
from mlxd_shared import config
from tests.support.served import serve
from tests.support.trained import DEMO

LOSSES = int(os.environ.get("MLXD_RANK_LOSSES", "12"))
TOKENS = 200
OTHERS = 6
"""Streams at once that ask for memory."""
GROUP_S = 10.0
"""Within this a group ends after the loss of a rank."""
WAIT_S = 120.0
TWO = LoadSpec(ranks=2, context_length=1024)


def starve(pid: int) -> None:
    """Have a process get no more memory: neither maps nor what its allocator has reserved.

    RLIMIT_AS would leave it the latter, 64 MiB a thread: Linux looks at RLIMIT_DATA alone there.
    """
    resource.prlimit(pid, resource.RLIMIT_DATA, (1 << 20, 1 << 20))


WAYS: dict[str, Callable[[int], None]] = {
    "killed": lambda pid: os.kill(pid, signal.SIGKILL),
    "stopped": lambda pid: os.kill(pid, signal.SIGSTOP),
    "starved": starve,
}


async def generate(
    client: Client, number: int, *, words: int = 1, hit_at: int = -1, hit: object = None
) -> str:
    """Generate after a prompt of its own; call `hit` once so many tokens are there."""
    text, tokens = "", 0
    stream = client.generate(
        f"Once there were {number}" + " dogs and cats" * words,
        model="a",
        sampling=SamplingOptions(temperature=0.0),
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    async with stream as events:
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
                tokens += len(event.token_ids)
            if callable(hit) and tokens >= hit_at:
                hit()
                hit = None
    return text


def wait_gone(pids: list[int], begin_s: float) -> float:
    """Wait until none of the processes lives; return its seconds, infinite where it is too long."""
    for pid in pids:
        try:
            psutil.Process(pid).wait(timeout=WAIT_S)
        except psutil.NoSuchProcess:
            continue
        except psutil.TimeoutExpired:
            return math.inf
    return time.monotonic() - begin_s


async def ask_memory(client: Client, ended: asyncio.Future[float]) -> None:
    """Generate after long prompts until a group has ended: one round may fit what ranks hold."""
    numbers = itertools.count(LOSSES)
    while not ended.done():
        streams = [generate(client, next(numbers), words=200) for _ in range(OTHERS)]
        await asyncio.gather(*streams)


@pytest.mark.asyncio
@pytest.mark.timeout(7200)
async def test_streams_outlive_their_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a random token; the group ends in time, and the stream is as undisturbed."""
    draw, took_s = random.Random(LOSSES), dict[str, list[float]]()
    async with (
        serve(f"--model=a={DEMO}", "--reserve=1%", "--log-level=error") as server,
        Client(server.address, timeout_s=600.0) as client,
    ):
        for number in range(LOSSES):
            way = sorted(WAYS)[number % len(WAYS)]
            await client.unload("a")  # a failure before is forgotten
            async with client.load("a", options=TWO) as updates:
                async for _ in updates:
                    pass
            whole = await generate(client, number)
            (worker,) = [w for w in (await client.status()).workers if w.exit_code is None]
            pids = [rank.pid for rank in worker.memory.ranks]
            ending: list[asyncio.Future[float]] = []
            others: list[asyncio.Future[None]] = []

            def lose(
                way: str = way,
                pids: list[int] = pids,
                ending: list[asyncio.Future[float]] = ending,
                others: list[asyncio.Future[None]] = others,
            ) -> None:
                WAYS[way](pids[-1])
                waiting = asyncio.to_thread(wait_gone, pids, time.monotonic())
                ending.append(asyncio.ensure_future(waiting))
                if way == "starved":
                    others.append(asyncio.ensure_future(ask_memory(client, ending[0])))

            hit_at = draw.randrange(1, TOKENS // 2)
            assert await generate(client, number, hit_at=hit_at, hit=lose) == whole
            await asyncio.gather(*others)
            took_s.setdefault(way, []).append(await ending[0])
            assert took_s[way][-1] <= GROUP_S + config.RANK_BEAT_S, (way, number, took_s)
    with capsys.disabled():
        for way, seconds in took_s.items():  # the figures of docs/evidence
            most = max(seconds)
            median = statistics.median(seconds)
            line = f"{way}: {len(seconds)}, ends {median:.2f} s, at most {most:.2f} s"
            print(f"\n{line}")  # noqa: T201
