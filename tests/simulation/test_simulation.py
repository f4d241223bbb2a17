"""Thousands of seeded histories of the scheduler core, in shards that run side by side.

A failure names its seed: `python -m tests.simulation.run SEED SEED+1` replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.run import run_seeds
from tests.simulation.world import World
from tests.support.effort import FACTOR, IN_SOAK

SHARDS_OF_SOAK = 10
SHARDS = SHARDS_OF_SOAK if IN_SOAK else 1
SEEDS = 200 * SHARDS * FACTOR
"""200 in every run, 4,000 in soak. A shard of 200 is large enough to meet every hard state."""
HARD_STATES = (
    "a choice between evictions on two devices",
    "adopted",
    "all machines lost",
    "arrival while draining",
    "arrival while failed",
    "arrival while loading",
    "arrival while queued",
    "arrival while unloading",
    "back empty",
    "back with workers",
    "cancel while queued",
    "crash while loading",
    "death in use",
    "death while stopping",
    "duplicate event",
    "evicted on another device",
    "eviction",
    "eviction under pressure",
    "hang while loading",
    "hang while stopping",
    "held for another",
    "joined late",
    "late answer to shrink",
    "late event",
    "lost answer to shrink",
    "lost in use",
    "lost reply while loading",
    "lost while loading",
    "lost while ready",
    "lost while stopping",
    "lying answer to shrink",
    "measured",
    "memory while loading",
    "out of reach",
    "pins under pressure",
    "placed beside a device above its marks",
    "placed on a second device",
    "placed on several devices",
    "refused: ModelTooLarge",
    "refused: NoRoom",
    "several victims",
    "pressure that only streams can end",
    "shrink",
    "shrink in use",
    "shutdown in the middle",
    "slow while loading",
    "stop while loading",
    "streams aborted",
    "surplus",
    "two GPUs load at once",
)


@pytest.mark.timeout(600)  # half a minute of a processor, however many share it
@pytest.mark.parametrize("shard", range(SHARDS))
def test_histories(shard: int) -> None:
    """In every history all invariants hold, and every shard of them meets every hard state."""
    size = SEEDS // SHARDS
    seen = run_seeds(shard * size, (shard + 1) * size)
    assert seen["events"] >= size * 500
    missed = [state for state in HARD_STATES if not seen[state]]
    assert not missed, f"these histories prove nothing about {missed}"


def test_a_seed_is_one_history() -> None:
    """The same seed gives the same events, so that a failure can be replayed."""

    def life(seed: int) -> tuple[Counter[str], float, int]:
        world = World(seed)
        return world.run(), world.now_s, world.sent

    assert [life(seed) for seed in range(5)] == [life(seed) for seed in range(5)]
