"""The policies that are compared: each says which idle models go, from the same view.

LRU, LFU (uses since the beginning), GreedyDual-Size-Frequency (clock + uses x reload / size) and
Ollama's rule (shortest keep-alive, then name; all have the same keep-alive here) take victims in
the order of their key until it is enough, and spare what is superfluous. The two clairvoyant ones
know all later requests: farthest next use first, and weighted: the set with the smallest sum of
reload seconds / requests until the next use, searched exactly. Ours is the controller's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlxd_controller.core.placement import evict, reuse
from tests.bench.eviction_cells import MODELS, Cell


@dataclass(slots=True)
class Seen:
    """What a scheduler has seen by now, and the place in the trace (for who knows the future)."""

    now_s: float = 0.0
    place: int = 0
    arrived: int = 0
    """Requests that have come by `now_s`: those from `place` on are waiting."""
    last_used_s: list[float] = field(default_factory=lambda: [0.0] * MODELS)
    uses: list[int] = field(default_factory=lambda: [0] * MODELS)
    usages: list[reuse.Usage] = field(default_factory=lambda: [reuse.Usage()] * MODELS)


class Policy(Protocol):
    """Chooses victims; a new one for each replay."""

    def choose(self, idle: Sequence[int], short: int, seen: Seen) -> Sequence[int]:
        """Return models of `idle` whose sizes sum up to `short` or more; all together do."""
        ...

    def note_use(self, model: int, seen: Seen) -> None:
        """Note a use of `model`; `seen` includes it already."""
        ...


class ByKey:
    """Smallest key first, then the name; a member that later ones make superfluous stays."""

    def __init__(self, cell: Cell, key: Callable[[int, Seen], float]) -> None:
        self._sizes = cell.sizes
        self._key = key

    def choose(self, idle: Sequence[int], short: int, seen: Seen) -> Sequence[int]:
        """Take in the order of the keys."""
        chosen: list[int] = []
        for model in sorted(idle, key=lambda m: (self._key(m, seen), m)):
            if sum(self._sizes[m] for m in chosen) >= short:
                break
            chosen.append(model)
        for model in chosen[::-1]:
            if sum(self._sizes[m] for m in chosen) - self._sizes[model] >= short:
                chosen.remove(model)
        return chosen

    def note_use(self, model: int, seen: Seen) -> None:
        """Nothing to note: all is in `seen`."""


class GreedyDual:
    """GreedyDual-Size-Frequency: the clock rises to the priority of whatever was evicted."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._clock = 0.0
        self._priority = [0.0] * MODELS
        self._order = ByKey(cell, lambda model, _: self._priority[model])

    def choose(self, idle: Sequence[int], short: int, seen: Seen) -> Sequence[int]:
        """Take the lowest priorities."""
        chosen = self._order.choose(idle, short, seen)
        self._clock = max([self._clock, *(self._priority[model] for model in chosen)])
        return chosen

    def note_use(self, model: int, seen: Seen) -> None:
        """Raise the model above the clock."""
        worth = seen.uses[model] * self._cell.reload_s(model) / self._cell.sizes[model]
        self._priority[model] = self._clock + worth


class Cheapest:
    """The controller's search for the cheapest set, under a given expectation of the next use.

    again_s: what a model's next request takes longer, beside the load, once it was evicted.
    """

    def __init__(
        self,
        cell: Cell,
        requests: Callable[[int, Seen], float],
        *,
        again_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self._cell = cell
        self._requests = requests
        self._again_s = again_s

    def choose(self, idle: Sequence[int], short: int, seen: Seen) -> Sequence[int]:
        """Search."""
        victims = tuple(
            evict.Victim(
                f"{model:02d}",
                self._cell.sizes[model],
                seen.last_used_s[model],
                reuse.cost(
                    self._cell.reload_s(model) + self._again_s(model), self._requests(model, seen)
                ),
            )
            for model in idle
        )
        chosen = evict.choose(victims, shortfall_bytes=short, shortfall_slots=0)
        assert chosen is not None
        return [int(victim.digest) for victim in chosen]

    def note_use(self, model: int, seen: Seen) -> None:
        """Nothing to note: all is in `seen`."""


class Uses:
    """At which places of the trace each model is used."""

    def __init__(self, cell: Cell) -> None:
        self._places: list[list[int]] = [[] for _ in range(MODELS)]
        for place, request in enumerate(cell.requests):
            self._places[request.model].append(place)
        self._never = 2 * len(cell.requests)

    def ahead(self, model: int, place: int, *, before: int | None = None) -> int | None:
        """Return how many requests on `model` is used next; None: not, or not before `before`."""
        places = self._places[model]
        at = bisect_left(places, place)
        if at == len(places) or (before is not None and places[at] >= before):
            return None
        return places[at] - place

    def clairvoyant(self, model: int, seen: Seen) -> float:
        """Return how many requests on `model` is used next, whatever has come by now."""
        ahead = self.ahead(model, seen.place)
        return self._never if ahead is None else ahead

    def nearest(self, model: int, seen: Seen) -> float:
        """Return the key that puts the farthest next use first."""
        return -self.clairvoyant(model, seen)

    def expect(self, model: int, seen: Seen) -> float:
        """Return the same from the requests that wait now and, beyond them, from past uses."""
        ahead = self.ahead(model, seen.place, before=seen.arrived)
        return expect(model, seen, seen.arrived - seen.place) if ahead is None else ahead


def expect(model: int, seen: Seen, waiting: int = 0) -> float:
    """Return what past uses let expect, none of `waiting` requests being for `model`."""
    return reuse.requests_ahead(
        seen.usages[model],
        total_uses=reuse.total(seen.usages, seen.now_s),
        now_s=seen.now_s,
        waiting=waiting,
    )


POLICIES: dict[str, Callable[[Cell], Policy]] = {
    "lru": lambda cell: ByKey(cell, lambda model, seen: seen.last_used_s[model]),
    "lfu": lambda cell: ByKey(cell, lambda model, seen: seen.uses[model]),
    "gdsf": GreedyDual,
    "ollama": lambda cell: ByKey(cell, lambda *_: 0.0),
    "farthest": lambda cell: ByKey(cell, Uses(cell).nearest),
    "weighted": lambda cell: Cheapest(cell, Uses(cell).clairvoyant),
    "past": lambda cell: Cheapest(cell, expect),
    "ours": lambda cell: Cheapest(cell, Uses(cell).expect),
}
"""`past` is ours without what waits: past uses alone."""
