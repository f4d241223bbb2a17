"""What free slots are known to hold: a slot's next row finds numbers, and little is cleared.

Invariants:
- A row that leaves says whether all that it held are numbers. Then what it held may stay: masks
  hide it from the next row, whose own tokens take its place. What lies beyond, where passes that
  nobody has judged may have written, is zeroed for the next row.
- Where passes write in place, kernels read nothing beyond a row's tokens: nothing is zeroed then.
- Of any other slot that was used all is zeroed: of a row that held no numbers, that nobody judged,
  or that has moved away.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_worker.cache.base import ArenaId, Change, Clear, Close, Place, Reuse


class JudgedSlots:
    """The free slots whose last rows held numbers. One owner: the row caches."""

    def __init__(self, *, in_place: bool) -> None:
        """Know of none. in_place: whether passes write in place."""
        self._in_place = in_place
        self._tokens: dict[ArenaId, dict[int, int]] = {}
        """Of each slot: how many positions its last row held."""

    def note(self, place: Place, tokens: int) -> None:
        """Learn that a row leaves `place` whose `tokens` tokens all are numbers."""
        self._tokens.setdefault(place.arena, {})[place.slot] = tokens

    def clear_less(self, changes: Iterable[Change]) -> list[Change]:
        """Return changes that are about to be carried out, with less to clear."""
        kept: list[Change] = []
        for change in changes:
            match change:
                case Reuse(spare, arena):
                    self._tokens[arena] = self._tokens.pop(spare, {})
                case Close(arena):
                    self._tokens.pop(arena, None)
                case Clear(place):
                    tokens = self._tokens.get(place.arena, {}).pop(place.slot, 0)
                    if not (tokens and self._in_place):
                        kept.append(Clear(place, tokens))
                    continue
            kept.append(change)
        return kept
