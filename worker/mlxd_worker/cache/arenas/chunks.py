"""How several rows' chunks, read in one pass, lie in the arenas.

Invariants:
- In products a pass is one list of tokens, without padding, each written at its row's own position.
- Attention is one call for the chunks of one arena whose widths round up to the same power of two:
  beyond `WIDTH_MIN` at most half of the queries are padding. No query reads another row's keys.
- Nothing beyond a chunk's own tokens is ever written, and a token reads no others than it would if
  its chunk were alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxd_models.sizes.pass_sizes import Together
from mlxd_worker.cache.arenas.layout import FINE_SPAN
from mlxd_worker.cache.arenas.plan import Chunks, Group, StepPlan
from mlxd_worker.cache.base import ArenaId, Place

WIDTH_MIN = 16
"""Chunks up to so wide share a call: what that pads costs less than a call."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A chunk's place among the batch's tokens, and in its row."""

    place: Place
    first: int
    """Of its tokens in the batch."""
    count: int
    end: int
    """Where its row stands after it."""


def stretches_of(
    places: Sequence[Place], lengths: Sequence[int], counts: Sequence[int]
) -> list[Stretch]:
    """Return the chunks of a batch; pure."""
    stretches, first = [], 0
    for place, length, count in zip(places, lengths, counts, strict=True):
        stretches.append(Stretch(place, first, count, length))
        first += count
    return stretches


def split_into_calls(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """Return the chunks of each attention call, by slot; pure."""
    calls: dict[tuple[ArenaId, int], list[Stretch]] = {}
    for its in stretches:
        calls.setdefault((its.place.arena, _width_class(its.count)), []).append(its)
    return [sorted(call, key=lambda its: its.place.slot) for call in calls.values()]


@dataclass(frozen=True, slots=True)
class Attended:
    """What a layer's attention takes of the chunks of one pass at most, wherever their rows sit."""

    calls: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    """By class of width: rows, tokens of the longest chunk, positions of the longest row."""

    def beside(self, count: int, end: int) -> Attended:
        """Return it with one more chunk, of `count` tokens, after which its row stands at `end`."""
        rows, width, span = self.calls.get(_width_class(count), (0, 0, 0))
        call = (rows + 1, max(width, count), max(span, _span(end)))
        return Attended({**self.calls, _width_class(count): call})

    def within(self, most: Together) -> bool:
        """Tell whether one pass may have so much."""
        positions = sum(rows * span for rows, _, span in self.calls.values())
        scores = sum(rows * width * span for rows, width, span in self.calls.values())
        queries = sum(rows * width for rows, width, _ in self.calls.values())
        within = positions <= most.positions and scores <= most.scores
        return within and queries <= most.queries


def plan_chunks(
    places: Sequence[Place],
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    dtype: mx.Dtype,
    bounded_shapes: bool,
    lasts: Sequence[int] = (),
) -> StepPlan:
    """Return the plan of a pass of `counts` tokens a row, after which rows stand at `lengths`.

    lasts: the last position that each token sees; empty: its own.
    """
    stretches = stretches_of(places, lengths, counts)
    calls = split_into_calls(stretches)
    result_of = [0] * sum(counts)
    results, groups = 0, []
    for call in calls:
        group = _group_of(call, lasts)
        for its in call:
            result_of[its.first : its.first + its.count] = range(results, results + its.count)
            results += _width(call)
        groups.append(group)
    in_order = result_of == list(range(results))
    return StepPlan(
        width=1,
        dtype=dtype,
        groups=tuple(groups),
        order=None if in_order else _index(result_of),
        places=tuple(places),
        bounded_shapes=bounded_shapes,
    )


def _group_of(call: Sequence[Stretch], lasts: Sequence[int]) -> Group:
    place, width = call[0].place, _width(call)
    tokens = [its.first + at for its in call for at in range(its.count)]
    positions = [its.end - its.count + at for its in call for at in range(its.count)]
    one_run = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
    starts = _index([its.end - its.count for its in call])
    source = [its.first + min(at, its.count - 1) for its in call for at in range(width)]
    visible = starts[:, None] + mx.arange(width, dtype=mx.int32)
    if lasts:
        visible = _index([lasts[at] for at in source]).reshape(-1, width)
    return Group(
        arena=place.arena,
        capacity=place.capacity,
        members=None if one_run else _index(tokens),
        first=tokens[0],
        count=len(tokens),
        slots_used=len(call),
        span=min(_span(max(its.end for its in call)), place.capacity),
        write_slots=_index([its.place.slot for its in call for _ in range(its.count)])[:, None],
        write_positions=_index(positions)[:, None],
        last_visible=visible,
        chunks=Chunks(
            slots=_slots_of([its.place.slot for its in call]),
            width=width,
            source=_index(source),
        ),
    )


def _width_class(count: int) -> int:
    return (max(count, WIDTH_MIN) - 1).bit_length()


def _width(call: Sequence[Stretch]) -> int:
    return max(its.count for its in call)


def _span(end: int) -> int:
    return -(-end // FINE_SPAN) * FINE_SPAN


def _slots_of(slots: Sequence[int]) -> slice | mx.array:
    run = slice(slots[0], slots[0] + len(slots))
    return run if list(slots) == list(range(run.start, run.stop)) else _index(slots)


def _index(values: Sequence[int]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)
