"""Machines that are lost with all that runs there, come back, and come back empty; some join late.

Invariants:
- They are drawn by a generator of their own, so that all other worlds are what they are without.
- The core hears of a loss by one measurement. What the lost workers say comes after it, or never.
- A machine joins late only where no model lives with a short context until then: in the books a
  model has one need.
- Who comes back with a machine is others' memory until the core has adopted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

from mlxd_controller.core import events as ev
from mlxd_controller.core.phases import Cold
from mlxd_controller.core.state import State
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.devices import JOINT
from mlxd_shared.domain.errors import WorkerExited, WorkerLost
from mlxd_shared.domain.requests import LoadSpec
from tests.simulation.books import Books, Process, Request, Stage
from tests.simulation.checks import Checks
from tests.simulation.memory import Memory
from tests.simulation.settings import EVENTS, Setting

NONE = 0.6
"""How likely no machine of a world is ever lost."""
SHARED = 0.3
"""How likely a device belongs to the machine of the one before it."""
LATE = 0.3
"""How likely a machine joins late, where there is another."""
FOR_GOOD = 0.1
"""How likely a lost machine never comes back."""
EMPTY = 0.5
"""How likely it comes back empty."""
FEW_PLACES = 0.3
"""How likely the machines have only so many workers, one to three each."""
SPOKEN_OF = 0.5
"""How likely the edge says something of a lost worker, later."""


class Living(Protocol):
    """What is needed of a world."""

    books: Books
    checks: Checks
    memory: Memory
    setting: Setting
    state: State
    sent: int
    seen: Counter[str]

    def later(self, delay_s: float, thing: Callable[[], None]) -> None:
        """Have something happen after a while."""
        ...

    def send(self, event: ev.Event) -> None:
        """Let the core decide, check the decision and do what it wants."""
        ...

    def release(self, request: Request) -> None:
        """Have a request be over, if it is not yet."""
        ...


class Machines:
    """The machines of one world. `first` are the devices that the core begins with."""

    def __init__(self, seed: int, setting: Setting) -> None:
        devices = setting.devices
        self._rng = Random(f"machines {seed}")
        self._interval_s = self._outage_s = 0.0
        self._late: tuple[Device, ...] = ()
        self.first = devices
        if self._rng.random() < NONE:
            return
        self._interval_s = self._rng.choice((10.0, 40.0, 150.0))
        self._outage_s = self._rng.choice((2.0, 20.0, 60.0))
        numbers = [0]
        for _ in devices[1:]:
            numbers.append(numbers[-1] + (self._rng.random() >= SHARED))
        few = self._rng.random() < FEW_PLACES
        placed = [
            replace(device, node=f"n{number}", models_max=self._rng.randint(1, 3) if few else None)
            for device, number in zip(devices, numbers, strict=True)
        ]
        late = numbers[-1] if numbers[-1] and self._rng.random() < LATE else len(numbers)
        early = tuple(device for device in placed if device.node != f"n{late}")
        if setting.shortens(early):
            self.first = tuple(placed)
            return
        self.first = early
        self._late = tuple(device for device in placed if device.node == f"n{late}")

    def begin(self, world: Living) -> None:
        """Have machines be lost from now on, where any ever is."""
        if self._interval_s:
            self._lose_later(world)
        if self._late:
            world.later(self._rng.uniform(0, 100), partial(self._join, world))

    def _join(self, world: Living) -> None:
        world.seen["joined late"] += 1
        world.books.devices.update({device.name: device for device in self._late})
        world.send(world.memory.read())

    def _lose_later(self, world: Living) -> None:
        delay_s = self._rng.expovariate(1 / self._interval_s)
        world.later(delay_s, partial(self._lose, world))

    def _lose(self, world: Living) -> None:
        """Lose one of the machines that are there, and all that runs on it."""
        if world.sent >= EVENTS:
            return
        self._lose_later(world)
        books = world.books
        nodes = sorted({device.node for device in books.present.values()})
        if not nodes:
            return
        node = self._rng.choice(nodes)
        if len(nodes) == 1:
            world.seen["all machines lost"] += 1
        gone = [p for p in books.processes.values() if books.devices[p.devices[0]].node == node]
        survivors = [p for p in gone if p.stage is Stage.READY and p.alive]
        for process in gone:
            self._lose_worker(world, process)
        for name in [name for name, device in books.devices.items() if device.node == node]:
            books.devices[name] = replace(books.devices[name], lost=True)
            books.pressed.discard(name)
        world.send(world.memory.read())
        if self._rng.random() >= FOR_GOOD:
            delay_s = self._rng.expovariate(1 / self._outage_s)
            world.later(delay_s, partial(self._bring_back, world, node, survivors))

    def _lose_worker(self, world: Living, process: Process) -> None:
        """Have a process be gone, its streams break, and a load that an operator wants go on."""
        books = world.books
        world.seen[f"lost while {process.stage.value}"] += 1
        if books.leases.get(process.digest):
            world.seen["lost in use"] += 1
        streams = world.checks.streams_of(process)
        wanted_s = books.wanted.get(process.digest)
        world.checks.note_end(process)
        if wanted_s is not None:
            books.wanted[process.digest] = wanted_s
        books.lost_workers.add(process.number)
        for request in streams:
            world.later(self._rng.uniform(0, 0.5), partial(world.release, request))
        if self._rng.random() < SPOKEN_OF:
            news = self._news_of(process)
            world.later(self._rng.uniform(0, 20), partial(world.send, news))

    def _news_of(self, process: Process) -> ev.Event:
        """Return what the edge says of a worker that it does not know to be lost, or ends."""
        number, name = process.number, process.digest
        return self._rng.choice(
            (
                ev.Ready(number),
                ev.LoadFailed(number, WorkerExited(name, (), 255)),
                ev.WorkerDied(number, WorkerLost(name, cause="its machine is lost")),
                ev.Unloaded(number),
                ev.Shrunk(number),
            )
        )

    def _bring_back(self, world: Living, node: str, survivors: list[Process]) -> None:
        """Have a machine be back, empty or with those of `survivors` that are of use."""
        books, models = world.books, world.state.models
        for name in [name for name, device in books.devices.items() if device.node == node]:
            books.devices[name] = replace(books.devices[name], lost=False)
        empty = world.state.stopping or self._rng.random() < EMPTY
        kept = [p for p in survivors if not empty and isinstance(models[p.digest].phase, Cold)]
        world.seen["back with workers" if kept else "back empty"] += 1
        withheld: Counter[str] = Counter()
        for process in kept:
            withheld.update(dict.fromkeys(process.devices, process.need_bytes))
        world.memory.withheld = dict(withheld)
        world.send(world.memory.read())
        world.memory.withheld = {}
        for process in kept:
            self._offer(world, process)
        world.send(world.memory.read())

    def _offer(self, world: Living, former: Process) -> None:
        """Have the core adopt a worker, and judge whether it stays."""
        name, books = former.digest, world.books
        number = world.state.next_worker
        need_bytes = books.takings.get(name, former.need_bytes)  # what was measured meanwhile
        process = Process(number, name, need_bytes, former.devices, former.choice)
        device = JOINT.join(former.devices)
        load_s = books.worth.load_s.get(name, 1.0)
        facts, model = world.setting.facts_of(name), world.state.models[name]
        spec = LoadSpec(pinned=model.pinned)
        world.checks.adopt(process)
        world.memory.grow(process)
        world.send(
            ev.Adopted(number, name, name, f"/{name}", facts, former.choice, device, spec, load_s)
        )
        world.checks.check_adoption(process)
