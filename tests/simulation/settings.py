"""What a seed chooses: the machine, the models, how people behave and how often things break."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from mlxd_models.fit.facts import Division, ModelFacts, Parts
from mlxd_models.fit.plan import Device
from mlxd_models.fit.planner import plan_load
from mlxd_shared.config import MIB
from mlxd_shared.domain.requests import LoadSpec
from tests.support.model_facts import device, facts

EVENTS = 500
STALL_S = 60.0
"""After so long without news of a load the edge reports it as failed."""
LOAD_S_MAX = 40.0
STOP_S_MAX = 12.0
"""Within this the edge ends a process that it was told to stop, by force in the end."""
HUGE = "huge"
WIDE = "wide"
"""A model that no single device can hold, and two GPUs of one machine can; its size is a rank's."""
WIDE_SOUGHT = 0.4
"""How often it is asked for, where there is one."""


@cache
def facts_of(mib: int) -> ModelFacts:
    """Return the facts of a model of this size."""
    return facts(mib)


@cache
def need_of(mib: int, kind: str) -> int:
    """Return what a model of this size cannot do without on a device of this kind."""
    return plan_load(facts_of(mib), LoadSpec(), device(1 << 20, kind=kind)).least_bytes


@cache
def least_need_of(mib: int, kind: str) -> int:
    """Return the same with as short a context as a load may come to."""
    return plan_load(facts_of(mib), LoadSpec(), device(0, kind=kind)).least_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """One world before its first event."""

    devices: tuple[Device, ...]
    sizes: dict[str, int]
    weights: tuple[float, ...]
    """How often each model is asked for, in the order of `sizes`."""
    max_loaded: int | None
    keep_alive_s: float
    age_min_s: float
    arrival_s: float
    stream_s: float
    fault: float
    """How likely each thing that may break is to break."""
    shutdown_at: int
    """The event after which the controller is told to stop; beyond EVENTS: at the end."""
    greedy: bool = False
    """Whether others take memory, and workers hold more than they were promised."""

    def ranks_of(self, name: str) -> int:
        """Return how many devices one of the models takes."""
        return 2 if name == WIDE else 1

    def facts_of(self, name: str) -> ModelFacts:
        """Return the facts of one of the models."""
        part = facts_of(self.sizes[name])
        if name != WIDE:
            return part
        return replace(facts_of(2 * self.sizes[name]), division=Division(Parts({2: part})))

    def need_of(self, name: str) -> int:
        """Return what one of the models, or each of its ranks, is reckoned to need."""
        return need_of(self.sizes[name], self.devices[0].kind)

    def shortens(self, devices: tuple[Device, ...]) -> bool:
        """Return whether one of the models would live on these, and with a short context alone."""
        most, kind = max(device.budget_bytes for device in devices), devices[0].kind
        sizes = self.sizes.values()
        return any(least_need_of(mib, kind) <= most < need_of(mib, kind) for mib in sizes)


def _shares(rng: Random, budget: int, *, largest: int, least: int) -> list[int]:
    """Split memory between one, two or three devices, one of which holds the largest model."""
    count = rng.choice((1, 1, 2, 2, 3))
    if count == 1:
        return [budget]
    shares = [max(least, int(budget / count * rng.uniform(0.6, 1.2))) for _ in range(count)]
    at = rng.randrange(count)
    shares[at] = max(shares[at], largest)
    return shares


GPU_TIMES = 8
"""By how much models of GPUs are larger."""


def setting_of(rng: Random) -> Setting:
    """Draw a setting: from calm and roomy to crowded and broken."""
    count = rng.randint(3, 7)
    sizes = {f"m{i}": rng.choice((4, 10, 20, 40, 80, 120)) for i in range(count)}
    greedy = rng.random() < 0.25
    most = rng.uniform(0.2, 0.9)
    alpha = rng.choice((0.0, 0.7, 1.5))
    kind = rng.choice(("cpu", "cpu", "cuda"))
    if kind == "cuda":  # beside a context of 600 MiB these would all be of one size
        sizes = {name: GPU_TIMES * mib for name, mib in sizes.items()}
    needs = sorted(need_of(mib, kind) for mib in sizes.values())
    budget = max(needs[-1], int(sum(needs) * (0.9 if greedy else most)))
    budgets = _shares(rng, budget, largest=needs[-1], least=needs[0])
    sizes[HUGE] = 40_000
    drawn = Setting(
        devices=tuple(
            device(-(-nbytes // MIB), kind=kind, name=f"{kind}{index}")
            for index, nbytes in enumerate(budgets)
        ),
        sizes=sizes,
        weights=(*((i + 1) ** -alpha for i in range(count)), 0.05),
        max_loaded=rng.choice((None, None, 1, 2, 3)),
        keep_alive_s=rng.choice((0.0, 5.0, 60.0, 300.0, math.inf)),
        age_min_s=rng.choice((0.0, 5.0, 20.0)),
        arrival_s=rng.choice((0.2, 1.0, 5.0)),
        stream_s=rng.choice((0.5, 3.0, 15.0)),
        fault=rng.choice((0.0, 0.05, 0.2)),
        shutdown_at=rng.randint(50, EVENTS) if rng.random() < 0.1 else EVENTS + 1,
    )
    if not greedy:
        return drawn
    # Few requests and much memory: models are idle, and others take what they hold.
    return replace(
        drawn, greedy=True, max_loaded=None, keep_alive_s=math.inf, arrival_s=5.0, stream_s=1.0
    )


def widen(setting: Setting, seed: int) -> Setting:
    """Return the setting with a model for two GPUs, where it has them, and some of it is drawn.

    Of a generator of its own, so that all other worlds are what they are without. No device can
    hold it alone, and none a rank of it with a shorter context: in the books a model has one need.
    """
    rng = Random(f"wide {seed}")
    budgets = sorted(device.budget_bytes for device in setting.devices)
    kind = setting.devices[0].kind
    if len(budgets) < 2 or kind != "cuda":
        return setting
    mib = int(budgets[-2] / MIB * rng.uniform(0.5, 1.0))
    while mib > 0 and need_of(mib, kind) > budgets[-2]:
        mib -= GPU_TIMES
    shortened = any(least_need_of(mib, kind) <= nbytes < need_of(mib, kind) for nbytes in budgets)
    if mib <= 0 or shortened or least_need_of(2 * mib, kind) <= budgets[-1]:
        return setting
    return replace(
        setting,
        sizes={**setting.sizes, WIDE: mib},
        weights=(*setting.weights, WIDE_SOUGHT * sum(setting.weights)),
    )
