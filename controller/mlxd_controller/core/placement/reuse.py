"""How soon a model is likely to be used again, from what the scheduler has seen. Pure.

Invariants:
- Only the past and the requests that wait now are used; nothing is fitted to a trace.
- A cost is finite, at least 0, and never falls when a model is used once more at the same moment.

A count of uses with a half-life is kept per model, two numbers and no history. The share of a model
in all decayed counts is the chance that the next request is for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxd_shared import config


@dataclass(frozen=True, slots=True)
class Usage:
    """The decayed count of a model's uses, as it was at `at_s`."""

    uses: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float) -> float:
        """Return the count as it has decayed until `now_s`, which is not before `at_s`."""
        return float(self.uses * 0.5 ** ((now_s - self.at_s) / config.USES_HALF_LIFE_S))

    def add_use(self, now_s: float) -> Usage:
        """Return the usage with one more use at `now_s`."""
        return Usage(self.at(now_s) + 1.0, now_s)


NEVER_USED = Usage()


def total(usages: Iterable[Usage], now_s: float) -> float:
    """Return the decayed count of all models' uses: what a model's own is a share of."""
    return sum(usage.at(now_s) for usage in usages)


def requests_ahead(usage: Usage, *, total_uses: float, now_s: float, waiting: int = 0) -> float:
    """Return how many requests are expected up to the model's next one, itself included.

    `waiting` requests, none of them for this model, are known to come before.
    """
    least = config.USES_MIN
    return waiting + max(1.0, (total_uses + least) / (usage.at(now_s) + least))


def cost(reload_s: float, requests: float) -> float:
    """Return what evicting a model costs a request: its reload over the requests it is spread on.

    `requests` is how many come up to its next use, at least 1; 1 / `requests` is the chance that
    the next one is for it.
    """
    return reload_s / max(1.0, requests)
