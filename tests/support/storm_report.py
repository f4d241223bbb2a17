"""What a storm came to: its figures, and what must hold after any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.support.storm_jobs import ROOM_FOR
from tests.support.storm_tally import Tally
from tests.support.storms import EXPECTED_ERRORS, Aftermath, Storm

TIES_PART_MAX = 1 / 500
"""Of the streams that moved, those that may go on otherwise after a near tie."""
RSS_GROWN_NBYTES_MAX = 48 << 20
"""What the server may hold more than before, with all its models unloaded."""
RECKONED_SHORT_MAX = 1.03
"""What models take at most of what they were reckoned to need before anything was measured."""
COUNTERS = (
    "mlxd_model_loads_total",
    "mlxd_model_evictions_total",
    "mlxd_worker_restarts_total",
    "mlxd_migrations_total",
)
TOLD_EACH = 5
MILLI = 1000
MEGA = 1_000_000


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that so large a part of them does not exceed; 0 of none."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)] if values else 0.0


def growth_per_request(aftermath: Aftermath, storm: Storm, *, settled: float) -> float:
    """Return how many bytes the server grew by a request, after that part of the storm."""
    return (
        aftermath.controller.slope(round(settled * storm.seconds))
        * storm.seconds
        / aftermath.tally.begun
    )


def client_figures(tally: Tally, *, clients: int, seconds: float) -> dict[str, object]:
    """Return what so many clients had in that time, by name."""
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": tally.begun,
        "requests_per_s": tally.begun / seconds,
        "tokens_per_s": tally.tokens / seconds,
        "complete": tally.complete,
        "left": tally.left,
        "ended_by": tally.ended_by,
        "broke_off": tally.broke_off,
        "wrong": len(tally.wrong),
        "undocumented": len(tally.undocumented),
        "hung": len(tally.hung),
        "faults": [
            *tally.wrong[:TOLD_EACH],
            *tally.undocumented[:TOLD_EACH],
            *tally.hung[:TOLD_EACH],
        ],
        "migrated": tally.migrated,
        "near_ties": tally.ties,
        "first_token_s": summarise(tally.first_token_s),
    }


def figures(aftermath: Aftermath, storm: Storm) -> dict[str, object]:
    """Return what happened, by name."""
    tally, seen = aftermath.tally, aftermath.seen
    return {
        **client_figures(tally, clients=storm.clients, seconds=storm.seconds),
        "migrations": tally.migrations,
        "move_gap_s": summarise(tally.move_gap_s),
        "refused_after_s": summarise(tally.refused_s),
        "kills": dict(aftermath.kills),
        "server": {name: aftermath.counted.get(name, 0.0) for name in COUNTERS},
        "status_ms": summarise([MILLI * s for s in seen.status_s]),
        "health_ms": summarise([MILLI * s for s in seen.health_s]),
        "bare_ms": summarise([MILLI * s for s in seen.bare_s]),
        "observations": len(seen.status_s),
        "most_loaded": seen.most_loaded,
        "reserved_mb": seen.most_reserved_bytes / MEGA,
        "budget_mb": seen.budget_bytes / MEGA,
        "workers_rss_mb": seen.most_resident_bytes / MEGA,
        "descriptors": (aftermath.before.descriptors, aftermath.after.descriptors),
        "controller_rss_mb": (
            aftermath.before.rss_nbytes / MEGA,
            aftermath.after.rss_nbytes / MEGA,
        ),
        "errors_logged": dict(aftermath.errors),
    }


def check(aftermath: Aftermath) -> None:
    """Assert that every request ended well or as documented, and that nothing is left."""
    tally, seen = aftermath.tally, aftermath.seen
    assert (tally.wrong, tally.undocumented, tally.hung) == ([], [], [])
    assert tally.ends == tally.begun
    assert tally.complete > 0
    assert sum(aftermath.kills.values()) > 0
    assert tally.ties <= max(1, TIES_PART_MAX * tally.migrated)
    # Once measured, what models take counts in place of what was reckoned, which may be less.
    assert 0 < seen.most_reserved_bytes <= RECKONED_SHORT_MAX * seen.budget_bytes
    assert seen.most_loaded <= ROOM_FOR
    assert seen.sums_broken == 0
    assert aftermath.errors.keys() <= EXPECTED_ERRORS
    assert aftermath.after.descriptors <= aftermath.before.descriptors
    assert aftermath.after.rss_nbytes - aftermath.before.rss_nbytes <= RSS_GROWN_NBYTES_MAX


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return how many values there are, their median, the 99th percentile and the largest."""
    parts = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    ranked = {name: round(percentile(values, part), 3) for name, part in parts.items()}
    return {"count": len(values), **ranked}
