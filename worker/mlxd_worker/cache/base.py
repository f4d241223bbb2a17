"""The seam between rows and layers: who sits where, and what a layer's cache must be able to do.

Invariants:
- A row starts at position 0, never padded; its offset belongs to the engine's row, not to a cache.
- A row sits in one slot of one arena; the rows of an arena hold at most its capacity of tokens.
- The slots in use are the first ones of the arena: a row that leaves is replaced by the last one.
- One `RowTable` decides for all layers; a layer's cache only carries out `resize`, `move`, `clear`.
- What a cache holds beyond a row's offset has no meaning: rewinding a row to an earlier offset of a
  standard cache needs no call at all, the next write lands there. What it holds there is finite.
- Nothing keeps a reference to, or a view of, a cache's array across a step: it would turn the next
  write in place into a copy of the whole arena.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

import mlx.core as mx

RowId = NewType("RowId", int)
"""The engine's name of a row; unique among the rows alive."""


class RowError(Exception):
    """A bug of the caller: an unknown or doubled row, or a write beyond what was reserved."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row lives: slot `slot` of the arena whose rows hold `capacity` tokens."""

    capacity: int
    slot: int


@dataclass(frozen=True, slots=True)
class Resize:
    """The arena of `capacity` gets exactly `slots` slots; 0 releases it."""

    capacity: int
    slots: int


@dataclass(frozen=True, slots=True)
class Move:
    """One row's contents go from `source` to `target`."""

    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class Clear:
    """A slot that a former row used is zeroed."""

    place: Place


Change = Resize | Move | Clear
"""What the row table tells every layer's cache to do, in order."""


class LayerCache(Protocol):
    """One layer's state for all rows, arranged as the row table says.

    All methods run on the engine thread and have taken effect (been evaluated) when they return.
    """

    def resize(self, capacity: int, *, slots: int) -> None:
        """Give the arena of `capacity` exactly `slots` slots, keeping the first ones' contents.

        0 releases it. New slots are zero.
        """
        ...

    def move(self, source: Place, target: Place) -> None:
        """Copy one whole row to a place of at least its capacity; the source becomes free."""
        ...

    def clear(self, place: Place) -> None:
        """Zero one slot, so that a former row's values (a NaN above all) cannot reach the next."""
        ...

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes one slot of the arena of `capacity` takes in this layer."""
        ...

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name, for the ledger and for `mx.eval`; do not keep them."""
        ...

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        ...
