"""60 clients of six models on three nodes that are killed and stopped, under two lost controllers.

Prints its figures as one JSON object, whether they are good or not. MLXD_FLEET_S is its length in
seconds; nodes are lost at the same pace, and controllers at the same parts of the time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fleet_storms import CONTROLLER, KILL, STOP, FleetAftermath, FleetStorm
from tests.support.fleet_storms import weather_fleet as weather
from tests.support.storm_jobs import scene
from tests.support.storm_report import TIES_PART_MAX, client_figures, summarise

SECONDS_VARIABLE = "MLXD_FLEET_S"
STORM = FleetStorm(seconds=float(os.environ.get(SECONDS_VARIABLE, "600")))
REQUESTS_EACH = 8
GAP_S_MAX = {KILL: 4.0, STOP: 8.0}
"""The median silence of streams that were on a node that was killed, or that fell silent."""
SOON_S = 1.0
"""A stream's last token may have come so long before its node was lost."""
SEVERAL, OTHER = "several", "other"


def sort_gaps(aftermath: FleetAftermath) -> dict[str, list[float]]:
    """Return the longest silence of each stream that moved, by what befell meanwhile."""
    gaps: dict[str, list[float]] = {KILL: [], STOP: [], CONTROLLER: [], SEVERAL: [], OTHER: []}
    for begin_s, gap_s in aftermath.tally.moves:
        causes = {
            what for at_s, what in aftermath.strokes if begin_s - SOON_S <= at_s <= begin_s + gap_s
        }
        gaps[SEVERAL if len(causes) > 1 else next(iter(causes), OTHER)].append(gap_s)
    return gaps


def figures(aftermath: FleetAftermath) -> dict[str, object]:
    """Return what happened, by name."""
    tally = aftermath.tally
    return {
        **client_figures(tally, clients=STORM.clients, seconds=STORM.seconds),
        "befell": dict(Counter(what for _, what in aftermath.strokes)),
        "resumed": tally.resumed,
        "gap_s": {cause: summarise(gaps) for cause, gaps in sort_gaps(aftermath).items()},
        "cluster_s": round(aftermath.cluster_s, 1),
        "start_s": [round(value, 1) for value in aftermath.start_s],
        "adopted": aftermath.adopted,
        "node_mb": [round(node["others"], 1) for node in aftermath.memory],
        "node_workers_mb": [round(node["workers"], 1) for node in aftermath.memory],
        "call_ms": summarise(aftermath.calls_ms),
    }


@pytest.mark.asyncio
@pytest.mark.timeout(STORM.seconds + 900)
async def test_a_fleet_that_loses_nodes_and_controllers(tmp_path: Path) -> None:
    """Each stream ends as alone or with a documented status, soon; workers are adopted twice."""
    storm_scene = await scene(tmp_path, each=REQUESTS_EACH, seed=STORM.seed)
    aftermath = await weather(storm_scene, STORM, tmp_path)
    sys.stdout.write(json.dumps(figures(aftermath)) + "\n")

    tally, gaps = aftermath.tally, sort_gaps(aftermath)
    assert (tally.wrong, tally.undocumented, tally.hung) == ([], [], [])
    assert tally.ends == tally.begun
    assert tally.complete > 0.5 * tally.begun
    assert tally.migrated > 0
    assert tally.ties <= max(1, TIES_PART_MAX * len(tally.moves))
    assert len(aftermath.adopted) == 1 + len(STORM.controller_kills)
    assert min(aftermath.adopted[1:]) > 0
    for cause, limit_s in GAP_S_MAX.items():
        assert gaps[cause], f"no stream moved after a {cause}"
        assert statistics.median(gaps[cause]) <= limit_s
