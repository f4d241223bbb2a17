"""A short mixed load through a controller; the long one is in tests/soak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.effort import examples
from tests.support.mixed_load import EMPTY_WHEN_SWEPT, Load, check_swept, pair, run_load
from tests.support.tiny_model import write_tiny_model

SHORT = Load(requests=examples(400, few=200), rounds=examples(8, few=4))
TRIES_MAX = 5
LEAKY = Load(requests=40, rounds=1, clients=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.asyncio
async def test_the_account_holds_whenever_idle(folder: Path) -> None:
    """Through reuse, eviction and departures every byte has a name; swept, only weights are."""
    async with pair(folder) as both:
        await run_load(both, SHORT)
        idle = await both.idle()
        assert next(a.bytes for a in idle.memory.accounts if a.name == "prefix") > 0
        check_swept(await both.sweep())


@pytest.mark.asyncio
async def test_a_row_that_is_not_left_is_found(folder: Path) -> None:
    """The same check fails where a worker loses one row on purpose: it is held, and is named."""
    async with pair(folder, module="tests.support.leaking_worker") as both:
        for seed in range(TRIES_MAX):  # whoever leaves may come too late for a row to be lost
            await run_load(both, replace(LEAKY, seed=seed))
            swept = await both.sweep()
            if any(a.bytes for a in swept.memory.accounts if a.name == "kv"):
                break
        with pytest.raises(AssertionError, match="kv"):
            check_swept(swept)
        held = {a.name: a.bytes for a in swept.memory.accounts if a.name in EMPTY_WHEN_SWEPT}
        assert held.pop("kv") > 0
        assert set(held.values()) == {0}
