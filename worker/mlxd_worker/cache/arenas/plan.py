"""How one forward pass meets the arenas: index arrays made once and shared by all layers.

Invariants:
- A plan holds index arrays and masks only, never a cache's array or a view of one.
- Every write is inside what its row reserved; `RowCaches.plan` has checked that on the host, since
  an index out of range would overwrite another row in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx

from mlxd_worker.cache.base import ArenaId, LayerCache, Place, RowId


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row's tokens (a prompt's chunk, or a single token): written as a block, causal."""

    arena: ArenaId
    capacity: int
    slot: int
    length: int
    """Tokens the row holds afterwards, as the host knows them: offset + width."""
    start: mx.array
    """int32 [2]: slot and position of the first token."""
    span: int = 0
    """Positions that are read where shapes must be few; 0 for all of the capacity."""
    lasts: tuple[int, ...] = ()
    """The last position that each token sees; empty: its own."""

    def last_seen(self, first: int, count: int, width: int) -> tuple[int, ...]:
        """Return the last position that `count` tokens from the `first` on see; empty: their own.

        Filled up to `width`; what that sees is dropped.
        """
        own = self.lasts[first : first + count]
        return (*own, *own[-1:] * (width - len(own)))


@dataclass(frozen=True, slots=True)
class Chunks:
    """How several rows' chunks, token after token, are attended as rows of one width.

    A chunk that is shorter is filled up with its own last token; what that reads is dropped.
    """

    slots: slice | mx.array
    """Whose keys are read: consecutive slots, or int32 [n]."""
    width: int
    """Tokens of the longest chunk."""
    source: mx.array
    """int32 [n * width]: the batch's token that stands there."""


@dataclass(frozen=True, slots=True)
class Group:
    """The part of a batch that lives in one arena: one write and one attention call a layer.

    Where a batch is several rows' chunks (`chunks`), its rows are tokens, several of one row's.
    """

    arena: ArenaId
    capacity: int
    first: int
    count: int
    """m."""
    slots_used: int
    """The first slots of the arena, those with a batch row among them."""
    span: int
    """Positions attended by a standard cache, from 0; masks hide what lies beyond each row."""
    write_slots: mx.array
    """int32 [m, 1]."""
    write_positions: mx.array
    """int32 [m, width]."""
    last_visible: mx.array
    """int32 [slots_used, width]: the position of each slot's queries, hence the last they see."""
    members: mx.array | None = None
    """int32 [m]: the batch's rows that live here; None where they are `first .. first + m`."""
    queriers: mx.array | None = None
    """int32 [slots_used]: whose query each slot takes; None where these are the members.

    A slot whose row is not in the batch takes any; what it yields is dropped.
    """
    targets: mx.array | None = None
    """Slots and positions to write, int32 [m or more, 2], where a kernel may do so in place; a
    third column is where tokens stand for rotations (`Capabilities.turns_apart`)."""
    chunks: Chunks | None = None
    """Where the batch is several rows' chunks: how these here are attended; `slots_used` is then
    the number of their rows, and `last_visible` is by these, `[n, chunks.width]`."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: a chunk of one row, groups of rows, or groups of several rows' chunks."""

    width: int
    dtype: mx.Dtype
    """Of masks."""
    bounded_shapes: bool
    """Whether attention must keep to the few shapes that were warmed, instead of exact ones."""
    chunk: Chunk | None = None
    groups: tuple[Group, ...] = ()
    order: mx.array | None = None
    """int32 [N]: where in the groups' slot-wise results, one after another, each batch row's
    stands; None where they are in order already."""
    places: tuple[Place, ...] = ()
    """Where each batch row lives. For caches that keep something by row."""
    in_place: bool = False
    """Whether the groups have `targets`: every cache's owner lets a kernel write in place."""
    writes_first: bool = False
    """Whether the groups' rows are tokens, several of one row's: then all are written before any of
    them reads."""
    memo: dict[tuple[object, ...], mx.array] = field(default_factory=dict)
    """Masks and indices that layers with the same geometry share within this pass."""

    def share(self, key: tuple[object, ...], make: Callable[[], mx.array]) -> mx.array:
        """Return what `make` gives, made once a pass for all layers that use the same `key`."""
        value = self.memo.get(key)
        if value is None:
            value = self.memo[key] = make()
        return value

    def seeing(self, lasts: tuple[int, ...]) -> StepPlan:
        """Return this plan of a chunk whose tokens see up to the positions `lasts`."""
        assert self.chunk is not None, "others have it in their groups"
        return replace(self, chunk=replace(self.chunk, lasts=lasts))

    def in_order(self, parts: Sequence[mx.array]) -> mx.array:
        """Return what the groups' rows read, group by group, in the batch's order, lazy."""
        if self.groups[0].chunks is not None:  # [n, heads, width, *] each, to a token a row
            parts = [part.swapaxes(1, 2).flatten(0, 1)[:, :, None] for part in parts]
        result = parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=0)
        return result if self.order is None else mx.take(result, self.order, axis=0)


class PassCaches(Protocol):
    """What a model's pass needs of the caches: all rows' caches, or those of a traced function."""

    @property
    def layers(self) -> Sequence[LayerCache | None]:
        """Each layer's cache; None for a layer without state."""

    def plan(
        self,
        rows: tuple[RowId, ...],
        *,
        offsets: mx.array,
        lengths: tuple[int, ...],
        width: int,
        dtype: mx.Dtype,
        counts: tuple[int, ...] = (),
        lasts: tuple[int, ...] = (),
    ) -> StepPlan:
        """Return how a batch of `rows` x `width` tokens meets the arenas; masks are of `dtype`.

        counts: where the batch is a chunk of each row, one after another: their tokens; offsets are
        then every token's position, and the width is 1. lasts: the last position that each token
        of chunks sees; empty: its own.
        """
