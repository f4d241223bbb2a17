"""A proof that a cell cannot be served within a time: no schedule, not even one that knows it all.

A model's requests are covered by stays: a load, then being there. A stay that begins at its load's
end t and lasts d covers the requests of [t - wait_s, t + d]. A load takes the one loader reload_s,
and size x reload_s of memory; staying takes size x d of memory. With the two weighted by `share`
and 1 - `share`, the cheapest cover of each model is found exactly, and each schedule needs at least
their sum; more than there is means that none exists, whichever share is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.bench.eviction_cells import MODELS, Cell

SHARES = tuple(step / 20 for step in range(21))


def least_load(cell: Cell, *, wait_s: float) -> float:
    """Return a lower bound of what is needed, as a multiple of what there is; above 1: impossible.

    Needed so that each request's model is there at most `wait_s` after its arrival; prefill and
    the memory of models in service beyond that are left out, in favour of the schedule.
    """
    times_s = [[r.at_s for r in cell.requests if r.model == model] for model in range(MODELS)]
    there_s = cell.requests[-1].at_s + wait_s
    needs_s: list[float] = []
    for share in SHARES:
        need_s = 0.0
        for model, arrivals_s in enumerate(times_s):
            memory = (1 - share) * cell.sizes[model] / cell.capacity
            load_s = (share + memory) * cell.reload_s(model)
            need_s += cheapest_cover(arrivals_s, load_s=load_s, stay=memory, wait_s=wait_s)
        needs_s.append(need_s)
    return max(needs_s) / there_s


def cheapest_cover(
    arrivals_s: Sequence[float], *, load_s: float, stay: float, wait_s: float
) -> float:
    """Return the least cost of covering ordered arrivals with stays.

    A stay over arrivals i to j costs `load_s`, and `stay` a second by which they are further
    apart than `wait_s`.
    """
    costs = [0.0]
    far, first_near = math.inf, 0
    for at_s in arrivals_s:
        while at_s - arrivals_s[first_near] > wait_s:
            far = min(far, costs[first_near] - stay * arrivals_s[first_near])
            first_near += 1
        costs.append(load_s + min(costs[first_near], far + stay * (at_s - wait_s)))
    return costs[-1]
