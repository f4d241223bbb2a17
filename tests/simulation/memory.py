"""The memory of a simulated machine: what workers hold, what others take, what measuring tells.

Invariants:
- What is told to the core and to the judge is one measurement; neither sees more.
- At rest others hold nothing, and no worker more than it was promised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from mlxd_controller.core import events as ev
from mlxd_models.fit.measured import Figures
from mlxd_models.fit.terms import HEAP_BYTES, PROCESS_BYTES
from mlxd_shared.config import MIB
from tests.simulation.books import Books, Process, Stage
from tests.simulation.settings import Setting

TAKEN_MAX = 0.6
"""The part of the budget that others hold at most."""
TAKEN_GREEDY_MAX = 0.95
"""The same in greedy worlds."""
GREED = 0.2
"""How likely others take memory between two measurements, in greedy worlds."""
GIVEN_BACK = 0.1
"""How likely they give it back."""
WRONG = 0.4
"""How likely a worker grows beyond its promise, or answers wrongly, in greedy worlds."""
OVER_PROMISE = 3.0
"""What a worker holds at most of what it was promised, in greedy worlds."""
PROCESS_PARTS = (-0.5, 0.3)
"""By how much a process is measured to take less, or more, than was reckoned, as a part of that."""

PROMPTS_S_MAX = 23
"""Workers say that their prompts cost less than so many seconds again, each something else."""


class Memory:
    """Draws from the world's generator whenever it is asked."""

    def __init__(self, rng: Random, setting: Setting, books: Books, seen: Counter[str]) -> None:
        self._rng = rng
        self._setting = setting
        self._books = books
        self._seen = seen
        self._taken = dict.fromkeys((device.name for device in setting.devices), 0.0)
        self._resting = False
        self.withheld: dict[str, int] = {}
        """What workers hold of devices that are not this controller's yet."""

    def rest(self) -> None:
        """Have others give back what they took, and workers hold no more than they may."""
        self._resting = True
        for process in self._books.processes.values():
            process.arrays_bytes = min(process.arrays_bytes, process.need_bytes)

    def read(self) -> ev.MemoryRead:
        """Measure; others take some of the budget for a while, at times."""
        arrays: dict[int, int] = {}
        prompts_s: dict[int, float] = {}
        for process in self._books.processes.values():
            process.known = process.stage is Stage.READY and process.alive
            if process.known:
                arrays[process.number] = process.told_bytes = process.arrays_bytes
                prompts_s[process.number] = process.number * 7 % PROMPTS_S_MAX
            process.prompts_s = prompts_s.get(process.number, 0.0)
        for name in self._books.present:
            self._read(name)
        return ev.MemoryRead(tuple(self._books.devices.values()), arrays, prompts_s)

    def _read(self, name: str) -> None:
        """Measure one device."""
        self._taken[name] = self._others(self._taken[name])
        device = self._books.devices[name]
        usable_bytes = int(device.budget_bytes * (1 - self._taken[name]))
        usable_bytes = max(0, usable_bytes - self.withheld.get(name, 0))
        held_bytes = sum(p.arrays_bytes for p in self._books.on(name) if p.known)
        told_bytes = held_bytes if device.kind == "cpu" else 0
        if (usable_bytes, told_bytes) != (device.usable_bytes, device.held_bytes):
            device = replace(device, usable_bytes=usable_bytes, held_bytes=told_bytes)
            self._books.devices[name] = device
        self._books.note_measurement(device, held_bytes)

    def _others(self, taken: float) -> float:
        """Return what part of a device others hold now, who held `taken`."""
        if self._resting:
            return 0.0
        if not self._setting.greedy:
            few = self._rng.random() < self._setting.fault
            return self._rng.uniform(0, TAKEN_MAX) if few else 0.0
        if self._rng.random() < GREED:
            return self._rng.uniform(0, TAKEN_GREEDY_MAX)
        return 0.0 if self._rng.random() < GIVEN_BACK else taken

    def size_of(self, name: str) -> int:
        """Return the size of a model in MiB."""
        return self._setting.sizes[name]

    def grow(self, process: Process) -> None:
        """Have a worker that serves hold more than before; at times more than was promised."""
        over = self._wrong() and not self._resting
        most = OVER_PROMISE if over else 1.0
        grown_bytes = int(process.need_bytes * self._rng.uniform(0.6, most))
        process.arrays_bytes = max(process.arrays_bytes, grown_bytes)
        process.least_bytes = int(process.arrays_bytes * self._rng.uniform(0.3, 1.0))

    def figures(self, process: Process) -> Figures:
        """Measure a worker: its need is as reckoned but for its process, known on a CPU alone.

        Never above the budget of a device that could hold it: there it would be given less context.
        """
        weights = self._setting.sizes[process.digest] * MIB
        if self._books.devices[process.devices[0]].kind != "cpu":
            return Figures(weights=weights, peak=0)
        need_bytes = self._setting.need_of(process.digest)
        budgets = [device.budget_bytes for device in self._setting.devices]
        room_bytes = min(budget for budget in budgets if budget >= need_bytes) - need_bytes
        more_bytes = int(min(room_bytes, PROCESS_BYTES * self._rng.uniform(*PROCESS_PARTS)))
        self._books.takes(process, need_bytes + more_bytes)
        return Figures(weights=weights, peak=0, process=PROCESS_BYTES + HEAP_BYTES + more_bytes)

    def fault(self) -> str:
        """Return what is wrong with the next answer to an order to shrink; "": nothing."""
        if not self._wrong():
            return ""
        fault = self._rng.choice(("lost", "late", "lying"))
        self._seen[f"{fault} answer to shrink"] += 1
        return fault

    def shrink(self, process: Process, target_bytes: int, fault: str) -> ev.Shrunk:
        """Have a worker give back what it can; return its answer."""
        before_bytes = process.arrays_bytes
        after_bytes = min(before_bytes, max(process.least_bytes, target_bytes))
        if fault != "lying":
            process.arrays_bytes = after_bytes
        return ev.Shrunk(process.number, before_bytes, after_bytes)

    def _wrong(self) -> bool:
        return self._setting.greedy and self._rng.random() < WRONG
