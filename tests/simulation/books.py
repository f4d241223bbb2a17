"""What a simulated edge knows by itself, and a naive model of memory that judges the core by it.

Invariants:
- Nothing here reads the core's state: a fault of the core cannot hide in its own books.
- A process holds its memory from its start to its end, whatever the core believes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from itertools import combinations

from mlxd_models.fit.plan import Choice, Device
from mlxd_shared import config

HARD_MARK = 0.05
"""The part of the budget that workers may hold above the soft mark, as the design has it."""


class Stage(enum.Enum):
    """What the controller has been told of a process, or has told it."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(slots=True)
class Process:
    """One worker process that has been started and whose end has not been reported yet."""

    number: int
    digest: str
    need_bytes: int
    """On each of its devices, one for each rank."""
    devices: tuple[str, ...]
    choice: Choice
    began_at_s: float = 0.0
    stage: Stage = Stage.LOADING
    ready_at_s: float = 0.0
    alive: bool = True
    arrays_bytes: int = 0
    """What it holds in truth, which may be more than it was promised."""
    least_bytes: int = 0
    """What of that no shrinking gives back."""
    told_at_s: float = -math.inf
    """When it was last told to shrink."""
    is_reported: bool = False
    """Whether it was told to since the hard mark was passed the last time."""
    shrinking: bool = False
    prompts_s: float = 0.0
    """What its prompts would cost again after a reload, as the last measurement told the core."""
    known: bool = False
    """Whether the last measurement told the core what it holds."""
    told_bytes: int = 0
    """What it told the core of that."""


@dataclass(slots=True)
class Request:
    """One ticket: waits until it is answered, is over when it is released."""

    ticket: str
    digest: str
    since_s: float
    lease: bool
    unload: bool = False
    worker: int = 0
    answered: bool = False
    refused: bool = False
    aborted: bool = False
    released: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """What each device would have left, bytes and places, and all of them together: slots."""

    rooms: dict[str, tuple[int, float]]
    slots: float

    def can_make_room(self, homes: list[tuple[str, ...]], nbytes: int, count: int) -> bool:
        """Return whether so many models of so many bytes in all would fit, on one of these homes.

        Of a home of several devices: on each.
        """
        fitting = {
            name
            for name, (free, places) in self.rooms.items()
            if nbytes <= free and count <= places
        }
        return any(fitting.issuperset(home) for home in homes) and count <= self.slots


@dataclass(slots=True)
class Worth:
    """What the absence of each model costs: seconds of its last load by its share of all uses."""

    load_s: dict[str, float] = field(default_factory=dict)
    uses: dict[str, list[float]] = field(default_factory=dict)
    """When each model was asked for."""

    def of(self, digest: str, *, prompts_s: float) -> float:
        """Return a model's worth; each use counts half after a while.

        prompts_s: what its prompts cost again beside the load.
        """
        times = [at_s for all_ in self.uses.values() for at_s in all_]
        last_s = max(times, default=0.0)

        def decay(moments: list[float]) -> float:
            return math.fsum(0.5 ** ((last_s - at_s) / config.USES_HALF_LIFE_S) for at_s in moments)

        share = (decay(self.uses.get(digest, [])) + config.USES_MIN) / (
            decay(times) + config.USES_MIN
        )
        return (self.load_s.get(digest, 0.0) + prompts_s) * min(1.0, share)


