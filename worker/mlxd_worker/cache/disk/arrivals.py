"""What one row is given from the disk: blocks as they arrive, put back as soon as they can be.

Invariants:
- A row stands where all its layers can. Where all of them keep every position, that is the end of
  each block that has arrived; where some keep a state, the end of the last, and what arrived before
  is held until then.
- What is put back is copied into the row; snapshots made on the way are closed with it.
- Engine thread only.
"""

from __future__ import annotations

from mlxd_shared.blocks.block_file import Part
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.disk.cutting import states_of
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.disk.tier import Reading
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.kept.snapshot import Snapshot


class Arrivals:
    """One row's blocks on their way. From `PrefixDisk.find` until it is over, or closed."""

    def __init__(self, disk: PrefixDisk, reading: Reading, contents: RowContents) -> None:
        """Take over what was begun for a row of `contents`."""
        self._disk = disk
        self._reading = reading
        self._contents = contents
        self._held: list[Snapshot] = []

    @property
    def nbytes(self) -> int:
        """The bytes of what has arrived and is held."""
        return sum(snapshot.nbytes for snapshot in self._held)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come in time."""
        return self._disk.tier.is_over(self._reading)

    def put_back(self, row: RowId) -> bool:
        """Put the next block that has arrived into the row; return whether it moved on."""
        block = self._disk.tier.take(self._reading)
        if block is None:
            return False
        start = block.depth * self._disk.block_tokens
        stop = start + self._disk.block_tokens
        states = states_of(block, self._disk.shapes)
        book = self._contents.book
        self._held += [book.add_owned(kind, start, stop, layers) for kind, layers in states.items()]
        if self._disk.needs_states and block.part is not Part.STATE:
            return False
        moved = self._contents.restore(row, self._held, stop)
        assert moved, "the blocks were chosen so that every kind can follow"
        self._close_held()
        return True

    def close(self) -> None:
        """Want no more of it, and give back what is held."""
        self._disk.tier.cancel(self._reading)
        self._close_held()

    def _close_held(self) -> None:
        for snapshot in self._held:
            snapshot.close()
        self._held.clear()
