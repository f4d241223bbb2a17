"""What a folder of blocks holds, and which of it goes first. Pure.

Invariants:
- The worth of a file is the rate of its reuse, by uses and the time since the last one, times the
  tokens that it saves over its bytes, as for snapshots in memory (decision 0015); all save a block.
  The least goes first, of equals the deepest. A use of a block is one of all blocks before it, so
  that what others stand on goes after them.
- `nbytes` is the sum of the files' sizes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlxd_shared.blocks.block_file import BlockId

USES_WEIGHT = 0.25
"""What e times the uses adds to the rate of reuse."""

YOUNG_S = 1.0
"""An idle time of less counts as this."""

SPARE_FRACTION = 1 / 16
"""How much more than is needed goes at once, of the budget: so that few rankings are made."""


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


def worth(entry: Entry, now_s: float) -> float:
    """Return what keeping a byte of a file is worth, but for a factor common to all."""
    idle_s = max(now_s - entry.last_s, YOUNG_S)
    return (1 + USES_WEIGHT * math.log(entry.uses)) / idle_s / max(entry.nbytes, 1)


class BlockIndex:
    """The files by their names. One owner."""

    def __init__(self) -> None:
        self._entries: dict[BlockId, Entry] = {}
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
        """Note a file; one of its name before is replaced."""
        self.drop(entry.id)
        self._entries[entry.id] = entry
        self._nbytes += entry.nbytes

    def drop(self, block: BlockId) -> None:
        """Forget a file, if it is known."""
        entry = self._entries.pop(block, None)
        if entry is not None:
            self._nbytes -= entry.nbytes

    def use(self, block: BlockId, now_s: float) -> None:
        """Note a use of a file, if it is known."""
        entry = self._entries.get(block)
        if entry is not None:
            last_s = max(entry.last_s, now_s)
            self._entries[block] = replace(entry, last_s=last_s, uses=entry.uses + 1)

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
