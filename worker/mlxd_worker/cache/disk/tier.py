"""The threads that write and read blocks, and what is on its way between them and the engine.

Invariants:
- The engine never waits for the disk: it hands a block over where there is room for its bytes, and
  takes what has arrived. Only where no row has anything else to do does it wait, for `WAIT_S`.
- What waits to be written is at most `in_flight_nbytes`, and so is what was read and not taken; of
  that each reading has `read_ahead_nbytes` at most. Or it is one block. Whoever reads has a thread
  of his own: a read never waits for a write.
- A reading gives its blocks in order, up to the first that is missing. Readings have turns, a block
  each.
- A reading is late by the time in which the thread has read, its own blocks or others'. While what
  was read waits for the engine, nobody waits for the disk.
- Both threads end with `close`, or with the process: what they are at is then not there.
- A thread that fails ends with a line in the log. Nobody waits for what it would have done: a
  reading is over, a write is not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from mlxd_shared.blocks.block_file import Block, BlockId
from mlxd_shared.blocks.policy import READ_ASSUMED_NBYTES_S, Meter, Rates
from mlxd_shared.blocks.store import BlockStore
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.priorities import give_way
from mlxd_worker.cache.disk.pauses import Pauses

IN_FLIGHT_NBYTES: Final = 64 << 20
"""Of blocks of 8 to 32 MiB two at least: one is written while the other is cut."""

READ_AHEAD_NBYTES: Final = 8 << 20
"""One block is put back while another one is read. With more, eight blocks would be read at once
when a row begins, and all steps meanwhile be longer."""

NICENESS: Final = 10
"""How far both threads stay behind: steps divide all cores, and one that is slow holds up all."""

WAIT_S: Final = 0.01

SURVEY_S: Final = 2.0
"""Between two looks at what would go first is worth: for whoever shares room out among models."""

SURVEY_SPARE: Final = 50
"""A look is taken again after as many times what it took, so that it costs 2 % at most."""

SAVING_NEWS: Final = 1.25
"""By what factor a block's saving has to change to be written down again."""

_WRITER, _READER = "prefix-writer", "prefix-reader"
_log = get_logger("prefix disk")


class Reading:
    """Blocks that are wanted of the disk, in order. Its tier's affair but for the deadline."""

    def __init__(self, blocks: Sequence[BlockId], *, nbytes: int, late_s: float) -> None:
        """Ask for `blocks`; nobody waits for them once the tier has read for `late_s` in all.

        nbytes: how large their files are.
        """
        self.nbytes = nbytes
        self.late_s = late_s
        self.waiting = deque(blocks)
        self.arrived: deque[Block] = deque()
        self.is_read = False
        """Whether a thread is at one of the blocks."""
        self.is_wanted = True

    @property
    def ahead_nbytes(self) -> int:
        """What has arrived and was not taken."""
        return sum(block.nbytes for block in self.arrived)


