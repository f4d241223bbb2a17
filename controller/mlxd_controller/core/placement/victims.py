"""Which models may go to make room, and what their absence would cost. Pure.

Invariants:
- Nothing that loads or leaves is offered, and nothing pinned or too young.
- What is in use is offered only to be held until it is idle, never to be evicted.
- A model makes room on its own device, and a place. What only a slot is lacking for may be had on
  any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxd_controller.core.placement import evict, reuse
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.plan import Device


@dataclass(frozen=True, slots=True)
class Short:
    """What is lacking on a device: bytes, slots and places; nothing where none is above 0."""

    device: Device
    nbytes: int
    slots: int
    places: int = 0

    @property
    def nothing(self) -> bool:
        """Whether nothing is."""
        return self.nbytes <= 0 and self.slots <= 0 and self.places <= 0


def candidates(state: State, now_s: float, *, in_use: bool = False) -> list[Model]:
    """Return the models that may be evicted, or might be if nobody used them (`in_use`)."""
    return [
        model
        for model, ready in state.ready()
        if (in_use or not ready.leases)
        and not model.pinned
        and now_s >= ready.since_s + state.age_min_s
    ]


def choose(state: State, offered: list[Model], short: Short) -> tuple[evict.Victim, ...] | None:
    """Return the cheapest of `offered` that are enough; None where all of them are too few."""
    if len(offered) < short.slots or state.reserved_on(short.device, offered) < short.nbytes:
        return None  # the usual case while models are in use: what they cost need not be known
    return evict.choose(
        _offer(state, offered, short),
        shortfall_bytes=short.nbytes,
        shortfall_slots=short.slots,
        shortfall_places=short.places,
    )


def cheapest(
    state: State, offered: list[Model], shorts: Iterable[Short]
) -> tuple[Device, tuple[evict.Victim, ...]] | None:
    """Return where the cheapest of `offered` are enough, and who they are; None: nowhere.

    Among equals the first of `shorts` is taken. A device on which somebody of higher priority would
    have to go comes after all others.
    """
    chosen = [(short.device, choose(state, offered, short)) for short in shorts]
    affordable = [(device, victims) for device, victims in chosen if victims is not None]
    return min(affordable, key=lambda pair: evict.dearness(pair[1]), default=None)


def _offer(state: State, models: list[Model], short: Short) -> tuple[evict.Victim, ...]:
    """Return them as victims; of those elsewhere, which help with slots only, none without need."""
    # All usages decay alike, so that their shares are the same now as at the last use of any.
    last_s = max((model.usage.at_s for model in state.models.values()), default=0.0)
    uses = reuse.total((model.usage for model in state.models.values()), last_s)
    return tuple(
        evict.Victim(
            model.digest,
            model.reserved_bytes if here else 0,
            model.last_used_s,
            cost=reuse.cost(
                model.load_s + state.prompts_again_s(model),
                reuse.requests_ahead(model.usage, total_uses=uses, now_s=last_s),
            ),
            priority=model.spec.priority or 0,
            places=int(here),
        )
        for model in models
        if (here := state.lives_on(model, short.device)) or short.slots > 0
    )
