"""Replays a cell on a simulated clock with one queue a model, collated under the fairness bound.

- One load at a time, for all who wait for the model when it is there: A B A B becomes A A B B.
- A model that is there serves whoever comes, before all who wait for another.
- Queues are served in the order of their oldest requests; the next one may go before where the idle
  models cannot make room for it, until it has waited for the bound.
- From then on nobody goes before, and models in use must make room: the cheapest sufficient set is
  closed to newcomers, who wait, until it is idle.

Victims are chosen by the controller's own functions, from past uses alone. `passed_over` is counted
apart from the rules, at each load.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mlxd_controller.core.placement import evict, reuse
from tests.bench.eviction_cells import MODELS, Cell
from tests.bench.eviction_policies import Seen, expect
from tests.bench.eviction_replay import Outcome, outcome

FAIRNESS_BOUND_S = 30.0


class Collated:
    """One machine: resident models, one queue each, one load at a time."""

    def __init__(self, cell: Cell, *, bound_s: float) -> None:
        self._cell = cell
        self._bound_s = bound_s
        self._seen = Seen()
        self._resident: set[int] = set()
        self._closed: tuple[int, ...] = ()
        self._closed_for: int | None = None
        self._loading: int | None = None
        self._loaded_at_s = math.inf
        self._waiting: list[list[int]] = [[] for _ in range(MODELS)]
        self._busy_until_s = [0.0] * MODELS
        self._reload_s = 0.0
        self._waits_s = [math.nan] * len(cell.requests)
        self._passed_over: set[int] = set()
        self._loader_free_s = 0.0
        self._drain_max_s = 0.0

    def run(self) -> Outcome:
        """Serve all requests; return what it cost."""
        seen, requests = self._seen, self._cell.requests
        while True:
            while seen.arrived < len(requests) and requests[seen.arrived].at_s <= seen.now_s:
                self._arrive(seen.arrived)
                seen.arrived += 1
            if seen.now_s >= self._loaded_at_s:
                self._ready()
            if self._loading is None:
                self._make_room()
            next_s = self._next_s()
            if math.isinf(next_s):
                break
            seen.now_s = next_s
        assert not any(math.isnan(wait_s) for wait_s in self._waits_s)
        ttfts_s = [w + r.prefill_s for w, r in zip(self._waits_s, requests, strict=True)]
        figures = outcome(self._reload_s, self._waits_s, ttfts_s)
        return replace(figures, passed_over=len(self._passed_over), drain_max_s=self._drain_max_s)

    def _next_s(self) -> float:
        """Return when something happens next; infinite: never."""
        seen, requests = self._seen, self._cell.requests
        times = [self._loaded_at_s]
        if seen.arrived < len(requests):
            times.append(requests[seen.arrived].at_s)
        if self._loading is None and any(self._waiting):
            times += [self._busy_until_s[model] for model in self._resident]
            times += [requests[queue[0]].at_s + self._bound_s for queue in self._waiting if queue]
        return min((time for time in times if time > seen.now_s), default=math.inf)

    def _arrive(self, place: int) -> None:
        request, seen = self._cell.requests[place], self._seen
        model = request.model
        seen.usages[model] = seen.usages[model].add_use(seen.now_s)
        if model in self._resident and model not in self._closed:
            self._serve(place)
        else:
            self._waiting[model].append(place)

    def _serve(self, place: int) -> None:
        request, seen = self._cell.requests[place], self._seen
        self._waits_s[place] = seen.now_s - request.at_s
        until_s = seen.now_s + request.service_s
        self._busy_until_s[request.model] = max(self._busy_until_s[request.model], until_s)
        seen.last_used_s[request.model] = seen.now_s

    def _ready(self) -> None:
        assert self._loading is not None
        model, self._loading, self._loaded_at_s = self._loading, None, math.inf
        self._loader_free_s = self._seen.now_s
        self._resident.add(model)
        for place in self._waiting[model]:
            self._serve(place)
        self._waiting[model].clear()

    def _make_room(self) -> None:
        """Begin the first load that can begin now; close models for the first overdue one."""
        requests, now_s = self._cell.requests, self._seen.now_s
        queued = (m for m in range(MODELS) if self._waiting[m] and m not in self._resident)
        for model in sorted(queued, key=lambda m: self._waiting[m][0]):
            overdue = now_s >= requests[self._waiting[model][0]].at_s + self._bound_s
            if self._begin_load(model, may_close=overdue) or overdue:
                return

    def _begin_load(self, model: int, *, may_close: bool) -> bool:
        """Return whether the load of `model` began."""
        sizes = self._cell.sizes
        short = sizes[model] + sum(sizes[m] for m in self._resident) - self._cell.capacity
        gone: tuple[int, ...] = ()
        if short > 0:
            now_s = self._seen.now_s
            idle = [m for m in self._resident if self._busy_until_s[m] <= now_s]
            if self._closed_for == model and set(self._closed) <= set(idle):
                gone = self._closed
            elif self._closed_for == model:
                return False
            else:
                victim = self._choose(idle, short)
                if victim is None:
                    if may_close:
                        chosen = self._choose(sorted(self._resident), short)
                        assert chosen is not None
                        self._closed, self._closed_for = chosen, model
                    return False
                gone = victim
        self._load(model, gone)
        return True

    def _choose(self, models: list[int], short: int) -> tuple[int, ...] | None:
        seen = self._seen
        victims = tuple(
            evict.Victim(
                f"{model:02d}",
                self._cell.sizes[model],
                seen.last_used_s[model],
                reuse.cost(self._cell.reload_s(model), expect(model, seen)),
            )
            for model in models
        )
        chosen = evict.choose(victims, shortfall_bytes=short, shortfall_slots=0)
        return None if chosen is None else tuple(int(victim.digest) for victim in chosen)

    def _load(self, model: int, gone: tuple[int, ...]) -> None:
        seen, requests = self._seen, self._cell.requests
        oldest_s = requests[self._waiting[model][0]].at_s
        self._passed_over.update(
            place
            for queue in self._waiting
            for place in queue
            if requests[place].at_s < oldest_s and seen.now_s - requests[place].at_s > self._bound_s
        )
        due_s = max(self._loader_free_s, oldest_s + self._bound_s)
        self._drain_max_s = max(self._drain_max_s, seen.now_s - due_s)
        self._resident.difference_update(gone)
        self._closed, self._closed_for = (), None
        self._loading = model
        self._loaded_at_s = seen.now_s + self._cell.reload_s(model)
        self._reload_s += self._cell.reload_s(model)


def replay_collated(cell: Cell, *, bound_s: float = FAIRNESS_BOUND_S) -> Outcome:
    """Replay `cell` collated under a bound for being passed over."""
    return Collated(cell, bound_s=bound_s).run()
