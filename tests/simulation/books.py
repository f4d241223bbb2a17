"""What a simulated edge knows by itself, and a naive model of memory that judges the core by it.

Invariants:
- Nothing here reads the core's state: a fault of the core cannot hide in its own books.
- A process holds its memory from its start to its end, whatever the core believes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from mlxd_controller.core.fit import Device
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
    stage: Stage = Stage.LOADING
    ready_at_s: float = 0.0
    alive: bool = True
    arrays_bytes: int = 0
    """What it holds in truth, which may be more than it was promised."""
    least_bytes: int = 0
    """What of that no shrinking gives back."""
    told_at_s: float = -math.inf
    """When it was last told to shrink."""
    told: bool = False
    """Whether it was told to since the hard mark was passed the last time."""
    shrinking: bool = False
    known: bool = False
    """Whether the last measurement told the core what it holds."""


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


@dataclass(slots=True)
class Books:
    """Processes, requests and pins, kept from events sent and actions received alone."""

    needs: dict[str, int]
    """Bytes that a model cannot do without, by digest."""
    device: Device
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
    excess_bytes: int = 0
    """What workers were last measured to hold above the soft mark."""
    pressed: bool = False
    """Whether the hard mark was passed, and the soft one not since."""

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

    def held_bytes(self) -> int:
        """What living processes may hold in truth."""
        return sum(p.need_bytes for p in self.processes.values() if p.alive)

    def evictable(self, process: Process, now_s: float) -> bool:
        """Return whether the controller may take this one away for another."""
        return (
            process.stage is Stage.READY
            and not self.leases.get(process.digest)
            and process.digest not in self.pinned
            and process.digest not in self.draining
            and now_s >= process.ready_at_s + self.age_min_s
        )

    def measured(self, usable_bytes: int, held_bytes: int) -> None:
        """Take note of a measurement that the core is about to hear of."""
        self.excess_bytes = held_bytes - usable_bytes
        if self.excess_bytes <= 0:
            self.pressed = False
        elif not self.pressed and self.excess_bytes > HARD_MARK * self.device.budget_bytes:
            self.pressed = True
            for process in self.processes.values():
                process.told = False

    def giving_back(self, now_s: float) -> bool:
        """Return whether memory is about to come free: somebody leaves, or was told to shrink."""
        return any(
            process.stage is Stage.STOPPING
            or (process.shrinking and now_s < process.told_at_s + config.SHRINK_TIMEOUT_S)
            for process in self.processes.values()
        )

    def to_be_told(self, now_s: float) -> list[Process]:
        """Return the ready processes that have not been told to shrink of late."""
        return [
            process
            for process in self.processes.values()
            if process.stage is Stage.READY
            and process.digest not in self.draining
            and process.known
            and (not process.told or now_s >= process.told_at_s + config.SHRINK_PAUSE_S)
        ]

    def queued(self) -> list[str]:
        """Return the models that wait for memory, the one that waits longest first."""
        since = dict(self.wanted)
        for request in self.waiting.values():
            since[request.digest] = min(since.get(request.digest, request.since_s), request.since_s)
        busy = {process.digest for process in self.processes.values()}
        return sorted((d for d in since if d not in busy), key=lambda d: (since[d], d))

    def can_make_room(self, digest: str, before: list[str], now_s: float) -> bool:
        """Return whether `digest` would fit, beside all of `before`, once all that may leave left.

        The naive model: add up what must stay, and compare.
        """
        staying = [
            process
            for process in self.processes.values()
            if process.stage is not Stage.STOPPING
            and process.digest not in self.draining
            and not self.evictable(process, now_s)
        ]
        nbytes = sum(process.need_bytes for process in staying) + self.needs[digest]
        nbytes += sum(self.needs[other] for other in before)
        slots = len(staying) + len(before) + 1
        within_slots = self.max_loaded is None or slots <= self.max_loaded
        return nbytes <= self.device.usable_bytes and within_slots