@dataclass(slots=True)
class Books:
    """Processes, requests and pins, kept from events sent and actions received alone."""

    needs: dict[str, int]
    """Bytes that a model, or each of its ranks, cannot do without, by digest."""
    ranks: dict[str, int]
    """How many devices a model takes, by digest."""
    devices: dict[str, Device]
    max_loaded: int | None
    age_min_s: float = 0.0
    processes: dict[int, Process] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    """Those that are not released."""
    waiting: dict[str, Request] = field(default_factory=dict)
    """Those for a model that are not answered, oldest first."""
    pinned: set[str] = field(default_factory=set)
    pins_to_come: dict[str, bool] = field(default_factory=dict)
    """What loads that have not begun ask for; void if they are refused."""
    draining: set[str] = field(default_factory=set)
    wanted: dict[str, float] = field(default_factory=dict)
    """Loads of operators, which go on though nobody waits."""
    leases: dict[str, int] = field(default_factory=dict)
    takings: dict[str, int] = field(default_factory=dict)
    """What models were measured to take."""
    excess: dict[str, int] = field(default_factory=dict)
    """What workers were last measured to hold above the soft mark of each device."""
    pressed: set[str] = field(default_factory=set)
    """Where the hard mark was passed, and the soft one not since."""
    worth: Worth = field(default_factory=Worth)
    lost_workers: set[int] = field(default_factory=set)
    """Those whose machine was lost, as the core has heard."""

    def worth_of(self, process: Process) -> float:
        """Return what a process's absence costs."""
        return self.worth.of(process.digest, prompts_s=process.prompts_s)

    def on(self, device: str) -> list[Process]:
        """Return the processes that live on a device."""
        return [process for process in self.processes.values() if device in process.devices]

    @property
    def present(self) -> dict[str, Device]:
        """The devices that are not lost."""
        return {name: device for name, device in self.devices.items() if not device.lost}

    def homes_of(self, digest: str) -> list[tuple[str, ...]]:
        """Return the devices, or those of one machine together, that could hold a model alone."""
        able = [d for d in self.devices.values() if self.needs[digest] <= d.budget_bytes]
        return [
            tuple(device.name for device in home)
            for home in combinations(able, self.ranks[digest])
            if len({device.node for device in home}) == 1
        ]

    def can_hold(self, digest: str) -> bool:
        """Return whether any device could hold a model, were it alone, lost or not."""
        return bool(self.homes_of(digest))

    def can_reach(self, digest: str) -> bool:
        """Return whether any device that is not lost could hold a model, were it alone."""
        return any(self.present.keys() >= {*home} for home in self.homes_of(digest))

    def is_closed(self, digest: str) -> bool:
        """Return whether a device that could hold a model is above its marks."""
        return any(not self.pressed.isdisjoint(home) for home in self.homes_of(digest))

    def process_of(self, digest: str) -> Process | None:
        """Return the process that serves, or will serve, a model."""
        return next((p for p in self.processes.values() if p.digest == digest), None)

    def takes(self, process: Process, need_bytes: int) -> None:
        """Take note of what a model is measured to take: the most that was ever measured of it."""
        most = max(need_bytes, self.takings.get(process.digest, 0))
        self.takings[process.digest] = self.needs[process.digest] = process.need_bytes = most

    def pin(self, digest: str) -> None:
        """Put into force what the load that begins, or has begun, asked for."""
        if digest in self.pins_to_come:
            change = self.pinned.add if self.pins_to_come.pop(digest) else self.pinned.discard
            change(digest)

    def gives_up_load(self, request: Request) -> bool:
        """Return whether the refusal of `request` is that of the last load of a cold model."""
        if self.process_of(request.digest) is not None:
            return False
        same = [r for r in self.waiting.values() if r.digest == request.digest]
        return not any(not r.lease for r in same) if not request.lease else not same

    def held_bytes(self, device: str) -> int:
        """What living processes on a device may hold in truth."""
        return sum(p.need_bytes for p in self.on(device) if p.alive)

    def evictable(self, process: Process, now_s: float) -> bool:
        """Return whether the controller may take this one away for another."""
        return (
            process.stage is Stage.READY
            and not self.leases.get(process.digest)
            and process.digest not in self.pinned
            and process.digest not in self.draining
            and now_s >= process.ready_at_s + self.age_min_s
        )

    def note_measurement(self, device: Device, held_bytes: int) -> None:
        """Take note of a measurement that the core is about to hear of."""
        name, excess_bytes = device.name, held_bytes - device.usable_bytes
        self.excess[name] = excess_bytes
        if excess_bytes <= 0:
            self.pressed.discard(name)
        elif name not in self.pressed and excess_bytes > HARD_MARK * device.budget_bytes:
            self.pressed.add(name)
            for process in self.on(name):
                process.is_reported = False

    def giving_back(self, device: str, now_s: float) -> bool:
        """Return whether memory is about to come free: somebody leaves, or was told to shrink."""
        return any(
            process.stage is Stage.STOPPING
            or (process.shrinking and now_s < process.told_at_s + config.SHRINK_TIMEOUT_S)
            for process in self.on(device)
        )

    def to_be_told(self, device: str, now_s: float) -> list[Process]:
        """Return the ready processes that have not been told to shrink of late."""
        return [
            process
            for process in self.on(device)
            if process.stage is Stage.READY
            and process.digest not in self.draining
            and process.known
            and (not process.is_reported or now_s >= process.told_at_s + config.SHRINK_PAUSE_S)
        ]

    def list_queued(self) -> list[str]:
        """Return the models that wait for memory, the one that waits longest first."""
        since = dict(self.wanted)
        for request in self.waiting.values():
            since[request.digest] = min(since.get(request.digest, request.since_s), request.since_s)
        busy = {process.digest for process in self.processes.values()}
        return sorted((d for d in since if d not in busy), key=lambda d: (since[d], d))

    def count_left(self, now_s: float, *, closed_too: bool = False) -> Left:
        """Return what there would be once all that may leave has left.

        The naive model: add up what must stay, device by device, those above their marks left out
        but with `closed_too`.
        """
        staying = [p for p in self.processes.values() if not self.may_leave(p, now_s)]
        rooms = {}
        for name, device in self.present.items():
            if closed_too or name not in self.pressed:
                there = [process for process in staying if name in process.devices]
                taken_bytes = sum(process.need_bytes for process in there)
                rooms[name] = device.usable_bytes - taken_bytes, places_of(device) - len(there)
        slots = math.inf if self.max_loaded is None else self.max_loaded - len(staying)
        return Left(rooms, slots)

    def can_make_room(self, digest: str, left: Left, nbytes: int, count: int) -> bool:
        """Return whether there is room for a model and for others, of so many bytes in all."""
        return left.can_make_room(self.homes_of(digest), nbytes, count)

    def may_leave(self, process: Process, now_s: float) -> bool:
        """Return whether a process is on its way out, or may be sent there."""
        going = process.stage is Stage.STOPPING or process.digest in self.draining
        return going or self.evictable(process, now_s)

    def cheapest_eviction(self, digest: str, offered: list[Process]) -> float | None:
        """Return what the cheapest set of `offered` costs that makes room for `digest`.

        The naive way: every set, on every device below its marks. None where no set is enough.
        """
        costs = (
            sum(self.worth_of(process) for process in chosen)
            for size in range(len(offered) + 1)
            for chosen in combinations(offered, size)
            if self._enough(digest, frozenset(process.number for process in chosen))
        )
        return min(costs, default=None)

    def _enough(self, digest: str, gone: frozenset[int]) -> bool:
        left = [process for process in self.processes.values() if process.number not in gone]
        if self.max_loaded is not None and len(left) >= self.max_loaded:
            return False
        fitting = set()
        for name, device in self.present.items():
            there = [process for process in left if name in process.devices]
            need_bytes = sum(process.need_bytes for process in there) + self.needs[digest]
            fits = need_bytes <= device.usable_bytes and len(there) < places_of(device)
            if fits and name not in self.pressed:
                fitting.add(name)
        return any(fitting.issuperset(home) for home in self.homes_of(digest))


def places_of(device: Device) -> float:
    """Return how many models a device can hold, whatever they take."""
    return math.inf if device.models_max is None else device.models_max
