"""Which models may go to make room, and what their absence would cost. Pure.

Invariants:
- Nothing that loads or leaves is offered, and nothing pinned or too young.
- What is in use is offered only to be held until it is idle, never to be evicted.
"""

from __future__ import annotations

import math

from mlxd_controller.core import evict, reuse
from mlxd_controller.core.state import Model, Phase, State


def victims_of(state: State, now_s: float = math.inf) -> tuple[evict.Victim, ...]:
    """Return the models that may be evicted at `now_s`; by default, all but the busy and pinned."""
    return _offered(state, candidates(state, now_s))


def candidates(state: State, now_s: float, *, in_use: bool = False) -> list[Model]:
    """Return the models that may be evicted, or might be if nobody used them (`in_use`)."""
    return [
        model
        for model in state.models.values()
        if (model.idle or (in_use and model.phase is Phase.READY))
        and not model.pinned
        and now_s >= model.ready_s + state.age_min_s
    ]


def choose(
    state: State, offered: list[Model], short_bytes: int, short_slots: int
) -> tuple[evict.Victim, ...] | None:
    """Return the cheapest of `offered` that are enough; None where all of them are too few."""
    enough = len(offered) >= short_slots
    if not enough or sum(model.reserved_bytes for model in offered) < short_bytes:
        return None  # the usual case while models are in use: what they cost need not be known
    return evict.choose(
        _offered(state, offered), shortfall_bytes=short_bytes, shortfall_slots=short_slots
    )


def _offered(state: State, models: list[Model]) -> tuple[evict.Victim, ...]:
    # All usages decay alike, so that their shares are the same now as at the last use of any.
    last_s = max((model.usage.at_s for model in state.models.values()), default=0.0)
    uses = reuse.total((model.usage for model in state.models.values()), last_s)
    return tuple(
        evict.Victim(
            model.digest,
            model.reserved_bytes,
            model.last_used_s,
            cost=reuse.cost(
                model.load_s, reuse.requests_ahead(model.usage, total_uses=uses, now_s=last_s)
            ),
            priority=model.spec.priority or 0,
        )
        for model in models
    )
