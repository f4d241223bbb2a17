"""What mlx-lm's layers find where they look for their caches: ours, for one part of a pass.

Invariants:
- A part is what goes through the peer's model at once: a chunk's one row, the slots of an arena, or
  one row of a batch. Nothing made here outlives it.
- What may be seen follows from the positions that columns hold, whatever the cache; a row starts at
  position 0 and is never padded.
- Only kinds of caches that are known by name are mapped; what a model remembers in any other is
  refused by that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxd_models.families.common.fields import CONFIG_FILE
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.cache.arenas.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.attention import by_slot
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.cache.layers.rotating import RotatingCache, wrapping_positions
from mlxd_worker.models.base import Batch

Mask = mx.array | str | None


@dataclass(frozen=True, slots=True)
class KeysLeaf:
    """A cache of keys and values; `geometry` is None where the model never fills it."""

    geometry: AttentionGeometry | None
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class StatesLeaf:
    """A cache of states: `at` has the index of each in the peer's list of `size`."""

    size: int
    states: tuple[RowState, ...]
    at: tuple[int, ...]


Leaf = KeysLeaf | StatesLeaf


@dataclass(frozen=True, slots=True)
class Leaves:
    """All caches of a model, one by one; `groups` are the numbers that stand in one entry."""

    leaves: tuple[Leaf, ...]
    groups: tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that go through the peer's model together, `[rows, width]` tokens."""

    plan: StepPlan
    group: Group | None
    """None: the plan's chunk."""
    tokens: mx.array
    offset: int | mx.array
    """The position of each row's first token; a number where there is one row."""
    fresh: bool
    """Whether no row has had a token."""
    row: int | None = None
    """The one batch row that this is; None: all of a group, or the only one there is."""

    def take_rows(self, states: mx.array) -> mx.array:
        """Return a batch's states `[N, ...]` as this part's rows."""
        if self.group is not None:
            return by_slot(states, self.group)
        return states if self.row is None else states[self.row : self.row + 1]


def parts_of(plan: StepPlan, batch: Batch, *, apart: bool) -> list[Part]:
    """Return a pass's parts: by arena, or with `apart` row by row in the batch's order."""
    width = batch.width
    fresh = all(length == width for length in batch.lengths)
    if plan.chunk is not None:
        return [Part(plan, None, batch.tokens, batch.lengths[0] - width, fresh)]
    if not apart:
        return [
            Part(plan, group, by_slot(batch.tokens, group), group.last_visible[:, 0], fresh)
            for group in plan.groups
        ]
    parts = []
    for row, (place, length) in enumerate(zip(plan.places, batch.lengths, strict=True)):
        offset = length - width
        start = mx.array([place.slot, offset], dtype=mx.int32)
        chunk = Chunk(place.arena, place.capacity, place.slot, length, start)
        alone = replace(plan, chunk=chunk, groups=(), order=None, places=(place,), memo={})
        tokens = batch.tokens[row : row + 1]
        parts.append(Part(alone, None, tokens, offset, fresh=offset == 0, row=row))
    return parts


def join_parts(parts: Sequence[Part], results: Sequence[mx.array]) -> mx.array:
    """Return what the parts gave, one after another, in the batch's order."""
    if parts[0].group is not None:
        return parts[0].plan.in_order(results)
    return results[0] if len(results) == 1 else mx.concatenate(list(results), axis=0)


