"""The figures of a siege, and what must hold after any."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tests.support.attacks.siege import BURST, Outcome
from tests.support.attacks.tally import together

MIB = 1 << 20
MORE_DESCRIPTORS_MAX = 4
"""Of the controller, at rest after an attack, beyond those before it."""


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that so large a part of them does not exceed."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)]


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return what a siege came to, by name."""
    probed, beside = outcome.probed, outcome.beside
    health_s = probed.old_s + probed.fresh_s
    alone = [speed for streamed in outcome.alone for speed in streamed.tokens_per_s]
    whole = together(outcome.tallies.values())
    before, after = outcome.before, outcome.after
    return {
        "health_ms_p50": percentile(health_s, 0.5) * 1000,
        "health_ms_p99": percentile(health_s, 0.99) * 1000,
        "health_ms_max": max(health_s) * 1000,
        "health_old_ms_p99": percentile(probed.old_s, 0.99) * 1000,
        "health_fresh_ms_p99": percentile(probed.fresh_s, 0.99) * 1000,
        "bare_ms_p99": percentile(probed.bare_s, 0.99) * 1000,
        "bare_ms_max": max(probed.bare_s) * 1000,
        "health_probes": len(health_s),
        "health_failures": dict(probed.failures),
        "good_alone_tokens_per_s": statistics.median(alone),
        "good_beside_tokens_per_s": statistics.median(beside.tokens_per_s),
        "good_ratio": statistics.median(beside.tokens_per_s) / statistics.median(alone),
        "good_streams": len(beside.tokens_per_s),
        "good_refused": dict(beside.refused),
        "good_texts": len(
            {text for streamed in (*outcome.alone, beside) for text in streamed.texts}
        ),
        "calls": {kind: dict(sorted(t.codes.items())) for kind, t in outcome.tallies.items()},
        "worst_s": {kind: t.worst_s for kind, t in outcome.tallies.items()},
        "queue_full": {kind: t.queue_full for kind, t in outcome.tallies.items()},
        "connections": {
            kind: (t.connections_made, t.connections_closed) for kind, t in outcome.tallies.items()
        },
        "undocumented": whole.undocumented,
        "without_retry": whole.without_retry,
        "examples": whole.examples,
        "controller_rss_mib": [h.controller.rss_nbytes / MIB for h in (before, after)],
        "worker_rss_mib": [h.worker_rss_nbytes / MIB for h in (before, after)],
        "worker_accounts_mib": [
            {name: nbytes / MIB for name, nbytes in h.accounts.items()} for h in (before, after)
        ],
        "descriptors": [h.controller.descriptors for h in (before, after)],
        "deaths": outcome.deaths,
        "workers": len(outcome.worker_pids),
        "errors": sorted(set(outcome.errors)),
    }


def check(seen: dict[str, Any]) -> None:
    """Assert what holds whatever the machine does: codes, retry times, and that nothing died."""
    assert (seen["deaths"], seen["workers"], seen["errors"]) == (0, 1, [])
    assert seen["undocumented"] == 0, seen["examples"]
    assert seen["without_retry"] == 0, seen["examples"]
    assert seen["health_failures"] == {}
    assert seen["good_texts"] == 1
    assert seen["good_refused"].keys() <= {"RESOURCE_EXHAUSTED"}
    hanging = [name for codes in seen["calls"].values() for name in codes if "HANGS" in name]
    assert hanging == []
    assert all(seen["calls"].values()), "every attack was made"
    assert seen["queue_full"][BURST] > 0, "no burst reached the bound, so that it was none"
    assert seen["calls"]["tokenize"].get("Tokenize OK", 0) > 0, "no text became tokens"
    for kind, (opened, closed) in seen["connections"].items():
        assert opened == closed > 0, kind
        assert "connect REFUSED" not in seen["calls"][kind]
    before, after = seen["descriptors"]
    assert after <= before + MORE_DESCRIPTORS_MAX
