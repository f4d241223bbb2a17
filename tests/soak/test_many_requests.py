"""Ten thousand mixed requests through a controller against one worker: nothing is lost or grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mixed_load import (
    RSS_BYTES_PER_REQUEST_MAX,
    Load,
    check_swept,
    pair,
    run_load,
)
from tests.support.tiny_model import write_tiny_model

LOAD = Load(requests=10_000, rounds=100, clients=6)
SETTLED = 2000
"""Requests after which memory may not grow any more."""


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
async def test_ten_thousand_mixed_requests(tmp_path: Path) -> None:
    """The account holds at every idle moment, a sweep empties it, and memory stays level."""
    async with pair(write_tiny_model(tmp_path / "tiny")) as both:
        controller, worker = await run_load(both, LOAD)
        slopes = {"controller": controller.slope(SETTLED), "worker": worker.slope(SETTLED)}

        assert max(slopes.values()) <= RSS_BYTES_PER_REQUEST_MAX, slopes
        check_swept(await both.sweep())
