"""Replays a cell on a simulated clock, in arrival order: one load at a time, none overtakes.

A request is served when all before it have been; a victim must be idle, and where the idle ones
cannot make room, the clock goes on to the next end of a service. Unloading takes no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.eviction_cells import MODELS, Cell
from tests.bench.eviction_policies import POLICIES, Policy, Seen


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay cost."""

    reload_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    wait_max_s: float
    """Until the model was there: prefill is not in it."""
    passed_over: int = 0
    """Requests that were passed over after the fairness bound: a load began for later ones."""
    drain_max_s: float = 0.0
    """How long, at most, somebody past the bound waited for models in use, the loader idle."""


def outcome(reload_s: float, waits_s: Sequence[float], ttfts_s: Sequence[float]) -> Outcome:
    """Return the figures of all requests of a cell."""
    ordered = sorted(ttfts_s)
    p99_s = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return Outcome(reload_s, statistics.fmean(ordered), p99_s, max(waits_s))


class InOrder:
    """One machine that takes requests strictly one after the other."""

    def __init__(self, cell: Cell, policy: Policy) -> None:
        self.loads = [0] * MODELS
        """How often each model was loaded."""
        self._cell = cell
        self._policy = policy
        self._seen = Seen()
        self._resident: set[int] = set()
        self._busy_until_s = [0.0] * MODELS
        self._reload_s = 0.0

    def run(self) -> Outcome:
        """Serve all requests."""
        waits_s: list[float] = []
        ttfts_s: list[float] = []
        seen = self._seen
        for place, request in enumerate(self._cell.requests):
            seen.place = place
            seen.now_s = max(seen.now_s, request.at_s)
            if request.model not in self._resident:
                self._load(request.model)
            self._use(request.model, request.service_s)
            waits_s.append(seen.now_s - request.at_s)
            ttfts_s.append(waits_s[-1] + request.prefill_s)
        return outcome(self._reload_s, waits_s, ttfts_s)

    def _load(self, model: int) -> None:
        sizes, seen = self._cell.sizes, self._seen
        free = self._cell.capacity - sum(sizes[m] for m in self._resident)
        short = sizes[model] - free
        if short > 0:
            self._resident.difference_update(
                self._policy.choose(self._idle(short), short, self._see_arrived())
            )
        self._resident.add(model)
        seen.now_s += self._cell.reload_s(model)
        self._reload_s += self._cell.reload_s(model)
        self.loads[model] += 1

    def _idle(self, short: int) -> list[int]:
        """Wait until the idle models are large enough; return them."""
        while True:
            now_s = self._seen.now_s
            idle = [m for m in sorted(self._resident) if self._busy_until_s[m] <= now_s]
            if sum(self._cell.sizes[m] for m in idle) >= short:
                return idle
            ends = (self._busy_until_s[m] for m in self._resident)
            self._seen.now_s = min(end for end in ends if end > now_s)

    def _see_arrived(self) -> Seen:
        requests, seen = self._cell.requests, self._seen
        while seen.arrived < len(requests) and requests[seen.arrived].at_s <= seen.now_s:
            seen.arrived += 1
        return seen

    def _use(self, model: int, service_s: float) -> None:
        seen = self._seen
        self._busy_until_s[model] = max(self._busy_until_s[model], seen.now_s + service_s)
        seen.last_used_s[model] = seen.now_s
        seen.uses[model] += 1
        seen.usages[model] = seen.usages[model].add_use(seen.now_s)
        self._policy.note_use(model, seen)


def in_order(cell: Cell, policy: str) -> Outcome:
    """Replay `cell` in arrival order under the policy of this name."""
    return InOrder(cell, POLICIES[policy](cell)).run()