class Attended:
    """A layer's keys and values by the peer's names. One part's; the engine thread's."""

    def __init__(
        self, cache: KVCache | RotatingCache | None, window: int | None, part: Part
    ) -> None:
        """Show `cache`, or none that the model would ever fill; `window` is the peer's own."""
        self.offset = part.offset
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._cache = cache
        self._window = window
        self._part = part

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """What was fetched."""
        return self.keys, self.values

    def empty(self) -> bool:
        """Tell whether the rows have had no token."""
        return self._part.fresh and self.keys is None

    def size(self) -> int:
        """Return how many positions may be read, of the longest row."""
        chunk, group = self._part.plan.chunk, self._part.group
        if group is not None:
            return group.span
        assert chunk is not None, "a part without a group is a chunk"
        return chunk.length if self.keys is not None else chunk.length - self._part.plan.width

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the part's tokens; return all that it may read, the mask telling what."""
        assert self._cache is not None, "a cache that the model was seen to fill"
        part = self._part
        keys, values = self._cache.fetch(keys, values, part.plan, part.group)
        self.keys, self.values = keys, values
        self.offset = self.offset + part.plan.width
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """Return what was fetched: layers may share it."""
        return self.keys, self.values

    def make_mask(
        self,
        N: int,  # noqa: N803 - the peer's name
        return_array: bool = False,  # noqa: FBT001, FBT002 - the peer's signature
        window_size: int | None = None,
    ) -> Mask:
        """Return which columns of what will be fetched each of `N` queries sees."""
        assert self._part.plan.width == N, "a mask is of the part's own tokens"
        stated = [window for window in (window_size, self._window) if window is not None]
        window = min(stated, default=None)
        if self._part.group is None:
            return self._chunk_mask(window, as_array=return_array)
        plan, group = self._part.plan, self._part.group
        asking = group.last_visible[:, :, None]

        def make() -> mx.array:
            return _visible(self._group_columns(group)[:, None, :], asking, window)[:, None]

        return plan.share(("visible to the peer", group.arena, self._ring, window), make)

    @property
    def _ring(self) -> int | None:
        """Columns of a row where they are a ring."""
        if not isinstance(self._cache, RotatingCache):
            return None
        plan, group = self._part.plan, self._part.group
        held_by = plan.chunk if group is None else group
        assert held_by is not None, "a part without a group is a chunk"
        return min(held_by.capacity, self._cache.window)

    def _group_columns(self, group: Group) -> mx.array:
        """Return the positions of the columns, `[slots or 1, columns]`."""
        ring = self._ring
        if ring is None:
            return mx.arange(group.span, dtype=mx.int32)[None]
        width = self._part.plan.width
        if width > 1 and group.span > ring:
            return wrapping_positions(ring, group.last_visible[:, 0], ring, width)
        last = group.last_visible[:, -1:]
        return last - (last - mx.arange(min(group.span, ring), dtype=mx.int32)) % ring

    def _chunk_mask(self, window: int | None, *, as_array: bool) -> Mask:
        plan = self._part.plan
        assert plan.chunk is not None, "a part without a group is a chunk"
        length, width, ring = plan.chunk.length, plan.width, self._ring
        kept = length if ring is None else min(length, ring + width - 1)
        slides = window is not None and kept > window
        if width == 1 and not slides:
            return None
        if not slides and not as_array:
            return "causal"
        if ring is None or (width > 1 and length > ring):
            held = length - width if ring is None else min(length - width, ring)
            columns = mx.arange(length - width - held, length, dtype=mx.int32)
        else:
            seen = mx.arange(min(length, ring), dtype=mx.int32)
            columns = (length - 1) - (length - 1 - seen) % ring
        asking = mx.arange(length - width, length, dtype=mx.int32)[:, None]
        return _visible(columns[None], asking, window)


def _visible(columns: mx.array, asking: mx.array, window: int | None) -> mx.array:
    seen = (columns >= 0) & (columns <= asking)
    return seen if window is None else seen & (columns > asking - window)


