"""200 clients over six models with room for three, and workers killed all the time.

Prints its figures as one JSON object, whether they are good or not. A short one: tests/system.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.mixed_load import RSS_BYTES_PER_REQUEST_MAX, SETTLED
from tests.support.storm_jobs import scene
from tests.support.storm_report import check, figures, growth_per_request, percentile
from tests.support.storms import Storm, weather

SECONDS_VARIABLE = "MLXD_CROWD_S"
STORM = Storm(
    clients=200,
    seconds=float(os.environ.get(SECONDS_VARIABLE, "600")),
    kill_every_s=20.0,
)
REQUESTS_EACH = 12
STATUS_S_MAX = 0.1


@pytest.mark.asyncio
@pytest.mark.timeout(STORM.seconds + 600)
async def test_a_crowd_over_more_models_than_fit(tmp_path: Path) -> None:
    """Every request is right or refused as documented, streams move, the status answers, memory
    stays within its budget and level, and nothing is left behind.
    """
    crowd_scene = await scene(tmp_path, each=REQUESTS_EACH, seed=STORM.seed)
    aftermath = await weather(crowd_scene, STORM, tmp_path)
    grown = growth_per_request(aftermath, STORM, settled=SETTLED)
    report = figures(aftermath, STORM) | {"grown_bytes_per_request": grown}
    sys.stdout.write(json.dumps(report) + "\n")

    check(aftermath)
    assert aftermath.tally.migrated > 0
    assert percentile(aftermath.seen.status_s, 0.99) < STATUS_S_MAX
    assert grown <= RSS_BYTES_PER_REQUEST_MAX
