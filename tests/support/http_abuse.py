"""A whole server with a gateway, abused over HTTP while good requests are answered beside it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxd import Client, LoadSpec
from tests.support.gateways import Web, serve_web
from tests.support.http_attacks import HANGS, Target, attack, burden

GOOD = {"model": "demo", "prompt": "Once", "max_tokens": 4}
AT_ONCE = 16
ROWS_MAX = 16
CONTEXT = 256
"""So that no request is long, whatever its spoilt bound says."""


@dataclass(frozen=True, slots=True)
class Abused:
    """What became of the spoilt requests, and how long good ones took, in seconds."""

    seen: Mapping[str, int]
    alone_s: float
    beside_s: float
    good: int


async def check_abuse(
    folder: Path, *, count: int, idle: int, slow: int, silent: float = 0.0
) -> Abused:
    """Abuse the model in `folder`; fail where an answer is ours to blame, or a good one fails.

    silent: see `spoil`.
    """
    async with serve_web("--model", f"demo={folder}") as web:
        assert web.served is not None
        options = LoadSpec(rows_max=ROWS_MAX, context_length=CONTEXT, pinned=True)
        async with (
            Client(web.served.address) as client,
            client.load("demo", options=options) as ups,
        ):
            async for _ in ups:
                pass
        target = Target.of(web.url)
        alone_s = statistics.median([await _time_good(web) for _ in range(9)])
        async with burden(target, idle=idle, slow=slow):
            attacking = asyncio.create_task(
                attack(target, count=count, at_once=AT_ONCE, silent=silent, seed=count)
            )
            beside = [await _time_good(web)]
            while not attacking.done():
                beside.append(await _time_good(web))
            seen = await attacking
        assert (await web.http.get("/health")).status_code == 200
        log = web.served.log_path.read_text(encoding="utf-8")
    abused = Abused(dict(seen), alone_s, statistics.median(beside), len(beside))
    assert not {status for status in seen if status.startswith("5")} - {"503"}, abused
    assert not seen[HANGS], abused
    assert "Traceback" not in log, log
    return abused


async def _time_good(web: Web) -> float:
    """Return how long a good request takes; it is answered."""
    begin_s = time.perf_counter()
    answer = await web.post("/v1/completions", GOOD)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - begin_s
