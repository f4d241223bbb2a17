"""How long the rows of a table are, and may become: who will soon outgrow where it sits.

Invariants:
- Lengths are those that rows have reserved; they only say what is worth preparing for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mlxd_worker.cache.base import Place, RowId

NEARLY_FULL = 0.75
"""A row that fills more of its capacity will soon cross, if it may become so long."""


@dataclass(slots=True)
class _Length:
    tokens: int
    tokens_max: int | None
    """None where nobody has said."""


class RowLengths:
    """The lengths of a table's rows. One owner: the row table."""

    def __init__(self) -> None:
        """Know of no row."""
        self._lengths: dict[RowId, _Length] = {}

    def join(self, row: RowId, *, tokens: int, tokens_max: int | None) -> None:
        """Take a row; it may become `tokens_max` long, None where nobody knows."""
        self._lengths[row] = _Length(tokens, tokens_max)

    def reserve(self, wanted: Mapping[RowId, int]) -> None:
        """Note what rows have reserved."""
        for row, tokens in wanted.items():
            self._lengths[row].tokens = tokens

    def leave(self, row: RowId) -> None:
        """Forget a row."""
        del self._lengths[row]

    def nearing(self, capacity: int, places: Mapping[RowId, Place]) -> int:
        """Return how many rows in places of this capacity nearly fill it and may outgrow it."""
        return sum(
            length.tokens > capacity * NEARLY_FULL and (length.tokens_max or 0) > capacity
            for row, length in self._lengths.items()
            if places[row].capacity == capacity
        )
