"""An hour of attacks, one kind after another: health, a good stream and memory beside them.

Prints its figures as one JSON object, whether they are good or not. Attackers are niced to 10 and
pause between volleys (`tests/support/attacks/siege.py`, FULL); the machine is to have nothing else
to do. A miniature of it: tests/system.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mlxd_shared import config
from tests.support.attacks.report import check, figures
from tests.support.attacks.siege import FULL, Plan, besiege

SECONDS_VARIABLE = "MLXD_ATTACKS_S"
SECONDS = float(os.environ.get(SECONDS_VARIABLE, "3600"))
WAITING_MAX = 128
"""Streams that may wait for a row, so that bursts reach a bound: their senders get what processor
is left over, and a server on a quiet machine keeps up with all that they can send."""
PLAN = Plan(
    seconds=SECONDS,
    settings=FULL,
    alone_s=min(SECONDS / 10, 60.0),
    warm_s=min(SECONDS / 5, 300.0),
    round_s=min(SECONDS / 5, 60.0),
    waiting_max=WAITING_MAX,
    settle_s=config.IDLE_REST_S + 3 * config.HEAP_LOOK_S,
)
HEALTH_MS_P99_MAX = 100.0
HEALTH_MS_MAX = 1000.0
GOOD_RATIO_MIN = 0.5
GROWTH_MIB_MAX = 64.0
"""Of a process after all its attacks, beyond what it has after the first of each: both times it has
rested for so long that nothing is kept any more for streams to come. What a worker keeps of former
prompts is meant to be kept, within its bound, and has an account: that is taken off."""


@pytest.mark.asyncio
@pytest.mark.timeout(2 * SECONDS + 1800)
async def test_an_hour_of_attacks(tmp_path: Path) -> None:
    """Health is answered at once, good streams keep half their speed, every refusal is documented
    and says when to come back, nothing dies, and no memory is kept.
    """
    seen = figures(await besiege(PLAN, tmp_path))
    sys.stdout.write(json.dumps(seen) + "\n")

    check(seen)
    assert seen["health_ms_p99"] < HEALTH_MS_P99_MAX
    assert seen["health_ms_max"] < HEALTH_MS_MAX
    assert seen["good_ratio"] >= GOOD_RATIO_MIN
    prefixes = [accounts["prefix"] for accounts in seen["worker_accounts_mib"]]
    for name, meant in (("controller_rss_mib", [0.0, 0.0]), ("worker_rss_mib", prefixes)):
        before, after = (rss - kept for rss, kept in zip(seen[name], meant, strict=True))
        assert after - before <= GROWTH_MIB_MAX, name
