"""More models than fit, and workers that are killed: a short storm; the long one: tests/soak."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlxd_shared.domain.errors import ModelDraining
from tests.support.effort import IN_CI
from tests.support.storm import documented_reason
from tests.support.storm_jobs import scene
from tests.support.storm_report import check, figures
from tests.support.storms import Storm, weather

STORM = Storm(
    clients=40 if IN_CI else 16,
    seconds=20.0 if IN_CI else 4.0,
    kill_every_s=4.0 if IN_CI else 2.0,
    processes=1,
    deadline_s=10.0,
)
REQUESTS_EACH = 4


@pytest.mark.asyncio
async def test_a_short_storm(tmp_path: Path) -> None:
    """Every request ends right or as documented, within the budget, and nothing is left behind."""
    crowd_scene = await scene(tmp_path, each=REQUESTS_EACH, seed=STORM.seed)
    aftermath = await weather(crowd_scene, STORM, tmp_path)
    sys.stdout.write(json.dumps(figures(aftermath, STORM)) + "\n")

    check(aftermath)


def test_a_storm_expects_a_hold_to_be_told_of_at_a_deadline_alone() -> None:
    """Who has no deadline waits until the hold is over, and is told nothing."""
    error = ModelDraining("a")
    assert documented_reason(error, hurried=True) == "MODEL_DRAINING"
    assert documented_reason(error, hurried=False) is None
