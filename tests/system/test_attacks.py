"""All attacks at once, in miniature; in full and for an hour they are in tests/soak."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.attacks.report import check, figures
from tests.support.attacks.siege import MINIATURE, Plan, besiege

PLAN = Plan(seconds=8.0, settings=MINIATURE, alone_s=1.0, rows_max=4, waiting_max=1)
"""So few decode and wait that 50 streams at once are more than the server takes, however fast."""
HEALTH_MS_MAX = 60_000.0
"""Of a machine that may stand still for seconds; the promise is measured on a quiet one."""


@pytest.mark.asyncio
async def test_a_server_under_attack_answers(tmp_path: Path) -> None:
    """Every call is answered as documented, overload with a time to come back at; health is, too;
    good streams say the same as ever; nothing dies.
    """
    seen = figures(await besiege(PLAN, tmp_path))
    sys.stdout.write(json.dumps(seen) + "\n")

    check(seen)
    assert seen["health_ms_max"] < HEALTH_MS_MAX
    assert seen["good_streams"] > 0
