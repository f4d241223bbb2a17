"""Runs the processes of `tests.support.overload` beside a test, and reads what they print."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.overload import Crowd, Observed
from tests.support.storm_tally import Tally, together
from tests.support.worker_process import ROOT

MODULE = "tests.support.overload"
STORM_MODULE = "tests.support.storm"
BARE_MODULE = "tests.support.bare_server"
OBSERVED_EVERY_S = 0.02


async def _start(*arguments: str, module: str = MODULE) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


async def crowd(address: str, model: str, *, streams: int, tokens: int, at_once: int) -> Crowd:
    """Have a process of clients offer the streams; return what became of them."""
    process = await _start("crowd", address, model, str(streams), str(tokens), str(at_once))
    output, _ = await process.communicate()
    assert process.returncode == 0
    return Crowd(**json.loads(output))


async def storm_crowd(
    address: str,
    jobs_path: Path,
    *more: str,
    clients: int,
    processes: int,
    seconds: float,
    deadline_s: float,
    seed: int,
) -> Tally:
    """Have so many processes share the clients of a storm; return what these had.

    more: further arguments of `tests.support.storm`.
    """
    each = str(clients // processes)
    running = [
        await _start(
            *(address, str(jobs_path), each, str(seconds), str(deadline_s), f"{seed}-{number}"),
            *more,
            module=STORM_MODULE,
        )
        for number in range(processes)
    ]
    outputs = await asyncio.gather(*(process.communicate() for process in running))
    assert [process.returncode for process in running] == [0] * processes
    return together([Tally(**json.loads(output)) for output, _ in outputs])


@dataclass(slots=True)
class Watch:
    """What an observer saw, once it is over."""

    seen: Observed


@asynccontextmanager
async def observe_server(
    address: str, *, every_s: float = OBSERVED_EVERY_S
) -> AsyncIterator[Watch]:
    """Have an idle process observe the server during the body."""
    bare = await _start(module=BARE_MODULE)
    assert bare.stdout is not None
    bare_address = (await bare.stdout.readline()).decode().strip()
    process = await _start("observe", address, bare_address, str(every_s))
    watch = Watch(Observed())
    try:
        yield watch
    finally:
        output = await _end(process)
        await _end(bare)
    watch.seen = Observed(**json.loads(output))


async def _end(process: asyncio.subprocess.Process) -> bytes:
    """End a process by the end of its input; return what it printed."""
    assert process.stdin is not None
    process.stdin.close()
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output
