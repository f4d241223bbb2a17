"""Two controllers behind SMG, one of which is killed again and again: nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.effort import FACTOR
from tests.support.ports import own_port
from tests.support.served import Served, serve
from tests.support.smg import Routed, smg_over, write_manifest

CLIENTS = 12
KILLS = 4 * FACTOR
BETWEEN_S = 10.0
SLOW_S = 60.0
"""No request takes longer: whoever asks a lost machine is sent on, or told."""
OPTIONS = ("--preload", "demo", "--orphan-grace", "1s")


class Clients:
    """Clients that ask on and on, and what came of it."""

    def __init__(self, smg: Routed) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.over = False
        self._smg = smg

    async def run(self, client: int) -> None:
        """Ask until it is over; after an error a moment later."""
        number = 0
        while not self.over:
            number += 1
            begun_s = time.monotonic()
            outcome = await self._ask(client, number)
            self.outcomes[outcome] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
            if outcome != "whole":
                await self._smg.pause()

    async def _ask(self, client: int, number: int) -> str:
        """Return how one answer ended: `whole`, or in SMG's word for what went wrong."""
        body: dict[str, Any] = {
            "model": "demo", "prompt": f"Client {client} " * 20 + str(number), "max_tokens": 40,
            "stream": number % 2 == 0,
        }  # fmt: skip
        answer = await self._smg.http.post("/v1/completions", json=body)
        if answer.status_code != httpx2.codes.OK:
            return f"{answer.status_code} {answer.json()['error']['code']}"
        if not body["stream"]:
            return "whole" if answer.json()["choices"][0]["finish_reason"] else "cut"
        lines = answer.text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        errors = [event["error"]["type"] for event in events if "error" in event]
        ends = [e for event in events for e in event.get("choices", ()) if e["finish_reason"]]
        return str(errors[0]) if errors else "whole" if ends else "cut"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.asyncio
async def test_nobody_waits_for_ever_while_controllers_are_killed(tmp_path: Path) -> None:
    """Each answer is whole or an error that is said; afterwards both serve, and all is whole."""
    async with AsyncExitStack() as stack:
        doors = [stack.enter_context(own_port()) for _ in range(2)]

        async def start(door: str) -> Served:
            return await stack.enter_async_context(serve("--router", door, *OPTIONS))

        served = [await start(door) for door in doors]
        write_manifest(tmp_path / "m.json", doors)
        router = smg_over(
            tmp_path / "m.json", "--policy", "cache_aware", workers=2, log_path=tmp_path / "smg.log"
        )
        smg = await stack.enter_async_context(router)
        clients = Clients(smg)
        running = [asyncio.create_task(clients.run(number)) for number in range(CLIENTS)]
        for kill in range(KILLS):
            await asyncio.wait(running, timeout=BETWEEN_S, return_when=asyncio.FIRST_EXCEPTION)
            served[kill % 2].process.kill()
            await served[kill % 2].process.wait()
            await smg.until_known(1)
            served[kill % 2] = await start(doors[kill % 2])
            await smg.until_known(2)
        clients.over = True
        await asyncio.gather(*running)
        after = Clients(smg)
        last = [asyncio.create_task(after.run(number)) for number in range(CLIENTS)]
        await asyncio.wait(last, timeout=BETWEEN_S)
        after.over = True
        await asyncio.gather(*last)

    slowest = f"slowest {clients.slowest_s:.1f} s"
    print(dict(clients.outcomes), slowest, dict(after.outcomes))  # noqa: T201 - asked for
    assert clients.slowest_s < SLOW_S
    assert clients.outcomes["cut"] == 0, clients.outcomes
    assert clients.outcomes["whole"] > 0.5 * clients.outcomes.total(), clients.outcomes
    assert set(after.outcomes) == {"whole"}
