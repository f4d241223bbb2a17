"""Workers of a former controller, with which some worlds begin; they may be too many.

Invariants:
- They are drawn by a generator of their own, so that all other worlds are what they are without.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Protocol

from mlxd_controller.core import events as ev
from mlxd_models.fit.groups import group_of
from mlxd_models.fit.planner import plan_load
from mlxd_models.fit.terms import reckon
from mlxd_shared.domain.requests import LoadSpec
from tests.simulation.books import Books, Process
from tests.simulation.checks import Checks
from tests.simulation.memory import Memory
from tests.simulation.settings import Setting

NONE = 0.7
"""How likely a world begins without any."""


class Begun(Protocol):
    """What is needed of a world in which nothing has happened yet."""

    seed: int
    setting: Setting
    books: Books
    checks: Checks
    memory: Memory

    def send(self, event: ev.Event) -> None:
        """Let the core decide, check the decision and do what it wants."""
        ...


def begin_with_former_workers(world: Begun) -> None:
    """Have the core take them over, one after another, and judge which of them stay."""
    rng = Random(f"former {world.seed}")
    if rng.random() < NONE:
        return
    sizes = world.setting.sizes
    names = rng.sample(list(sizes), rng.randint(1, len(sizes)))
    for number, name in enumerate(names, start=1):
        facts = world.setting.facts_of(name)
        homes = world.books.homes_of(name)
        if not homes:
            continue
        home = group_of([world.books.devices[each] for each in rng.choice(homes)])
        choice = replace(plan_load(facts, LoadSpec(), home).choice, prefix_bytes=0)
        pinned = rng.choice((None, True))
        if pinned:
            world.books.pinned.add(name)
        need_bytes = reckon(facts, home, choice).need_bytes
        process = Process(number, name, need_bytes, tuple(home.parts), choice)
        world.checks.adopt(process)
        world.memory.grow(process)
        spec = LoadSpec(pinned=pinned)
        world.send(ev.Adopted(number, name, name, f"/{name}", facts, choice, home.name, spec, 1.0))
        world.checks.check_adoption(process)
