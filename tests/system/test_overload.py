"""More streams than may wait: a short crowd; the thousand of the promise are in tests/soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd import Client, LoadSpec
from tests.support.crowds import crowd, observe_server
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model

ROWS_MAX = 4
WAITING_MAX = 12
STREAMS = 26
TOKENS = 8
RETRIES_MAX = 3


@pytest.mark.asyncio
async def test_a_crowd_is_served_or_told_when_to_come_back(tmp_path: Path) -> None:
    """As many as rows and places are let in; whoever keeps its appointment completes, too."""
    folder = write_tiny_model(tmp_path / "tiny")
    options = ("--model", f"tiny={folder}", "--waiting-max", str(WAITING_MAX), "--reserve", "1%")
    async with serve(*options) as server, Client(server.address) as client:
        async with client.load("tiny", options=LoadSpec(rows_max=ROWS_MAX)) as updates:
            async for _ in updates:
                pass
        async with observe_server(server.address) as watch:
            got = await crowd(
                server.address, "tiny", streams=STREAMS, tokens=TOKENS, at_once=STREAMS
            )

    assert got.failures == []
    assert (got.complete, got.tokens) == (STREAMS, STREAMS * TOKENS)
    assert got.complete_at_first >= ROWS_MAX + WAITING_MAX
    assert max(got.retries, default=0) <= RETRIES_MAX
    assert len(set(got.waits_s)) == len(got.waits_s)
    seen = watch.seen
    assert seen.most_streams <= ROWS_MAX + WAITING_MAX
    assert 0 < seen.most_bytes <= seen.budget_bytes
