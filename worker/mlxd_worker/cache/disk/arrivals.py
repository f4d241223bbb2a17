"""What one row is given from the disk: blocks as they arrive, put back as soon as they can be.

Invariants:
- A row stands where all its layers can. Where all of them keep every position, that is the end of
  each block that has been put back; where some keep a state, the end of the last. Until then what
  is put lies ahead of where the row stands.
- Entries may be put back in parts, layer by layer, so that no step is longer by a block. A state
  goes in at once: half of one is none.
- What is put back is copied into the row; nothing else of it is held but one block's bytes.
- Engine thread only.
"""

from __future__ import annotations

from collections import defaultdict, deque

from mlxd_shared.blocks.block_file import Block, Part, Tensor
from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.disk.cutting import LayerOfKind, split_by_layer, state_of, states_of
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.disk.tier import Reading
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.kept.stacks import LayerState


class Arrivals:
    """One row's blocks on their way. From `PrefixDisk.find` until it is over, or closed."""

    def __init__(self, disk: PrefixDisk, reading: Reading, contents: RowContents) -> None:
        """Take over what was begun for a row of `contents`."""
        self._disk = disk
        self._reading = reading
        self._contents = contents
        self._left: deque[tuple[LayerOfKind, tuple[Tensor, ...]]] = deque()
        """What of the block that is being put back is still to be put."""
        self._stop = 0
        """Where that block ends."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come in time."""
        return not self._left and self._disk.tier.is_over(self._reading)

    def put_back(self, row: RowId, *, nbytes_max: int | None) -> int:
        """Put back the next block that has arrived, or go on with it; return how many bytes.

        nbytes_max: so much of entries is put at most, or one layer's; None: all of the block's.
        """
        if not self._left:
            block = self._disk.tier.take(self._reading)
            if block is None:
                return 0
            self._stop = (block.depth + 1) * self._disk.block_tokens
            if block.part is Part.STATE:
                self._put_state(row, block)
                return block.nbytes
            self._left.extend(split_by_layer(block, self._disk.shapes).items())
        put_nbytes = self._put_entries(row, nbytes_max)
        if not self._left and not self._disk.needs_states:
            moved = self._contents.restore(row, (), self._stop)
            assert moved, "every layer has been put as far"
        return put_nbytes

    def close(self) -> None:
        """Want no more of it."""
        self._disk.tier.cancel(self._reading)
        self._left.clear()

    def _put_entries(self, row: RowId, nbytes_max: int | None) -> int:
        """Put the next layers' entries ahead of the row; return how many bytes they are.

        nbytes_max: as `put_back`.
        """
        put_nbytes = 0
        states: defaultdict[Kind, dict[int, LayerState]] = defaultdict(dict)
        while self._left:
            (kind, index), tensors = self._left[0]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            if put_nbytes and nbytes_max is not None and put_nbytes + nbytes > nbytes_max:
                break
            states[kind][index] = state_of(tensors)
            self._left.popleft()
            put_nbytes += nbytes
        start = self._stop - self._disk.block_tokens
        for kind, layers in states.items():
            self._contents.put_ahead(row, kind, start, layers)
        return put_nbytes

    def _put_state(self, row: RowId, block: Block) -> None:
        """Bring the row to where a state was written; its entries are there."""
        start, book = self._stop - self._disk.block_tokens, self._contents.book
        states = [
            book.add_owned(kind, start, self._stop, layers)
            for kind, layers in states_of(block, self._disk.shapes).items()
        ]
        moved = self._contents.restore(row, states, self._stop)
        assert moved, "the blocks were chosen so that every kind can follow"
        for state in states:
            state.close()
