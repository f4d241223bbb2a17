"""The blocks of one form on disk: at most a budget, the least worth going first.

Invariants:
- What is there is known by names and sizes alone; a file's content is believed when it is read and
  its checksum is right. One that is torn, foreign, too large or of another version is removed with
  one line in the log, and is a miss.
- No fault of the disk reaches a caller: a block that cannot be written is not there, one that
  cannot be read is a miss. A full disk ends the growth, with one line; one that cannot be written
  to ends the writing, with one line.
- Room is made before bytes are spent.
- Either all files are encrypted, with the folder's key, or none is. One that is not as the others
  are is removed when the store is opened.
- Any thread: what is known is behind a lock, which no reading or writing of files holds.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.block_file import (
    Block,
    BlockId,
    BlockRefused,
    Fault,
    decode,
    encode,
    file_nbytes,
)
from mlxd_shared.blocks.folder import BlockFolder, FolderRefused
from mlxd_shared.blocks.index import BlockIndex, Entry
from mlxd_shared.blocks.sealing import SEAL_NBYTES
from mlxd_shared.ops.logs import get_logger

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_log = get_logger("prefix disk")


@dataclass(slots=True)
class StoreCounts:
    """What a store has done since it was opened."""

    written: int = 0
    written_nbytes: int = 0
    read: int = 0
    read_nbytes: int = 0
    evicted: int = 0
    refused: dict[Fault, int] = field(default_factory=dict)
    """Files that were removed because they were no blocks."""


class BlockStore:
    """One form's blocks. Open until `close`."""

    def __init__(
        self,
        folder: BlockFolder,
        form_name: bytes,
        *,
        budget_nbytes: int | None,
        file_nbytes_max: int,
        check: Callable[[Block], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take a folder over, and what it holds; `clock` gives the time of day in seconds.

        budget_nbytes: None lets what is there stay, and nothing come, until `set_budget`.
        file_nbytes_max: the most that one block's file can have; a larger one is none. check:
        raises BlockRefused where a sound block is none of this model's.

        Raises:
            FolderRefused: it cannot be listed, and is closed.
        """
        self.form_name = form_name
        self.counts = StoreCounts()
        self.about = folder.about()
        self.least_worth = math.inf
        """Of what would go first, as of the last `survey`; see `index.worth`."""
        self._folder = folder
        self.encrypted = folder.key is not None
        self.name_key = b"" if folder.key is None else folder.key.name_key
        """What names of blocks are made under."""
        self._full_nbytes: int | None = None
        """What there was when the disk was full; None: it was not since the last budget."""
        self._said_full = False
        self._file_nbytes_max = file_nbytes_max
        self._check = check
        self._clock = clock
        self._lock = threading.Lock()
        self._index = BlockIndex()
        self._writable = True
        try:
            unlike = [entry for entry in folder.list_blocks() if not self._take_over(entry)]
        except OSError as error:
            folder.close()
            raise FolderRefused(f"{folder.path}: {error.strerror or error}") from error
        if unlike:
            problem = "removed blocks in the clear" if self.encrypted else "removed locked blocks"
            _log.warning(problem, count=len(unlike), folder=str(folder.path))
        self._share_nbytes = self.nbytes if budget_nbytes is None else budget_nbytes
        self._make_room(0)
        self.survey()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._index.nbytes

    @property
    def budget_nbytes(self) -> int:
        """What they may take; a full disk lowers it."""
        if self._full_nbytes is None:
            return self._share_nbytes
        return min(self._share_nbytes, self._full_nbytes)

    @property
    def writable(self) -> bool:
        """Whether writing has a point."""
        return self._writable and self.budget_nbytes > 0

    def set_budget(self, nbytes: int) -> None:
        """Keep at most so much from now on; what is beyond goes at once.

        A disk that was full is tried again: whoever gives a budget may know more of it.
        """
        self._share_nbytes = nbytes
        self._full_nbytes = None
        self._make_room(0)
        self.survey()

    def survey(self) -> None:
        """Reckon anew what would go first is worth: it looks at every file that is known."""
        with self._lock:
            self.least_worth = self._index.least_worth(self._clock())

    def describe(self, about: About) -> None:
        """Have the folder say whose blocks it has, where it said something else."""
        if about != self.about:
            self.about = about
            self._folder.describe(about)

    def __len__(self) -> int:
        return len(self._index)

    def nbytes_of(self, block: BlockId) -> int | None:
        """Return how large a block's file is; None where there is none."""
        with self._lock:
            entry = self._index.get(block)
        return None if entry is None else entry.nbytes

    def use(self, blocks: Iterable[BlockId]) -> None:
        """Note a request that used these blocks; those that are not there are left out."""
        now_s = self._clock()
        with self._lock:
            for block in blocks:
                self._index.use(block, now_s)

    def write(self, block: Block, *, between: Callable[[], None] | None = None) -> bool:
        """Keep a block, if it can be kept; return whether it is there afterwards.

        between: what is called between its parts: the header, and each tensor.
        """
        if self.nbytes_of(block.id) is not None:
            return True
        assert block.name_key == self.name_key, "its name would be another one's"
        nbytes = file_nbytes(block) + (SEAL_NBYTES if self.encrypted else 0)
        if not self.writable or nbytes > self.budget_nbytes:
            return False
        entry = Entry(block.id, block.depth, nbytes, self._clock(), sealed=self.encrypted)
        self._make_room(nbytes)
        try:
            self._folder.write(entry, _one_by_one(encode(block), between))
        except OSError as error:
            self._note_trouble(error)
            return False
        with self._lock:
            self._index.add(entry)
        self.counts.written += 1
        self.counts.written_nbytes += nbytes
        return True

    def read(self, block: BlockId) -> Block | None:
        """Return a block, whose tensors own what was read; None where there is no sound one."""
        with self._lock:
            entry = self._index.get(block)
        if entry is None:
            return None
        try:
            sound = self._read_sound(entry)
        except FileNotFoundError:
            self._forget(entry)
            return None
        except OSError as error:
            _log.warning("cannot read a block", reason=error.strerror, block=block.name.hex())
            self._forget(entry)
            return None
        except BlockRefused as refused:
            _log.warning("removed a block", reason=str(refused), block=block.name.hex())
            self.counts.refused[refused.fault] = self.counts.refused.get(refused.fault, 0) + 1
            self._folder.remove(entry)
            self._forget(entry)
            return None
        self._folder.touch(replace(entry, last_s=self._clock()))
        self.counts.read += 1
        self.counts.read_nbytes += entry.nbytes
        return sound

    def close(self) -> None:
        """Let another process have the folder; files' times say when they were used last."""
        with self._lock:
            entries = [entry for entry in self._index if entry.uses > 1]
        for entry in entries:
            self._folder.touch(entry)
        self._folder.close()

    def _read_sound(self, entry: Entry) -> Block:
        """Return what a file holds; raises OSError, or BlockRefused."""
        raw = self._folder.read(entry, nbytes_max=self._file_nbytes_max)
        digits = self.form_name.hex()
        block = decode(raw, form_digits=digits, wanted=entry.id, name_key=self.name_key)
        if block.depth != entry.depth:
            raise BlockRefused(Fault.FOREIGN, f"at depth {block.depth}, not {entry.depth}")
        self._check(block)
        return block

    def _take_over(self, entry: Entry) -> bool:
        """Know a file that was left here; False, and it goes, where it is not as those here are.

        Of two that say they are one block, the first stays.
        """
        if entry.sealed != self.encrypted:
            self._folder.remove(entry)
            return False
        if self._index.get(entry.id) is not None:
            self._folder.remove(entry)
            return True
        # A file from the future, after a clock was put back, would count as just used till then.
        self._index.add(replace(entry, last_s=min(entry.last_s, self._clock())))
        return True

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            self._index.drop(entry.id)

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            victims = self._index.choose_victims(
                nbytes, budget_nbytes=self.budget_nbytes, now_s=self._clock()
            )
            for entry in victims:
                self._index.drop(entry.id)
        for entry in victims:
            self._folder.remove(entry)
        self.counts.evicted += len(victims)

    def _note_trouble(self, error: OSError) -> None:
        """Learn that a file could not be written."""
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            # What is there may stay, and be replaced; the disk has no room for more.
            if not self._said_full:
                _log.warning("the disk is full", reason=reason, kept_nbytes=self.nbytes)
                self._said_full = True
            self._full_nbytes = min(self.budget_nbytes, self.nbytes)
            return
        if self._writable:
            _log.warning("blocks are not written any more", reason=reason)
            self._writable = False


def _one_by_one(
    pieces: Iterable[bytes | memoryview], between: Callable[[], None] | None
) -> Iterator[bytes | memoryview]:
    """Yield pieces; between two of them do what is to be done there."""
    for number, piece in enumerate(pieces):
        if number and between is not None:
            between()
        yield piece
