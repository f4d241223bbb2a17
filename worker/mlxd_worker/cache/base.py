"""The seam between rows and layers: who sits where, and what a layer's cache must be able to do.

Invariants:
- A row starts at position 0, never padded. All layers of a row stand at the same offset.
- A row sits in one slot of one arena; the rows of an arena hold at most its capacity of tokens.
- An arena's slots are fixed when it is opened; it is closed with its last row.
- One `RowTable` decides for all layers; a layer's cache only carries out `open`, `close`, `move`,
  `clear` and `free`. How much memory a capacity takes is the layer's own affair: a window or a
  recurrent state does not grow with it.
- What a cache holds beyond a row's offset has no meaning. What it holds there is finite.
- Nothing keeps a reference to, or a view of, a cache's array across a step: it would turn the next
  write in place into a copy of the whole arena.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

import mlx.core as mx

RowId = NewType("RowId", int)
"""The engine's name of a row; unique among the rows alive."""

ArenaId = NewType("ArenaId", int)
"""The row table's name of an arena; never used twice."""


class RowError(Exception):
    """A bug of the caller: an unknown or doubled row, or a write beyond what was reserved."""


class Kind(StrEnum):
    """What a layer remembers of a row; one snapshot is taken of all layers of a kind together."""

    STANDARD = "standard"
    """Keys and values of every position."""
    QUANTIZED = "quantized"
    """The same in 8 or 4 bits."""
    ROTATING = "rotating"
    """Keys and values of the last positions: a sliding window."""
    LATENT = "latent"
    """One entry a position that keys and values of all heads are made of."""
    RECURRENT = "recurrent"
    """A state that every token changes: convolution tail and recurrence."""

    @property
    def sliceable(self) -> bool:
        """Whether every token's entry stands for itself, so that a range of them can be kept."""
        return self in (Kind.STANDARD, Kind.QUANTIZED, Kind.LATENT)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row lives: slot `slot` of `arena`, whose rows hold `capacity` tokens."""

    arena: ArenaId
    capacity: int
    slot: int


@dataclass(frozen=True, slots=True)
class Open:
    """A new arena of `slots` slots for rows of up to `capacity` tokens."""

    arena: ArenaId
    capacity: int
    slots: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """A spare arena is the new one; its slots hold what they held."""

    spare: ArenaId
    arena: ArenaId
    capacity: int
    slots: int


@dataclass(frozen=True, slots=True)
class Close:
    """An arena without rows is released."""

    arena: ArenaId


@dataclass(frozen=True, slots=True)
class Move:
    """One row's contents go from `source` to `target`, of at least the source's capacity."""

    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class Clear:
    """A slot that a former row used is zeroed, from position `start` on: before it are numbers."""

    place: Place
    start: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """The row at `place` has left for good; what it held has no meaning any more."""

    place: Place


Change = Open | Reuse | Close | Move | Clear | Free
"""What the row table tells every layer's cache to do, in order."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of what a layer keeps of a row."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


class LayerCache(Protocol):
    """One layer's state for all rows, arranged as the row table says.

    All methods run on the engine thread, and all are lazy: they take effect when `arrays` are
    evaluated, which their caller sees to before the next pass. A recurrent layer keeps its states
    by row rather than by slot: there an arena takes nothing, and a move copies nothing.
    """

    @property
    def kind(self) -> Kind:
        """What this layer remembers."""

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""

    def reuse(self, spare: ArenaId, arena: ArenaId) -> None:
        """Give an arena without rows another name; it stays as it is."""

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""

    def lift(self, place: Place) -> tuple[mx.array, ...]:
        """Return a copy of all that the slot at `place` holds, to be moved.

        The caller evaluates it before anything is written.
        """

    def move(self, source: Place, target: Place, lifted: tuple[mx.array, ...]) -> None:
        """Have the row of `source`, which was `lifted` there, at `target`; the source is free."""

    def clear(self, place: Place, start: int = 0) -> None:
        """Zero one slot, so that a former row's values (a NaN above all) cannot reach the next.

        Sliceable kinds may keep what lies before position `start`, which are numbers.
        """

    def free(self, place: Place) -> None:
        """Learn that the row at `place` has left; memory that is kept by slot stays the arena's."""

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return compact copies of what the row at `place`, now at offset `stop` or beyond, holds.

        Sliceable kinds: the entries of positions [start, stop), positions along the axis before
        the last, which is how a snapshot of them is split, merged and cut. A rotating cache: the
        last `min(stop, window)` positions before `stop`, in order; the row must not have
        overwritten them. A recurrent cache: its state, the row standing at `stop`. `start` says
        nothing to the last two. The caller evaluates them before anything is written.
        """

    def shapes(self, start: int, stop: int) -> tuple[ArrayShape, ...]:
        """Return what `read(_, start, stop)` returns, but for its values."""

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned; the row then stands at `stop`."""

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell whether a row at `offset` can go back to `target` (0 <= target <= offset) by itself.

        Sliceable kinds always; a rotating cache until its window has wrapped; a recurrent one
        only to where it stands.
        """

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes that one slot of an arena of `capacity` takes in this layer.

        A recurrent one: the bytes of one row's states, wherever it sits.
        """

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name, for the ledger and for `mx.eval`; do not keep them."""

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
