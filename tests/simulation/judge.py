"""What is known of one history, and the bounds of each wait; a Violation names what broke."""

from __future__ import annotations

from collections import Counter

from mlxd_controller.core import actions as a
from mlxd_shared import config
from tests.simulation.books import Books, Stage
from tests.simulation.settings import LOAD_S_MAX, STALL_S, STOP_S_MAX

READY_TO_ACT_S = 2 * (STALL_S + STOP_S_MAX)
"""How long the next in line may wait, while room can be made, for victims and another's load."""


class Violation(AssertionError):
    """Something that must always hold did not."""


class Judge:
    """What is known of one history, and how long anybody waits in it."""

    def __init__(self, books: Books, seen: Counter[str]) -> None:
        self.books = books
        self.seen = seen
        self.now_s = 0.0
        self.stopped: list[a.StopWorker] = []
        self.no_room: list[str] = []
        self.backing_off: set[str] = set()
        self._held: dict[str, float] = {}
        """When somebody was first seen waiting for a model that is ready, of the last hold."""
        self.could_start: dict[str, tuple[float, int]] = {}
        """Since when the naive model has said that room can be made for a model in line."""

    def hold(self, condition: bool, rule: str) -> None:
        """Raise Violation unless `condition`."""
        if not condition:
            raise Violation(f"{rule} (at {self.now_s:.3f} s)")

    def check_in_time(self, line: list[str]) -> None:
        """Hold the wait of each model in line while room can be made beside all before it."""
        left, needs, nbytes = self.books.count_left(self.now_s), self.books.needs, 0
        for place, digest in enumerate(line):
            nbytes += needs[digest]
            if not self.books.can_make_room(digest, left, nbytes, place + 1):
                self.could_start.pop(digest, None)
                self.seen["waits for models in use"] += 1
                if not self.books.can_make_room(digest, left, needs[digest], 1):
                    self._in_vain(digest)
                continue
            # Those who were before it then have had their loads since, one after another.
            since_s, before = self.could_start.setdefault(digest, (self.now_s, place))
            waited_s = self.now_s - since_s
            bound_s = (before + 1) * READY_TO_ACT_S
            self.hold(waited_s <= bound_s, f"{digest} waits though room can be made")
        for digest in self.no_room:
            with_it = {*line, digest}
            nbytes = sum(needs[other] for other in with_it)
            possible = self.books.can_make_room(digest, left, nbytes, len(with_it))
            self.hold(not possible, f"{digest} is refused though room can be made")
        for digest in [d for d in self.could_start if d not in line]:
            del self.could_start[digest]

    def _in_vain(self, digest: str) -> None:
        """Hold everybody's wait for a model that no eviction makes room for to its bound."""
        if digest in self.backing_off or self.books.is_closed(digest):
            return
        waits = [r.since_s for r in self.books.waiting.values() if r.digest == digest]
        waited_s = self.now_s - min(waits, default=self.now_s)
        self.hold(waited_s <= config.ROOM_WAIT_MAX_S + 1e-6, "no vain wait beyond its bound")

    def check_bounds(self) -> None:
        """Hold every wait, with or without room, to a bound that depends on the models alone."""
        oldest = next(iter(self.books.waiting.values()), None)
        if oldest is None:
            return
        bound_s = len(self.books.needs) * (STALL_S + LOAD_S_MAX + STOP_S_MAX)
        self.hold(self.now_s - oldest.since_s <= bound_s, "no wait is without a bound")

    def check_holds(self) -> None:
        """Hold to its bounds how long a ready model takes nobody, for the sake of another."""
        books = self.books
        ready = {
            process.digest
            for process in books.processes.values()
            if process.stage is Stage.READY and process.digest not in books.draining
        }
        held = ready & {request.digest for request in books.waiting.values() if request.lease}
        if held:
            self.seen["held for another"] += 1
            self.hold(bool(books.list_queued()), "nobody is held for nobody")
        for digest in held:
            since_s = self._held.setdefault(digest, self.now_s)
            # Seen held for the first time at `since_s`: it may have been for HOLD_MAX_S before.
            in_time = self.now_s <= since_s + config.HOLD_MAX_S + 1e-6
            if not in_time:
                again_s = since_s + config.HOLD_PAUSE_S
                self.hold(self.now_s >= again_s - 1e-6, "a ready model takes nobody for long")
                self._held[digest] = self.now_s
