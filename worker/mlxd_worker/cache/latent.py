"""The latent cache: one entry a position, for all heads, whose first values are the values as well.

Invariants:
- An arena is one array `[slots, 1, capacity, entry_dim]`; position p of a row is column p. Queries
  are compared with whole entries and read the first `latent_dim` values of these.
- Values are never stored: where a pass reads them they are a view of the entries, made of the array
  that has been written, and it dies with the step.
- Writing is in place, as in the standard cache; no reference to an arena's array outlives a step.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxd_worker.cache.attention import (
    attend_row,
    attend_slots,
    by_slot,
    members,
    visible_by_slot,
)
from mlxd_worker.cache.base import ArenaId, Kind, LayerCache, Place, RowError
from mlxd_worker.cache.kv import columns_copy, put, row_copy
from mlxd_worker.cache.plan import Group, StepPlan


class LatentCache:
    """One layer's latents. One owner: the engine thread."""

    def __init__(self, *, entry_dim: int, latent_dim: int, dtype: mx.Dtype) -> None:
        """Return a cache without arenas, of entries whose first `latent_dim` values are read."""
        self.entry_dim = entry_dim
        self.latent_dim = latent_dim
        self.dtype = dtype
        self._arenas: dict[ArenaId, mx.array] = {}

    @property
    def kind(self) -> Kind:
        """LATENT."""
        return Kind.LATENT

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(entries.nbytes for entries in self._arenas.values())

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row's entries in an arena of `capacity`."""
        return capacity * self.entry_dim * self.dtype.size

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        return {f"latents.{arena}": entries for arena, entries in self._arenas.items()}

    def lend(self, arena: ArenaId) -> tuple[mx.array, ...]:
        """Give an arena's array away, until it is settled again."""
        return (self._arenas.pop(arena),)

    def settle(self, arena: ArenaId, arrays: Sequence[mx.array]) -> None:
        """Take an arena's array."""
        (self._arenas[arena],) = arrays

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""
        entries = self._zeros(slots, capacity)
        mx.eval(entries)
        self._arenas[arena] = entries

    def reuse(self, spare: ArenaId, arena: ArenaId) -> None:
        """Give an arena without rows another name; it stays as it is."""
        self._arenas[arena] = self._arenas.pop(spare)

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""
        del self._arenas[arena]

    def move(self, source: Place, target: Place) -> None:
        """Copy one row; the rest of a larger target keeps what it held."""
        row = row_copy(self._arenas[source.arena], source.slot)
        if source.arena == target.arena:  # written to while it is read, it would be copied whole
            mx.eval(row)
        self._put(target, 0, row)

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        self._put(place, 0, self._zeros(1, place.capacity))

    def free(self, place: Place) -> None:
        """Do nothing: the slot stays, and is zeroed for its next row."""

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return the entries `[1, 1, stop - start, entry_dim]`, compact, lazy."""
        return (columns_copy(self._arenas[place.arena], place.slot, start, stop),)

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned.

        Raises:
            RowError: `state` is not that of [start, stop), or the place is too small for it.
        """
        (entries,) = state
        if entries.shape[2] != stop - start or stop > place.capacity:
            problem = f"{entries.shape[2]} positions for [{start}, {stop})"
            raise RowError(f"{problem} in a capacity of {place.capacity}")
        self._put(place, start, entries)

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell that a row can go back anywhere: the next write lands there."""
        return 0 <= target <= offset

    def attend(
        self, queries: mx.array, entries: mx.array, plan: StepPlan, *, scale: float
    ) -> mx.array:
        """Write entries `[N, 1, width, entry_dim]`; return what the queries read of latents.

        `queries` are `[N, heads, width, entry_dim]`, the result `[N, heads, width, latent_dim]`, in
        the batch's order, lazy.
        """
        chunk = plan.chunk
        if chunk is None:
            for group in plan.groups:
                at = (group.write_slots, slice(None), group.write_positions)
                self._arenas[group.arena][at] = members(entries, group).transpose(0, 2, 1, 3)
            return plan.in_order([self._read(queries, it, plan, scale=scale) for it in plan.groups])
        arena = mx.slice_update(self._arenas[chunk.arena], entries, chunk.start, axes=(0, 2))
        self._arenas[chunk.arena] = arena
        row = arena[chunk.slot : chunk.slot + 1]
        return attend_row(queries, row, row[..., : self.latent_dim], chunk, plan, scale=scale)

    def _read(self, queries: mx.array, group: Group, plan: StepPlan, *, scale: float) -> mx.array:
        entries = self._arenas[group.arena][: group.slots_used, :, : group.span]
        return attend_slots(
            by_slot(queries, group),
            entries,
            entries[..., : self.latent_dim],
            visible_by_slot(group, group.span, plan),
            scale=scale,
        )

    def _put(self, place: Place, column: int, block: mx.array) -> None:
        # Popped, so that the write's input is the only reference to the array.
        entries = put(self._arenas.pop(place.arena), place.slot, column, block)
        self._arenas[place.arena] = entries
        mx.eval(entries)

    def _zeros(self, slots: int, capacity: int) -> mx.array:
        return mx.zeros((slots, 1, capacity, self.entry_dim), dtype=self.dtype)


def as_latent(cache: LayerCache | None) -> LatentCache:
    """Return the cache of a layer of latents as what it is; engine thread, every step.

    Raises:
        TypeError: a bug: the layer has no state, or another one.
    """
    if not isinstance(cache, LatentCache):
        raise TypeError(f"{type(cache).__name__} is not a latent layer's cache")
    return cache