class BlockTier:
    """A store's two threads. Made, used and closed by the engine thread."""

    def __init__(
        self,
        store: BlockStore,
        *,
        in_flight_nbytes: int = IN_FLIGHT_NBYTES,
        read_ahead_nbytes: int = READ_AHEAD_NBYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads; the store is closed with them."""
        self.store = store
        self.clock = clock
        self._in_flight_nbytes = in_flight_nbytes
        self._read_ahead_nbytes = read_ahead_nbytes
        self._change = threading.Condition()
        self._writes: deque[tuple[Block, bool]] = deque()
        """What waits, and whether it is written with pauses."""
        self._write_nbytes = 0
        self._readings: deque[Reading] = deque()
        self._read_nbytes = 0
        self._reading_s = 0.0
        """For how long blocks have been read in all, the one under way apart."""
        self._reading_since_s: float | None = None
        """When that one was begun; None: there is none."""
        self._budget_nbytes: int | None = None
        """What the store may take from now on; None: as before."""
        self._applied: list[Callable[[], None]] = []
        """Whom to tell once it does."""
        self._block_s = 0.0
        self._survey_at_s = clock() + SURVEY_S
        self._closed = False
        self._hurries = 0
        """How many wait for what is written."""
        self._failed: set[str] = set()
        """Names of threads that a fault has ended."""
        self._read_rate, self._write_rate = Meter(), Meter()
        self._threads = tuple(
            threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
            for name, work in ((_WRITER, self._write_all), (_READER, self._read_all))
        )
        for thread in self._threads:
            thread.start()

    def rates(self, token_s: float) -> Rates:
        """Return what was measured, for a machine that takes `token_s` to compute a token."""
        with self._change:
            measured = self._read_rate.nbytes_s or self._write_rate.nbytes_s
        return Rates(measured or READ_ASSUMED_NBYTES_S, token_s)

    @property
    def writes(self) -> bool:
        """Whether what is handed over can still be written."""
        return self.store.writable and not self._closed and _WRITER not in self._failed

    def has_room(self) -> bool:
        """Tell whether a block can be handed over now."""
        with self._change:
            return not self._writes or self._write_nbytes < self._in_flight_nbytes

    def write(self, block: Block, *, gently: bool = False) -> None:
        """Hand a block over, where there is room, to be written.

        gently: with pauses between its tensors, unless somebody waits for it: beside rows on the
        same cores the whole of it at once would be one long step.
        """
        with self._change:
            self._writes.append((block, gently))
            self._write_nbytes += block.nbytes
            self._change.notify_all()

    def is_writing(self, block: BlockId) -> bool:
        """Tell whether a block waits to be written."""
        with self._change:
            return any(waiting.id == block for waiting, _ in self._writes)

    def set_budget(self, nbytes: int, applied: Callable[[], None]) -> None:
        """Have the store keep at most so much; files are removed on the writing thread.

        `applied` is called once that is done, or cannot be, on whatever thread.
        """
        with self._change:
            if not self._closed and _WRITER not in self._failed:
                self._budget_nbytes = nbytes
                self._applied.append(applied)
                self._change.notify_all()
                return
        applied()

    def note_saving(self, block_s: float) -> None:
        """Note how long computing a block takes; the folder says it after the next write."""
        with self._change:
            self._block_s = block_s

    def read(self, blocks: Sequence[BlockId], *, nbytes: int, patience_s: float) -> Reading:
        """Begin to read blocks, `nbytes` in all; `take` gives them, in order.

        What has not arrived once blocks were read for `patience_s` will not come any more.
        """
        with self._change:
            reading = Reading(blocks, nbytes=nbytes, late_s=self._read_for_s() + patience_s)
            self._readings.append(reading)
            self._change.notify_all()
        return reading

    def take(self, reading: Reading) -> Block | None:
        """Return the next block that has arrived; None where there is none yet, or no more."""
        with self._change:
            if not reading.arrived:
                return None
            block = reading.arrived.popleft()
            self._read_nbytes -= block.nbytes
            self._change.notify_all()
            return block

    def is_over(self, reading: Reading) -> bool:
        """Tell whether everything that will come has been taken, or it is too late for the rest."""
        with self._change:
            late = self._read_for_s() > reading.late_s
            if reading.arrived:
                return False
            ended = self._closed or _READER in self._failed
            return late or ended or not (reading.waiting or reading.is_read)

    def cancel(self, reading: Reading) -> None:
        """Let a reading's blocks go; nothing more of it is read."""
        with self._change:
            reading.is_wanted = False
            reading.waiting.clear()
            self._read_nbytes -= sum(block.nbytes for block in reading.arrived)
            reading.arrived.clear()
            self._change.notify_all()

    def wait(self) -> None:
        """Wait, not for long, for anything to change; not while something has arrived."""
        with self._change:
            if not self._read_nbytes:
                self._change.wait(WAIT_S)

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything is written; False where that takes too long, or cannot be."""
        with self.hurry(), self._change:
            self._change.wait_for(
                lambda: not self._writes or _WRITER in self._failed, timeout=timeout_s
            )
            return not self._writes

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Have nothing written with pauses meanwhile: somebody waits for it."""
        with self._change:
            self._hurries += 1
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._hurries -= 1

    def close(self, *, timeout_s: float) -> None:
        """Let both threads end with what they are at, wait so long, close the store; idempotent.

        What still waits to be written is not written: `flush` before. A thread that takes longer
        keeps the store open, until the process ends.
        """
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self._tell_applied()
        if not any(thread.is_alive() for thread in self._threads):
            self.store.close()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        """Work until the end; a fault is told of once, and ends this thread alone."""
        give_way(NICENESS)
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the thread's last words
            # First of all: whoever sees that it failed can read why.
            _log.critical("a thread of the prefix disk failed", thread=name, exc_info=error)
            with self._change:
                self._failed.add(name)
                self._change.notify_all()
            self._tell_applied()

    def _write_all(self) -> None:
        while True:
            with self._change:
                left_s = max(self._survey_at_s - self.clock(), WAIT_S)
                self._change.wait_for(self._has_work, timeout=left_s)
                if self._closed:
                    return
                block, gently = self._writes[0] if self._writes else (None, False)
                budget_nbytes, self._budget_nbytes = self._budget_nbytes, None
                ordered = len(self._applied)
            self._keep_house(budget_nbytes, ordered)
            if block is None:
                continue
            started_s = self.clock()
            pauses = Pauses(clock=self.clock, rest=self._rest)
            written = self.store.write(block, between=pauses if gently else None)
            elapsed_s = self.clock() - started_s - pauses.rested_s
            with self._change:
                self._writes.popleft()
                self._write_nbytes -= block.nbytes
                if written:
                    self._write_rate.note(block.nbytes, elapsed_s)
                self._change.notify_all()
            if written:
                self._describe_saving()

    def _rest(self, seconds: float) -> None:
        """Wait so long, or until somebody waits for this thread."""
        with self._change:
            self._change.wait_for(self._is_awaited, timeout=seconds)

    def _is_awaited(self) -> bool:
        return self._closed or self._hurries > 0 or self._budget_nbytes is not None

    def _has_work(self) -> bool:
        return self._closed or bool(self._writes) or self._budget_nbytes is not None

    def _keep_house(self, budget_nbytes: int | None, ordered: int) -> None:
        """Keep to a new budget, and look at what is there, where either is due.

        ordered: how many orders that is the last of; a later one is not told yet.
        """
        if budget_nbytes is not None:
            self.store.set_budget(budget_nbytes)
            self._tell_applied(ordered)
        began_s = self.clock()
        if began_s >= self._survey_at_s:
            self.store.survey()
            took_s = self.clock() - began_s
            self._survey_at_s = self.clock() + max(SURVEY_S, SURVEY_SPARE * took_s)

    def _tell_applied(self, count: int | None = None) -> None:
        """Tell those who gave the first `count` orders, or all of them."""
        with self._change:
            applied = self._applied[:count]
            del self._applied[:count]
        for tell in applied:
            tell()

    def _describe_saving(self) -> None:
        """Have the folder say what a block saves, where that has changed."""
        with self._change:
            block_s = self._block_s
        about = self.store.about
        if block_s and not 1 / SAVING_NEWS < block_s / about.block_s < SAVING_NEWS:
            self.store.describe(replace(about, block_s=block_s))

    def _read_all(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._next_reading() is not None)
                reading = self._next_reading()
                if self._closed or reading is None:
                    return
                wanted = reading.waiting.popleft()
                reading.is_read = True
                self._readings.remove(reading)
                self._readings.append(reading)
                self._reading_since_s = started_s = self.clock()
            block = self.store.read(wanted)
            with self._change:
                elapsed_s = self.clock() - started_s
                self._reading_s += elapsed_s
                self._reading_since_s = None
                reading.is_read = False
                if block is None:
                    reading.waiting.clear()
                elif reading.is_wanted:
                    reading.arrived.append(block)
                    self._read_nbytes += block.nbytes
                    self._read_rate.note(block.nbytes, elapsed_s)
                self._change.notify_all()

    def _next_reading(self) -> Reading | None:
        """Return whose block may be read now, forgetting who wants no more; locked."""
        if self._read_nbytes >= self._in_flight_nbytes:
            return None
        self._readings = deque(reading for reading in self._readings if reading.waiting)
        ahead = self._read_ahead_nbytes
        return next((each for each in self._readings if each.ahead_nbytes < ahead), None)

    def _read_for_s(self) -> float:
        """Return for how long blocks have been read in all; locked."""
        since_s = self._reading_since_s
        return self._reading_s + (0.0 if since_s is None else self.clock() - since_s)
