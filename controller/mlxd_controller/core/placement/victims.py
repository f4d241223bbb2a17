"""Which models may go to make room, and what their absence would cost. Pure.

Invariants:
- Nothing that loads or leaves is offered, and nothing pinned or too young.
- What is in use is offered only to be held until it is idle, never to be evicted.
- A model makes room on its own device, or on those of all its ranks, and a place. What only a slot
  is lacking for may be had on any.
- For a group there has to be enough on each of its devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from mlxd_controller.core.placement import evict, reuse
from mlxd_controller.core.placement.room import Room
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.plan import Device, Plan

GROUPS_SEARCHED = 8
"""Groups of devices on which victims are looked for; those with most room come first."""


@dataclass(frozen=True, slots=True)
class Lack:
    """What is lacking on one device: bytes, and places."""

    device: str
    nbytes: int
    places: int = 0


@dataclass(frozen=True, slots=True)
class Short:
    """What is lacking for a model: bytes, slots and places; nothing where none is above 0.

    Of a group the most that any of its devices lacks, and in `lacks` what each does.
    """

    device: Device
    nbytes: int
    slots: int
    places: int = 0
    lacks: tuple[Lack, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether nothing is."""
        return self.nbytes <= 0 and self.slots <= 0 and self.places <= 0

    @property
    def each(self) -> tuple[Lack, ...]:
        """What each device lacks."""
        return self.lacks or (Lack(self.device.name, self.nbytes, self.places),)


def short_of(rooms: Mapping[str, Room], device: Device, plan: Plan) -> Short:
    """Return what a plan lacks on its device, or on each of a group's, by their `rooms`."""
    lacks = tuple(
        Lack(name, plan.least_bytes * ranks - rooms[name].free_bytes, 1 - rooms[name].free_places)
        for name, ranks in device.parts.items()
    )
    slots = 1 - next(iter(rooms.values())).free_slots
    nbytes = max(lack.nbytes for lack in lacks)
    places = max(lack.places for lack in lacks)
    return Short(device, nbytes, slots, places, lacks if len(lacks) > 1 else ())


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
    if len(offered) < short.slots or any(
        sum(model.reserved_on(lack.device) for model in offered) < lack.nbytes
        for lack in short.each
    ):
        return None  # the usual case while models are in use: what they cost need not be known
    first, *further = short.each
    return evict.choose(
        _offer(state, offered, short),
        shortfall_bytes=first.nbytes,
        shortfall_slots=short.slots,
        shortfall_places=first.places,
        shortfall_beyond=tuple((lack.nbytes, lack.places) for lack in further),
    )


def cheapest(
    state: State, offered: list[Model], shorts: Sequence[Short]
) -> tuple[Device, tuple[evict.Victim, ...]] | None:
    """Return where the cheapest of `offered` are enough, and who they are; None: nowhere.

    Among equals the first of `shorts` is taken. A device on which somebody of higher priority would
    have to go comes after all others. Of groups of devices, of which there may be 70, only the
    first `GROUPS_SEARCHED` are looked at: a search takes milliseconds.
    """
    searched = [short for short in shorts if not short.device.members]
    groups = (short for short in shorts if short.device.members)
    searched += islice(groups, GROUPS_SEARCHED)
    chosen = [(short.device, choose(state, offered, short)) for short in searched]
    affordable = [(device, victims) for device, victims in chosen if victims is not None]
    return min(affordable, key=lambda pair: evict.dearness(pair[1]), default=None)


def _offer(state: State, models: list[Model], short: Short) -> tuple[evict.Victim, ...]:
    """Return them as victims; of those elsewhere, which help with slots only, none without need."""
    # All usages decay alike, so that their shares are the same now as at the last use of any.
    last_s = max((model.usage.at_s for model in state.models.values()), default=0.0)
    uses = reuse.total((model.usage for model in state.models.values()), last_s)
    first, *further = (lack.device for lack in short.each)

    def on(model: Model, device: str) -> tuple[int, int]:
        nbytes = model.reserved_on(device)
        return nbytes, int(nbytes > 0)

    return tuple(
        evict.Victim(
            model.digest,
            on(model, first)[0],
            model.last_used_s,
            cost=reuse.cost(
                model.load_s + state.prompts_again_s(model),
                reuse.requests_ahead(model.usage, total_uses=uses, now_s=last_s),
            ),
            priority=model.spec.priority or 0,
            places=on(model, first)[1],
            beyond=tuple(on(model, device) for device in further),
        )
        for model in models
        if state.lives_on(model, short.device) or short.slots > 0
    )
