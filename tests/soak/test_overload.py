"""A thousand streams at once against the demo model: what is let in, how fast, and who waits.

Prints its figures as one JSON object, whether they are good or not.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

import pytest

from mlxd import Client, LoadSpec
from mlxd_shared import config
from tests.support.crowds import crowd, observe_server
from tests.support.overload import Crowd, Observed
from tests.support.served import serve

MODEL = "demo"
ROWS_MAX = 32
TOKENS = 64
STREAMS = 1000
CLIENTS = 32
STEADY_STREAMS = 512
SPEED_PART_MIN = 0.9
RETRIES_MAX = 3
ANSWER_S_MAX = 0.1


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that so large a part of them does not exceed."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)]


def figures(steady: Crowd, crowded: Crowd, seen: Observed) -> dict[str, float]:
    """Return what the promise is about, by name."""
    return {
        "steady_tokens_per_s": steady.tokens / steady.wall_s,
        "crowded_tokens_per_s": crowded.tokens / crowded.wall_s,
        "speed_part": crowded.tokens / crowded.wall_s / (steady.tokens / steady.wall_s),
        "complete": crowded.complete,
        "complete_at_first": crowded.complete_at_first,
        "refused": len(crowded.waits_s),
        "retries_max": max(crowded.retries, default=0),
        "retry_wait_s_p50": percentile(crowded.waits_s, 0.5),
        "retry_wait_s_max": max(crowded.waits_s),
        "first_token_s_p50": percentile(crowded.first_token_s, 0.5),
        "status_ms_p99": percentile(seen.status_s, 0.99) * 1000,
        "status_ms_max": max(seen.status_s) * 1000,
        "health_ms_p99": percentile(seen.health_s, 0.99) * 1000,
        "bare_ms_p99": percentile(seen.bare_s, 0.99) * 1000,
        "health_ms_max": max(seen.health_s) * 1000,
        "observations": len(seen.status_s),
        "most_bytes": seen.most_bytes,
        "budget_bytes": seen.budget_bytes,
        "most_waiting": seen.most_waiting,
        "most_running": seen.most_running,
    }


@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_a_thousand_at_once() -> None:
    """At least the queue's bound complete, nearly as fast as 32 clients' streams; the refused who
    keep their appointments complete, too; the server answers meanwhile, and stays in its budget.
    """
    async with serve() as server, Client(server.address) as client:
        async with client.load(MODEL, options=LoadSpec(rows_max=ROWS_MAX)) as updates:
            async for _ in updates:
                pass
        await crowd(server.address, MODEL, streams=CLIENTS, tokens=TOKENS, at_once=CLIENTS)
        async with observe_server(server.address):  # observers take the same part of both
            steady = await crowd(
                server.address, MODEL, streams=STEADY_STREAMS, tokens=TOKENS, at_once=CLIENTS
            )
        async with observe_server(server.address) as watch:
            crowded = await crowd(
                server.address, MODEL, streams=STREAMS, tokens=TOKENS, at_once=STREAMS
            )
    report = figures(steady, crowded, watch.seen)
    sys.stdout.write(json.dumps(report) + "\n")

    assert crowded.failures == steady.failures == []
    assert report["complete_at_first"] >= config.WAITING_STREAMS_MAX
    assert report["complete"] == STREAMS
    assert report["speed_part"] >= SPEED_PART_MIN
    assert report["retries_max"] <= RETRIES_MAX
    assert 0 < report["most_bytes"] <= report["budget_bytes"]
    assert report["status_ms_p99"] < ANSWER_S_MAX * 1000
    assert report["health_ms_p99"] < ANSWER_S_MAX * 1000
