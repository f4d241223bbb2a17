"""The schedule of captures of one row: at which offsets, and what came of each. Pure.

Invariants:
- Offsets are sorted, distinct, and not behind the row when they are scheduled.
- They fire in order. The base, where the next capture starts, moves when one fires and never at the
  end of a write: with the row at 2, {3, 5} gives [2, 3) and [3, 5) however the tokens arrive.
- There is one result for each offset: None where nothing lies between it and the base, or where the
  row never came so far.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from mlxd_worker.cache.base import RowError

T = TypeVar("T")


class Captures(Generic[T]):
    """One row's schedule from `schedule` to `take`."""

    def __init__(self, offsets: Sequence[int], *, offset: int) -> None:
        """Schedule captures at `offsets` for a row that stands at `offset`.

        Raises:
            RowError: the offsets are not sorted, or doubled, or behind the row.
        """
        if any(after <= before for before, after in pairwise(offsets)):
            raise RowError(f"captures at {list(offsets)} are not sorted and distinct")
        if offsets and offsets[0] < offset:
            raise RowError(f"a capture at {offsets[0]} is behind the row, which is at {offset}")
        self._offsets = tuple(offsets)
        self.base = offset
        """Where the next capture starts: nothing beyond it has been captured."""
        self._results: list[T | None] = []
        if offsets and offsets[0] == offset:
            self.fire(None)

    @property
    def next_stop(self) -> int | None:
        """The first offset whose capture has not fired."""
        fired = len(self._results)
        return self._offsets[fired] if fired < len(self._offsets) else None

    def due(self, offset: int) -> tuple[int, int] | None:
        """Return the capture to make now that the row stands at `offset`, if there is one.

        It is of what lies between both offsets, or of the state at the second.
        """
        stop = self.next_stop
        return (self.base, stop) if stop is not None and stop <= offset else None

    def fire(self, result: T | None) -> None:
        """Note what came of the capture at `next_stop`, which there must be."""
        stop = self.next_stop
        assert stop is not None, "no capture is left to fire"
        self._results.append(result)
        self.base = stop

    def results(self) -> list[T | None]:
        """Return one result for each offset, in order; the caller owns them from now on."""
        missing = len(self._offsets) - len(self._results)
        return [*self._results, *([None] * missing)]