@dataclass(frozen=True, slots=True)
class PeerCaches:
    """The peer's own module of caches, of which some classes are used and others known."""

    module: Any

    def leaves(self, narrow: Sequence[Any], wide: Sequence[Any]) -> Leaves:
        """Return what caches hold after two passes; raises InvalidModel for an unknown kind."""
        leaves: list[Leaf] = []
        groups: list[int | tuple[int, ...]] = []
        for short, long in zip(narrow, wide, strict=True):
            if type(long) is self.module.CacheList:
                first = len(leaves)
                pairs = zip(short.caches, long.caches, strict=True)
                leaves += [self._leaf(*pair) for pair in pairs]
                groups.append(tuple(range(first, len(leaves))))
            else:
                groups.append(len(leaves))
                leaves.append(self._leaf(short, long))
        return Leaves(tuple(leaves), tuple(groups))

    def dress(
        self,
        leaves: Leaves,
        layers: Sequence[LayerCache | None],
        part: Part,
        states: Mapping[int, tuple[mx.array, ...]],
    ) -> list[Any]:
        """Return what the peer's model takes as its caches, for one part.

        states: of all rows of the batch before the pass, by the number of the leaf.
        """

        def make_leaf(number: int) -> Any:  # noqa: ANN401 - the peer's classes have no types
            leaf = leaves.leaves[number]
            if isinstance(leaf, StatesLeaf):
                return self._states(leaf, part, states.get(number, ()))
            layer = layers[number]
            assert layer is None or isinstance(layer, KVCache | RotatingCache), "of `new_caches`"
            window = None if leaf.geometry is None else leaf.geometry.window
            return Attended(layer, window, part)

        return [
            make_leaf(entry)
            if isinstance(entry, int)
            else self.module.CacheList(*(make_leaf(number) for number in entry))
            for entry in leaves.groups
        ]

    def states_after(self, leaves: Leaves, dressed: Sequence[Any]) -> dict[int, list[mx.array]]:
        """Return the states that a part's pass left, by the number of the leaf."""
        after: dict[int, list[mx.array]] = {}
        for entry, caches in zip(leaves.groups, dressed, strict=True):
            pairs = (
                [(entry, caches)]
                if isinstance(entry, int)
                else list(zip(entry, caches.caches, strict=True))
            )
            for number, cache in pairs:
                leaf = leaves.leaves[number]
                if isinstance(leaf, StatesLeaf) and leaf.states:
                    kept = zip(leaf.at, leaf.states, strict=True)
                    after[number] = [_as_declared(cache[at], state) for at, state in kept]
        return after

    def _states(self, leaf: StatesLeaf, part: Part, states: Sequence[mx.array]) -> object:
        cache = self.module.ArraysCache(size=leaf.size)
        if not part.fresh:  # a model may treat a start in its own way: nothing is there
            for at, state in zip(leaf.at, states, strict=True):
                cache[at] = part.take_rows(state)
        return cache

    def _leaf(self, short: Any, long: Any) -> Leaf:  # noqa: ANN401 - as above
        kind, module = type(long), self.module
        if kind is module.ArraysCache:
            return _states_leaf(short, long)
        if kind is module.KVCache:
            return _keys_leaf(long, window=None)
        if kind is module.RotatingKVCache and not long.keep:
            return _keys_leaf(long, window=long.max_size)
        problem = f"mlx-lm keeps what this model remembers in a {kind.__name__}"
        raise unmapped_error(f"{problem}, which has no counterpart here")


def _keys_leaf(cache: Any, *, window: int | None) -> KeysLeaf:  # noqa: ANN401 - as above
    if cache.keys is None:
        return KeysLeaf(None, mx.float32)
    heads, width = cache.keys.shape[1], cache.keys.shape[-1]
    geometry = AttentionGeometry(heads, width, window, value_dim=cache.values.shape[-1])
    return KeysLeaf(geometry, cache.keys.dtype)


def _states_leaf(short: Any, long: Any) -> StatesLeaf:  # noqa: ANN401 - as above
    at = tuple(index for index, state in enumerate(long.cache) if state is not None)
    states = []
    for index in at:
        shape, before = tuple(long[index].shape[1:]), tuple(short[index].shape[1:])
        if shape != before and not mx.issubdtype(long[index].dtype, mx.integer):
            raise unmapped_error(f"a state grows with the text, from {before} to {shape}")
        states.append(RowState(f"state{index}", shape, long[index].dtype))
    return StatesLeaf(len(long.cache), tuple(states), at)


def unmapped_error(problem: str) -> InvalidModel:
    """Return the error about a model whose memory cannot be kept here."""
    return InvalidModel(problem, file=CONFIG_FILE, field="model_type")


def _as_declared(array: mx.array, state: RowState) -> mx.array:
    """Return a state in its type and shape: earlier ids that are not there yet are zeros."""
    missing = [
        (wanted - have, 0) for have, wanted in zip(array.shape[1:], state.shape, strict=True)
    ]
    if any(before for before, _ in missing):
        array = mx.pad(array, [(0, 0), *missing])
    return array.astype(state.dtype)


def recurrent(layers: Sequence[LayerCache | None]) -> dict[int, RecurrentCache]:
    """Return the layers that keep states, by number."""
    return {at: layer for at, layer in enumerate(layers) if isinstance(layer, RecurrentCache)}
