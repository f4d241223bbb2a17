"""Passes over tokens that each know their slot and position: decode steps and prompts alike.

Invariants:
- All rows sit in one arena with a slot for each row that there may be (`RowTable`, `whole`), so no
  row ever moves, and an arena's shape is that of all passes.
- The flat tokens of a pass are one of few numbers. What is left over is filled with copies of one
  of its own tokens, which write the same values to the same place once more; what they yield is
  dropped.
- Only kernels that write in place run such a pass: every token's key and value is there before any
  token reads, where a row has several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Group, StepPlan
from mlxd_worker.cache.base import ArenaId, Place, RowId
from mlxd_worker.cache.layers.slots import ArenaShape, on_device

TOKEN_SIZES: Final = (64, 128, 256, 384, 512, 768, 1024, 2048)
"""How many tokens a pass over several of a row may have, copies included."""

READS_MAX: Final = 1 << 19
"""Tokens times the positions that their rows then have: what the kernel reads position by position,
for each token anew. 512 tokens of a prompt, or 16 prompts of 128, are a quarter to a half of it."""

LONG_TOKENS: Final = 256
"""So many tokens of one row are long enough for products, which have the weights to themselves."""

LONG_READS_MAX: Final = 3 << 17
"""The same of so long a chunk: beyond, products read it faster. 256 tokens that end at position
2,048 of an 8 B model took an H200 some 22 ms beside the step's rows, 512 of them by products 20."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How a pass's tokens lie: which flat token is which, and where each is written."""

    arena: ArenaId
    shape: ArenaShape
    count: int
    """The pass's own tokens; they are the first flat ones."""
    flat: int
    several: bool
    """Whether a row may have more than one of these tokens."""
    slots: mx.array
    """int32 [flat]."""
    positions: mx.array
    """int32 [flat]."""
    source: mx.array | None
    """int32 [flat]: which of the pass's tokens each is; None where that is all of them in order."""


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The part of a decode step's layout that serves until a row's place changes."""

    rows: tuple[RowId, ...]
    version: int
    copied: int
    """The row whose token is copied to fill the step: the shortest when this was made."""
    layout: TokenLayout
    """That of the step for which this was made; the next ones differ in their positions."""


def size_of(count: int, sizes: Sequence[int]) -> int | None:
    """Return the least of the ascending sizes that holds so many tokens; None: none does. Pure."""
    return next((size for size in sizes if size >= count), None)


def is_read_in_place(lengths: Sequence[int], counts: Sequence[int], *, most: int) -> bool:
    """Tell whether a kernel is to read `counts` tokens of rows that then stand at `lengths`. Pure.

    most: tokens that a pass may have where a row has several, copies included. Where each row has
    one it always is.
    """
    if max(counts) == 1:
        return True
    each = list(zip(counts, lengths, strict=True))
    if any(own >= LONG_TOKENS and own * end > LONG_READS_MAX for own, end in each):
        return False
    flat = size_of(sum(counts), TOKEN_SIZES)
    return flat is not None and flat <= most and sum(own * end for own, end in each) <= READS_MAX


def fill(count: int, flat: int, copied: int) -> list[int]:
    """Return which of a pass's `count` tokens each of the flat ones is. Pure."""
    return [*range(count), *([copied] * (flat - count))]


def lay_rows(
    rows: tuple[RowId, ...],
    places: Sequence[Place],
    lengths: Sequence[int],
    *,
    slots: int,
    version: int,
    sizes: Sequence[int],
    least: int = 1,
) -> RowSlots:
    """Return how one token of each row lies; slots: of the arena that holds all rows."""
    flat = size_of(max(len(rows), least), sizes)
    assert flat is not None, "there are no more rows than slots"
    copied = min(range(len(rows)), key=lambda index: lengths[index])
    source = fill(len(rows), flat, copied)
    layout = TokenLayout(
        arena=places[0].arena,
        shape=ArenaShape(places[0].capacity, slots),
        count=len(rows),
        flat=flat,
        several=False,
        slots=_index([places[index].slot for index in source]),
        positions=_index([lengths[index] - 1 for index in source]),
        source=None if flat == len(rows) else _index(source),
    )
    return RowSlots(rows, version, copied, layout)


def step_of(its: RowSlots, lengths: Sequence[int]) -> TokenLayout:
    """Return the layout of a step after which rows stand at `lengths`."""
    positions = [length - 1 for length in lengths]
    positions += [positions[its.copied]] * (its.layout.flat - len(positions))
    return replace(its.layout, positions=_index(positions))


def lay_tokens(
    places: Sequence[Place],
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    slots: int,
    most: int,
    least: int = 1,
) -> TokenLayout | None:
    """Return how `counts` tokens of each row lie, after which rows stand at `lengths`.

    None: they are more than `most`, or would read too much, to be read by a kernel.
    """
    count = sum(counts)
    flat = size_of(max(count, least), TOKEN_SIZES)
    if flat is None or not is_read_in_place(lengths, counts, most=most):
        return None
    at_slots = [place.slot for place, own in zip(places, counts, strict=True) for _ in range(own)]
    positions = [
        end - own + at for own, end in zip(counts, lengths, strict=True) for at in range(own)
    ]
    source = fill(count, flat, min(range(count), key=positions.__getitem__))
    return TokenLayout(
        arena=places[0].arena,
        shape=ArenaShape(places[0].capacity, slots),
        count=count,
        flat=flat,
        several=True,
        slots=_index([at_slots[index] for index in source]),
        positions=_index([positions[index] for index in source]),
        source=None if flat == count else _index(source),
    )


def plan_tokens(
    shape: ArenaShape,
    arena: ArenaId,
    *,
    positions: mx.array,
    slots: mx.array,
    several: bool,
    dtype: mx.Dtype,
    turned: mx.array | None = None,
) -> StepPlan:
    """Return the plan of a pass over tokens, from arrays that may be a function's arguments.

    turned: where tokens stand for rotations, as `positions`; None: there.
    """
    count = positions.shape[0]
    at = positions[:, None]
    group = Group(
        arena=arena,
        capacity=shape.capacity,
        first=0,
        count=count,
        slots_used=count,
        span=shape.capacity,
        write_slots=slots[:, None],
        write_positions=at,
        last_visible=at,
        targets=on_device(slots, positions, turned),
    )
    return StepPlan(
        width=1,
        dtype=dtype,
        groups=(group,),
        bounded_shapes=True,
        in_place=True,
        writes_first=several,
    )


def _index(values: Sequence[int]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)
