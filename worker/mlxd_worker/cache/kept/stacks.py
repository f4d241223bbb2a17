"""What layers hold of one row, stacked: an array has many layers', so that what is kept is in few.

Invariants:
- A stack is a tuple of arrays, each with one entry a layer on its first axis; what one layer's
  `read` returns is a stack of one.
- A stack has at most `LIFTED_NBYTES`, or one layer's. Where two are joined, one of each side may be
  alive beside what has been made of it.

A GPU's host takes some ten microseconds to make an array and to free it: a model of 28 layers cost
1.1 ms for every row that left, where a step takes 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mlx.core as mx

from mlxd_worker.cache.changes import LIFTED_NBYTES

POSITION_AXIS = -2
"""Where positions lie in every array of a sliceable kind's state: `[..., positions, entry]`."""

LayerState = tuple[mx.array, ...]
"""What one layer's `read` returns: arrays `[1, ...]`."""

Stack = tuple[mx.array, ...]
"""What layers in a row hold: arrays `[layers, ...]`."""


def layers_of(stacks: Iterable[Stack]) -> tuple[LayerState, ...]:
    """Return what each layer holds: views, where it is not the only one of its stack."""
    return tuple(state for stack in stacks for state in _unstack(stack))


def nbytes_of(stack: Stack) -> int:
    """Return the bytes of a stack, or of one layer's state."""
    return sum(array.nbytes for array in stack)


def clip(stack: Stack, first: int, last: int) -> Stack:
    """Return the entries [first, last) of a stack: itself, or views of it."""
    if (first, last) == (0, stack[0].shape[POSITION_AXIS]):
        return stack
    return tuple(array[..., first:last, :] for array in stack)


def compact(stack: Stack, first: int, last: int) -> Stack:
    """Return the entries [first, last) as memory of their own, lazy.

    Two parts joined are always copied; a slice, even `mx.contiguous` of one, may share the whole,
    and gathering is several times slower.
    """
    if last - first < 2:
        positions = mx.arange(first, last)
        return tuple(mx.take(array, positions, axis=POSITION_AXIS) for array in stack)
    middle = (first + last) // 2
    return concatenate(clip(stack, first, middle), clip(stack, middle, last))


def concatenate(before: Stack, after: Stack) -> Stack:
    """Return two adjacent states of the same layers as one, lazy."""
    pairs = zip(before, after, strict=True)
    return tuple(mx.concatenate(list(pair), axis=POSITION_AXIS) for pair in pairs)


def take_pairs(before: list[Stack], after: list[Stack]) -> Iterator[tuple[Stack, Stack]]:
    """Take stacks away from two lists, and yield what both have of the same layers, in order.

    Both are of one number of layers, stacked in their own ways. A pair has as many layers as the
    larger of their stacks, but no more than `LIFTED_NBYTES`, or one layer; lazy where it takes
    several. A stack is alive until the last of its layers has been yielded.
    """
    while before:
        layer_nbytes = sum(nbytes_of(side[0]) // len(side[0][0]) for side in (before, after))
        most = max(LIFTED_NBYTES // max(layer_nbytes, 1), 1)
        count = min(max(len(before[0][0]), len(after[0][0])), most, _count_layers(before))
        yield _take_layers(before, count), _take_layers(after, count)
    assert not after, "of one number of layers"


def _count_layers(stacks: Iterable[Stack]) -> int:
    return sum(len(stack[0]) for stack in stacks)


def _take_layers(stacks: list[Stack], count: int) -> Stack:
    """Take so many layers away from the beginning of a list: views, or a copy of several's."""
    parts: list[Stack] = []
    while count:
        stack = stacks.pop(0)
        taken = min(len(stack[0]), count)
        if taken < len(stack[0]):
            stacks.insert(0, tuple(array[taken:] for array in stack))
            stack = tuple(array[:taken] for array in stack)
        parts.append(stack)
        count -= taken
    if len(parts) == 1:
        return parts[0]
    return tuple(mx.concatenate(list(arrays), axis=0) for arrays in zip(*parts, strict=True))


def _unstack(stack: Stack) -> Iterator[LayerState]:
    layers = len(stack[0])
    if layers == 1:
        yield stack
        return
    for at in range(layers):
        yield tuple(array[at : at + 1] for array in stack)
