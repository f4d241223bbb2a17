"""A controller that starts the ranks of one model: its tokens, its memory, and a rank killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxd import (
    Client,
    Delta,
    FormatKind,
    InvalidRequest,
    LoadSpec,
    ResponseFormat,
    SamplingOptions,
)
from tests.support.cli import LIMIT_S
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model

ASKED: dict[str, Any] = {
    "sampling": SamplingOptions(temperature=0.0),
    "max_tokens": 300,
    "ignore_eos": True,
}
HELD: dict[str, Any] = {
    "sampling": SamplingOptions(temperature=0.0),
    "max_tokens": 300,
    "response_format": ResponseFormat(FormatKind.REGEX, "([a-z]{3} ){70}"),
}
TWO = LoadSpec(ranks=2, context_length=1024)


def follower_of(pid: int) -> int:
    """Return the process of a worker's only follower."""
    children = psutil.Process(pid).children()
    (follower,) = [c.pid for c in children if "mlxd_worker.distributed" in c.cmdline()]
    return follower


async def generate(client: Client, options: dict[str, Any], begun: asyncio.Event) -> str:
    """Return a stream's text; `begun` is set with the first of it."""
    text = ""
    async with client.generate("ab", model="a", **options) as events:
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
                begun.set()
    return text


@pytest.mark.asyncio
async def test_ranks_are_placed_served_and_replaced(tmp_path: Path) -> None:
    """Two ranks draw one's tokens; streams go on in two others when one of them is killed, with a
    format and without.
    """
    model = write_tiny_model(tmp_path / "a", context_max=1024)
    async with (
        serve(f"--model=a={model}", "--reserve=1%") as server,
        Client(server.address, timeout_s=LIMIT_S) as client,
    ):
        with pytest.raises(InvalidRequest, match="ranks"):
            await client.fit("a", options=LoadSpec(ranks=3))
        fit = await client.fit("a", options=TWO)
        assert (fit.device, fit.ranks, fit.fits_now) == ("cpu+cpu", 2, True)

        whole = [await client.complete("ab", model="a", **each) for each in (ASKED, HELD)]
        assert len(whole[1].text) == 280
        await client.unload("a")
        async with client.load("a", options=TWO) as updates:
            loaded = [update.model async for update in updates][-1]
        assert (loaded.device, loaded.ranks) == ("cpu+cpu", 2)
        (worker,) = (await client.status()).workers
        leader, other = worker.memory.ranks
        assert (leader.pid, other.pid) == (worker.pid, follower_of(worker.pid))
        assert (leader.device, other.device) == ("cpu", "cpu")

        begun = [asyncio.Event() for _ in whole]
        going = asyncio.gather(*map(generate, [client] * 2, (ASKED, HELD), begun))
        for event in begun:
            await event.wait()
        os.kill(other.pid, signal.SIGKILL)
        assert await going == [each.text for each in whole]
        now = (await client.model("a"), (await client.status()).workers)
        assert now[0].ranks == 2
        (last,) = [each for each in now[1] if each.exit_code is None]
        assert last.pid != worker.pid


@pytest.mark.asyncio
async def test_ranks_outlive_their_controller(tmp_path: Path) -> None:
    """The next one adopts them, on the devices that they have, and they serve on."""
    model = write_tiny_model(tmp_path / "a", context_max=1024)
    options = [f"--model=a={model}", "--reserve=1%", "--orphan-grace=60s"]
    options.append(f"--run-dir={tmp_path / 'run'}")
    async with serve(*options) as first:
        async with Client(first.address, timeout_s=LIMIT_S) as client:
            async with client.load("a", options=TWO) as updates:
                async for _ in updates:
                    pass
            whole = await client.complete("ab", model="a", **ASKED)
            (worker,) = (await client.status()).workers
        first.process.kill()
        await first.process.wait()
    async with serve(*options) as second, Client(second.address, timeout_s=LIMIT_S) as client:
        (kept,) = (await client.status()).workers
        assert [rank.pid for rank in kept.memory.ranks] == [r.pid for r in worker.memory.ranks]
        known = await client.model("a")
        assert (known.ranks, known.device) == (2, "cpu+cpu")
        assert (await client.complete("ab", model="a", **ASKED)).text == whole.text
        (device,) = (await client.status()).devices
        assert device.reserved_nbytes > 2 * kept.memory.total_nbytes
