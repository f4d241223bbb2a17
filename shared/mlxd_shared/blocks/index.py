"""What a folder of blocks holds, and which of it goes first. Pure.

Invariants:
- The worth of a file is the rate of its reuse times the tokens that it saves over its bytes, as for
  snapshots in memory (decision 0015); all save a block. The rate follows from uses, the time since
  the last one, and the pause before that: what came back after a pause may do so after another one.
  The least goes first, of equals the deepest. A use of a block is one of all blocks before it, so
  that what others stand on goes after them.
- Uses and pauses of blocks that are not there, because they went or are in memory alone, are
  remembered: of as many as there are files, and `PAST_MIN` at least, those used last.
- `nbytes` is the sum of the files' sizes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlxd_shared.blocks.block_file import BlockId, Part

USES_WEIGHT = 0.25
"""What e times the uses adds to the rate of reuse."""

PAUSE_WEIGHT = 0.6
"""What it adds that the last pause was as long as a file has been idle by now; less in proportion.
Anything from 0.3 to 1 hits about the same."""

YOUNG_S = 1.0
"""An idle time of less counts as this."""

SPARE_FRACTION = 1 / 64
"""How much more than is needed goes at once, of the budget: so that few rankings are made."""

PAST_MIN = 1024
"""A few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file."""

    id: BlockId
    depth: int
    nbytes: int
    """The whole file's."""
    last_s: float
    """When it was used last, or written."""
    uses: int = 1
    """Since this process knows it."""
    pause_s: float = 0.0
    """Between the last two of them."""
    sealed: bool = False
    """Whether it is encrypted: its name says so."""

    def after_use(self, now_s: float) -> Entry:
        """Return it as it is after one more use; a clock that was put back makes nothing older."""
        last_s = max(self.last_s, now_s)
        pause_s = last_s - self.last_s
        if pause_s < YOUNG_S:  # of several requests at a time, none says when the next ones come
            pause_s = self.pause_s
        return replace(self, last_s=last_s, uses=self.uses + 1, pause_s=pause_s)


def worth(entry: Entry, now_s: float) -> float:
    """Return what keeping a byte of a file is worth, but for a factor common to all."""
    idle_s = max(now_s - entry.last_s, YOUNG_S)
    again = PAUSE_WEIGHT * min(entry.pause_s / idle_s, 1.0)
    return (1 + USES_WEIGHT * math.log(entry.uses) + again) / idle_s / max(entry.nbytes, 1)


class BlockIndex:
    """The files by their names. One owner."""

    def __init__(self) -> None:
        self._entries: dict[BlockId, Entry] = {}
        self._past: dict[BlockId, Entry] = {}
        """What is known of blocks that are not there, the one used last at the end; no bytes."""
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, block: BlockId) -> Entry | None:
        """Return what is known of a file; None where there is none."""
        return self._entries.get(block)

    def add(self, entry: Entry) -> None:
        """Note a file, with what is known of its block; one of its name before is replaced."""
        self.drop(entry.id)
        past = self._past.pop(entry.id, None)
        if past is not None:
            uses = max(past.uses, entry.uses)
            entry = replace(entry, uses=uses, pause_s=past.pause_s)
        self._entries[entry.id] = entry
        self._nbytes += entry.nbytes

    def drop(self, block: BlockId) -> None:
        """Forget a file, if it is known, but for how it was used."""
        entry = self._entries.pop(block, None)
        if entry is not None:
            self._nbytes -= entry.nbytes
            self._remember(entry)

    def use(self, block: BlockId, now_s: float) -> None:
        """Note a use of a block, whether it has a file or not."""
        entry = self._entries.get(block)
        if entry is not None:
            self._entries[block] = entry.after_use(now_s)
            return
        past = self._past.get(block)
        if past is not None:
            self._remember(past.after_use(now_s))
        elif block.part is Part.ENTRIES:  # a state is never made at most of the ends
            self._remember(Entry(block, 0, 0, now_s, uses=2))

    def _remember(self, entry: Entry) -> None:
        self._past.pop(entry.id, None)
        self._past[entry.id] = entry
        while len(self._past) > max(PAST_MIN, len(self._entries)):
            del self._past[next(iter(self._past))]

    def least_worth(self, now_s: float) -> float:
        """Return the worth of what would go first; math.inf where there is nothing."""
        return min((worth(entry, now_s) for entry in self), default=math.inf)

    def choose_victims(self, nbytes: int, *, budget_nbytes: int, now_s: float) -> list[Entry]:
        """Return what has to go, first the least worth, so that `nbytes` more are in the budget.

        Where anything has to, some more does; all, where the budget is less than `nbytes`.
        """
        if self._nbytes + nbytes <= budget_nbytes:
            return []
        excess = self._nbytes + nbytes - int(budget_nbytes * (1 - SPARE_FRACTION))
        heap = [(worth(entry, now_s), -entry.depth, order, entry)
                for order, entry in enumerate(self)]  # fmt: skip
        heapq.heapify(heap)
        victims: list[Entry] = []
        while heap and excess > 0:
            victims.append(heapq.heappop(heap)[3])
            excess -= victims[-1].nbytes
        return victims
